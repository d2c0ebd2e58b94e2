"""The dashboard *Speculation*: what drafts bring, and why, for readers who meet them first here."""

import itertools

from deploy.grafana.panels import (
    MODEL,
    RED,
    Dashboard,
    Kind,
    Panel,
    Query,
    Row,
    gauge,
    quantiles,
    rate,
    total,
)

_INTRODUCTION = """\
A model computes a text token by token, and one **step** of it takes about as long for one token \
as for several. So a **drafter** guesses the next tokens: it looks up where the last few occurred \
in the text before, and proposes what followed there. A **verifier** checks such a **draft** in \
one step, and keeps it up to the first token that is not the model's own: the output is the same. \
Text that repeats (edits, code, quotations) gains much, prose little. From top to bottom: what \
drafts bring, how good the guesses are, and whether they come in time."""

_STEPS = total(rate("tandem_generation_steps_total", MODEL))
_DRAFTS = total(rate("tandem_spec_decode_num_drafts_total", MODEL))
_DRAFTED = total(rate("tandem_spec_decode_num_draft_tokens_total", MODEL))
_ACCEPTED = total(rate("tandem_spec_decode_num_accepted_tokens_total", MODEL))
_POSITIONS = {0: "1st", 1: "2nd", 3: "4th", 7: "8th", 15: "16th"}
# Of the histogram's bounds, the last of each part.
_DEPTHS = {"0.0": "none", "3.0": "1 to 3", "7.0": "4 to 7", "15.0": "8 to 15", "+Inf": "over 15"}


def _shares(metric: str, label: str, matchers: str = "") -> Query:
    """The parts of a counter by a label's values, / all."""
    return Query(
        expression=(
            f"{total(rate(metric, matchers), label)}"
            f" / on () group_left () {total(rate(metric, matchers))}"
        ),
        legend=f"{{{{{label}}}}}",
    )


def _depth_shares() -> list[Query]:
    """The shares of the sequences in all steps by their drafts."""
    up_to = {
        bound: total(rate("tandem_speculation_depth_bucket", f'{MODEL},le="{bound}"'))
        for bound in _DEPTHS
    }
    bounds = list(_DEPTHS)
    parts = [up_to[bounds[0]]]
    parts += [f"({up_to[bound]} - {up_to[before]})" for before, bound in itertools.pairwise(bounds)]
    return [
        Query(expression=f"{part} / {up_to['+Inf']}", legend=legend)
        for part, legend in zip(parts, _DEPTHS.values(), strict=True)
    ]


_BRINGS = Row(
    title="What do drafts bring?",
    panels=[
        Panel(
            title="Times as fast",
            description=(
                "The verifiers' estimate of the time without drafts, / the time taken. 1, the "
                "line: nothing gained. Under it for long: drafts cost, and something is wrong."
            ),
            unit="none",
            colours=((0, RED), (1, RED)),
            queries=[
                Query(
                    expression=(
                        f"{total(rate('tandem_decode_plain_seconds_total', MODEL))}"
                        f" / {total(rate('tandem_decode_seconds_total', MODEL))}"
                    ),
                    legend="times as fast as without drafts",
                )
            ],
        ),
        Panel(
            title="Tokens per step",
            description=(
                "Without drafts a step gives a sequence one token. With drafts: those that were "
                "right, and one more."
            ),
            unit="none",
            queries=[
                Query(
                    expression=f"{total(rate('tandem_generation_tokens_total', MODEL))} / {_STEPS}",
                    legend="all steps",
                ),
                Query(expression=f"1 + {_ACCEPTED} / {_DRAFTS}", legend="steps with drafts"),
            ],
        ),
        Panel(
            title="Guessed output",
            description="Of all output tokens, the share that drafters guessed.",
            unit="percentunit",
            max_value=1,
            queries=[
                Query(
                    expression=(
                        f"{_ACCEPTED} / {total(rate('tandem_generation_tokens_total', MODEL))}"
                    ),
                    legend="guessed",
                )
            ],
        ),
    ],
)

_GUESSES = Row(
    title="How good are the guesses?",
    panels=[
        Panel(
            title="Drafts checked, and right",
            description="In tokens. What lies between the lines was computed in vain.",
            unit="none",
            queries=[
                Query(expression=_DRAFTED, legend="checked / s"),
                Query(expression=_ACCEPTED, legend="right / s"),
            ],
        ),
        Panel(
            title="How often the n-th guess is right",
            description=(
                "A guess counts only if all before it were right, so later ones fall. Drafts that "
                "are shorter count as not right there."
            ),
            unit="percentunit",
            max_value=1,
            queries=[
                Query(
                    expression=(
                        total(
                            rate(
                                "tandem_spec_decode_num_accepted_tokens_per_pos_total",
                                f'{MODEL},position="{position}"',
                            )
                        )
                        + f" / {_DRAFTS}"
                    ),
                    legend=legend,
                )
                for position, legend in _POSITIONS.items()
            ],
        ),
        Panel(
            title="How many are tried",
            description=(
                "Share of the sequences in all steps, by the number of their drafts. A verifier "
                "tries as many as pay: few under load, on prose, or where guesses were wrong."
            ),
            unit="percentunit",
            kind=Kind.PARTS,
            max_value=1,
            queries=_depth_shares(),
        ),
    ],
)

_IN_TIME = Row(
    title="Do they come in time?",
    panels=[
        Panel(
            title="What drafters answer",
            description=(
                "`draft`: what followed the same tokens before. `no_match`: the text has not "
                "repeated. `appended`: no draft was requested. `indexing`: the text is not "
                "searchable yet. Much `out_of_sync`: drafters forget texts."
            ),
            unit="percentunit",
            kind=Kind.PARTS,
            max_value=1,
            queries=[_shares("tandem_drafter_proposals_total", "outcome")],
        ),
        Panel(
            title="What became of drafts",
            description=(
                "`used` as they came; `realigned`: moved forward, as the text had gone on as "
                "guessed; `stale`: the text had gone on otherwise; `late`: no step could use them."
            ),
            unit="percentunit",
            kind=Kind.PARTS,
            max_value=1,
            queries=[_shares("tandem_draft_hints_total", "outcome", MODEL)],
        ),
        Panel(
            title="The way to the drafter and back",
            description=(
                "From sending tokens to the draft that goes on with them, the drafter's part of "
                "it, and a step of the model: a draft that takes longer misses the next step."
            ),
            unit="s",
            queries=[
                *(
                    Query(expression=query.expression, legend=f"way {query.legend}")
                    for query in quantiles("tandem_draft_hop_seconds", 0.5, 0.99, matchers=MODEL)
                ),
                *(
                    Query(expression=query.expression, legend=f"drafter's part {query.legend}")
                    for query in quantiles("tandem_drafter_proposal_seconds", 0.5)
                ),
                Query(
                    expression=(
                        f"{total(rate('tandem_step_duration_seconds_sum', MODEL))}"
                        f" / {total(rate('tandem_step_tokens_count', MODEL))}"
                    ),
                    legend="step, mean",
                ),
            ],
        ),
    ],
)

_COST = Row(
    title="What does waiting cost?",
    panels=[
        Panel(
            title="Waiting for drafts",
            description=(
                "A step waits for drafts where that should pay. Share of the verifiers' time that "
                "is spent so, and share of the waits in which a draft came."
            ),
            unit="percentunit",
            max_value=1,
            width=12,
            queries=[
                Query(
                    expression=(
                        f"{total(rate('tandem_draft_wait_seconds_sum', MODEL))}"
                        f" / ({total(rate('tandem_draft_wait_seconds_sum', MODEL))}"
                        f" + {total(rate('tandem_step_duration_seconds_sum', MODEL))})"
                    ),
                    legend="time spent waiting",
                ),
                Query(
                    expression=(
                        total(rate("tandem_draft_waits_total", f'{MODEL},outcome="paid"'))
                        + f" / {total(rate('tandem_draft_waits_total', MODEL))}"
                    ),
                    legend="waits that paid",
                ),
            ],
        ),
        Panel(
            title="Drafters, as verifiers see them",
            description=(
                "Each verifier counts those that it uses. `slow`: late again and again, and not "
                "waited for; `down`: tried again and again."
            ),
            unit="none",
            kind=Kind.PARTS,
            width=12,
            queries=[
                Query(
                    expression=total(gauge("tandem_verifier_drafters", f'{MODEL},state="{state}"')),
                    legend=state,
                )
                for state in ("up", "connecting", "slow", "down")
            ],
        ),
    ],
)

SPECULATION = Dashboard(
    uid="tandem-speculation",
    title="Tandem / Speculation",
    description="What drafts bring, how good they are, and whether they come in time.",
    introduction=_INTRODUCTION,
    rows=[_BRINGS, _GUESSES, _IN_TIME, _COST],
)
