"""The messages to a drafter, without a channel: pieces, replays, limits, refusals."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servicekit.message_limits import MessageLimits
from tandem.client import (
    Draft,
    DraftedSequence,
    DraftQuery,
    Keep,
    NgramParams,
    TandemError,
)
from tandem.drafts.draft_exchange import exchange, release_requests
from tandem.v1 import drafter_pb2 as pb
from tandem.v1 import limits_pb2
from tests.client.drafter_model import DrafterModel
from tests.volume import examples

Answer = Callable[[pb.ProposeRequest], pb.ProposeResponse]


def sequence(params: NgramParams | None = None, max_length: int = 0) -> DraftedSequence:
    return DraftedSequence(
        params=params or NgramParams(), prompt_length=None, max_length=max_length
    )


def query(of: DraftedSequence, token_ids: Sequence[int], max_draft_tokens: int = 4) -> DraftQuery:
    return DraftQuery(sequence=of, token_ids=token_ids, max_draft_tokens=max_draft_tokens)


def run_exchange(queries: Sequence[DraftQuery], answer: Answer) -> tuple[Draft, ...]:
    """Runs an exchange with function calls instead of RPCs."""
    conversation = exchange(queries)
    try:
        request = next(conversation)
        while True:
            request = conversation.send(answer(request))
    except StopIteration as end:
        drafts: tuple[Draft, ...] = end.value
        return drafts


def test_a_long_history_goes_in_pieces_and_only_the_last_asks_for_a_draft() -> None:
    model, drafted, token_ids = DrafterModel(), sequence(), list(range(20_000))
    requested: list[int] = []

    def answer(request: pb.ProposeRequest) -> pb.ProposeResponse:
        requested.extend(delta.max_draft_tokens for delta in request.sequences)
        return model.answer(request)

    run_exchange([query(drafted, token_ids, max_draft_tokens=4)], answer)
    assert requested == [0, 0, 4]
    assert model.known[drafted.sequence_id] == token_ids


def test_many_long_histories_are_split_into_messages_that_fit() -> None:
    model = DrafterModel()
    largest = 2**32 - 1
    queries = [query(sequence(), [largest] * 10_000) for _ in range(40)]
    queries += [query(sequence(), [largest]) for _ in range(3000)]
    drafts = run_exchange(queries, model.answer)  # the model asserts the limits
    assert drafts == (Draft(),) * 3040
    assert all(model.known[q.sequence.sequence_id] == list(q.token_ids) for q in queries)


def test_a_draft_for_another_length_is_dropped() -> None:
    num_requests = 0

    def answer(request: pb.ProposeRequest) -> pb.ProposeResponse:
        """As a drafter to which deltas of abandoned calls come late, each time."""
        nonlocal num_requests
        num_requests += 1
        proposal = pb.Proposal(
            sequence_id=request.sequences[0].sequence_id,
            base_length=4,
            token_ids=[5, 6],
            source=pb.SOURCE_SEQUENCE,
            status=pb.STATUS_OK,
        )
        return pb.ProposeResponse(batch_id=request.batch_id, proposals=[proposal])

    drafted = sequence()
    assert run_exchange([query(drafted, [1, 2, 3])], answer) == (Draft(),)
    assert num_requests == 3
    (draft,) = run_exchange([query(drafted, [1, 2, 3, 4])], answer)
    assert draft.token_ids == (5, 6)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_whatever_is_forgotten_the_drafter_ends_with_the_histories(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    model = DrafterModel()
    drafted = [sequence() for _ in range(3)]
    texts: list[list[int]] = [[], [], []]
    for _ in range(steps):
        chosen = rng.sample(range(3), rng.randint(1, 3))
        for i in chosen:
            if rng.random() < 0.1:
                del texts[i][rng.randint(0, len(texts[i])) :]
            texts[i] += rng.choices(range(2**31, 2**32), k=rng.randint(0, 20))
        forgotten = drafted[rng.randrange(3)].sequence_id
        if rng.random() < 0.3:
            model.known.pop(forgotten, None)
        if rng.random() < 0.2:  # an answer is lost: the drafter has more than the client knows
            i = rng.choice(chosen)
            tried = texts[i] + rng.choices(range(2**31, 2**32), k=rng.randint(0, 3))
            lost = exchange([query(drafted[i], tried)])
            model.answer(next(lost))
        queries = [query(drafted[i], texts[i], max_draft_tokens=rng.randint(0, 2)) for i in chosen]
        for draft in run_exchange(queries, model.answer):
            assert draft == Draft()
        for i in chosen:
            assert model.known.get(drafted[i].sequence_id, []) == texts[i]


def test_a_drafter_that_keeps_losing_histories_costs_a_draft_only() -> None:
    num_requests = 0

    def forgetful(request: pb.ProposeRequest) -> pb.ProposeResponse:
        nonlocal num_requests
        num_requests += 1
        return DrafterModel().answer(request)

    drafted, healthy = sequence(), sequence()
    long, model = list(range(20_000)), DrafterModel()
    assert run_exchange([query(drafted, long)], forgetful) == (Draft(),)
    assert num_requests < 10
    assert run_exchange([query(healthy, [1]), query(drafted, long)], model.answer) == (
        Draft(),
        Draft(),
    )
    assert model.known[drafted.sequence_id] == long


def test_parameters_and_lengths_travel_with_every_creation() -> None:
    model = DrafterModel()
    fields: dict[str, Any] = {"min_ngram": 0, "max_ngram": 32, "tokens_per_match": 2}
    fields |= {"pool_id": "p", "pool_min_ngram": 3}
    params = NgramParams(overlap="allowed", tie="latest", algorithm="kmp", **fields)
    expected = pb.NgramParams(
        overlap=pb.OVERLAP_ALLOWED, tie=pb.TIE_LATEST, algorithm=pb.ALGORITHM_KMP, **fields
    )
    drafted = sequence(params, max_length=50)
    run_exchange([query(drafted, [1, 2, 3])], model.answer)
    model.known.clear()
    run_exchange([query(drafted, [1, 2, 3, 4])], model.answer)
    assert len(model.created) == 2
    for delta in model.created:
        assert delta.params.HasField("min_ngram")
        assert delta.params == expected
        assert delta.prompt_length == 3, "the first history is the prompt"
        assert delta.max_length == 50


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("token_ids", query(sequence(), [1, -1])),
        ("token_ids", query(sequence(), [1, 2**32])),
        ("max_draft_tokens", query(sequence(), [1], max_draft_tokens=-1)),
        ("max_length", query(sequence(max_length=-1), [1])),
        ("params.min_ngram", query(sequence(NgramParams(min_ngram=-1)), [1])),
        ("params.tie", query(sequence(NgramParams(tie="first")), [1])),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_no_message_can_hold_is_refused_by_name(field: str, bad: DraftQuery) -> None:
    with pytest.raises(TandemError) as error:
        run_exchange([bad], DrafterModel().answer)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.field == field


def test_a_sequence_in_a_batch_twice_or_released_is_an_error() -> None:
    drafted = sequence()
    with pytest.raises(ValueError, match="twice"):
        run_exchange([query(drafted, [1]), query(drafted, [1])], DrafterModel().answer)
    drafted.is_released = True
    with pytest.raises(ValueError, match="released"):
        run_exchange([query(drafted, [1])], DrafterModel().answer)


def test_an_answer_to_something_else_is_an_error() -> None:
    for wrong in (
        pb.ProposeResponse(batch_id=1),
        pb.ProposeResponse(batch_id=1, proposals=[pb.Proposal(sequence_id="x")]),
    ):
        with pytest.raises(TandemError) as error:
            run_exchange([query(sequence(), [1])], lambda _, wrong=wrong: wrong)  # type: ignore[misc]
        assert error.value.code is grpc.StatusCode.INTERNAL


def test_releases_are_split_into_messages_that_fit() -> None:
    drafted = [sequence() for _ in range(5000)]
    # The longest feed id that is allowed.
    requests = list(release_requests(drafted, keep=Keep.ALL, feed_id="f" * 256))
    limits = MessageLimits(pb.ReleaseRequest.DESCRIPTOR, limits_pb2)
    for request in requests:
        limits.check_size(request.SerializeToString())
        limits.check(request)
    releases = [release for request in requests for release in request.releases]
    assert [release.sequence_id for release in releases] == [d.sequence_id for d in drafted]
    assert {(release.keep, release.feed_id) for release in releases} == {(pb.KEEP_ALL, "f" * 256)}
