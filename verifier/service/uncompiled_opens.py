"""The Opens of one session that wait for their grammar; other commands do not wait for them.

Runs on the event loop; grammars are compiled elsewhere.
"""

import asyncio
import dataclasses
from collections.abc import Callable

from servicekit.errors import RequestError
from servicekit.logs import get_logger
from verifier.engine.messages import Event, Rejected, Update, cancelled
from verifier.errors import InternalError, OverloadedError, UnsupportedFieldError
from verifier.scheduling.sequence import OpenSequence
from verifier.structured.grammar import Grammar
from verifier.structured.grammar_state import GrammarState
from verifier.structured.grammars import Grammars

logger = get_logger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class _Uncompiled:
    """An Open that waits, as the updates since then have made it."""

    sequence: OpenSequence
    grammar: "asyncio.Future[GrammarState]"


class UncompiledOpens:
    """Owned by a session."""

    def __init__(
        self,
        grammars: Grammars | None,
        *,
        may_wait: Callable[[int], bool],
        submit: Callable[[OpenSequence], None],
        report: Callable[[Event], None],
    ) -> None:
        """Args:
        may_wait: whether a sequence of so many tokens may wait for its grammar.
        submit: called with a sequence whose grammar is compiled.
        report: called with the event that ends one without.
        """
        self._grammars = grammars
        self._may_wait = may_wait
        self._submit = submit
        self._report = report
        self._by_id: dict[str, _Uncompiled] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._by_id

    @property
    def num_tokens(self) -> int:
        return sum(len(each.sequence.token_ids) for each in self._by_id.values())

    async def join(self) -> None:
        """Returns when every one is submitted or rejected."""
        while self._by_id:
            # One at a time: a future keeps its grammar, and others wait until that is freed.
            await asyncio.wait([next(iter(self._by_id.values())).grammar])
            await asyncio.sleep(0)

    def cancel(self) -> None:
        """Gives up all grammars."""
        for uncompiled in self._by_id.values():
            uncompiled.grammar.cancel()

    def add(self, sequence: OpenSequence, grammar: Grammar) -> None:
        """Compiles the sequence's grammar, then submits it.

        Raises:
            RequestError: names the field.
        """
        if self._grammars is None:
            raise UnsupportedFieldError(
                "structured output is not enabled on this server: --allow-structured-output",
                field=grammar.field,
            )
        if not self._may_wait(len(sequence.token_ids)):
            # It names the field: there is room for sequences without a grammar.
            raise OverloadedError(
                "too many tokens wait for their grammars", field=grammar.field, retry_after_ms=1000
            )
        compiling = asyncio.wrap_future(
            self._grammars.compile(
                grammar,
                sequence.token_ids[sequence.prompt_length :],
                is_drafted=sequence.num_speculative_tokens > 0,
                tenant=sequence.cache_salt,
                priority=sequence.priority,
            )
        )
        uncompiled = _Uncompiled(sequence, compiling)
        self._by_id[sequence.sequence_id] = uncompiled
        compiling.add_done_callback(lambda _: self._on_compiled(uncompiled))

    def update(self, command: Update) -> None:
        """Does what the engine does for an open sequence. The update is not kept: a client may send
        any number.
        """
        uncompiled = self._by_id[command.sequence_id]
        drafted_by, address = uncompiled.sequence.drafted_by, command.drafter_address
        if drafted_by is not None and address is not None:
            drafted_by = dataclasses.replace(drafted_by, address=address)
        uncompiled.sequence = dataclasses.replace(
            uncompiled.sequence, drafting=command.drafting, drafted_by=drafted_by
        )

    def close(self, sequence_id: str) -> None:
        """Ends the sequence if it still waits for its grammar."""
        uncompiled = self._by_id.pop(sequence_id, None)
        if uncompiled is None:
            return
        uncompiled.grammar.cancel()
        self._report(cancelled(sequence_id, len(uncompiled.sequence.token_ids)))

    def _on_compiled(self, uncompiled: _Uncompiled) -> None:
        sequence, compiled = uncompiled.sequence, uncompiled.grammar
        if self._by_id.get(sequence.sequence_id) is not uncompiled:
            # It was closed, and its id may have been opened again.
            return
        del self._by_id[sequence.sequence_id]
        if compiled.cancelled():
            return
        error = compiled.exception()
        if error is None:
            self._submit(dataclasses.replace(sequence, grammar=compiled.result()))
            return
        if not isinstance(error, RequestError):
            logger.error("command_failed", sequence_id=sequence.sequence_id, exc_info=error)
            error = InternalError()
        self._report(Rejected(sequence_id=sequence.sequence_id, error=error))
