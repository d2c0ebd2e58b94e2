"""Every option of drafting, set by a client, through gateway and drafter to the verifier.

Only the target model is scripted: it says whatever token a request's `logit_bias` favours, always.
A request's prompt is a context without its last token, which the model says first; the drafts of
the step after that are what the drafter proposed for the context.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import drafter.ngram.params as ngram_params
from drafter.ngram.params import NgramParams, Overlap, Tie
from tandem.client import GenerationRequest, SamplingParams, SpeculationParams
from tests.drafter.brute_force import propose
from tests.integration.scripted_model import StepObserver, loaded, model_of_script
from tests.integration.stack import LOOPBACK, MODEL, Stack, running_stack, settled
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.engine.observation import StepRecord

SEMANTICS = json.loads((Path(__file__).parents[1] / "data" / "drafter_semantics.json").read_text())
VOCAB_SIZE = 1000
LIMIT = 31
LAWS: list[tuple[str, Any, Any]] = [
    ("disjoint_earliest", "disjoint", "earliest"),
    ("allowed_earliest", "allowed", "earliest"),
    ("allowed_latest", "allowed", "latest"),
]


class DraftRecorder(StepObserver):
    """An `EngineObserver` that keeps the drafts of each step."""

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
class Asked:
    stack: Stack
    recorder: DraftRecorder

    async def draft(
        self,
        context: Sequence[int],
        speculation: SpeculationParams,
        *,
        max_length: int | None = None,
    ) -> list[int]:
        """What is verified after this context. A limit of length is the verifier's own."""
        # The last step of the request before is recorded behind its last event.
        await asyncio.wrap_future(self.stack.engine.call(self.recorder.drafts.clear))
        *prompt, last = context
        max_new_tokens = LIMIT + 8 if max_length is None else max_length - len(prompt) + 1
        generation = await self.stack.generate(
            GenerationRequest(
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                sampling=SamplingParams(logit_bias={last: 100.0}),
                speculation=speculation,
            )
        )
        assert list(generation.token_ids) == [last] * max_new_tokens
        return self.recorder.drafts[1]


@pytest.fixture
async def asked() -> AsyncIterator[Asked]:
    recorder = DraftRecorder()
    async with running_stack(
        verifier=VerifierConfig(server=LOOPBACK, model=MODEL, numerics="fast"),
        load=load_scripted,
        observer=recorder,
        # Deterministic: every step waits for its proposal.
        gateway={"tokenizer": None, "draft_wait": "always"},
    ) as stack:
        yield Asked(stack, recorder)


@pytest.mark.parametrize("algorithm", ["index", "kmp"])
async def test_known_drafters_proposals_arrive_token_by_token(asked: Asked, algorithm: Any) -> None:
    for example in SEMANTICS["examples"]:
        for name, overlap, tie in LAWS:
            draft = await asked.draft(
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


# Contexts in which each option matters, from here on.
REPEATING = [3, 4, 50, 1, 2, 3, 4, 60, 1, 2, 3, 4]
THRICE = [1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3]
OVERLAPPING = [1, 2, 1, 2, 1, 2]
LONG = [*range(10, 60), 9, *range(10, 20)]


def drafted(context: Sequence[int], most: int, **params: Any) -> list[int]:
    """What the oracle says."""
    proposal = propose(context, NgramParams(**params), most)
    return proposal[0] if proposal else []


EARLIEST = SpeculationParams(tie="earliest")
LONGEST = SpeculationParams(tie="longest")

#: Option, context, a request and the same with the option flipped, and both drafts by the oracle.
FLIPS: list[tuple[str, list[int], SpeculationParams, dict[str, Any], list[int], list[int]]] = [
    ("enabled", LONG, EARLIEST, {"enabled": False}, drafted(LONG, 7), []),
    (
        "num_speculative_tokens",
        LONG,
        EARLIEST,
        {"num_speculative_tokens": 3},
        drafted(LONG, 7),
        drafted(LONG, 3),
    ),
    (
        "prompt_lookup_min",
        [7, 1, 5, 2, 1],
        EARLIEST,
        {"prompt_lookup_min": 1},
        drafted([7, 1, 5, 2, 1], 7),
        drafted([7, 1, 5, 2, 1], 7, min_ngram=1),
    ),
    (
        "prompt_lookup_max",
        [8, 1, 2, 9, 7, 1, 2, 6, 8, 1, 2, 9, 0, 7, 1, 2],
        dataclasses.replace(EARLIEST, prompt_lookup_max=2),
        {"prompt_lookup_max": 3},
        drafted([8, 1, 2, 9, 7, 1, 2, 6, 8, 1, 2, 9, 0, 7, 1, 2], 7, max_ngram=2),
        drafted([8, 1, 2, 9, 7, 1, 2, 6, 8, 1, 2, 9, 0, 7, 1, 2], 7, max_ngram=3),
    ),
    (
        "overlap",
        OVERLAPPING,
        EARLIEST,
        {"overlap": "allowed"},
        drafted(OVERLAPPING, 7),
        drafted(OVERLAPPING, 7, overlap=Overlap.ALLOWED),
    ),
    (
        "tie",
        THRICE,
        EARLIEST,
        {"tie": "latest"},
        drafted(THRICE, 7),
        drafted(THRICE, 7, tie=Tie.LATEST),
    ),
    (
        "tokens_per_match",
        LONG,
        LONGEST,
        {"tokens_per_match": 1},
        drafted(LONG, LIMIT, tie=Tie.LONGEST, tokens_per_match=2),
        drafted(LONG, LIMIT, tie=Tie.LONGEST, tokens_per_match=1),
    ),
    (
        "chained",
        OVERLAPPING,
        EARLIEST,
        {"chained": True},
        drafted(OVERLAPPING, 7),
        drafted(OVERLAPPING, 7, chained=True),
    ),
    ("hint_tokens", LONG, EARLIEST, {"hint_tokens": 2}, drafted(LONG, 7), drafted(LONG, 2)),
    (
        "preset",
        OVERLAPPING,
        SpeculationParams(num_speculative_tokens=4),
        {"preset": "transformers"},
        drafted(OVERLAPPING, 4, tie=Tie.LONGEST, tokens_per_match=2),
        drafted(OVERLAPPING, 4, min_ngram=1, max_ngram=2, overlap=Overlap.ALLOWED),
    ),
]


@pytest.mark.parametrize("algorithm", ["index", "kmp"])
async def test_each_option_changes_the_drafts_and_never_the_tokens(
    asked: Asked, algorithm: Any
) -> None:
    for option, context, one, flip, drafts, flipped in FLIPS:
        assert drafts != flipped, option
        one = dataclasses.replace(one, algorithm=algorithm)
        other = dataclasses.replace(one, **flip)
        assert await asked.draft(context, one) == drafts, option
        assert await asked.draft(context, other) == flipped, option


async def test_the_algorithm_is_the_one_that_was_asked_for(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both give the same drafts; which one ran shows in what the drafter was told."""
    algorithms = []
    store = asked.stack.drafter.store
    append = store.append

    def note(delta: Any, *arguments: Any) -> Any:
        if delta.base_length == 0:
            algorithms.append(delta.params.algorithm)
        return append(delta, *arguments)

    monkeypatch.setattr(store, "append", note)
    for algorithm in ("kmp", "index", None):
        speculation = SpeculationParams(algorithm=algorithm)
        await asked.draft(REPEATING, speculation)
    await asked.draft(REPEATING, SpeculationParams(preset="vllm-kmp"))
    kmp, index = ngram_params.Algorithm.KMP, ngram_params.Algorithm.INDEX
    assert algorithms == [kmp, index, index, kmp]


async def test_a_pool_is_asked_when_the_own_match_reaches_less_far(asked: Asked) -> None:
    pooled = SpeculationParams(pool="shared", tie="earliest", prompt_lookup_min=1)
    # Its output, 70 times the same token, is the pool's text.
    await asked.draft([5, 6, 70], pooled)
    await settled(lambda: asked.stack.drafter.pools.num_texts == 1)
    await asked.stack.drafter.pool_keeper.settle()
    context = [70, 71, 1, 2, 70]
    alone = await asked.draft(context, dataclasses.replace(pooled, pool=""))
    assert alone == drafted(context, 7, min_ngram=1) == [71, 1, 2, 70]
    assert await asked.draft(context, dataclasses.replace(pooled, pool="other")) == alone
    assert await asked.draft(context, pooled) == alone
    # The pool's match reaches as far as the own; it is asked, and wins where it reaches further.
    longer = [70, 71, 1, 70, 70]
    own = drafted(longer, 7, min_ngram=1)
    assert await asked.draft(longer, dataclasses.replace(pooled, pool="")) == own
    from_pool = await asked.draft(longer, dataclasses.replace(pooled, pool_min_ngram=2))
    assert from_pool == [70] * 7 != own


PRESETS: list[tuple[Any, dict[str, Any], int]] = [
    ("tandem", {"tie": Tie.LONGEST, "tokens_per_match": 2}, LIMIT),
    ("vllm-kmp", {"min_ngram": 5}, 7),
    ("vllm", {"min_ngram": 5, "overlap": Overlap.ALLOWED}, 7),
    ("vllm-gpu", {"min_ngram": 5, "overlap": Overlap.ALLOWED, "tie": Tie.LATEST}, 7),
    ("transformers", {"min_ngram": 1, "max_ngram": 2, "overlap": Overlap.ALLOWED}, 10),
    ("tensorrt-llm", {"min_ngram": 1, "max_ngram": 2, "overlap": Overlap.ALLOWED}, 4),
]
CONTEXTS = [
    REPEATING,
    OVERLAPPING,
    LONG,
    [1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5, 7, 9, 1, 2, 3, 4, 5],
    [4] * 12,
]


async def test_a_preset_drafts_as_the_drafter_that_it_is_named_after(asked: Asked) -> None:
    for preset, params, most in PRESETS:
        for context in CONTEXTS:
            draft = await asked.draft(context, SpeculationParams(preset=preset))
            assert draft == drafted(context, most, **params), (preset, context)


async def test_the_largest_size_alone_is_the_smallest_too_where_the_preset_has_one_size(
    asked: Asked,
) -> None:
    speculation = SpeculationParams(preset="vllm-kmp", prompt_lookup_max=3)
    context = [1, 2, 3, 8, 2, 3]
    assert await asked.draft(context, speculation) == []
    both = dataclasses.replace(speculation, prompt_lookup_min=2)
    assert await asked.draft(context, both) == [8, 2, 3]


async def test_a_preset_of_the_gateways_holds_for_requests_that_name_none() -> None:
    recorder = DraftRecorder()
    async with running_stack(
        verifier=VerifierConfig(server=LOOPBACK, model=MODEL, numerics="fast"),
        load=load_scripted,
        observer=recorder,
        gateway={
            "tokenizer": None,
            "draft_wait": "always",
            "preset": "transformers",
            "prompt_lookup_max": 3,
        },
    ) as stack:
        asked = Asked(stack, recorder)
        context = [9, 1, 2, 60, 1, 2, 50, 9, 1, 2]
        ours = {"min_ngram": 1, "overlap": Overlap.ALLOWED}
        drafts = await asked.draft(context, SpeculationParams())
        assert drafts == drafted(context, 10, max_ngram=3, **ours)
        # Who names a preset gets it as it is.
        named = await asked.draft(context, SpeculationParams(preset="tensorrt-llm"))
        assert named == drafted(context, 4, max_ngram=2, **ours)
