"""Must hold 1: the golden trace, replayed through drafter, verifier and gateway over gRPC.

Only the target model is scripted. What is on the wire is compared there; what is not is recorded
by an observer of the engine's steps.
"""

import json
from pathlib import Path

import numpy as np

from tandem.client import GenerationRequest, SpeculationParams
from tests.integration.scripted_model import ScriptedModel
from tests.integration.stack import LOOPBACK, MODEL, running_stack
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.draft_buffer import HintOutcome
from verifier.engine import EngineLoad, StepRecord
from verifier.faults import Fault
from verifier.numerics import FAST
from verifier.wire import ServedModel

TRACE = json.loads((Path(__file__).parents[1] / "data" / "golden_trace.json").read_text())
VOCAB_SIZE = 151_936


class StepRecorder:
    """An `EngineObserver` that keeps every step, as the trace writes it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, object]] = []
        self.num_sampled_tokens: list[int] = []
        self.padded_outputs: list[list[int]] = []

    def stepped(self, record: StepRecord) -> None:
        [item] = record.scheduled
        layout, verdict = record.layout, record.verdict
        num_accepted = int(verdict.num_accepted_tokens[0])
        self.num_sampled_tokens.append(int(layout.num_sampled_tokens[0]))
        self.padded_outputs.append(verdict.output_token_ids[0].tolist())
        self.steps.append(
            {
                "step": record.stats.step_id,
                "num_computed_tokens": int(layout.positions[0]),
                "num_scheduled_tokens": layout.num_tokens,
                "input_token_ids": layout.input_token_ids.tolist(),
                "positions": layout.positions.tolist(),
                "logits_indices": layout.logits_indices.tolist(),
                "draft_token_ids": item.draft_token_ids,
                "num_accepted_tokens": num_accepted,
                "output_token_ids": verdict.output_token_ids[0, : num_accepted + 1].tolist(),
                "context_length_after": len(item.sequence.token_ids),
            }
        )

    def hint_ended(self, outcome: HintOutcome) -> None:
        pass

    def hop_measured(self, duration_s: float) -> None:
        pass

    def settled(self, load: EngineLoad) -> None:
        pass

    def fault_met(self, fault: Fault) -> None:
        pass


def load_scripted(config: VerifierConfig) -> LoadedModel:
    first = len(TRACE["prompt_token_ids"])
    script = dict(enumerate(TRACE["target_continuation"], start=first))
    served = ServedModel(
        model_id="golden",
        model_digest="scripted",
        numerics_digest="scripted",
        instance_id="golden",
        architecture="Scripted",
        dtype="float32",
        device="cpu",
        numerics="fast",
        attention_backend="none",
        max_model_len=TRACE["max_model_len"],
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_speculative_tokens=TRACE["num_speculative_tokens"],
        vocab_size=VOCAB_SIZE,
        block_size=16,
        num_kv_blocks=8,
        eos_token_ids=frozenset(),
    )
    return LoadedModel(
        model=ScriptedModel(script, vocab_size=VOCAB_SIZE),
        served=served,
        numerics=FAST,
        trash_slot=8 * 16,
    )


async def test_the_golden_trace_is_reproduced_step_by_step_and_in_every_count() -> None:
    recorder = StepRecorder()
    config = VerifierConfig(server=LOOPBACK, model=MODEL, numerics="fast")
    async with running_stack(
        verifier=config,
        load=load_scripted,
        observer=recorder,
        gateway={
            "tokenizer": None,
            "draft_wait": "always",
            "hint_tokens": 2,
            "num_speculative_tokens": 2,
        },
    ) as stack:
        generation = await stack.generate(
            GenerationRequest(
                prompt=TRACE["prompt_token_ids"],
                max_new_tokens=len(TRACE["target_continuation"]),
                speculation=SpeculationParams(
                    num_speculative_tokens=TRACE["num_speculative_tokens"],
                    prompt_lookup_min=TRACE["prompt_lookup_min"],
                    prompt_lookup_max=TRACE["prompt_lookup_max"],
                    overlap="disjoint",
                    tie="earliest",
                ),
            )
        )
        await stack.check_idle()

        # Step by step, but for the proposals, which are the drafter's and judged below.
        expected = [{k: v for k, v in s.items() if k != "proposal_after"} for s in TRACE["steps"]]
        assert recorder.steps == expected
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
        # Every proposal was scheduled at the step after it, but for the last, which had no room.
        proposals = [step["proposal_after"] for step in TRACE["steps"]]
        assert [s["draft_token_ids"] for s in recorder.steps[1:-1]] == proposals[:-2]
        assert proposals[-2] == [16]
        assert recorder.steps[-1]["draft_token_ids"] == []

        # On the wire and in the counts.
        assert list(generation.token_ids) == TRACE["target_continuation"]
        assert generation.finish_reason == "length"
        summary, usage = TRACE["summary"], generation.usage
        assert usage.num_steps == summary["total_steps"] == 13
        assert usage.num_drafts == summary["steps_with_drafts"] == 7
        assert usage.num_steps - usage.num_drafts == summary["steps_without_drafts"]
        assert usage.num_draft_tokens == summary["num_draft_tokens"] == 14
        assert usage.num_accepted_tokens == summary["num_accepted_tokens"] == 8
        assert round(usage.mean_acceptance_length or 0, 4) == summary["mean_acceptance_length"]
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
