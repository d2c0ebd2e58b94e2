"""The threads that run forward passes beside the engine's own."""

import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.kernels.memory import address_of
from servicekit.logs import get_logger
from verifier.cpu.kernels.forward import forward
from verifier.cpu.kernels.threads import CONTROL_BYTES, announce, await_round

logger = get_logger(__name__)


class ForwardThreads:
    """The threads beside the caller's; each runs every forward pass."""

    def __init__(self, count: int, arguments: tuple[npt.NDArray[Any], ...]) -> None:
        self._control = np.zeros(CONTROL_BYTES // 8, dtype=np.int64)
        self._address = address_of(self._control)
        self._arguments = arguments
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"model-{i}", daemon=True)
            for i in range(1, count + 1)
        ]
        for thread in self._threads:
            thread.start()

    def start(self) -> None:
        """Lets all threads begin a forward pass."""
        if self._threads:
            announce(self._address)

    def stop(self) -> None:
        self._is_stopping = True
        announce(self._address)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self, index: int) -> None:
        try:
            known = 0
            while True:
                # Compiled or loaded at its first call, as all kernels are: it may fail.
                known = await_round(self._address, known)
                if self._is_stopping:
                    return
                linear, other, models, layers, steps = self._arguments
                forward(linear, other, models, layers, steps, index)
        except BaseException:
            # The other threads wait for this one, in a kernel that nobody can interrupt.
            logger.exception("decoder_thread_failed", thread=index)
            os._exit(1)
