"""Every drafting option (docs/acceptance.md), from the client through all services.

Only the target model is scripted: it always gives the token that a request's `logit_bias` favours.
The prompt is a context without its last token, which is the first output token; the second step
then verifies what the drafter proposed for the context.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from drafter.ngram.params import NgramParams, Overlap, Tie
from tandem.client import GenerationRequest, SamplingParams, SpeculationParams
from tests.drafter.brute_force import propose
from tests.integration.scripted_model import loaded, model_of_script
from tests.integration.stack import (
    EVERY_DRAFT,
    LOOPBACK,
    MODEL,
    Stack,
    running_stack,
    wait_until,
)
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.engine.observation import EngineObserver, StepRecord

pytestmark = pytest.mark.asyncio(loop_scope="module")

DATA = Path(__file__).parents[1] / "data"
SEMANTICS = json.loads((DATA / "drafter_semantics.json").read_text())
# Of `python -m benchmarks.record_proposers`.
RECORDED = json.loads((DATA / "recorded_proposals.json").read_text())
VOCAB_SIZE = 1000
LIMIT = 31
MATCHINGS: list[tuple[str, Any, Any]] = [
    ("disjoint_earliest", "disjoint", "earliest"),
    ("allowed_earliest", "allowed", "earliest"),
    ("allowed_latest", "allowed", "latest"),
]


class DraftRecorder(EngineObserver):
    """Records the drafts of each step."""

    def __init__(self) -> None:
        self.drafts: list[list[int]] = []

    def stepped(self, record: StepRecord) -> None:
        [item] = record.scheduled
        self.drafts.append(list(item.draft_token_ids))


def load_scripted(config: VerifierConfig) -> LoadedModel:
    return loaded(
        model_of_script({}, vocab_size=VOCAB_SIZE),
        config,
        max_model_len=2048,
        max_num_speculative_tokens=LIMIT,
    )


@dataclasses.dataclass
class DraftProbe:
    """Finds the drafts that a running stack verifies after a context."""

    stack: Stack
    recorder: DraftRecorder

    async def draft(
        self,
        context: Sequence[int],
        speculation: SpeculationParams,
        *,
        max_length: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> list[int]:
        """Returns the drafts verified after `context`; none passes `max_length`."""
        # A request's last event is sent before its last step is recorded.
        await asyncio.wrap_future(self.stack.engine.call(self.recorder.drafts.clear))
        *prompt, last = context
        max_new_tokens = LIMIT + 8 if max_length is None else max_length - len(prompt) + 1
        generation = await self.stack.generate(
            GenerationRequest(
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                sampling=SamplingParams(logit_bias={last: 100.0}),
                speculation=speculation,
                stop_token_ids=stop_token_ids,
            )
        )
        assert list(generation.token_ids) == [last] * max_new_tokens
        return self.recorder.drafts[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def probe() -> AsyncIterator[DraftProbe]:
    recorder = DraftRecorder()
    async with running_stack(
        verifier=VerifierConfig(server=LOOPBACK, model=MODEL, numerics="fast"),
        load=load_scripted,
        observer=recorder,
        gateway={"tokenizer": [], **EVERY_DRAFT},
    ) as stack:
        yield DraftProbe(stack, recorder)


@pytest.mark.parametrize("algorithm", ["index", "kmp"])
async def test_proposals_are_those_of_the_known_drafters(probe: DraftProbe, algorithm: Any) -> None:
    for example in SEMANTICS["examples"]:
        for name, overlap, tie in MATCHINGS:
            draft = await probe.draft(
                example["context"],
                SpeculationParams(
                    num_speculative_tokens=example["k"],
                    hint_tokens=example["k"],
                    prompt_lookup_min=example["min"],
                    prompt_lookup_max=example["max"],
                    overlap=overlap,
                    tie=tie,
                    algorithm=algorithm,
                ),
                max_length=example.get("max_length"),
            )
            assert draft == example[name], (example, name)


# Contexts in which the options below matter.
REPEATING = [3, 4, 50, 1, 2, 3, 4, 60, 1, 2, 3, 4]
OVERLAPPING = [1, 2, 1, 2, 1, 2]
LONG = [*range(10, 60), 9, *range(10, 20)]


def expected_drafts(context: Sequence[int], max_draft_tokens: int, **params: Any) -> list[int]:
    """The drafts by brute force."""
    proposal = propose(context, NgramParams(**params), max_draft_tokens)
    return proposal[0] if proposal else []


EARLIEST = SpeculationParams(tie="earliest")
LONGEST = SpeculationParams(tie="longest")

#: Option, context, request, what to change in it, expected drafts before and after the change.
CHANGES: list[tuple[str, list[int], SpeculationParams, dict[str, Any], list[int], list[int]]] = [
    ("enabled", LONG, EARLIEST, {"enabled": False}, expected_drafts(LONG, 7), []),
    (
        "tokens_per_match",
        LONG,
        LONGEST,
        {"tokens_per_match": 1},
        expected_drafts(LONG, LIMIT, tie=Tie.LONGEST, tokens_per_match=2),
        expected_drafts(LONG, LIMIT, tie=Tie.LONGEST, tokens_per_match=1),
    ),
    (
        "hint_tokens",
        LONG,
        EARLIEST,
        {"hint_tokens": 2},
        expected_drafts(LONG, 7),
        expected_drafts(LONG, 2),
    ),
    (
        "preset",
        OVERLAPPING,
        SpeculationParams(num_speculative_tokens=4),
        {"preset": "transformers"},
        expected_drafts(OVERLAPPING, 4, tie=Tie.LONGEST, tokens_per_match=2),
        expected_drafts(OVERLAPPING, 4, min_ngram=1, max_ngram=2, overlap=Overlap.ALLOWED),
    ),
]


@pytest.mark.parametrize("algorithm", ["index", "kmp"])
async def test_each_option_changes_the_drafts_and_never_the_tokens(
    probe: DraftProbe, algorithm: Any
) -> None:
    for option, context, request, change, drafts, changed_drafts in CHANGES:
        assert drafts != changed_drafts, option
        request = dataclasses.replace(request, algorithm=algorithm)
        changed = dataclasses.replace(request, **change)
        assert await probe.draft(context, request) == drafts, option
        assert await probe.draft(context, changed) == changed_drafts, option


async def test_a_pool_is_searched_when_the_own_match_is_shorter(probe: DraftProbe) -> None:
    pooled = SpeculationParams(pool="shared", tie="earliest", prompt_lookup_min=1)
    # Its output, token 70 repeated, is the pool's text.
    await probe.draft([5, 6, 70], pooled)
    await wait_until(lambda: probe.stack.drafter.pools.num_texts == 1)
    await probe.stack.drafter.pool_keeper.settle()
    context = [70, 71, 1, 2, 70]
    alone = await probe.draft(context, dataclasses.replace(pooled, pool=""))
    assert alone == expected_drafts(context, 7, min_ngram=1) == [71, 1, 2, 70]
    assert await probe.draft(context, dataclasses.replace(pooled, pool="other")) == alone
    assert await probe.draft(context, pooled) == alone
    # The pool wins only where its match is longer than the sequence's own.
    longer = [70, 71, 1, 70, 70]
    own = expected_drafts(longer, 7, min_ngram=1)
    assert await probe.draft(longer, dataclasses.replace(pooled, pool="")) == own
    from_pool = await probe.draft(longer, dataclasses.replace(pooled, pool_min_ngram=2))
    assert from_pool == [70] * 7 != own


@pytest.mark.parametrize(
    "recording",
    RECORDED["recordings"],
    ids=lambda recording: f"{recording['proposer']}, {recording['prompt_lookup_max']}",
)
async def test_a_preset_verifies_what_the_system_that_it_is_named_after_proposed(
    probe: DraftProbe, recording: dict[str, Any]
) -> None:
    """As far as the text has room for the draft and one more token."""
    options = {name: recording[name] for name in SpeculationParams.__slots__ if name in recording}
    # vLLM's proposers know no end token.
    ends = [RECORDED["end_token_id"]] if recording["preset"] == "transformers" else []
    for history, proposed in zip(RECORDED["histories"], recording["drafts"], strict=True):
        context = history["token_ids"]
        draft = await probe.draft(
            context,
            SpeculationParams(**options),
            max_length=min(history["max_length"] - 1, len(context) + 12),
            stop_token_ids=ends,
        )
        assert draft == proposed[: history["max_length"] - len(context) - 1], history


async def test_tandems_own_preset_follows_the_longest_match(probe: DraftProbe) -> None:
    for context in (REPEATING, OVERLAPPING, LONG, [4] * 12):
        draft = await probe.draft(context, SpeculationParams(preset="tandem"))
        assert draft == expected_drafts(context, LIMIT, tie=Tie.LONGEST, tokens_per_match=2)
