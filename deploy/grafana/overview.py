"""The dashboard *On call*: is it up, slow, failing, helping; which instance; how much is left."""

from deploy.grafana.panels import (
    GREEN,
    MODEL,
    RED,
    YELLOW,
    Dashboard,
    Kind,
    Panel,
    Query,
    Row,
    gauge,
    quantiles,
    rate,
    recorded,
    total,
)

# 1: the instance serves; 0: it does not, or is gone.
_SERVING = gauge("tandem_serving") + " or " + gauge("up", 'job=~"tandem-.+"') + " == 0"
# Of errors, those that are not their callers'.
_OURS = "DEADLINE_EXCEEDED|INTERNAL|RESOURCE_EXHAUSTED|UNAVAILABLE"

_NOW = Row(
    title="Now",
    panels=[
        Panel(
            title="Serving",
            description="Of each service's instances, the share that serves.",
            unit="percentunit",
            kind=Kind.TILE,
            width=8,
            colours=((0, RED), (0.5, YELLOW), (1, GREEN)),
            queries=[
                Query(
                    expression=f"avg by (job) ({_SERVING})",
                    legend="{{job}}",
                )
            ],
        ),
        Panel(
            title="First token, p99",
            description="99 of 100 first tokens come within this time. The objective is 2.5 s.",
            unit="s",
            kind=Kind.TILE,
            width=4,
            colours=((0, GREEN), (1, YELLOW), (2.5, RED)),
            queries=quantiles("tandem_time_to_first_token_seconds", 0.99, matchers=MODEL),
        ),
        Panel(
            title="Failed requests",
            description=(
                "Share of the last 5 minutes' requests that failed, callers' mistakes aside. Of "
                "the objective's budget of 30 days, 0.5 % spends as much as it may, 7.2 % a "
                "fiftieth in an hour."
            ),
            unit="percentunit",
            kind=Kind.TILE,
            width=4,
            colours=((0, GREEN), (0.005, YELLOW), (0.072, RED)),
            queries=[
                Query(expression=recorded("tandem:request_errors:ratio_rate5m"), legend="failed")
            ],
        ),
        Panel(
            title="Faster by drafts",
            description=(
                "How many times as fast as without drafts verifiers decode. Near 1 is right under "
                "full load and on text that does not repeat; under it, drafts cost."
            ),
            unit="none",
            kind=Kind.TILE,
            width=4,
            colours=((0, RED), (0.98, YELLOW), (1.02, GREEN)),
            queries=[Query(expression=recorded("tandem:decode_gain:ratio_rate5m"), legend="times")],
        ),
        Panel(
            title="Room left",
            description=(
                "Of the limit that is nearest, over all instances: 1 - use / limit. *Use of "
                "limits* says which one it is."
            ),
            unit="percentunit",
            kind=Kind.TILE,
            width=4,
            colours=((0, RED), (0.1, YELLOW), (0.25, GREEN)),
            queries=[
                Query(
                    expression=f"1 - max(avg by (limit) ({gauge('tandem:saturation:ratio')}))",
                    legend="left",
                )
            ],
        ),
    ],
)

_SLOW = Row(
    title="Slow?",
    panels=[
        Panel(
            title="Time to first token",
            description="Arrival of a request to the first token sent. The line is the objective.",
            unit="s",
            colours=((0, GREEN), (2.5, RED)),
            queries=quantiles("tandem_time_to_first_token_seconds", 0.5, 0.9, 0.99, matchers=MODEL),
        ),
        Panel(
            title="Time per output token",
            description="First to last token of each choice, / the tokens after the first.",
            unit="s",
            queries=quantiles(
                "tandem_request_time_per_output_token_seconds", 0.5, 0.9, 0.99, matchers=MODEL
            ),
        ),
        Panel(
            title="Whole request",
            description="Arrival of a request to the last token of a choice.",
            unit="s",
            queries=quantiles("tandem_e2e_request_latency_seconds", 0.5, 0.9, 0.99, matchers=MODEL),
        ),
    ],
)

_WHY = Row(
    title="Why?",
    panels=[
        Panel(
            title="Waiting and prefill",
            description=(
                "Parts of the time to the first token: until a verifier has room, and from then "
                "on. Waiting: too few verifiers, or a full limit. Prefill: long prompts, or slow "
                "steps."
            ),
            unit="s",
            queries=[
                Query(expression=query.expression, legend=f"{part} {query.legend}")
                for part, histogram in (
                    ("waiting", "tandem_request_queue_time_seconds"),
                    ("prefill", "tandem_request_prefill_time_seconds"),
                )
                for query in quantiles(histogram, 0.5, 0.99, matchers=MODEL)
            ],
        ),
        Panel(
            title="Errors and moves",
            description=(
                "Requests that failed, by code; callers' mistakes in one line; choices that "
                "another verifier went on with."
            ),
            unit="reqps",
            queries=[
                Query(
                    expression=total(
                        rate("tandem_request_errors_total", f'code=~"{_OURS}"'), "code"
                    ),
                    legend="{{code}}",
                ),
                Query(
                    expression=total(rate("tandem_request_errors_total", f'code!~"{_OURS}"')),
                    legend="callers' mistakes",
                ),
                Query(expression=total(rate("tandem_request_resumes_total")), legend="moved"),
            ],
        ),
        Panel(
            title="Open choices",
            description="In a verifier's batch, and waiting for one.",
            unit="short",
            kind=Kind.PARTS,
            queries=[
                Query(expression=total(gauge("tandem_num_requests_running")), legend="running"),
                Query(expression=total(gauge("tandem_num_requests_waiting")), legend="waiting"),
            ],
        ),
    ],
)

_WHICH = Row(
    title="Which one, and how much is left?",
    panels=[
        Panel(
            title="Serving, by instance",
            description="Green: it serves. Red: it loads, drains, waits for peers, or is gone.",
            unit="short",
            kind=Kind.STATES,
            colours=((0, RED), (1, GREEN)),
            queries=[Query(expression=_SERVING, legend="{{job}} {{instance}}")],
        ),
        Panel(
            title="Verifiers beside their peers",
            description=(
                "How many times as long a verifier's steps take as the others' of its model, load "
                "aside. About 1 is usual; over the line for long, look at that instance."
            ),
            unit="none",
            colours=((0, GREEN), (1.5, RED)),
            queries=[
                Query(
                    expression=gauge("tandem:verifier_slowness:ratio_rate5m", MODEL),
                    legend="{{instance}}",
                )
            ],
        ),
        Panel(
            title="Use of limits",
            description=(
                "Of each limit, the use of the fullest instance. Full `sequences` are a full "
                "batch: others wait. Full `requests`, `waiting_tokens` or `verifier_queue`: "
                "requests are refused. Full `history_bytes` or `histories`: drafts are forgotten."
            ),
            unit="percentunit",
            max_value=1,
            colours=((0, GREEN), (0.9, RED)),
            queries=[
                Query(
                    expression=f"max by (limit) ({gauge('tandem:saturation:ratio')})",
                    legend="{{limit}}",
                )
            ],
        ),
    ],
)

OVERVIEW = Dashboard(
    uid="tandem-overview",
    title="Tandem / On call",
    description="Is it up, slow, failing, helping? Which instance? How much is left?",
    rows=[_NOW, _SLOW, _WHY, _WHICH],
)
