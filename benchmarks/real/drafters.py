"""What drafts along a recorded answer: Tandem's own kernels, and other systems' proposers.

vLLM, transformers and Arctic Inference are their own code, as `record_proposers.py` fetches it (the
last is compiled: it needs cmake and a C++ compiler). llama.cpp's two are written here from its
documentation; without the reset of `ngram-mod` after a series of bad drafts.
"""

import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.drafter_texts import PARAMS, propose
from benchmarks.record_proposers import (
    Propose,
    fetch,
    transformers_5_24,
    vllm_0_9,
    vllm_0_32,
)
from drafter.history.history import History
from drafter.history.pool_drafts import PoolDrafts
from drafter.ngram.params import Keep
from drafter.pool_index.records import PoolLimits
from drafter.pools.store import PoolStore

Tokens = npt.NDArray[np.uint32]

#: The most tokens of a draft, as the verifier's limit.
MOST_DRAFTS = 31
MOST_TOKENS = 1 << 14
_POOL_LIMITS = PoolLimits(max_pool_bytes=1 << 28, max_pools_bytes=1 << 29, pool_ttl_s=1e9)


class Drafter(Protocol):
    """Follows one answer after the other; what it learned from one may serve the next."""

    def begin(self, prompt: Tokens) -> None: ...

    def append(self, token_id: int) -> None: ...

    def draft(self) -> tuple[Sequence[int], int]:
        """Of the text so far: the draft, and the length of its match; 0 if unknown."""
        ...

    def end(self) -> None: ...


class TandemDrafter:
    """The product's policy; with `is_pooled`, finished answers are drafted from, too."""

    def __init__(self, *, is_pooled: bool = False, max_tokens: int = MOST_DRAFTS) -> None:
        self._params = dataclasses.replace(PARAMS, pool_id="answers" if is_pooled else "")
        self._max_tokens = max_tokens
        store = PoolStore(_POOL_LIMITS, clock=time.monotonic, seed=1)
        self._pools = PoolDrafts(store, on_work=store.finish) if is_pooled else None

    def begin(self, prompt: Tokens) -> None:
        self._history = History(
            params=self._params, prompt_length=len(prompt), max_tokens=MOST_TOKENS
        )
        self._history.append(prompt)

    def append(self, token_id: int) -> None:
        self._history.append(np.array([token_id], dtype=np.uint32))

    def draft(self) -> tuple[Sequence[int], int]:
        [found] = propose([self._history], [self._max_tokens], pools=self._pools)
        return found

    def end(self) -> None:
        if self._pools is not None:
            self._pools.keep(self._history, Keep.OUTPUT)


class OfText:
    """A proposer that knows only the text."""

    def __init__(self, propose: Propose) -> None:
        self._propose = propose

    def begin(self, prompt: Tokens) -> None:
        self._text = np.empty(MOST_TOKENS, dtype=np.int32)
        self._text[: len(prompt)] = prompt
        self._length = len(prompt)

    def append(self, token_id: int) -> None:
        self._text[self._length] = token_id
        self._length += 1

    def draft(self) -> tuple[Sequence[int], int]:
        # The proposers want a list or an array, and only read it.
        return self._propose(self._text[: self._length], MOST_TOKENS), 0  # type: ignore[arg-type]

    def end(self) -> None:
        pass


class LlamaSimple:
    """`ngram-simple`: what followed the latest occurrence of the last n tokens."""

    def __init__(self, *, n: int = 12, m: int = 48) -> None:
        self._n, self._m = n, m

    def begin(self, prompt: Tokens) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        for token_id in prompt.tolist():
            self.append(token_id)

    def append(self, token_id: int) -> None:
        if len(self._tokens) > self._n:
            self._ends[tuple(self._tokens[-self._n :])] = len(self._tokens)
        self._tokens.append(token_id)

    def draft(self) -> tuple[Sequence[int], int]:
        end = self._ends.get(tuple(self._tokens[-self._n :]))
        draft = self._tokens[end : end + self._m] if end else []
        # A draft shorter than the n-gram is not proposed.
        return draft if len(draft) >= self._n else [], self._n

    def end(self) -> None:
        pass


class LlamaMod:
    """`ngram-mod`: from n tokens to the next one, for all texts; at least so many in a row."""

    def __init__(self, *, n: int = 24, least: int = 48, most: int = 64) -> None:
        self._n, self._least, self._most = n, least, most
        self._next: dict[tuple[int, ...], int] = {}

    def begin(self, prompt: Tokens) -> None:
        self._tokens: list[int] = []
        for token_id in prompt.tolist():
            self.append(token_id)

    def append(self, token_id: int) -> None:
        if len(self._tokens) >= self._n:
            self._next[tuple(self._tokens[-self._n :])] = token_id
        self._tokens.append(token_id)

    def draft(self) -> tuple[Sequence[int], int]:
        text = self._tokens[-self._n :]
        while len(text) < self._n + self._most:
            token_id = self._next.get(tuple(text[-self._n :]))
            if token_id is None:
                break
            text.append(token_id)
        draft = text[self._n :]
        return draft if len(draft) >= self._least else [], self._n

    def end(self) -> None:
        pass


class Arctic:
    """Suffix decoding over the text and all answers before."""

    def __init__(self, cache: Any) -> None:
        self._cache, self._number = cache, 0

    def begin(self, prompt: Tokens) -> None:
        self._text = np.empty(MOST_TOKENS, dtype=np.int32)
        self._text[: len(prompt)] = prompt
        self._length = len(prompt)
        self._cache.start_request(self._number, self._text[: self._length])

    def append(self, token_id: int) -> None:
        self._text[self._length] = token_id
        self._length += 1
        self._cache.add_active_response(self._number, [token_id])

    def draft(self) -> tuple[Sequence[int], int]:
        found = self._cache.speculate(
            self._number, self._text[: self._length], max_spec_tokens=MOST_DRAFTS
        )
        return found.token_ids, found.match_len

    def end(self) -> None:
        self._cache.stop_request(self._number)
        self._number += 1


#: Makes a drafter that has seen nothing.
OWN: dict[str, Callable[[], Drafter]] = {
    "Tandem": TandemDrafter,
    "Tandem, pool of answers": partial(TandemDrafter, is_pooled=True),
    "llama.cpp ngram-simple": LlamaSimple,
    "llama.cpp ngram-mod": LlamaMod,
    "llama.cpp ngram-mod, 12, 1 to 64": partial(LlamaMod, n=12, least=1),
}


def peers(folder: Path) -> dict[str, Callable[[], Drafter]]:
    """Other systems' own code, fetched into a folder."""
    found: dict[str, Callable[[], Drafter]] = {}
    for name, prepare, options in (
        ("vLLM 0.9.2, 2 to 5, 8", vllm_0_9, (2, 5, 8)),
        ("vLLM 0.32, 2 to 5, 8", vllm_0_32, (2, 5, 8)),
        ("transformers 5.24, to 2, 10", transformers_5_24, (1, 2, 10)),
    ):
        found[name] = partial(OfText, prepare(folder, options))
    module = _arctic(folder)
    # Without and with the answers before.
    found["Arctic 0.3, text only"] = lambda: Arctic(
        module.SuffixDecodingCache(max_cached_requests=0)
    )
    found["Arctic 0.3, answers"] = lambda: Arctic(module.SuffixDecodingCache())
    return found


def _arctic(folder: Path) -> Any:
    """The package's suffix decoding, compiled by one process."""
    target = folder / "arctic"
    source = target / "arctic_inference-0.3.0"
    if not source.exists():
        fetch("download", "--no-binary=:all:", "--no-build-isolation", f"--dest={target}",
              "arctic-inference==0.3.0")  # fmt: skip
        fetch("install", f"--target={target / 'nanobind'}", "nanobind==3.1.0")
        with tarfile.open(target / "arctic_inference-0.3.0.tar.gz") as archive:
            archive.extractall(target, filter="data")
        build = target / "build"
        environ = os.environ | {"PYTHONPATH": str(target / "nanobind")}
        for command in (
            ["cmake", "-S", str(source / "csrc/suffix_decoding"), "-B", str(build),
             "-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"],
            ["cmake", "--build", str(build), "-j1"],
        ):  # fmt: skip
            subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)
        [module] = build.glob("_C.*.so")
        shutil.copy(module, source / "arctic_inference/suffix_decoding")
    sys.path.insert(0, str(source))
    return importlib.import_module("arctic_inference.suffix_decoding")
