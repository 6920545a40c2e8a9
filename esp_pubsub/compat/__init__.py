"""SAS's Python API, `pubsubApi` and `modelingApi`, for scripts that were written for it: only their import changes.

    from esp_pubsub.compat import modelingApi, pubsubApi

Names, order of calls, callbacks and return values are those of SAS ESP 6.2: 1 or an object is success, 0 or None is
failure, and nothing raises. Behind them is this SDK: a loop in a thread, to which every call is handed over. The reason
of a failure is logged under `esp_pubsub.compat`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ..errors import ConfigError, EspError

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F")

log = logging.getLogger(__name__)


def fails_with(failure: F) -> Callable[[Callable[P, T]], Callable[P, T | F]]:
    """What raises an error of the SDK returns this value instead, and the error is logged."""

    def wrap(function: Callable[P, T]) -> Callable[P, T | F]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T | F:
            try:
                return function(*args, **kwargs)
            except TimeoutError:
                log.error("%s: the bus did not answer in time", function.__name__)
            except (EspError, OSError) as error:
                log.error("%s: %s", function.__name__, error)
            return failure

        return call

    return wrap


def text(value: object, what: str) -> str:
    """A string, also where a script says it in bytes, as ctypes wants it."""
    try:
        plain = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        plain = None
    if not isinstance(plain, str):
        raise ConfigError(f"{what} is text, not {value!r:.80}")
    return plain
