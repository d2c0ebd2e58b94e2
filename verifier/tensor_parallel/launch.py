"""A process's rank, from torchrun's environment variables, and its GPU and network. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from servicekit.config import ConfigError

# torchrun sets these. torch itself reads the address and port.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Where gloo and NCCL connect the ranks. Without these, they may choose an address that other
# machines reach, and neither encrypts or authenticates anything.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK_INTERFACE = "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process's rank among `size`, at least 2, on one machine."""

    rank: int
    size: int


def read_launch(environ: Mapping[str, str], tensor_parallel_size: int) -> Launch | None:
    """This process's rank; None if it is the only one.

    Raises:
        ConfigError: torchrun has not started as many processes as the flag says.
    """
    flag = "--tensor-parallel-size"
    world_size = environ.get("WORLD_SIZE", "1")
    if tensor_parallel_size == 1:
        if world_size != "1":
            raise ConfigError(flag, f"1: torchrun has started {world_size} processes")
        return None
    if any(name not in environ for name in _VARIABLES):
        raise ConfigError(
            flag,
            f"{tensor_parallel_size}: start it with "
            f"`torchrun --nproc-per-node {tensor_parallel_size} -m verifier ...`",
        )
    if world_size != str(tensor_parallel_size):
        raise ConfigError(
            flag,
            f"{tensor_parallel_size}: torchrun has started {world_size} processes; "
            f"--nproc-per-node must be {tensor_parallel_size}",
        )
    if environ["LOCAL_WORLD_SIZE"] != world_size:
        raise ConfigError(
            flag,
            f"{tensor_parallel_size}: all processes must run on one machine; "
            f"{environ['LOCAL_WORLD_SIZE']} of them do here",
        )
    return Launch(rank=int(environ["RANK"]), size=tensor_parallel_size)


def loopback_variables(
    environ: Mapping[str, str], *, allow_plaintext: bool = False
) -> Mapping[str, str]:
    """The environment variables that keep the ranks' traffic on this machine.

    Args:
        allow_plaintext: whether an operator may have named other interfaces; what is set stays.

    Raises:
        ConfigError: one is named without that leave.
    """
    for name in _INTERFACE_VARIABLES:
        interface = environ.get(name) or _LOOPBACK_INTERFACE
        if interface != _LOOPBACK_INTERFACE and not allow_plaintext:
            raise ConfigError(
                name,
                f"{interface}: the ranks speak plaintext; beyond {_LOOPBACK_INTERFACE} only with "
                "--allow-plaintext",
            )
    return {name: _LOOPBACK_INTERFACE for name in _INTERFACE_VARIABLES if not environ.get(name)}
