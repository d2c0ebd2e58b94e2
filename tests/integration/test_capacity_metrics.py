"""Every limit is exported beside its use."""

import asyncio

from tandem.client import GenerationRequest, SpeculationParams
from tests.integration.stack import running_stack, verifier_config, wait_until

# Limits that no default equals, and the metrics that export them.
VERIFIER: dict[str, object] = {"max_num_seqs": 3, "max_num_waiting": 5, "max_waiting_tokens": 700}
DRAFTER: dict[str, object] = {
    "max_sequences": 11,
    "max_sequence_bytes": 1 << 20,
    "max_history_bytes": 3 << 20,
    "max_pool_bytes": 1 << 20,
    "max_pools_bytes": 5 << 20,
}
GATEWAY: dict[str, object] = {"max_concurrent_requests": 13, "max_waiting_tokens": 900}
USES = (
    ("gateway", "num_requests_admitted"),
    ("gateway", "num_requests_running"),
    ("gateway", "num_requests_waiting"),
    ("gateway", "waiting_prompt_tokens"),
    ("gateway", "kv_cache_usage_perc"),
    ("verifier", "kv_blocks_used"),
    ("verifier", "verifier_sequences_running"),
    ("verifier", "verifier_sequences_waiting"),
    ("verifier", "verifier_waiting_tokens"),
)
LIMITS = {
    ("verifier", "tandem_kv_blocks_total"): 128,
    ("verifier", "tandem_verifier_max_num_seqs"): 3,
    ("verifier", "tandem_verifier_max_num_waiting"): 5,
    ("verifier", "tandem_verifier_max_waiting_tokens"): 700,
    ("drafter", "tandem_drafter_max_sequences"): 11,
    ("drafter", "tandem_drafter_max_history_bytes"): 3 << 20,
    ("drafter", "tandem_drafter_max_pool_bytes"): 5 << 20,
    ("gateway", "tandem_max_concurrent_requests"): 13,
    ("gateway", "tandem_max_waiting_prompt_tokens"): 900,
}


async def test_limits_are_those_configured_and_uses_are_beside_them() -> None:
    verifier = verifier_config(num_kv_blocks=128, **VERIFIER)
    async with running_stack(verifier=verifier, drafter=DRAFTER, gateway=GATEWAY) as stack:
        assert {key: stack.metric(*key) for key in LIMITS} == LIMITS
        shape = {"block_size": "16", "num_gpu_blocks": "128"}
        assert stack.metric("verifier", "tandem_cache_config_info", **shape) == 1

        def used() -> dict[str, float]:
            return {name: stack.metric(service, f"tandem_{name}") for service, name in USES}

        # Longer than the test.
        request = GenerationRequest(
            prompt=[9, 10, 11] * 8,
            max_new_tokens=600,
            ignore_eos=True,
            speculation=SpeculationParams(enabled=False),
        )
        tasks = [asyncio.create_task(stack.generate(request)) for _ in range(8)]
        # Three run, and the others wait with the 24 tokens of their prompts.
        expected = {
            "num_requests_admitted": 8,
            "num_requests_running": 3,
            "num_requests_waiting": 5,
            "waiting_prompt_tokens": 5 * 24,
            "verifier_sequences_running": 3,
            "verifier_sequences_waiting": 5,
            "verifier_waiting_tokens": 5 * 24,
        }
        await wait_until(lambda: used().items() >= expected.items(), timeout_s=20)
        num_blocks = used()["kv_blocks_used"]
        assert 3 * 2 <= num_blocks <= used()["kv_blocks_used"] <= 3 * 39
        assert 0 < used()["kv_cache_usage_perc"] <= 3 * 39 / 128
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stack.check_idle()
        assert set(used().values()) == {0}
