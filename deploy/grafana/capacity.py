"""The dashboard *Capacity*: what the verifiers' steps and the drafters' memory are filled with."""

from deploy.grafana.panels import Dashboard, Panel, Query, Row, gauge, quantiles, rate, total

_MEMORY = Row(
    title="Verifiers' memory",
    panels=[
        Panel(
            title="K/V blocks",
            description="Held by sequences, and all there are.",
            unit="short",
            queries=[
                Query(expression=total(gauge("tandem_kv_blocks_used")), legend="used"),
                Query(expression=total(gauge("tandem_kv_blocks_total")), legend="all"),
            ],
        ),
        Panel(
            title="Sequences",
            description="In the batch, waiting for room, and commands that no step has taken yet.",
            unit="short",
            queries=[
                Query(
                    expression=gauge("tandem_verifier_sequences_running"),
                    legend="{{instance}} running",
                ),
                Query(
                    expression=gauge("tandem_verifier_sequences_waiting"),
                    legend="{{instance}} waiting",
                ),
                Query(
                    expression=gauge("tandem_verifier_pending_commands"),
                    legend="{{instance}} commands",
                ),
            ],
        ),
        Panel(
            title="Prefix cache and preemptions",
            description=(
                "Prompt tokens looked up and found cached; sequences put back to waiting because "
                "blocks ran out."
            ),
            unit="short",
            queries=[
                Query(
                    expression=total(rate("tandem_prefix_cache_queries_total")),
                    legend="looked up / s",
                ),
                Query(expression=total(rate("tandem_prefix_cache_hits_total")), legend="found / s"),
                Query(expression=total(rate("tandem_preemptions_total")), legend="preemptions / s"),
            ],
        ),
    ],
)

_STEPS = Row(
    title="Steps",
    panels=[
        Panel(
            title="Tokens per step",
            description="Prompt chunks, decodes and drafts alike; the budget bounds them.",
            unit="short",
            queries=[
                *quantiles("tandem_step_tokens", 0.5, 0.99),
                Query(
                    expression=(
                        f"{total(rate('tandem_step_tokens_sum'))}"
                        f" / {total(rate('tandem_step_tokens_count'))}"
                    ),
                    legend="mean",
                ),
            ],
        ),
        Panel(
            title="Tokens and steps",
            description="That the models ran over, drafts that were rejected included.",
            unit="short",
            queries=[
                Query(expression=total(rate("tandem_step_tokens_sum")), legend="tokens / s"),
                Query(expression=total(rate("tandem_step_tokens_count")), legend="steps / s"),
            ],
        ),
        Panel(
            title="Time by phase",
            description="Seconds of steps per second, over all verifiers.",
            unit="percentunit",
            stacked=True,
            queries=[
                Query(
                    expression=total(rate("tandem_step_duration_seconds_sum"), "phase"),
                    legend="{{phase}}",
                )
            ],
        ),
    ],
)

_DRAFTERS = Row(
    title="Drafters",
    panels=[
        Panel(
            title="Memory",
            description="Histories and shared pools, with their indexes; each has its bound.",
            unit="bytes",
            queries=[
                Query(
                    expression=gauge("tandem_drafter_history_bytes"),
                    legend="{{instance}} histories",
                ),
                Query(expression=gauge("tandem_drafter_pool_bytes"), legend="{{instance}} pools"),
            ],
        ),
        Panel(
            title="Held",
            description="Sequences with a history, pools, and texts in them.",
            unit="short",
            queries=[
                Query(expression=total(gauge("tandem_drafter_sequences")), legend="sequences"),
                Query(expression=total(gauge("tandem_drafter_pools")), legend="pools"),
                Query(expression=total(gauge("tandem_drafter_pool_texts")), legend="texts"),
            ],
        ),
        Panel(
            title="Forgotten",
            description="Sequences that nobody released, and texts of pools; bounds are reached.",
            unit="short",
            queries=[
                Query(
                    expression=total(rate("tandem_drafter_evictions_total"), "reason"),
                    legend="sequences: {{reason}} / s",
                ),
                Query(
                    expression=total(rate("tandem_drafter_pool_evictions_total"), "reason"),
                    legend="texts: {{reason}} / s",
                ),
            ],
        ),
    ],
)

CAPACITY = Dashboard(
    uid="tandem-capacity",
    title="Tandem / Capacity",
    description="K/V, prefix cache, batches and drafters' memory: what to scale, and when.",
    rows=[_MEMORY, _STEPS, _DRAFTERS],
)
