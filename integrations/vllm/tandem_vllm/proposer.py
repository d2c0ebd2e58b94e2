"""A proposer for vLLM's speculative decoding (`custom_class`) that asks a Tandem drafter.

vLLM verifies the drafts, so its output is its own whatever a drafter says. Nothing that a drafter
does or fails to do reaches vLLM, but as missing drafts: a step waits for it for a bounded time, and
after a failure not at all for a while.
"""

import concurrent.futures
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tandem.client import DrafterClient, DraftQuery, Keep, NgramParams, TandemError, TlsOptions
from tandem_vllm.rows import Row, Rows

_logger = logging.getLogger(__name__)

# Texts that are so far behind are sent beside the steps.
_MAX_TOKENS_BEHIND = 4096
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0


class TandemProposer:
    """What `speculative_config={"method": "custom_class", "model": "tandem_vllm.TandemProposer"}`
    names. vLLM calls it from one thread.

    It is configured by variables of the environment: vLLM passes none of its own to such a class.
    docs/vllm.md lists them.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises:
        ValueError: a variable is missing or has no valid value; it is named.
        """
        self._num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        # Each step adds a token after the draft.
        self._max_length = int(vllm_config.model_config.max_model_len) - 1
        self._timeout_s = _number("TANDEM_VLLM_TIMEOUT_MS", 50.0, least=1.0) / 1000
        self._params = NgramParams(
            min_ngram=int(_number("TANDEM_VLLM_PROMPT_LOOKUP_MIN", 2, least=1)),
            max_ngram=int(_number("TANDEM_VLLM_PROMPT_LOOKUP_MAX", 5, least=1)),
            pool_id=os.environ.get("TANDEM_VLLM_POOL", ""),
        )
        address = os.environ.get("TANDEM_VLLM_DRAFTER", "")
        if not address:
            raise ValueError("TANDEM_VLLM_DRAFTER is not set: HOST:PORT of a Tandem drafter")
        self._client = DrafterClient(address, tls=_tls())
        self._rows = Rows()
        self._sender = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tandem")
        self._sending: dict[str, concurrent.futures.Future[None]] = {}
        self._paused_until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def load_model(self, *_: object, **__: object) -> None:
        """There is no draft model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.integer],
        token_ids_cpu: npt.NDArray[np.integer],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts for the rows that sampled, of at most `num_speculative_tokens` tokens each.

        Args:
            sampled_token_ids: of each row in this step; empty: it computes its prompt yet.
            num_tokens_no_spec: [rows] the lengths of the rows' texts, sampled tokens included.
            token_ids_cpu: [rows, max_model_len] the texts.
            slot_mappings: not read.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        try:
            rows = self._step(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            for index, draft in self._drafts(rows).items():
                drafts[index] = draft
        except TandemError as error:
            self._pause(error)
        except Exception:
            # An exception here would end vLLM's engine.
            _logger.exception("no drafts")
        return drafts

    def close(self) -> None:
        """Lets the drafter forget all, as far as it can be reached."""
        self._sender.shutdown(cancel_futures=True)
        self._client.close()

    def _step(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        lengths: npt.NDArray[np.integer],
        texts: npt.NDArray[np.integer],
    ) -> Mapping[int, Row]:
        """The sequences of the rows that sampled, with their texts of now."""
        rows, over = self._rows.step(
            {
                index: texts[index, : int(lengths[index])]
                for index, sampled in enumerate(sampled_token_ids)
                if sampled
            },
            lambda index: self._client.open(
                params=self._params,
                prompt_length=int(lengths[index]) - len(sampled_token_ids[index]),
                max_length=self._max_length,
            ),
        )
        for row in over:
            self._sender.submit(self._release, row)
        return rows

    def _drafts(self, rows: Mapping[int, Row]) -> dict[int, list[int]]:
        """By row."""
        if time.monotonic() < self._paused_until_s:
            return {}
        queries: dict[int, DraftQuery] = {}
        for index, row in rows.items():
            sequence = row.sequence
            if (sent := self._sending.get(sequence.sequence_id)) is not None:
                if not sent.done():
                    continue
                del self._sending[sequence.sequence_id]
            if row.num_tokens - sequence.num_sent > _MAX_TOKENS_BEHIND:
                self._sending[sequence.sequence_id] = self._sender.submit(
                    self._send,
                    DraftQuery(sequence=sequence, token_ids=row.text.tolist(), max_draft_tokens=0),
                )
                continue
            queries[index] = DraftQuery(
                sequence=sequence,
                # Of an array, too, only what is new is read.
                token_ids=cast("Sequence[int]", row.text),
                max_draft_tokens=self._num_tokens,
            )
        if not queries:
            return {}
        found = self._client.propose_batch(list(queries.values()), timeout_s=self._timeout_s)
        self._pause_s = _FIRST_PAUSE_S
        return {
            index: list(draft.token_ids)[: self._num_tokens]
            for index, draft in zip(queries, found, strict=True)
        }

    def _send(self, query: DraftQuery) -> None:
        """Sends a long text; its drafts begin when that is done."""
        with contextlib.suppress(TandemError):
            self._client.propose_batch([query], timeout_s=1.0)

    def _release(self, row: Row) -> None:
        keep = Keep.ALL if self._params.pool_id else Keep.NOTHING
        # A drafter that cannot be reached forgets the sequence by itself.
        with contextlib.suppress(TandemError):
            self._client.release(row.sequence, keep=keep, timeout_s=1.0)

    def _pause(self, error: TandemError) -> None:
        """No step waits for the drafter for a while."""
        _logger.warning("no drafts for %.2f s: %s", self._pause_s, error)
        self._paused_until_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def _number(name: str, default: float, *, least: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not value >= least:
        raise ValueError(f"{name} is {text!r}, and must be a number of at least {least:g}")
    return value


def _tls() -> TlsOptions | None:
    """None: the drafter speaks plaintext."""
    files = {
        key: Path(os.environ[name])
        for key, name in (
            ("ca", "TANDEM_VLLM_TLS_CA"),
            ("certificate", "TANDEM_VLLM_TLS_CERT"),
            ("key", "TANDEM_VLLM_TLS_KEY"),
        )
        if os.environ.get(name)
    }
    return TlsOptions(**files) if files else None
