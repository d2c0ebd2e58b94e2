"""The life of a server process: its signals, its drain and its exit code.

    async def serve(options: Options) -> None:
        server = Server(options.server, service="mine", service_names=[...], ...)
        add_MyServiceServicer_to_server(servicer, server.grpc)
        async with server:  # starts it; stops it also if something fails before it serves
            await serve_until_signalled(server, drain=servicer.drain)

    options = load_config(Options, service="mine")
    configure_logs(options.server.log_level, "mine")
    warn_of_unknown_variables(Options, service="mine", logger=get_logger("mine"))
    end(run(lambda: serve(options)))

Knows no service. The ports belong to `servicekit.serving.server`.
"""

import asyncio
import atexit
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn

from servicekit.config import ConfigError
from servicekit.logs import get_logger
from servicekit.serving.server import Server

# How long calls that outlive the drain may take to end by themselves. The drain has waited for all
# work, so these are streams that only their client would end.
_GRACE_AFTER_DRAIN_S = 1.0


def open_standard_streams() -> None:
    """Opens /dev/null for each standard stream that is closed, as some supervisors leave it.

    Else the first socket would get its number, and what is printed would go there or nowhere. To be
    called before anything else.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


async def serve_until_signalled(
    server: Server,
    *,
    drain: Callable[[], Awaitable[None]] | None = None,
    ready_line: Callable[[], str] | None = None,
    failed: "asyncio.Future[None] | None" = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and stops; the server is stopped on return.

    Sets health to SERVING, prints the ready line on stdout, and waits. At the first signal health
    becomes NOT_SERVING, the server refuses calls and drains for at most `drain_timeout_s`. A second
    signal stops it at once.

    Args:
        server: a started server.
        drain: returns when the service's work is finished or handed over. It ends the service's
            own long-lived streams: afterwards calls in flight get one more second. None: calls
            in flight get all of `drain_timeout_s`.
        ready_line: returns the line to print; None prints `ready grpc=ADDRESS`.
        failed: when it is done, serving ends with its exception and without drain.

    Raises:
        Exception: that of `failed`, or of `drain`.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in previous:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        server.set_serving()
        # Standard output may be a file on a full disk, or a pipe that nobody reads any more.
        with contextlib.suppress(OSError):
            print(ready_line() if ready_line else f"ready grpc={server.address}", flush=True)
        await _first_of(signals.get(), failed)
        server.retire()
        await _first_of(_drain_and_stop(server, drain), signals.get(), failed)
    finally:
        await server.stop(0)
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def run(main: Callable[[], Awaitable[None]]) -> int:
    """Runs a process's main coroutine to its end, on uvloop where that is installed.

    Returns:
        The exit code: 0 at the end, 1 after an exception, which is logged, 2 after a ConfigError,
        which is printed in one line on stderr, 128 + n after signal n.
    """
    _allow_all_descriptors()
    # Process 1 of a container does not get SIGTERM at all unless it has a handler.
    previous = signal.getsignal(signal.SIGTERM)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_cancel_at_sigterm(main))
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except Exception:
        get_logger(__name__).exception("process_failed")
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def end(status: int) -> NoReturn:
    """Ends the process with this exit code, as soon as what is registered with `atexit` has run.

    Skips the end of the interpreter: a thread of a library that returns to it then, such as gRPC's
    poller, crashes the process, whose exit code would no longer be that of `run`.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it may be gone.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _allow_all_descriptors() -> None:
    # Each connection has one. Shells and systemd allow 1,024 at first, fewer than a server's own
    # limits, for the sake of programs that call select(2).
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Where there is no most, the system may have one nevertheless.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _cancel_at_sigterm(main: Callable[[], Awaitable[None]]) -> None:
    # The first SIGTERM cancels main, which can clean up. The second ends the process at once, even
    # if the loop is blocked.
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    is_first = True

    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_first
        if not is_first or task.done():
            os._exit(128 + signal.SIGTERM)
        is_first = False
        loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        await main()
    except asyncio.CancelledError:
        # A thread that loads a model may go on for minutes. The loop waits for those of its pool
        # when it closes: this one has none.
        loop.set_default_executor(ThreadPoolExecutor())
        raise


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _drain_and_stop(server: Server, drain: Callable[[], Awaitable[None]] | None) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + server.options.drain_timeout_s
    if drain is not None:
        # Before the drain: otherwise clients with open channels would keep sending their calls
        # here, to be refused, until the last stream has ended.
        server.refuse_calls()
        try:
            async with asyncio.timeout_at(deadline_s) as limit:
                await drain()
        except TimeoutError:
            # Not compared with the clock: uvloop's timers count milliseconds and may fire early.
            if not limit.expired():
                raise  # raised by the drain itself
            server.logger.warning("drain_timed_out", timeout_s=server.options.drain_timeout_s)
        deadline_s = min(deadline_s, loop.time() + _GRACE_AFTER_DRAIN_S)
    await server.stop(max(0.0, deadline_s - loop.time()))


async def _first_of(*awaitables: "Awaitable[object] | None") -> None:
    """Waits until one ends and cancels the others; raises its exception.

    Futures belong to the caller and are not cancelled.
    """
    futures = {a for a in awaitables if isinstance(a, asyncio.Future)}
    tasks = {asyncio.ensure_future(a) for a in awaitables if a is not None and a not in futures}
    watched: set[asyncio.Future[Any]] = {*tasks, *futures}
    try:
        done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for future in done:
        future.result()
