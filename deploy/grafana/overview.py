"""The dashboard *Overview*: traffic, latency, errors, saturation."""

from deploy.grafana.panels import Dashboard, Panel, Query, Row, gauge, quantiles, rate, total

_TRAFFIC = Row(
    title="Traffic",
    panels=[
        Panel(
            title="Tokens",
            description="Output tokens sent to clients, and prompt tokens of their choices.",
            unit="short",
            queries=[
                Query(
                    expression=total(rate("tandem_generation_tokens_total")), legend="generated / s"
                ),
                Query(expression=total(rate("tandem_prompt_tokens_total")), legend="prompt / s"),
            ],
        ),
        Panel(
            title="Requests",
            description="Received requests, and choices that ended, by reason.",
            unit="reqps",
            queries=[
                Query(expression=total(rate("tandem_requests_received_total")), legend="received"),
                Query(
                    expression=total(rate("tandem_request_success_total"), "finish_reason"),
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
                    legend="{{job}}",
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
            description="From the arrival of a request to the first token sent.",
            unit="s",
            queries=quantiles("tandem_time_to_first_token_seconds", 0.5, 0.9, 0.99),
        ),
        Panel(
            title="Inter-token latency",
            description="Gaps between the messages of a choice; one message can hold many tokens.",
            unit="s",
            queries=quantiles("tandem_inter_token_latency_seconds", 0.5, 0.9, 0.99),
        ),
        Panel(
            title="Whole request",
            description="From the arrival of a request to the last token of a choice.",
            unit="s",
            queries=quantiles("tandem_e2e_request_latency_seconds", 0.5, 0.9, 0.99),
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
            title="Shed and resumed",
            description="Shed requests, and choices that moved to another verifier.",
            unit="reqps",
            queries=[
                Query(
                    expression=total(rate("tandem_requests_shed_total"), "reason"),
                    legend="shed: {{reason}}",
                ),
                Query(
                    expression=total(rate("tandem_request_resumes_total"), "reason"),
                    legend="resumed: {{reason}}",
                ),
            ],
        ),
        Panel(
            title="Error budgets",
            description=(
                "Share of bad events in the last hour. The objectives allow 0.5 % of the requests "
                "to fail, and 1 % of the first tokens to take more than 2.5 s."
            ),
            unit="percentunit",
            queries=[
                Query(
                    expression=gauge("tandem:request_errors:ratio_rate1h"), legend="failed requests"
                ),
                Query(
                    expression=gauge("tandem:slow_first_tokens:ratio_rate1h"),
                    legend="slow first tokens",
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
            queries=[
                Query(
                    expression=(
                        f"{gauge('tandem_kv_blocks_used')} / {gauge('tandem_kv_blocks_total')}"
                    ),
                    legend="{{instance}}",
                )
            ],
        ),
        Panel(
            title="Certificates",
            description="Time until they expire. Services load them at start.",
            unit="s",
            queries=[
                Query(
                    expression=f"{gauge('tandem_certificate_expiry_timestamp_seconds')} - time()",
                    legend="{{instance}} {{certificate}}",
                )
            ],
        ),
    ],
)

OVERVIEW = Dashboard(
    uid="tandem-overview",
    title="Tandem / Overview",
    description="Traffic, latency, errors and saturation of all services.",
    rows=[_TRAFFIC, _LATENCY, _ERRORS, _SATURATION],
)
