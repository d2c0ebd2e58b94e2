"""How many requests are admitted: choices at a time, and prompt tokens that wait.

Owns both counts, in all, by tenant and by model. A choice waits until its first output comes: until
then a verifier has its prompt to compute, and how long that takes depends on the sum of prompts,
not on their number. On the event loop. Knows no request.

A tenant is refused more than its quotas. A tenant and a model are refused more than their shares
(`servicekit.shares`): a model whose verifiers are overloaded leaves room for the others. There are
no shares where clients are not authenticated, and where there is one model.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gateway.errors import InvalidRequestError, OverloadedError, shutting_down
from gateway.requests.principal import ANONYMOUS, Principal
from gateway.requests.retry_hint import RetryHint
from servicekit.shares import leaves_room


@dataclasses.dataclass(slots=True)
class _Held:
    """What admitted requests hold: all of them, or those of a tenant or a model."""

    num_requests: int = 0
    num_choices: int = 0
    num_waiting_tokens: int = 0


class _Party(NamedTuple):
    """A tenant or a model, which may have a share of the room."""

    kind: str  # "tenant" or "model", as in the reasons of refusals
    name: str

    @property
    def title(self) -> str:
        """As in messages, which do not tell a client its tenant."""
        return "client" if self.kind == "tenant" else "model"


class Admission:
    """Counts the admitted requests and refuses what is over the limits.

    Attributes:
        max_choices, max_waiting_tokens: the limits, over all requests.
    """

    def __init__(
        self,
        *,
        max_choices: int,
        max_waiting_tokens: int,
        on_shed: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Begins empty and open.

        Args:
            max_choices: the most choices at a time, over all requests.
            max_waiting_tokens: the most tokens of waiting choices, over all requests; a request
                may have more while no other waits.
            on_shed: called with the reason of every refusal.
            clock: returns seconds, monotonic.
        """
        self.max_choices = max_choices
        self.max_waiting_tokens = max_waiting_tokens
        self._on_shed = on_shed
        self._retry_hint = RetryHint(clock)
        self._all = _Held()
        self._by_party: dict[_Party, _Held] = {}  # only those that hold something
        self.is_draining = False
        self._emptied = asyncio.Event()

    @property
    def num_choices(self) -> int:
        """Choices admitted; any thread may read it."""
        return self._all.num_choices

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the choices that wait; any thread may read it."""
        return self._all.num_waiting_tokens

    def admit(
        self,
        num_choices: int,
        principal: Principal = ANONYMOUS,
        *,
        model_id: str = "",
        has_other_models: bool = False,
    ) -> "AdmittedRequest":
        """Admits one request, which must `leave`.

        Args:
            principal: whose tenant is charged.
            model_id: the model that is charged.
            has_other_models: whether others are served, which it must leave room for.

        Raises:
            UnavailableError: draining.
            InvalidRequestError: it has more choices than may ever be generated at a time.
            OverloadedError: there are too many choices, in all, of its tenant or of its model.
        """
        if self.is_draining:
            self._on_shed("draining")
            raise shutting_down()
        self.check_size(num_choices, principal, field="n")
        tenant, model = _Party("tenant", principal.tenant), _Party("model", model_id)
        quota = principal.max_choices
        held = self._held_by(tenant).num_choices
        num_others = self._all.num_choices
        if num_others + num_choices > self.max_choices:
            raise self._shed(
                "concurrency",
                f"{num_others} of at most {self.max_choices} choices are being generated",
            )
        if quota is not None and held + num_choices > quota:
            raise self._shed(
                "tenant_concurrency",
                f"{held} of this client's at most {quota} choices are being generated",
            )
        sharing = {tenant: principal.weight} if principal.tenant else {}
        if has_other_models:
            sharing[model] = 1
        for party, weight in sharing.items():
            held = self._held_by(party).num_choices
            num_free = self.max_choices - num_others
            if not leaves_room(held=held, added=num_choices, num_free=num_free, weight=weight):
                raise self._shed(
                    f"{party.kind}_concurrency",
                    f"{held} choices of this {party.title} are being generated, its share",
                )
        request = AdmittedRequest(self, num_choices, principal, (tenant, model), sharing)
        for each in self._all_held(request.parties):
            each.num_requests += 1
            each.num_choices += num_choices
        return request

    def check_size(self, num_choices: int, principal: Principal, *, field: str) -> None:
        """Refuses more choices than could be admitted even if there were no others.

        Args:
            field: what is at fault.

        Raises:
            InvalidRequestError: they are more.
        """
        quota = principal.max_choices
        most = self.max_choices if quota is None else min(quota, self.max_choices)
        if num_choices > most:
            raise InvalidRequestError(
                f"{num_choices} choices are over the limit of {most} at a time", field=field
            )

    async def drain(self) -> None:
        """Admits nobody from now on and returns when all have left."""
        self.is_draining = True
        while self._all.num_requests:
            self._emptied.clear()
            await self._emptied.wait()

    def check_idle(self) -> None:
        """Checks that no request is admitted.

        Raises:
            AssertionError: one is; it shows what is held.
        """
        assert self._all == _Held(), f"admitted: {self._all}"
        assert not self._by_party, f"admitted by tenant and model: {self._by_party}"

    def _wait(self, request: "AdmittedRequest", num_tokens: int, *, instead_of: int) -> None:
        others = self._all.num_waiting_tokens - instead_of
        if others > 0 and others + num_tokens > self.max_waiting_tokens:
            raise self._shed(
                "waiting_tokens",
                f"{others} prompt tokens are waiting; {num_tokens} more would exceed the limit of "
                f"{self.max_waiting_tokens}",
            )
        tenant = _Party("tenant", request.principal.tenant)
        own = self._held_by(tenant).num_waiting_tokens - instead_of
        quota = request.principal.max_waiting_tokens
        if own > 0 and quota is not None and own + num_tokens > quota:
            raise self._shed(
                "tenant_waiting_tokens",
                f"{own} prompt tokens of this client are waiting; {num_tokens} more would exceed "
                f"its limit of {quota}",
            )
        for party, weight in request.sharing.items():
            own = self._held_by(party).num_waiting_tokens - instead_of
            num_free = self.max_waiting_tokens - others
            if not leaves_room(held=own, added=num_tokens, num_free=num_free, weight=weight):
                raise self._shed(
                    f"{party.kind}_waiting_tokens",
                    f"{own} prompt tokens of this {party.title} are waiting; {num_tokens} more "
                    "would exceed its share",
                )
        self._add_tokens(request, num_tokens - instead_of)

    def _begin(self, request: "AdmittedRequest", num_tokens: int) -> None:
        self._retry_hint.count_served()
        self._add_tokens(request, -num_tokens)

    def _leave(self, request: "AdmittedRequest", num_choices: int, num_waiting_tokens: int) -> None:
        self._add_tokens(request, -num_waiting_tokens)
        for each in self._all_held(request.parties):
            each.num_requests -= 1
            each.num_choices -= num_choices
        for party in request.parties:
            if not self._by_party[party].num_requests:
                del self._by_party[party]
        if not self._all.num_requests:
            self._emptied.set()

    def _add_tokens(self, request: "AdmittedRequest", num_tokens: int) -> None:
        for each in self._all_held(request.parties):
            each.num_waiting_tokens += num_tokens

    def _held_by(self, party: _Party) -> _Held:
        return self._by_party.get(party, _Held())

    def _all_held(self, parties: Sequence[_Party]) -> Sequence[_Held]:
        return [self._all, *(self._by_party.setdefault(party, _Held()) for party in parties)]

    def _shed(self, reason: str, message: str) -> OverloadedError:
        self._on_shed(reason)
        return OverloadedError(message, retry_after_ms=self._retry_hint.refuse())


class AdmittedRequest:
    """What one admitted request holds, from `Admission.admit` to `leave`."""

    def __init__(
        self,
        admission: Admission,
        num_choices: int,
        principal: Principal,
        parties: Sequence[_Party],
        sharing: Mapping[_Party, int],
    ) -> None:
        """Nothing waits yet.

        Args:
            parties: its tenant and its model.
            sharing: those of them that have a share, with their weights.
        """
        self._admission = admission
        self.principal = principal
        self.parties = parties
        self.sharing = sharing
        self._num_choices = num_choices
        self._num_waiting = num_choices
        self._num_tokens = 0

    def wait_with(self, num_tokens: int) -> None:
        """Sets with how many tokens each choice waits; before any choice began.

        Raises:
            OverloadedError: too many tokens are waiting; the count is as before.
        """
        assert self._num_waiting == self._num_choices
        self._admission._wait(
            self,
            num_tokens * self._num_waiting,
            instead_of=self._num_tokens * self._num_waiting,
        )
        self._num_tokens = num_tokens

    def begin_choice(self) -> None:
        """The first output of one more choice came: it no longer waits."""
        self._num_waiting -= 1
        self._admission._begin(self, self._num_tokens)

    def leave(self) -> None:
        """The request is over."""
        self._admission._leave(self, self._num_choices, self._num_tokens * self._num_waiting)
