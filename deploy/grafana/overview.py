"""The dashboard *Overview*: traffic, latency, errors, saturation."""

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

_TRAFFIC = Row(
    title="Traffic",
    panels=[
        Panel(
            title="Tokens",
            description="Output tokens sent to clients, and prompt tokens of their choices.",
            unit="short",
            queries=[
                Query(
                    expression=total(rate("tandem_generation_tokens_total", MODEL)),
                    legend="generated / s",
                ),
                Query(
                    expression=total(rate("tandem_prompt_tokens_total", MODEL)), legend="prompt / s"
                ),
            ],
        ),
        Panel(
            title="Requests",
            description="Received requests, and choices that ended, by reason.",
            unit="reqps",
            queries=[
                Query(expression=total(rate("tandem_requests_received_total")), legend="received"),
                Query(
                    expression=total(rate("tandem_request_success_total", MODEL), "finish_reason"),
                    legend="ended: {{finish_reason}}",
                ),
            ],
        ),
        Panel(
            title="Up and serving",
            description=(
                "Instances of each service that Prometheus reaches, and those that serve: that do "
                "not load, drain or wait for verifiers. And what the gateway with the fewest is "
                "connected to: verifiers, and drafters that answer one of them."
            ),
            unit="short",
            queries=[
                Query(
                    expression=total(gauge("up").replace("{", '{job=~"tandem-.+",'), "job"),
                    legend="{{job}}: up",
                ),
                Query(expression=total(gauge("tandem_serving"), "job"), legend="{{job}}: serving"),
                Query(
                    expression=f"min by (kind) ({gauge('tandem_peers_connected')})",
                    legend="connected: {{kind}}",
                ),
            ],
        ),
    ],
)

_LATENCY = Row(
    title="Latency",
    panels=[
        Panel(
            title="Time to first token",
            description=(
                "From the arrival of a request to the first token sent. The line is the objective "
                "of 99 %."
            ),
            unit="s",
            alarming_over=2.5,
            queries=quantiles("tandem_time_to_first_token_seconds", 0.5, 0.9, 0.99, matchers=MODEL),
        ),
        Panel(
            title="Inter-token latency",
            description="Gaps between the messages of a choice; one message can hold many tokens.",
            unit="s",
            queries=quantiles("tandem_inter_token_latency_seconds", 0.5, 0.9, 0.99, matchers=MODEL),
        ),
        Panel(
            title="Whole request",
            description="From the arrival of a request to the last token of a choice.",
            unit="s",
            queries=quantiles("tandem_e2e_request_latency_seconds", 0.5, 0.9, 0.99, matchers=MODEL),
        ),
    ],
)

_ERRORS = Row(
    title="Errors",
    panels=[
        Panel(
            title="Errors by code",
            description="Requests that ended in an error, including callers' mistakes.",
            unit="reqps",
            queries=[
                Query(
                    expression=total(rate("tandem_request_errors_total"), "code"),
                    legend="{{code}}",
                )
            ],
        ),
        Panel(
            title="Shed",
            description="Requests that were refused for load or readiness, by reason.",
            unit="reqps",
            queries=[
                Query(
                    expression=total(rate("tandem_requests_shed_total"), "reason"),
                    legend="{{reason}}",
                )
            ],
        ),
        Panel(
            title="Error budgets",
            description=(
                "Share of bad events in the last hour. The objectives allow 0.5 % of the requests "
                "to fail, and 1 % of the first tokens to take more than 2.5 s. The line is the "
                "smaller one."
            ),
            unit="percentunit",
            alarming_over=0.005,
            queries=[
                Query(
                    expression=recorded("tandem:request_errors:ratio_rate1h"),
                    legend="failed requests",
                ),
                Query(
                    expression=recorded("tandem:slow_first_tokens:ratio_rate1h"),
                    legend="slow first tokens",
                ),
            ],
        ),
    ],
)

_FAILURES = Row(
    title="Failures survived",
    panels=[
        Panel(
            title="Moved to another verifier",
            description=(
                "Choices that another verifier went on with, and those that went to another one "
                "before they began, by reason."
            ),
            unit="short",
            queries=[
                Query(
                    expression=total(rate("tandem_request_resumes_total"), "reason"),
                    legend="resumed: {{reason}} / s",
                ),
                Query(
                    expression=total(rate("tandem_request_retries_total"), "reason"),
                    legend="retried: {{reason}} / s",
                ),
            ],
        ),
        Panel(
            title="Late and unread",
            description=(
                "Requests whose deadline passed, by what they were doing, and requests whose "
                "client did not read."
            ),
            unit="reqps",
            queries=[
                Query(
                    expression=total(rate("tandem_requests_expired_total"), "phase"),
                    legend="late: {{phase}}",
                ),
                Query(expression=total(rate("tandem_requests_unread_total")), legend="unread"),
            ],
        ),
        Panel(
            title="Faults",
            description=(
                "Tandem's own faults, of which each ended one sequence at most, and invalid "
                "messages of verifiers. Any is a bug: the log has it."
            ),
            unit="short",
            queries=[
                Query(
                    expression=total(rate("tandem_verifier_internal_errors_total", MODEL), "phase"),
                    legend="verifier: {{phase}} / s",
                ),
                Query(
                    expression=total(rate("tandem_drafter_internal_errors_total"), "reason"),
                    legend="drafter: {{reason}} / s",
                ),
                Query(
                    expression=total(rate("tandem_peer_messages_ignored_total"), "reason"),
                    legend="message: {{reason}} / s",
                ),
            ],
        ),
    ],
)

_SATURATION = Row(
    title="Saturation",
    panels=[
        Panel(
            title="Choices open",
            description="Running in a verifier's batch, and waiting for one.",
            unit="short",
            stacked=True,
            queries=[
                Query(expression=total(gauge("tandem_num_requests_running")), legend="running"),
                Query(expression=total(gauge("tandem_num_requests_waiting")), legend="waiting"),
            ],
        ),
        Panel(
            title="K/V blocks in use",
            description="By verifier. When all are in use, sequences wait.",
            unit="percentunit",
            max_value=1,
            alarming_over=0.95,
            queries=[
                Query(
                    expression=(
                        f"{gauge('tandem_kv_blocks_used', MODEL)}"
                        f" / {gauge('tandem_kv_blocks_total', MODEL)}"
                    ),
                    legend="{{instance}}",
                )
            ],
        ),
        Panel(
            title="Certificates",
            description="Time until they expire. An alert comes a week before, at the line.",
            unit="s",
            alarming_under=7 * 86_400,
            queries=[
                Query(
                    expression=f"{gauge('tandem_certificate_expiry_timestamp_seconds')} - time()",
                    legend="{{instance}} {{certificate}}",
                )
            ],
        ),
    ],
)

_INSTALLATION = Row(
    title="Calls and installation",
    panels=[
        Panel(
            title="Calls",
            description="gRPC calls that ended, by method and status.",
            unit="reqps",
            queries=[
                Query(
                    expression=total(rate("tandem_rpc_requests_total"), "method", "code"),
                    legend="{{method}} {{code}}",
                )
            ],
        ),
        Panel(
            title="Duration of calls",
            description="Half of a method's calls take less. Streams last as long as their peers.",
            unit="s",
            queries=quantiles("tandem_rpc_duration_seconds", 0.5, by=["method"]),
        ),
        Panel(
            title="Versions and files",
            description=(
                "Instances by version: two versions during an update only. And files that were "
                "read again, by whether they could be used."
            ),
            unit="short",
            queries=[
                Query(
                    expression=f"count by (service, version) ({gauge('tandem_build_info')})",
                    legend="{{service}} {{version}}",
                ),
                Query(
                    expression=total(rate("tandem_file_reloads_total"), "files", "outcome"),
                    legend="{{files}}: {{outcome}} / s",
                ),
            ],
        ),
    ],
)

OVERVIEW = Dashboard(
    uid="tandem-overview",
    title="Tandem / Overview",
    description="Traffic, latency, errors and saturation of all services.",
    rows=[_TRAFFIC, _LATENCY, _ERRORS, _FAILURES, _SATURATION, _INSTALLATION],
)
