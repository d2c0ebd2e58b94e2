"""Golden trace (docs/acceptance.md): one known request through drafter, verifier and gateway.

Only the target model is scripted. The request's trace is compared with the file. Padding is not
part of a trace: an observer of the engine's steps records it.
"""

import contextlib
import dataclasses

import numpy as np

from tandem.client import (
    AsyncDrafterClient,
    Chunk,
    GenerationRequest,
    NgramParams,
    SpeculationParams,
    StepTrace,
    Traced,
    UndraftedSteps,
)
from tandem.generation import EventCollector
from tests import golden_trace
from tests.golden_trace import TEXT, TRACE
from tests.integration.scripted_model import loaded, model_of_script
from tests.integration.stack import EVERY_DRAFT, LOOPBACK, MODEL, running_stack
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.engine.observation import EngineObserver, StepRecord

VOCAB_SIZE = 151_936


class StepRecorder(EngineObserver):
    """Records the padded outputs of each step."""

    def __init__(self) -> None:
        self.num_sampled_tokens: list[int] = []
        self.padded_outputs: list[list[int]] = []

    def stepped(self, record: StepRecord) -> None:
        self.num_sampled_tokens.append(int(record.layout.num_sampled_tokens[0]))
        self.padded_outputs.append(record.verdict.output_token_ids[0].tolist())


def load_scripted(config: VerifierConfig) -> LoadedModel:
    first = len(TRACE["prompt_token_ids"])
    script = dict(enumerate(TRACE["target_continuation"], start=first))
    return loaded(
        model_of_script(script, vocab_size=VOCAB_SIZE),
        config,
        max_model_len=TRACE["max_model_len"],
        max_num_speculative_tokens=TRACE["num_speculative_tokens"],
    )


async def test_the_golden_trace_is_reproduced_step_by_step_and_in_every_count() -> None:
    recorder = StepRecorder()
    config = VerifierConfig(server=LOOPBACK, model=MODEL, numerics="fast", allow_trace=True)
    async with running_stack(
        verifier=config,
        load=load_scripted,
        observer=recorder,
        gateway={
            "tokenizer": [],
            **EVERY_DRAFT,
            "hint_tokens": 2,
            "num_speculative_tokens": 2,
            "allow_trace": True,
        },
    ) as stack:
        request = GenerationRequest(
            prompt=TRACE["prompt_token_ids"],
            max_new_tokens=len(TRACE["target_continuation"]),
            speculation=SpeculationParams(
                num_speculative_tokens=TRACE["num_speculative_tokens"],
                prompt_lookup_min=TRACE["prompt_lookup_min"],
                prompt_lookup_max=TRACE["prompt_lookup_max"],
                overlap="disjoint",
                tie="earliest",
            ),
            trace=True,
        )
        collector = EventCollector()
        steps: list[StepTrace] = []
        async with contextlib.aclosing(stack.client.stream(request)) as events:
            async for event in events:
                collector.add(event)
                if isinstance(event, Traced):
                    steps.append(event.step)
                elif isinstance(event, Chunk):
                    assert event.token_ids == steps[-1].output_token_ids, "right after its trace"
        generation = collector.generation()
        await stack.check_idle()

        # Every field of every step, except slots: the block pool chooses the blocks.
        assert [dataclasses.replace(s, slot_mapping=s.positions) for s in steps] == (
            golden_trace.steps()
        )
        assert recorder.num_sampled_tokens == [
            len(s["draft_token_ids"]) + 1 for s in TRACE["steps"]
        ]
        assert recorder.padded_outputs == [
            np.pad(
                step["output_token_ids"],
                (0, len(step["draft_token_ids"]) + 1 - len(step["output_token_ids"])),
                constant_values=-1,
            ).tolist()
            for step in TRACE["steps"]
        ]
        # A token's slot follows from its position and its block of 16, and no two share a block.
        slots = {
            p: s for step in steps for p, s in zip(step.positions, step.slot_mapping, strict=True)
        }
        assert all(slot % 16 == position % 16 for position, slot in slots.items())
        blocks = {(position // 16, slot // 16) for position, slot in slots.items()}
        assert sorted(logical for logical, _ in blocks) == [0, 1]
        assert len({physical for _, physical in blocks}) == 2
        for step in steps:
            assert step.slot_mapping == tuple(slots[position] for position in step.positions)

        # The file writes a proposal at the step before the one that uses it.
        written = [step["proposal_after"] for step in TRACE["steps"]]
        traced = [list(proposal.token_ids) for step in steps for proposal in step.proposals]
        assert traced == written[:-2]
        # The gateway does not request the last two: a draft needs room for itself and one more
        # token. Asked directly, the drafter gives the file's proposals for them too.
        lengths = [step["context_length_after"] for step in TRACE["steps"]]
        async with AsyncDrafterClient(stack.drafter.server.address) as drafter:
            params = NgramParams(min_ngram=2, max_ngram=5, overlap="disjoint", tie="earliest")
            sequence = drafter.open(params=params, max_length=TRACE["max_model_len"])
            unrequested = [
                await drafter.propose(sequence, TEXT[:length], max_draft_tokens=2)
                for length in lengths[-2:]
            ]
        assert [list(draft.token_ids) for draft in unrequested] == written[-2:] == [[16], []]

        # The counts.
        assert list(generation.token_ids) == TRACE["target_continuation"]
        assert generation.finish_reason == "length"
        summary, usage = TRACE["summary"], generation.usage
        # The file has no reasons of steps without drafts.
        assert usage == dataclasses.replace(golden_trace.usage(), undrafted=usage.undrafted)
        assert usage.undrafted == UndraftedSteps(no_match=4, limited=1)
        assert (usage.num_steps, usage.num_drafts, usage.num_draft_tokens) == (13, 7, 14)
        assert usage.num_steps_without_drafts == summary["steps_without_drafts"]
        assert usage.num_accepted_tokens == 8
        assert round(usage.mean_acceptance_length or 0, 4) == summary["mean_acceptance_length"]
        assert usage.max_acceptance_length == 3
        rates = [round(rate, 4) for rate in usage.acceptance_per_position]
        assert rates == summary["acceptance_rate_per_position"]

        def metric(name: str, **labels: str) -> float:
            return stack.metric("gateway", name, **labels)

        assert metric("tandem_generation_steps_total") == 13
        assert metric("tandem_spec_decode_num_drafts_total") == 7
        assert metric("tandem_spec_decode_num_draft_tokens_total") == 14
        assert metric("tandem_spec_decode_num_accepted_tokens_total") == 8
        per_position = "tandem_spec_decode_num_accepted_tokens_per_pos_total"
        assert [metric(per_position, position=p) for p in ("0", "1")] == [4, 4]
        assert metric("tandem_generation_tokens_total") == 21
        assert metric("tandem_prompt_tokens_total") == 11
        assert metric("tandem_request_success_total", finish_reason="length") == 1
