"""What the steps of a generation did, and what it cost, as text for people.

Knows the client's events alone, so that whoever hears them can print them.

    step 10: 21 tokens computed, 3 scheduled
      proposal      11 220: for 22 tokens, they followed 16 16 in its own text
      input ids     16 11 220
      positions     21 22 23
      slot mapping  21 22 23
      logits        0 1 2
      draft         11 220
      sampled       11 220 16
      accepted      2 of 2
      appended      3, now 25 tokens
"""

from collections.abc import Sequence

from tandem.generation import DraftSource, ProposalTrace, StepTrace, Usage

# Of longer lists the middle is left out.
_MOST_SHOWN = 16
_SHOWN_AT_EACH_END = 6
_NAME_WIDTH = 14
_SOURCES = {
    DraftSource.SEQUENCE: "in its own text",
    DraftSource.POOL: "in the pool",
    None: "in a place that nobody told",
}


class TraceText:
    """Writes the traced steps of one choice; give it every one, in order.

    It keeps the tokens that it has seen, to show which n-gram a proposal continues.
    """

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        """`prompt_token_ids`, where they are known, also tell those that came from a cache."""
        self._tokens = dict(enumerate(prompt_token_ids))

    def step(self, step: StepTrace) -> str:
        """The lines of one step, without a line end after the last."""
        self._see(step)
        lines = [self._proposal(each) for each in step.proposals]
        num_drafts = len(step.draft_token_ids)
        lines += [
            _line("input ids", _listed(step.input_token_ids)),
            _line("positions", _listed(step.positions)),
            _line("slot mapping", _listed(step.slot_mapping)),
            _line("logits", _listed(step.logits_indices)),
            _line("draft", _listed(step.draft_token_ids)),
            _line("sampled", _listed(step.output_token_ids)),
            _line("accepted", f"{step.num_accepted_tokens} of {num_drafts}"),
            _line(
                "appended", f"{len(step.output_token_ids)}, now {step.context_length_after} tokens"
            ),
        ]
        head = (
            f"step {step.step_id}: {step.num_computed_tokens} tokens computed, "
            f"{step.num_scheduled_tokens} scheduled"
        )
        return "\n".join([head, *lines])

    def _see(self, step: StepTrace) -> None:
        num_known = step.num_scheduled_tokens - len(step.draft_token_ids)
        self._tokens.update(
            zip(step.positions[:num_known], step.input_token_ids[:num_known], strict=True)
        )
        first = step.context_length_after - len(step.output_token_ids)
        self._tokens.update(enumerate(step.output_token_ids, start=first))

    def _proposal(self, proposal: ProposalTrace) -> str:
        base, reach = proposal.base_length, proposal.matched_ngram_length
        if not proposal.token_ids:
            return _line("proposal", f"none, for {base} tokens")
        ngram = [self._tokens.get(position) for position in range(max(0, base - reach), base)]
        return _line(
            "proposal",
            f"{_listed(proposal.token_ids)}: for {base} tokens, they followed {_listed(ngram)} "
            f"{_SOURCES[proposal.source]}",
        )


def summary_rows(usage: Usage) -> dict[str, str]:
    """What one choice cost, by name; what drafts alone say is left out where there were none."""
    rows = {
        "prompt tokens": str(usage.prompt_tokens),
        "cached tokens": str(usage.cached_tokens),
        "output tokens": str(usage.output_tokens),
        "model steps": str(usage.num_steps),
        "steps with drafts": str(usage.num_drafts),
        "steps without drafts": str(usage.num_steps_without_drafts),
        "drafted tokens": str(usage.num_draft_tokens),
        "accepted tokens": str(usage.num_accepted_tokens),
    }
    if usage.num_drafts:
        rows |= {
            "acceptance rate": f"{usage.acceptance_rate:.2f}",
            "mean acceptance length": f"{usage.mean_acceptance_length:.2f}",
            "maximum acceptance length": str(usage.max_acceptance_length),
            "acceptance per position": " ".join(
                f"{share:.2f}" for share in usage.acceptance_per_position
            ),
            "accepted by match length": ", ".join(
                f"{each.matched_ngram_length}: {each.num_accepted_tokens}/{each.num_draft_tokens}"
                for each in usage.by_match_length
            ),
            "drafts of its own text": str(usage.num_sequence_drafts),
            "drafts of a pool": str(usage.num_pool_drafts),
        }
    return rows


def summary_text(usage: Usage, *, num_requests: int = 1) -> str:
    """The rows as lines, with how many requests they are of."""
    rows = {"requests": str(num_requests)} | summary_rows(usage)
    width = max(map(len, rows)) + 2
    return "\n".join(f"  {name:<{width}}{value}" for name, value in rows.items())


def _line(name: str, value: str) -> str:
    return f"  {name:<{_NAME_WIDTH}}{value}"


def _listed(values: Sequence[int | None]) -> str:
    """The values, the middle of a long list left out; "?" where one is not known, "-" for none."""
    shown = ["?" if value is None else str(value) for value in values]
    if len(shown) > _MOST_SHOWN:
        num_hidden = len(shown) - 2 * _SHOWN_AT_EACH_END
        hidden = [f"... {num_hidden} more ..."]
        shown = shown[:_SHOWN_AT_EACH_END] + hidden + shown[-_SHOWN_AT_EACH_END:]
    return " ".join(shown) or "-"
