"""The dashboard *Capacity*: use of the verifiers' steps and of all memory."""

from deploy.grafana.panels import MODEL, Dashboard, Panel, Query, Row, gauge, quantiles, rate, total


def _of_tandem(expression: str) -> str:
    """Only Tandem's processes: others export metrics of these names, too."""
    return expression.replace("{", '{job=~"tandem-.+",')


_MEMORY = Row(
    title="Verifiers' memory",
    panels=[
        Panel(
            title="K/V blocks",
            description="Held by sequences, and in total.",
            unit="short",
            queries=[
                Query(expression=total(gauge("tandem_kv_blocks_used", MODEL)), legend="used"),
                Query(expression=total(gauge("tandem_kv_blocks_total", MODEL)), legend="all"),
            ],
        ),
        Panel(
            title="Sequences",
            description="Running and at most, waiting for room, and commands not yet handled.",
            unit="short",
            queries=[
                Query(
                    expression=gauge("tandem_verifier_sequences_running", MODEL),
                    legend="{{instance}} running",
                ),
                Query(
                    expression=gauge("tandem_verifier_max_num_seqs", MODEL),
                    legend="{{instance}} at most",
                ),
                Query(
                    expression=gauge("tandem_verifier_sequences_waiting", MODEL),
                    legend="{{instance}} waiting",
                ),
                Query(
                    expression=gauge("tandem_verifier_pending_commands", MODEL),
                    legend="{{instance}} commands",
                ),
            ],
        ),
        Panel(
            title="Prefix cache and preemptions",
            description=(
                "Prompt tokens looked up and found cached; sequences preempted for lack of blocks."
            ),
            unit="short",
            queries=[
                Query(
                    expression=total(rate("tandem_prefix_cache_queries_total", MODEL)),
                    legend="looked up / s",
                ),
                Query(
                    expression=total(rate("tandem_prefix_cache_hits_total", MODEL)),
                    legend="found / s",
                ),
                Query(
                    expression=total(rate("tandem_preemptions_total", MODEL)),
                    legend="preemptions / s",
                ),
            ],
        ),
    ],
)

_STEPS = Row(
    title="Steps",
    panels=[
        Panel(
            title="Tokens per step",
            description="Prompt chunks, decodes and drafts, bounded by the token budget.",
            unit="short",
            queries=[
                *quantiles("tandem_step_tokens", 0.5, 0.99, matchers=MODEL),
                Query(
                    expression=(
                        f"{total(rate('tandem_step_tokens_sum', MODEL))}"
                        f" / {total(rate('tandem_step_tokens_count', MODEL))}"
                    ),
                    legend="mean",
                ),
            ],
        ),
        Panel(
            title="Tokens and steps",
            description="Tokens computed by the models, including rejected drafts.",
            unit="short",
            queries=[
                Query(expression=total(rate("tandem_step_tokens_sum", MODEL)), legend="tokens / s"),
                Query(
                    expression=total(rate("tandem_step_tokens_count", MODEL)), legend="steps / s"
                ),
            ],
        ),
        Panel(
            title="Time by phase",
            description="Seconds of steps per second, of all verifiers.",
            unit="percentunit",
            stacked=True,
            queries=[
                Query(
                    expression=total(rate("tandem_step_duration_seconds_sum", MODEL), "phase"),
                    legend="{{phase}}",
                )
            ],
        ),
    ],
)

_STRUCTURED = Row(
    title="Structured output",
    panels=[
        Panel(
            title="Grammars",
            description="Grammars that clients sent, by kind: compiled, or refused.",
            unit="short",
            width=12,
            queries=[
                Query(
                    expression=total(rate("tandem_grammars_total", MODEL), "kind", "outcome"),
                    legend="{{kind}} {{outcome}} / s",
                )
            ],
        ),
        Panel(
            title="Compiling",
            description=(
                "Share of the time in which a verifier compiles: it compiles one grammar at a "
                "time, and others wait."
            ),
            unit="percentunit",
            width=12,
            queries=[
                Query(
                    expression=rate("tandem_grammar_compile_seconds_sum", MODEL),
                    legend="{{instance}}",
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
            description="Histories and shared pools, with their indexes; both are bounded.",
            unit="bytes",
            width=12,
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
            description="Sequences with a history.",
            unit="short",
            width=12,
            queries=[
                Query(expression=total(gauge("tandem_drafter_sequences")), legend="sequences"),
            ],
        ),
        Panel(
            title="Pools",
            description="Texts that pools were fed, and snapshots of pools, by outcome.",
            unit="short",
            width=12,
            queries=[
                Query(
                    expression=total(rate("tandem_drafter_pool_feeds_total"), "outcome"),
                    legend="fed: {{outcome}} / s",
                ),
                Query(
                    expression=total(rate("tandem_drafter_snapshots_total"), "outcome"),
                    legend="snapshots: {{outcome}} / s",
                ),
            ],
        ),
        Panel(
            title="Forgotten",
            description="Evicted sequences and texts of pools, because a bound was reached.",
            unit="short",
            width=12,
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

_PROCESSES = Row(
    title="Processes",
    panels=[
        Panel(
            title="Resident memory",
            description="Of each process, mapped files included. Its pod's limit is the bound.",
            unit="bytes",
            queries=[
                Query(
                    expression=_of_tandem(gauge("process_resident_memory_bytes")),
                    legend="{{job}} {{instance}}",
                )
            ],
        ),
        Panel(
            title="Processor time",
            description="Cores that each process uses. A gateway uses one at most.",
            unit="short",
            queries=[
                Query(
                    expression=_of_tandem(rate("process_cpu_seconds_total")),
                    legend="{{job}} {{instance}}",
                )
            ],
        ),
        Panel(
            title="Restarts",
            description="Starts of each process in the last half hour, after the first.",
            unit="short",
            queries=[
                Query(
                    expression=f"changes({_of_tandem(gauge('process_start_time_seconds'))}[30m])",
                    legend="{{job}} {{instance}}",
                )
            ],
        ),
    ],
)

CAPACITY = Dashboard(
    uid="tandem-capacity",
    title="Tandem / Capacity",
    description="K/V, prefix cache, batches, grammars, drafters' memory and processes.",
    rows=[_MEMORY, _STEPS, _STRUCTURED, _DRAFTERS, _PROCESSES],
)
