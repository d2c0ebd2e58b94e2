"""The check of the decoder for CPUs against transformers: once per model and version.

A child process computes the reference, so that torch and transformers never enter this one
(`verifier.parity.reference`). The decoder computes the same text, in several chunkings. A
verdict is kept in the user's cache folder, beside what else is cached there; without one, or where
it cannot be written, the check runs at every start. Failures are not kept.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np

from servicekit.logs import get_logger
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.weight_types import FloatArray, WeightType
from verifier.cpu.decoder import CpuDecoder
from verifier.cpu.numerics_digest import sources_digest
from verifier.cpu.processor import TILES
from verifier.cpu.weights import DecoderWeights
from verifier.parity.comparison import (
    NUM_TOKENS,
    WINDOW_TOKENS,
    check_difference,
    check_rounding,
    paged_logits,
    probe_text,
)

_BLOCK_SIZE = 16
# Largest difference of any logit, relative to the largest logit. Both sides differ by the order of
# sums; in bfloat16 and float16, that may round a value of K/V otherwise. Correct models had up to
# 1e-3.
_TOLERANCES = {WeightType.FLOAT32: 1e-4, WeightType.BFLOAT16: 0.1, WeightType.FLOAT16: 0.05}
# Largest distance from the float32 logits, relative to that of transformers in the same dtype.
# Correct models had up to 0.1.
_ROUNDING_TOLERANCE = 1.0
_TIMEOUT_S = 900.0
_ROOT = Path(__file__).parents[2]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked: a verdict holds for equal ones. `dtype` and `quantization` as in flags,
    but never "auto".
    """

    folder: Path
    model_digest: str
    dtype: str
    quantization: str
    max_position_embeddings: int

    def key(self) -> str:
        sources = sources_digest("checkpoint", "cpu", "parity")
        parts = (self.model_digest, self.dtype, self.quantization, TILES.name, sources)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class ParityCheck:
    """One check; a context, which ends the child. `verify` must be called unless `is_known`."""

    def __init__(self, subject: Subject, *, cache: Path, num_threads: int) -> None:
        """Starts the child, unless a verdict is known.

        Args:
            cache: the folder of verdicts; need not exist.

        Raises:
            CheckpointError: no verdict is known, and transformers is not installed, or there is no
                folder for temporary files.
        """
        self._subject = subject
        self._num_threads = num_threads
        self._verdict = cache / f"parity-{subject.key()}.json"
        self._started = time.monotonic()
        self._stack = contextlib.ExitStack()
        fault = _fault_of(self._verdict)
        self.is_known = fault is None
        if self.is_known:
            logger.info("parity_known", verdict=str(self._verdict))
            return
        if importlib.util.find_spec("transformers") is None:
            raise CheckpointError(
                f"{subject.folder} was not checked yet: the check needs the packages torch and "
                f"transformers, or a verdict of another machine, {self._verdict.name}, in "
                f"{cache}: {fault}"
            )
        try:
            self._output = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        except OSError as error:
            # Full or read-only.
            raise CheckpointError(f"{subject.folder} was not checked yet: {error}") from error
        command = [
            sys.executable, "-m", "verifier.parity.reference",
            str(subject.folder.resolve()), str(self._output / "reference.npz"),
            "--dtype", subject.dtype, "--quantization", subject.quantization,
            "--threads", str(num_threads), "--end-with-stdin",
        ]  # fmt: skip
        errors = self._stack.enter_context((self._output / "errors").open("wb"))
        self._child = subprocess.Popen(
            command,
            cwd=_ROOT,
            # Closed with this process, however it ends: the child holds a whole model.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        self._stack.callback(self._end_child)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def verify(self, weights: DecoderWeights) -> None:
        """Waits for the child and compares; keeps the verdict.

        Raises:
            CheckpointError: logits differ by more than rounding, or there is no reference.
        """
        assert not self.is_known
        text = probe_text(
            vocab_size=weights.vocab_size, max_model_len=self._subject.max_position_embeddings
        )
        decoder = CpuDecoder(
            _with_short_windows(weights),
            num_blocks=NUM_TOKENS // _BLOCK_SIZE,
            block_size=_BLOCK_SIZE,
            num_threads=self._num_threads,
            max_num_tokens=NUM_TOKENS,
        )
        try:
            has_long_rope = any(r.long_inv_freq is not None for r in weights.rotaries)
            logits, *others = [
                paged_logits(
                    decoder, text, cuts, block_size=_BLOCK_SIZE, has_long_rope=has_long_rope
                )
                for cuts in ([], [len(text) // 2], [max(1, len(text) - 8)])
            ]
            for other in others:
                if not np.array_equal(logits, other):
                    raise CheckpointError("logits depend on how a text is cut into chunks")
        finally:
            decoder.close()
        exact, rounding = self._reference(num_bytes=logits.nbytes)
        is_rounded = weights.other_type is not WeightType.FLOAT32
        # A value of K/V that is rounded otherwise may route a token to other experts, which changes
        # its logits by any amount. The distance is a median over tokens.
        if not (is_rounded and any(layer.experts for layer in weights.layers)):
            check_difference(logits, exact, _TOLERANCES[weights.other_type])
        if is_rounded:
            check_rounding(logits, exact, rounding, _ROUNDING_TOLERANCE)
        seconds = round(time.monotonic() - self._started, 2)
        logger.info("parity_checked", seconds=seconds)
        _keep(self._verdict, {"seconds": seconds, "transformers": metadata.version("transformers")})

    def _reference(self, *, num_bytes: int) -> tuple[FloatArray, float]:
        """Logits [T, V], and the distance that transformers has in the model's dtype.

        Args:
            num_bytes: that the child writes.
        """
        rest = self._started + _TIMEOUT_S - time.monotonic()
        try:
            status = self._child.wait(timeout=max(0.0, rest))
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(
                f"transformers' logits did not come within {_TIMEOUT_S:.0f} s"
            ) from error
        if status != 0:
            errors = (self._output / "errors").read_text(errors="replace").strip()
            last = errors.splitlines()[-1] if errors else "nothing on stderr"
            # Where there is none, nothing may have reached the file of errors, either.
            if shutil.disk_usage(self._output).free < num_bytes:
                last += (
                    f": no space left in {self._output.parent}, where it writes {num_bytes} bytes"
                )
            raise CheckpointError(
                f"transformers' logits could not be computed (exit status {status}): {last}"
            )
        with np.load(self._output / "reference.npz") as reference:
            return reference["exact"], float(reference["rounding"])

    def _end_child(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        assert self._child.stdin is not None
        self._child.stdin.close()


def _with_short_windows(weights: DecoderWeights) -> DecoderWeights:
    layers = [
        dataclasses.replace(layer, sliding_window=min(layer.sliding_window, WINDOW_TOKENS))
        for layer in weights.layers
    ]
    return dataclasses.replace(weights, layers=layers)


def _fault_of(path: Path) -> str | None:
    """Why there is no verdict of the installed transformers; None: there is one, or one of any
    version, and none is installed.
    """
    try:
        kept = json.loads(path.read_bytes())["transformers"]
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, LookupError, TypeError):
        return "no verdict"
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None
    return None if kept == installed else f"of transformers {kept}, not {installed}"


def _keep(path: Path, verdict: dict[str, Any]) -> None:
    """Writes it whole or not at all; a folder that is full or read-only is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not a file of `tempfile`, which only its writer may read: an image is built by another.
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            unfinished.write_text(json.dumps(verdict))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
