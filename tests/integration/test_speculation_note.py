"""Why drafts bring little, said from the counts of real runs, one for each cause."""

from collections.abc import Sequence
from typing import Any

import pytest

from tandem.client import GenerationRequest, SamplingParams, SpeculationParams, StructuredOutput
from tandem.free_ports import free_port
from tandem.speculation_note import speculation_note
from tests.integration.prompts import rename_prompts
from tests.integration.stack import EVERY_DRAFT, running_stack, verifier_config
from verifier.drafts.depth_policy import DepthPolicy

[RENAME] = rename_prompts(1, seed=3)
# Each token of the vocabulary once, so that whatever follows has occurred.
EVERY_TOKEN = list(range(8, 1900))
# Text that repeats by accident only.
RANDOM = SamplingParams(temperature=100.0, seed=1)
# The last token alone is matched, where it was first.
LAST_TOKEN: dict[str, Any] = {
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 1,
    "overlap": "allowed",
    "tie": "earliest",
}


def request(prompt: Sequence[int] | str, **fields: Any) -> GenerationRequest:
    fields = {"max_new_tokens": 64, "ignore_eos": True} | fields
    return GenerationRequest(prompt=prompt, **fields)


async def note_of(
    request: GenerationRequest, *, verifier: dict[str, Any] | None = None, **gateway: Any
) -> str:
    """What is said of a request, by its client and by the gateway."""
    plain = GenerationRequest(
        prompt=request.prompt,
        max_new_tokens=32,
        sampling=request.sampling,
        speculation=SpeculationParams(enabled=False),
    )
    config = verifier_config(**(verifier or {}))
    async with running_stack(verifier=config, gateway={**EVERY_DRAFT, **gateway}) as stack:
        generation = await stack.generate(request)
        without = await stack.generate(plain)
        assert without.usage.undrafted is None, "a request without drafts needs no reason"
        note = speculation_note([generation.usage, without.usage])
        [model] = await stack.client.list_models()
        assert model.speculation_note == note
    return note


async def test_what_drafts_bring_needs_no_reason() -> None:
    note = await note_of(request(RENAME, max_new_tokens=160))
    assert float(note.removesuffix(" tokens per step")) > 1.25


async def test_nothing_repeats() -> None:
    note = await note_of(request(EVERY_TOKEN[:50], sampling=RANDOM))
    assert note.startswith("1.0")
    assert note.endswith("nothing that repeats was found")


async def test_no_drafter_answers_in_time() -> None:
    nobody = [f"127.0.0.1:{free_port()}"]
    note = await note_of(request(RENAME), drafters=nobody, draft_wait="adaptive")
    assert note == "1.00 tokens per step: in 98% of the steps, no drafter had answered in time"


async def test_rows_cost_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def decline(self: DepthPolicy, candidates: Sequence[Any], **_: Any) -> list[int]:
        return [0] * len(candidates)

    monkeypatch.setattr(DepthPolicy, "choose", decline)
    note = await note_of(
        request(RENAME), verifier={"speculation_depth": "learned"}, draft_wait="adaptive"
    )
    assert note.startswith("1.00 tokens per step")
    assert note.endswith("drafts were not worth what their rows cost")


async def test_the_grammar_forbids_them() -> None:
    # Where a digit was first, an x followed.
    note = await note_of(
        request(
            "".join(f"{digit}x" for digit in range(10)),
            sampling=SamplingParams(structured_output=StructuredOutput(regex="[0-9]{80}")),
            speculation=SpeculationParams(**LAST_TOKEN),
            ignore_eos=False,
        ),
        verifier={"allow_structured_output": True},
    )
    assert note.endswith("the grammar forbade what was drafted")


async def test_a_step_has_no_room() -> None:
    note = await note_of(request(RENAME), verifier={"max_num_seqs": 1, "max_num_batched_tokens": 1})
    assert note.startswith("1.00 tokens per step")
    assert note.endswith("limits left no room for drafts")


async def test_drafts_are_wrong() -> None:
    note = await note_of(
        request(EVERY_TOKEN, sampling=RANDOM, speculation=SpeculationParams(**LAST_TOKEN))
    )
    assert note.endswith("what was drafted was wrong")


def test_of_few_steps_nothing_is_said() -> None:
    assert speculation_note([]) == ""
