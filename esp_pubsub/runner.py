"""Running a program until it ends or a signal comes."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import sys
from collections.abc import Awaitable, Callable

from .errors import ConfigError, EspError
from .lib import shutdown

_log = logging.getLogger("esp_pubsub")


def run(main: Callable[[], Awaitable[object]]) -> None:
    """Run `main` in the place of `asyncio.run`: `esp.run(main)`.

    The first SIGINT or SIGTERM cancels `main`; what it has open closes in order on its way out, and so does what it
    left open: readers stop, publishers send what they have, and a member of a failover group hands over. What could not
    be sent is named in the log. Then the program exits with 130 or 143. A second signal ends it at once. What `main`
    raises comes out of here, so Python exits with 1.
    """
    if not callable(main):
        if inspect.iscoroutine(main):
            main.close()
        raise ConfigError("pass the function itself: esp.run(main), not esp.run(main())")
    code = asyncio.run(until_signal(lambda: _closed_after(main)))
    if code:
        sys.exit(code)


async def _closed_after(main: Callable[[], Awaitable[object]]) -> None:
    """Close every client that `main` leaves open."""
    try:
        await main()
    except BaseException:
        try:
            await shutdown()
        except EspError as unflushed:
            _log.warning("closing after an error: %s", unflushed)
        raise
    await shutdown()


async def until_signal(job: Callable[[], Awaitable[None]]) -> int:
    """Await the job. A signal cancels it, and what it has open closes in order on its way out. Returns 0, or the exit
    code for the signal.
    """
    loop = asyncio.get_running_loop()
    got: list[int] = []

    def end(number: int) -> None:
        got.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)  # not KeyboardInterrupt, on which all that is open would close in order
        scope.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as scope:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, end, number)
            await job()
    except TimeoutError:
        if not got:
            raise
    return 128 + got[0] if got else 0
