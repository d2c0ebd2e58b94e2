"""The dashboard *Speculation*: gain, depth and cost of drafts."""

from deploy.grafana.panels import (
    MODEL,
    Dashboard,
    Panel,
    Query,
    Row,
    gauge,
    quantiles,
    rate,
    recorded,
    total,
)

_DRAFTED = total(rate("tandem_spec_decode_num_draft_tokens_total", MODEL))
_ACCEPTED = total(rate("tandem_spec_decode_num_accepted_tokens_total", MODEL))
_DRAFTS = total(rate("tandem_spec_decode_num_drafts_total", MODEL))


_GAIN = Row(
    title="Gain",
    panels=[
        Panel(
            title="Acceptance rate",
            description="Accepted / verified drafts. High on edits and quotations, low on prose.",
            unit="percentunit",
            max_value=1,
            queries=[
                Query(expression=f"{_ACCEPTED} / {_DRAFTED}", legend="now"),
                Query(
                    expression=recorded("tandem:spec_decode_acceptance:ratio_rate5m"),
                    legend="5 minutes {{namespace}}",
                ),
            ],
        ),
        Panel(
            title="Mean acceptance length",
            description=(
                "Tokens per verify step: the accepted drafts and one more. And tokens per step "
                "over all steps, with and without drafts."
            ),
            unit="short",
            queries=[
                Query(expression=f"1 + {_ACCEPTED} / {_DRAFTS}", legend="per verify step"),
                Query(
                    expression=(
                        f"{total(rate('tandem_generation_tokens_total', MODEL))}"
                        f" / {total(rate('tandem_generation_steps_total', MODEL))}"
                    ),
                    legend="per step",
                ),
            ],
        ),
        Panel(
            title="Gain over plain decoding",
            description=(
                "The verifiers' estimate of the time for the same tokens without drafts, / the "
                "time of the steps, including waits. 1 is no gain."
            ),
            unit="short",
            alarming_under=1,
            queries=[
                Query(
                    expression=(
                        f"{total(rate('tandem_decode_plain_seconds_total', MODEL))}"
                        f" / {total(rate('tandem_decode_seconds_total', MODEL))}"
                    ),
                    legend="times as fast",
                )
            ],
        ),
        Panel(
            title="Draft tokens",
            description="Verified and accepted. The difference was computed in vain.",
            unit="short",
            width=12,
            queries=[
                Query(expression=_DRAFTED, legend="verified / s"),
                Query(expression=_ACCEPTED, legend="accepted / s"),
            ],
        ),
    ],
)

_DEPTH = Row(
    title="Depth",
    panels=[
        Panel(
            title="Depth chosen",
            description="Drafts per sequence and step, including 0.",
            unit="short",
            heatmap=True,
            width=12,
            queries=[
                Query(
                    expression=total(rate("tandem_speculation_depth_bucket", MODEL), "le"),
                    legend="{{le}}",
                )
            ],
        ),
        Panel(
            title="Mean depth",
            description="Drafts per sequence and step, including steps without drafts.",
            unit="short",
            width=12,
            queries=[
                Query(
                    expression=(
                        f"{total(rate('tandem_speculation_depth_sum', MODEL))}"
                        f" / {total(rate('tandem_speculation_depth_count', MODEL))}"
                    ),
                    legend="drafts",
                )
            ],
        ),
        Panel(
            title="Error of the expected step time",
            description=(
                "Difference between a step's duration and what the verifier expected, / the "
                "duration. High where other processes take the processor now and then."
            ),
            unit="percentunit",
            width=12,
            queries=quantiles("tandem_step_cost_error_ratio", 0.5, 0.9, matchers=MODEL),
        ),
    ],
)

_MATCH = Row(
    title="By match and by request",
    panels=[
        Panel(
            title="Acceptance length per request",
            description="Ended choices by their tokens per verify step.",
            unit="short",
            heatmap=True,
            queries=[
                Query(
                    expression=total(rate("tandem_request_acceptance_length_bucket", MODEL), "le"),
                    legend="{{le}}",
                )
            ],
        ),
    ],
)

_HINTS = Row(
    title="Hints",
    panels=[
        Panel(
            title="What became of hints",
            description=(
                "Used at their own length, realigned to a later one, stale (contradicted by the "
                "sequence), or late (decided or replaced before use)."
            ),
            unit="percentunit",
            stacked=True,
            max_value=1,
            queries=[
                Query(
                    expression=(
                        f"{total(rate('tandem_draft_hints_total', MODEL), 'outcome')}"
                        f" / on () group_left () {total(rate('tandem_draft_hints_total', MODEL))}"
                    ),
                    legend="{{outcome}}",
                )
            ],
        ),
        Panel(
            title="Waits",
            description="How long steps waited for hints; most do not wait.",
            unit="s",
            queries=[
                *quantiles("tandem_draft_wait_seconds", 0.5, 0.99, matchers=MODEL),
                Query(
                    expression=(
                        f"{total(rate('tandem_draft_wait_seconds_sum', MODEL))}"
                        f" / {total(rate('tandem_draft_wait_seconds_count', MODEL))}"
                    ),
                    legend="mean",
                ),
            ],
        ),
        Panel(
            title="What waits brought",
            description="Waits of steps for hints: paid, or in vain.",
            unit="short",
            stacked=True,
            queries=[
                Query(
                    expression=total(rate("tandem_draft_waits_total", MODEL), "outcome"),
                    legend="{{outcome}} / s",
                )
            ],
        ),
        Panel(
            title="Hop",
            description=(
                "From a verifier's sending tokens to the hint that continues them, of hints that "
                "travelled while no step was computed; and the drafters' part of it."
            ),
            unit="s",
            width=12,
            queries=[
                Query(expression=query.expression, legend=f"{name} {query.legend}")
                for name, histogram, matchers in (
                    ("hop", "tandem_draft_hop_seconds", MODEL),
                    ("drafter", "tandem_drafter_proposal_seconds", ""),
                )
                for query in quantiles(histogram, 0.5, 0.99, matchers=matchers)
            ],
        ),
    ],
)

_DRAFTERS = Row(
    title="Drafters",
    panels=[
        Panel(
            title="Connections to drafters",
            description=(
                "Drafters as verifiers see them, each verifier counting its own: slow ones are not "
                "waited for, those that are down are tried again."
            ),
            unit="short",
            stacked=True,
            width=12,
            queries=[
                Query(
                    expression=total(gauge("tandem_verifier_drafters", MODEL), "state"),
                    legend="{{state}}",
                )
            ],
        ),
        Panel(
            title="Drafters' faults",
            description="What drafters did wrong, as verifiers see it. They cost drafts only.",
            unit="short",
            width=12,
            queries=[
                Query(
                    expression=total(rate("tandem_verifier_drafter_faults_total", MODEL), "reason"),
                    legend="{{reason}} / s",
                )
            ],
        ),
        Panel(
            title="Drafters' answers",
            description="Proposals by outcome and source: the sequence itself or a pool.",
            unit="short",
            stacked=True,
            width=24,
            queries=[
                Query(
                    expression=total(rate("tandem_drafter_proposals_total"), "outcome", "source"),
                    legend="{{outcome}} ({{source}}) / s",
                )
            ],
        ),
    ],
)

SPECULATION = Dashboard(
    uid="tandem-speculation",
    title="Tandem / Speculation",
    description="Whether drafts pay: acceptance, depth, hints, waits, and the gain.",
    rows=[_GAIN, _DEPTH, _MATCH, _HINTS, _DRAFTERS],
)
