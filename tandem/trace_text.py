"""The steps of a generation, and its cost, as text for people.

Knows only the client's events, so that any client can print them.

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

from tandem.values import DraftSource, ProposalTrace, StepTrace, Usage

# The middle of longer lists is left out.
_MAX_SHOWN = 16
_SHOWN_AT_EACH_END = 6
_NAME_WIDTH = 14
_SOURCES = {
    DraftSource.SEQUENCE: "in its own text",
    DraftSource.POOL: "in the pool",
    None: "in an unknown place",
}


class TraceText:
    """Formats the traced steps of one choice; needs every one of them, in order.

    It keeps the tokens of earlier steps, to show which n-gram a proposal continues.
    """

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        """`prompt_token_ids`, if known, include the tokens that no step computes (cached ones)."""
        self._tokens = dict(enumerate(prompt_token_ids))

    def step(self, step: StepTrace) -> str:
        """The lines of one step, without a line end after the last."""
        self._record(step)
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

    def _record(self, step: StepTrace) -> None:
        num_known = step.num_scheduled_tokens - len(step.draft_token_ids)
        self._tokens.update(
            zip(step.positions[:num_known], step.input_token_ids[:num_known], strict=True)
        )
        first = step.context_length_after - len(step.output_token_ids)
        self._tokens.update(enumerate(step.output_token_ids, start=first))

    def _proposal(self, proposal: ProposalTrace) -> str:
        base, length = proposal.base_length, proposal.matched_ngram_length
        if not proposal.token_ids:
            return _line("proposal", f"none, for {base} tokens")
        ngram = [self._tokens.get(position) for position in range(max(0, base - length), base)]
        return _line(
            "proposal",
            f"{_listed(proposal.token_ids)}: for {base} tokens, they followed {_listed(ngram)} "
            f"{_SOURCES[proposal.source]}",
        )


def summary_rows(usage: Usage) -> dict[str, str]:
    """The cost of one choice, by name; without drafts, only the rows that do not need any."""
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
    """The rows as lines, and the number of requests that they cover."""
    rows = {"requests": str(num_requests)} | summary_rows(usage)
    width = max(map(len, rows)) + 2
    return "\n".join(f"  {name:<{width}}{value}" for name, value in rows.items())


def _line(name: str, value: str) -> str:
    return f"  {name:<{_NAME_WIDTH}}{value}"


def _listed(values: Sequence[int | None]) -> str:
    """The values, without the middle of a long list; "?" for an unknown value, "-" for none."""
    shown = ["?" if value is None else str(value) for value in values]
    if len(shown) > _MAX_SHOWN:
        num_hidden = len(shown) - 2 * _SHOWN_AT_EACH_END
        hidden = [f"... {num_hidden} more ..."]
        shown = shown[:_SHOWN_AT_EACH_END] + hidden + shown[-_SHOWN_AT_EACH_END:]
    return " ".join(shown) or "-"
