"""Every rank but 0: loads its part of the model, then runs the steps that rank 0 sends.

It ends in order only on rank 0's STOP. It ignores SIGTERM and SIGINT: torchrun sends them to all
ranks, and rank 0 drains first.
"""

import gc
import signal
import sys

import numpy as np
import torch

from servicekit.config import ConfigError
from servicekit.logs import get_logger
from verifier.checkpoint.refusals import CheckpointError
from verifier.config import VerifierConfig
from verifier.model.model_part import assemble, choose_device, load_part, room_for_part
from verifier.tensor_parallel.collectives import TorchCollectives
from verifier.tensor_parallel.connection import Connection, Kind, RankLostError
from verifier.tensor_parallel.launch import Launch
from verifier.tensor_parallel.layout_codec import decode
from verifier.tensor_parallel.rendezvous import connect_to_rank_0, torchrun_store
from verifier.tensor_parallel.watch import Watch

logger = get_logger(__name__)


def follow(config: VerifierConfig, launch: Launch) -> int:
    """Runs a rank to its end.

    Returns:
        The exit code: 0 after a STOP; 1 after an exception or a lost rank, which are logged; 2 if
        it cannot start, with one line on stderr.
    """
    try:
        _follow(config, launch)
    except ConfigError as error:
        print(f"error: rank {launch.rank}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RankLostError:
        return 1  # logged by the watch
    except Exception:
        logger.exception("process_failed", rank=launch.rank)
        return 1
    return 0


def _follow(config: VerifierConfig, launch: Launch) -> None:
    device = choose_device(config, rank=launch.rank)
    watch = Watch()
    store = torchrun_store(launch)
    connection = connect_to_rank_0(store, launch, on_lost=watch.rank_lost)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        collectives = TorchCollectives(store, rank=launch.rank, size=launch.size, device=device)
        try:
            _load_and_run(config, device, connection, collectives)
        except RuntimeError as error:
            raise watch.explain(error) from error
    except CheckpointError as error:
        connection.send(Kind.FAILED, message=f"--model: {error}")
        raise ConfigError("--model", str(error)) from error
    except RankLostError:
        raise
    except Exception as error:
        connection.send(Kind.FAILED, message=str(error) or type(error).__name__)
        raise
    collectives.close()


def _load_and_run(
    config: VerifierConfig,
    device: torch.device,
    connection: Connection,
    collectives: TorchCollectives,
) -> None:
    """Returns at a STOP. `receive` raises when rank 0 fails or is lost."""
    connection.receive()  # LOAD
    part = load_part(config, device=device, collectives=collectives)
    connection.send(
        Kind.LOADED,
        identity=part.identity(),
        num_kv_blocks=room_for_part(config, part),
    )
    begin = connection.receive()
    if begin.kind is Kind.STOP:
        return
    model = assemble(part, **begin.values)
    # Garbage collection of the loaded objects on any rank would delay all of them.
    gc.freeze()
    while (message := connection.receive()).kind is Kind.STEP:
        model.forward_on_device(decode(np.frombuffer(message.payload, dtype=np.int32)))
