"""One choice's state: shown output, usage, and cuts at stop strings."""

import itertools
from collections.abc import Sequence
from typing import Never

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import wire
from gateway.errors import UnavailableError, VerifierError
from gateway.messages.response import Chunk
from gateway.messages.sizes import MAX_CHUNK_BYTES
from gateway.messages.verifier import Decided, PromptScored
from gateway.text.output.output_text import OutputText, Shown
from gateway.text.tokenizer import Tokenizer
from tandem.values import FinishReason, SamplingParams
from tests.gateway.factories import append_step, encoded_logprob, make_generation, read_chunk
from tests.gateway.text.test_tokenizer import BUNDLED


def chunk(**fields: object) -> Chunk:
    return Chunk(
        **{  # type: ignore[arg-type]
            "choice_index": 0,
            "offset": 0,
            "token_ids": [],
            "text": "",
            "num_draft_tokens": 0,
            "num_accepted_tokens": 0,
            "num_steps": 1,
            **fields,
        }
    )


def test_usage_counts_steps_drafts_and_accepted_positions() -> None:
    generation = make_generation([9] * 5)
    generation.num_cached_tokens = 4
    append_step(generation, [1])
    append_step(generation, [2, 3, 4], drafts=3, accepted=2)
    append_step(generation, [5, 6], drafts=2, accepted=1)
    append_step(generation, [7], drafts=4)
    generation.publish()
    usage = generation.usage()
    assert usage.prompt_tokens == 5
    assert usage.cached_tokens == 4
    assert usage.output_tokens == 7
    assert usage.num_steps == 4
    assert usage.num_drafts == 3
    assert usage.num_draft_tokens == 9
    assert usage.num_accepted_tokens == 3
    assert usage.accepted_per_position == (2, 1, 0, 0)


def test_a_decision_at_another_length_is_an_error_of_the_verifier() -> None:
    generation = make_generation([1, 2, 3])
    wrong = Decided("sequence", 5, [4], 0, 0, None)
    with pytest.raises(VerifierError, match="3 tokens from 5"):
        generation.append(wrong)
    assert generation.token_ids == [1, 2, 3]


def test_the_end_is_reached_once() -> None:
    generation = make_generation()
    generation.cancel()
    generation.fail(UnavailableError("late"))
    assert generation.error is None
    assert generation.finish_reason is FinishReason.CANCELLED


def test_a_cancelled_output_ends_where_no_stop_string_can_be_before(tokenizer: Tokenizer) -> None:
    for stop_sequences, kept in (((), [5, 6]), (("abc",), [5])):
        generation = make_generation([1], tokenizer=tokenizer, stop_sequences=stop_sequences)
        append_step(generation, [5])
        generation.publish()
        append_step(generation, [6])
        generation.cancel()
        assert generation.token_ids == [1, *kept]


def test_an_output_whose_text_cannot_be_made_ends_there_too(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(output_text: OutputText, token_ids: Sequence[int]) -> Never:
        raise RuntimeError

    for stop_sequences, kept in (((), [5, 6]), (("abc",), [5])):
        generation = make_generation([1], tokenizer=tokenizer, stop_sequences=stop_sequences)
        append_step(generation, [5])
        generation.publish()
        append_step(generation, [6])
        with monkeypatch.context() as patched:
            patched.setattr(OutputText, "feed", fail)
            with pytest.raises(RuntimeError):
                generation.publish()
        generation.fail(RuntimeError())
        assert generation.token_ids == [1, *kept]


@given(
    steps=st.lists(st.lists(st.integers(5, 300), min_size=1, max_size=8), max_size=12),
    published=st.sets(st.integers(0, 12)),
    taken=st.sets(st.integers(0, 12)),
)
def test_however_it_is_published_and_read_every_token_comes_once_and_in_order(
    steps: list[list[int]], published: set[int], taken: set[int]
) -> None:
    generation = make_generation(num_speculative_tokens=8)
    chunks = []
    for index, step in enumerate(steps):
        append_step(generation, step, drafts=len(step), accepted=len(step) - 1)
        if index in published:
            generation.publish()
        if index in taken:
            chunks.append(read_chunk(generation))
    generation.publish()
    chunks.append(read_chunk(generation))
    come: list[int] = []
    num_steps = 0
    for part in chunks:
        if part is not None:
            assert part.offset == len(come)
            come += part.token_ids
            num_steps += part.num_steps
    assert come == [token_id for step in steps for token_id in step]
    assert num_steps == generation.usage().num_steps == len(steps)


@pytest.mark.parametrize("num_tops", [None, 0, 20])
@pytest.mark.parametrize("text", ["x", "\N{SNOWMAN}" * 300])
@pytest.mark.parametrize("reports_tokens", [False, True])
def test_a_slow_client_gets_chunks_of_bounded_bytes(
    num_tops: int | None, text: str, reports_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = make_generation(
        [1, 2, 3],
        sampling=SamplingParams(logprobs=num_tops, prompt_logprobs=num_tops),
        max_new_tokens=6_000,
    )
    texts = [text, *[""] * 7] if reports_tokens else ()
    monkeypatch.setattr(generation._output_text, "feed", lambda ids: Shown(text, len(ids), texts))
    if num_tops is not None:
        generation.append_prompt_logprobs(
            PromptScored(
                sequence_id="sequence",
                base_length=1,
                logprobs=[encoded_logprob(each, num_tops=num_tops) for each in (2, 3)],
            )
        )
    for first in range(0, 6_000, 8):
        token_ids = [200_000 + first % 1000 + offset for offset in range(8)]
        logprobs = [encoded_logprob(each, num_tops=num_tops or 0) for each in token_ids]
        base_length = len(generation.token_ids)
        generation.append(
            Decided(
                "sequence",
                base_length,
                token_ids,
                7,
                7,
                FinishReason.LENGTH if first + 8 == 6_000 else None,
                () if num_tops is None else logprobs,
            )
        )
    expected = generation.token_ids[3:]
    generation.publish()
    chunks = []
    while (part := read_chunk(generation)) is not None:
        assert generation.has_unread is bool(generation._unread._shown)
        assert wire.event_to_proto(part).ByteSize() <= MAX_CHUNK_BYTES + 100
        chunks.append(part)
    assert [token_id for part in chunks for token_id in part.token_ids] == expected
    assert "".join(part.text for part in chunks) == text * 750
    assert sum(part.num_steps for part in chunks) == 750
    assert sum(part.num_accepted_tokens for part in chunks) == 7 * 750
    told = [logprob for part in chunks for logprob in part.logprobs]
    assert told == (
        [] if num_tops is None else [encoded_logprob(each, num_tops=num_tops) for each in expected]
    )
    assert [part.offset for part in chunks] == [
        sum(len(earlier.token_ids) for earlier in chunks[:index]) for index in range(len(chunks))
    ]
    assert not generation._unread.logprobs, "read logprobs are freed"
    assert not generation._unread.prompt_logprobs


def test_more_alternatives_than_requested_are_an_error_of_the_verifier() -> None:
    generation = make_generation(sampling=SamplingParams(logprobs=1))
    logprobs = [encoded_logprob(1, num_tops=3)]
    with pytest.raises(VerifierError):
        generation.append(Decided("sequence", 3, [1], 0, 0, None, logprobs))
    assert generation.token_ids == [1, 2, 3]


def reported(part: Chunk) -> list[tuple[str, bool]]:
    """A chunk's tokens as the client gets them: the text of each, and whether it was drafted."""
    tokens = wire.event_to_proto(part).chunk.reported_tokens
    return [(token.text, token.accepted) for token in tokens]


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_end_without_the_token_that_caused_it_is_an_error_of_the_verifier(
    finish: FinishReason,
) -> None:
    generation = make_generation()
    append_step(generation, [4])
    with pytest.raises(VerifierError, match="decided 0 tokens"):
        append_step(generation, [], finish=finish)
    generation.publish()
    assert generation.finish_reason is None


@given(
    text=st.text(alphabet="ab é日\N{GRINNING FACE}", max_size=16),
    cuts=st.lists(st.integers(1, 4), min_size=1),
    published=st.sets(st.integers(0, 12)),
    taken=st.sets(st.integers(0, 12)),
    stop=st.sampled_from([(), ("b ",), ("日é", "ab")]),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_reports_cover_every_chunk_and_change_no_text(
    text: str,
    cuts: list[int],
    published: set[int],
    taken: set[int],
    stop: tuple[str, ...],
    finish: FinishReason,
) -> None:
    ids = [*BUNDLED.encode(text), 0]
    told, plain = (
        make_generation(
            tokenizer=BUNDLED, stop_sequences=stop, max_new_tokens=200, report_tokens=reports
        )
        for reports in (True, False)
    )
    chunks: list[tuple[Chunk | None, Chunk | None]] = []
    first = 0
    for index, cut in enumerate(itertools.cycle(cuts)):
        step = ids[first : first + cut]
        first += cut
        reason = finish if first >= len(ids) else None
        for generation in (told, plain):
            append_step(generation, step, drafts=4, accepted=len(step) - 1, finish=reason)
            if index in published:
                generation.publish()
        if index in taken:
            chunks.append((read_chunk(told), read_chunk(plain)))
        if first >= len(ids) or told.is_over:
            break
    for generation in (told, plain):
        generation.publish()
    while (last := (read_chunk(told), read_chunk(plain))) != (None, None):
        chunks.append(last)
    for part, without in chunks:
        assert part == without
        if part is not None:
            tokens = reported(part)
            assert "".join(token for token, _ in tokens) == part.text
            assert len(tokens) == len(part.token_ids)
            assert sum(accepted for _, accepted in tokens) == part.num_accepted_tokens
    assert told.token_ids == plain.token_ids
    assert told.usage() == plain.usage()
