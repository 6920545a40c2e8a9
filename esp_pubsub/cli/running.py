"""How every command runs and ends: signals, messages, exit codes, and a line of progress on a terminal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import typer

from ..errors import ConfigError, EspError
from ..runner import until_signal

if TYPE_CHECKING:
    from rich.live import Live

EXIT_CODES = (
    "Exit codes: 0 done, 1 an error, 2 a wrong command line or setting, 130 ended by Ctrl-C, 143 ended by SIGTERM. "
    "The first signal ends in order, a second one at once."
)
_EVERY = 0.25  # seconds between two looks of the line of progress


def say(text: str) -> None:
    """One line for whoever watches."""
    print(f"esp: {text}", file=sys.stderr, flush=True)


def plain(text: object) -> str:
    """What others wrote moves no cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def counted(number: int, noun: str) -> str:
    """`1 block`, `2,000 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def run(job: Callable[[], Awaitable[None]]) -> None:
    """Run a command to its end, and leave with its exit code."""
    _log_here()
    gc.set_threshold(100_000)  # rows make no cycles: to look for some every 700 of them costs an eighth of the time
    try:
        code = asyncio.run(until_signal(job))
    except ConfigError as e:
        say(str(e))
        code = 2
    except BrokenPipeError:
        say("who read the output has left")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again as it ends
        code = 1
    except EspError as e:
        say(str(e))
        code = 1
    except OSError as e:
        say(f"{e.filename}: {e.strerror}" if e.filename else str(e))
        code = 1
    except KeyboardInterrupt:  # before we listen to signals
        code = 130
    raise typer.Exit(code)


def _log_here() -> None:
    """Notices and warnings of the SDK are said; what vendors' clients log comes as notices already."""
    logging.getLogger("esp_pubsub").addHandler(_Saying())
    logging.getLogger().addHandler(logging.NullHandler())


class _Saying(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))  # above the line of progress, if there is one


@asynccontextmanager
async def progress(line: Callable[[float], str]) -> AsyncIterator[None]:
    """Show `line(seconds since the last look)` all the while, if there is a terminal to show it on."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # which take time to load
    from rich.live import Live

    try:
        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            async with asyncio.TaskGroup() as tasks:
                drawing = tasks.create_task(_draw(live, line))
                try:
                    yield
                finally:
                    drawing.cancel()
    except ExceptionGroup as group:  # of the one that the body raised
        raise group.exceptions[0] from None


async def _draw(live: Live, line: Callable[[float], str]) -> None:
    from rich.text import Text

    while True:
        live.update(Text(line(_EVERY)), refresh=True)
        await asyncio.sleep(_EVERY)
