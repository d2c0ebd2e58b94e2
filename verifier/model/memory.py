"""Memory for K/V blocks: what is free for this process, and how much of it they may take.

Knows no torch; `gpu_memory.py` asks a GPU.
"""

from pathlib import Path

from servicekit.config import ConfigError
from servicekit.control_groups import PROC, ROOT, limiting_groups, words
from verifier.config import VerifierConfig

UNMEASURED_FRACTION = 0.25
"""K/V's default share of free memory where no step was measured: on a CPU, or with several ranks.
"""

MEASURED_FRACTION = 0.9
"""K/V's default share of what weights and the largest step leave; the rest is for fragments of
torch's allocator.
"""


def choose_num_kv_blocks(
    config: VerifierConfig,
    *,
    model_limit: int,
    block_size: int,
    block_bytes: int,
    free_bytes: float,
    default_fraction: float = UNMEASURED_FRACTION,
    state_bytes: int = 0,
) -> int:
    """K/V blocks: the flag's, or as many as can be used and as memory has room for.

    Args:
        model_limit: the longest sequence of the model, in tokens.
        block_bytes: of one block over all layers, K and V.
        free_bytes: of the device, for this process.
        default_fraction: of them for K/V, unless the flag says so.
        state_bytes: of what is for K/V, that recurrent states take.

    Raises:
        ConfigError: there is no room for one, or for as many as the flag says.
    """
    if config.num_kv_blocks is not None:
        num_bytes = config.num_kv_blocks * block_bytes
        if num_bytes > free_bytes - state_bytes:
            raise ConfigError(
                "--num-kv-blocks",
                f"{config.num_kv_blocks} blocks take {num_bytes >> 20} MiB; "
                f"{int(free_bytes - state_bytes) >> 20} MiB are free",
            )
        return config.num_kv_blocks
    longest = config.max_model_len or model_limit
    num_usable = config.max_num_seqs * -(-longest // block_size)
    fraction = config.kv_memory_fraction or default_fraction
    affordable = int((free_bytes * fraction - state_bytes) // block_bytes)
    if affordable < 1:
        raise ConfigError("--kv-memory-fraction", "leaves no memory for the K/V cache")
    return min(num_usable, affordable)


def choose_num_state_slots(
    config: VerifierConfig,
    *,
    slot_bytes: int,
    free_bytes: float,
    default_fraction: float = UNMEASURED_FRACTION,
) -> int:
    """Slots for recurrent states: of all sequences that run, each with a snapshot of its prompt and
    one of its answer, but no more than half of the memory for K/V has room for.

    Args:
        free_bytes, default_fraction: as for `choose_num_kv_blocks`.

    Raises:
        ConfigError: there is no room for one.
    """
    room = free_bytes * (config.kv_memory_fraction or default_fraction) / 2
    num_slots = min(config.max_num_seqs * (3 if config.prefix_cache else 1), room // slot_bytes)
    if num_slots < 1:
        raise ConfigError(
            "--kv-memory-fraction",
            f"leaves no memory for recurrent states, {-(-slot_bytes >> 20)} MiB of each sequence",
        )
    return int(num_slots)


def free_memory_bytes(
    proc: Path = PROC, groups: Path = ROOT, *, keeps_used_files: bool = True
) -> int:
    """Free memory of the machine, and no more than the container's limit leaves.

    Pages of files that were not used lately count as free: they are given back when needed.

    Args:
        keeps_used_files: False: pages of files that were used lately count, too. Those of a
            checkpoint that was just read are among them.

    Raises:
        ConfigError: it is unknown.
    """
    limits = [_available_bytes(proc)]
    for version, group in limiting_groups("memory", proc=proc, root=groups):
        limits.append(_left_bytes(group, version, keeps_used_files=keeps_used_files))
    known = [limit for limit in limits if limit is not None]
    if not known:
        raise ConfigError("--num-kv-blocks", "must be set: the free memory is unknown here")
    return max(0, min(known))


def _available_bytes(proc: Path) -> int | None:
    """Free memory of the machine; None: unknown."""
    found = words(proc / "meminfo")
    if "MemAvailable:" not in found:
        return None
    return int(found[found.index("MemAvailable:") + 1]) * 1024


def _left_bytes(group: Path, version: int, *, keeps_used_files: bool) -> int | None:
    """What a control group's limit leaves; None: it has none.

    Version 1 knows no word for that: a group without a limit has a huge one.
    """
    limit_file, usage_file, prefix = (
        ("memory.max", "memory.current", "")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    kinds = ("inactive_file",) if keeps_used_files else ("inactive_file", "active_file")
    match words(group / limit_file), words(group / usage_file):
        case [[limit], [usage]] if limit != "max":
            stat = words(group / "memory.stat")
            names = [prefix + kind for kind in kinds if prefix + kind in stat]
            return int(limit) - int(usage) + sum(int(stat[stat.index(n) + 1]) for n in names)
    return None
