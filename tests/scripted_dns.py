"""A STAND-IN for the machine's resolver: its answers are the test's, at any time."""

import asyncio
import socket
from collections.abc import Sequence

PATIENCE_S = 60.0


class ScriptedDns:
    """Called as `servicekit.channels.discovery.Resolve`.

    Attributes:
        answers: the IP addresses of each name; a name without any is unknown.
        may_answer: cleared, a name of `slow` gets no answer.
        slow: names that wait for `may_answer`.
        asked: every name that was asked for, in order.
    """

    def __init__(self, **answers: Sequence[str]) -> None:
        self.answers: dict[str, Sequence[str]] = dict(answers)
        self.may_answer = asyncio.Event()
        self.slow: set[str] = set()
        self.asked: list[str] = []
        self._recorded = asyncio.Condition()

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        async with self._recorded:
            self._recorded.notify_all()
        if host in self.slow:
            await self.may_answer.wait()
        if host not in self.answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.answers[host]

    async def asked_for(self, host: str, times: int) -> None:
        """Waits until a name was asked for so often."""
        async with asyncio.timeout(PATIENCE_S), self._recorded:
            await self._recorded.wait_for(lambda: self.asked.count(host) >= times)

    async def applied(self, host: str) -> None:
        """Waits until the present answer for a name has been used: it is asked for once more."""
        await self.asked_for(host, self.asked.count(host) + 2)
