"""Few requests begin at a time, in order, and none whose client has gone."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

from gateway.api.turns import MAX_TURNS, ClientGoneError, Turns


async def let_run(num_iterations: int) -> None:
    """Lets the event loop run."""
    for _ in range(num_iterations):
        await asyncio.sleep(0)


async def test_few_begin_in_each_iteration_in_the_order_in_which_they_came() -> None:
    turns = Turns()
    began: list[tuple[int, int]] = []
    iteration = 0

    async def begin(index: int) -> None:
        await turns.take(lambda: False)
        began.append((iteration, index))

    tasks = [asyncio.create_task(begin(index)) for index in range(50)]
    while not all(task.done() for task in tasks):
        iteration += 1
        await asyncio.sleep(0)
    assert max(Counter(iteration for iteration, _ in began).values()) == MAX_TURNS
    assert [index for _, index in began] == list(range(50))


async def test_one_that_takes_turns_without_end_leaves_the_loop_to_others() -> None:
    turns = Turns()
    others: list[None] = []
    asyncio.get_running_loop().call_soon(others.append, None)
    for _ in range(MAX_TURNS + 1):
        await turns.take(lambda: False)
    assert others


async def test_those_that_have_gone_by_their_turn_hold_up_nobody() -> None:
    turns = Turns()
    gone: set[int] = set()
    outcomes: dict[int, bool] = {}

    def is_gone(index: int) -> Callable[[], bool]:
        return lambda: index in gone

    async def begin(index: int) -> None:
        outcomes[index] = False
        with contextlib.suppress(ClientGoneError):
            await turns.take(is_gone(index))
            outcomes[index] = True

    tasks = [asyncio.create_task(begin(index)) for index in range(20)]
    await asyncio.sleep(0)
    gone.update(range(MAX_TURNS, 19))
    await let_run(3)
    assert outcomes == {index: index not in gone for index in range(20)}
    await asyncio.gather(*tasks)


async def test_one_that_is_cancelled_takes_nobody_s_turn() -> None:
    turns = Turns()
    tasks = [asyncio.create_task(turns.take(lambda: False)) for _ in range(30)]
    await asyncio.sleep(0)
    for task in tasks[MAX_TURNS:-1]:
        task.cancel()
    async with asyncio.timeout(60):
        await tasks[-1]
    await turns.take(lambda: False)
