"""Guards: a test fails if it leaves tasks, threads or unseen errors behind, if the SDK blocks its loop, or if a loop is
called from another thread than its own.
"""

import asyncio
import functools
import logging
import shutil
import signal
import tempfile
import threading
from asyncio import runners
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.fixtures"]

# How long an example takes says more of the machine than of the code; a test that hangs ends by its own limit.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A shell's job in the background ignores SIGINT, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

_left: list[str] = []
_threads = pytest.StashKey[set[threading.Thread]]()
_cancel_all_tasks = runners._cancel_all_tasks


def _note_and_cancel(loop: asyncio.AbstractEventLoop) -> None:
    _left.extend(map(repr, asyncio.all_tasks(loop)))
    _cancel_all_tasks(loop)


# A runner cancels what is still pending without a word, whether pytest-asyncio or the test itself started it.
runners._cancel_all_tasks = _note_and_cancel


def _in_its_thread(what: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(what)
    def checked(loop: Any, *args: Any, **keywords: Any) -> Any:
        loop._check_thread()
        return what(loop, *args, **keywords)

    return checked


# What asyncio's debug mode finds and nothing else does, at a third of the time that a test takes in that.
for _name in ("call_soon", "call_at"):
    setattr(asyncio.BaseEventLoop, _name, _in_its_thread(getattr(asyncio.BaseEventLoop, _name)))


class _Unseen(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _left.append(record.getMessage())


# asyncio only logs a task's exception that nobody took, or a task that was destroyed while pending.
logging.getLogger("asyncio").addHandler(_Unseen(logging.ERROR))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    item.stash[_threads] = set(threading.enumerate())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    # After the fixtures of the test are torn down, its runner among them.
    try:
        return (yield)
    finally:
        for thread in set(threading.enumerate()) - item.stash.get(_threads, set(threading.enumerate())):
            if isinstance(thread, threading._DummyThread):  # not Python's: a library's own, which called back
                continue
            thread.join(1)
            if thread.is_alive():
                _left.append(repr(thread))
        left = "\n".join(_left)
        _left.clear()
        if left:
            pytest.fail(f"left behind: {left}", pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def blockbuster() -> Iterator[BlockBuster]:
    """Blocking calls below a frame of the SDK, in a thread whose loop runs, raise BlockingError."""
    with blockbuster_ctx("esp_pubsub") as guard:
        for function in guard.functions.values():  # what /proc says comes from memory
            function.can_block_in("transports/embedded/processes.py", {"_started", "_place", "process_of", "mapped"})
            function.can_block_in("esp_pubsub/ledger.py", {"once", "_do", "_prepare"})  # a user's own connection
            function.can_block_in("esp_pubsub/registry.py", {"driver", "names"})  # set_pubsub_lib is no coroutine
        yield guard


@pytest.fixture
def bus_directory() -> Iterator[Path]:
    """A private directory with a path short enough for a Unix socket in it."""
    path = Path(tempfile.mkdtemp(prefix="esp"))
    yield path
    shutil.rmtree(path)
