"""Writes docs/data_flow.md: the golden trace, walked through with its numbers.

After a change of this file, of the trace or of how a trace reads:

    python -m tests.repository.data_flow
"""

from pathlib import Path

from tandem.client import ProposalTrace, StepTrace
from tandem.trace_text import TraceText, summary_text
from tests import golden_trace
from tests.golden_trace import TEXT, TRACE

FILE = Path(__file__).resolve().parents[2] / "docs" / "data_flow.md"

_PROMPT = TRACE["prompt_token_ids"]
_K = TRACE["num_speculative_tokens"]
_MIN, _MAX = TRACE["prompt_lookup_min"], TRACE["prompt_lookup_max"]

_HEAD = f"""\
# What flows in a step

One request, step by step, with every number. It is `tests/data/golden_trace.json`: {len(_PROMPT)} \
prompt tokens, {len(TRACE["target_continuation"])} output tokens, greedy, at most {_K} drafts per \
step, n-grams of {_MIN} to {_MAX} tokens, the earliest occurrence that shares no token with the \
end of the text, and a model limit of {TRACE["max_model_len"]} tokens. A test runs it through \
drafter, verifier and gateway over gRPC, with a scripted model that says next what the file says, \
and compares every number that a client is told \
(`tests/integration/test_golden_trace.py`). This page is made of the same file by \
`python -m tests.repository.data_flow`.

To see the same of a request of your own:

```sh
python examples/quickstart.py --trace
tandem up --allow-trace                # then, elsewhere:
tandem generate --trace 'some text'
```

`GenerateRequest.trace` asks for it, and each `Traced` has one `StepTrace` (`sampling.proto`); \
operators allow it with `--allow-trace` at the gateway and at its verifiers.

## How to read it

The order is that of a step (`verifier/engine/engine.py`, `Engine.step`).

| Line | What it is | Made in |
|---|---|---|
| computed, scheduled | tokens whose K/V is there before the step; tokens that it runs: those not \
computed yet, then the drafts | `scheduler.py` |
| proposal | the draft that came since the last step, the length that it is for, and the n-gram \
that it followed where it was copied from | the drafter; kept by `draft_buffer.py` |
| input ids, positions | what is run, and where it stands in the text | `batch_layout.py` |
| slot mapping | where each token's K/V is written: block * block size + position % block size. \
Here the sequence has the blocks 0 and 1 of 16 tokens, so slot and position are the same | \
`batch_layout.py` |
| logits | which of the tokens that are run need logits: the last one, and before it one per draft \
| `batch_layout.py` |
| draft | what is verified: of the proposal, what continues the text as it is now \
| `draft_limits.py` |
| sampled | the accepted drafts and one token of the model's own: the recovered token at the first \
draft that it did not say itself, or the bonus token behind them all | `rejection_sampler.py` |
| accepted, appended | of the drafts; of the tokens sampled, and the length after it. K/V of a \
rejected draft is forgotten by not counting it: the next step writes over its slot | `engine.py` |

The prompt: `{" ".join(map(str, _PROMPT))}`
"""


def render() -> str:
    steps = golden_trace.steps()
    trace_text = TraceText()
    parts = [_HEAD]
    for step in steps:
        parts.append(f"## Step {step.step_id}: {_title(step)}\n\n{_told(step)}\n")
        parts.append(f"```\n{trace_text.step(step)}\n```\n")
    parts.append(
        "## In sum\n\n"
        f"{_count(golden_trace.usage().num_drafts, 'step')} of {len(steps)} verified drafts. The "
        "mean acceptance length is the tokens per verifying step: 1 + accepted / drafts. The "
        "acceptance at a position is the share of these steps that accepted the draft there. By "
        "match length: accepted of drafted tokens.\n"
    )
    parts.append(f"```\n{summary_text(golden_trace.usage())}\n```\n")
    return "\n".join(parts)


def _title(step: StepTrace) -> str:
    if step.num_computed_tokens == 0:
        return "the prompt"
    if not step.draft_token_ids:
        return "no draft"
    num_drafts = len(step.draft_token_ids)
    return f"{step.num_accepted_tokens} of {num_drafts} drafts accepted"


def _told(step: StepTrace) -> str:
    before = step.context_length_after - len(step.output_token_ids)
    last = step.output_token_ids[-1]
    if step.num_computed_tokens == 0:
        return (
            f"All {before} tokens of the prompt are run together. Only the last one's logits are "
            f"needed: they give the first output token, `{last}`."
        )
    if not golden_trace.is_requested(before):
        return (
            f"One output token is left, and a draft would need room for itself and one more: none "
            f"is asked for. (A drafter would have said `{_ids(golden_trace.proposal(before))}`.) "
            f"The step appends `{last}` and ends the request at its limit."
        )
    [proposal] = step.proposals
    if not proposal.token_ids:
        end = " ".join(map(str, TEXT[before - _MIN : before]))
        return (
            f"The text ends in `{end}`. Earlier, clear "
            "of that end, these tokens do not follow each other, so there is no draft. The step "
            f"runs the last token alone and appends `{last}`."
        )
    ngram = " ".join(map(str, TEXT[before - proposal.matched_ngram_length : before]))
    told = f"The text ends in `{ngram}`, and earlier `{_ids(proposal)}` came after that. "
    told += f"The step runs the last token and the {len(step.draft_token_ids)} drafts. "
    if step.num_accepted_tokens == len(step.draft_token_ids):
        return told + f"The model says the same, and `{last}` after it, the bonus token."
    refused = step.draft_token_ids[step.num_accepted_tokens]
    return told + f"Instead of `{refused}` the model says `{last}`, the recovered token."


def _ids(proposal: ProposalTrace) -> str:
    return " ".join(map(str, proposal.token_ids))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


if __name__ == "__main__":
    FILE.write_text(render())
