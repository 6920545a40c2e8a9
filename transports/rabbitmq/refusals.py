"""What a broker that says no means: BusRefused where it will not change its mind, BusUnavailable where that passes.

It says no by a number, for which aiormq has exceptions, and in words; of streams by a number alone. What is in no table
here is trouble that passes: links that are lost, answers that do not come.
"""

from __future__ import annotations

import ssl

from aiormq.exceptions import (
    AuthenticationError,
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelPreconditionFailed,
    ConnectionClosed,
    ConnectionCommandInvalid,
    ConnectionNotAllowed,
    ConnectionNotImplemented,
    ProbableAuthenticationError,
)

from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

_LASTS = (
    AuthenticationError,
    ChannelAccessRefused,
    ChannelLockedResource,
    ChannelPreconditionFailed,
    ConnectionCommandInvalid,
    ConnectionNotAllowed,
    ConnectionNotImplemented,
    ProbableAuthenticationError,
    ssl.SSLError,
)
COMES_UP = (  # for a moment after a restart, or while somebody makes a stream
    "inaccessible",
    "INTERNAL_ERROR",
    "Stream not found",
    "does not have a replica on the local node",
)
_PASSES = (  # whatever the number: it ends by itself, or when an operator has looked
    "is reached",  # a limit of connections or queues: of a virtual host, a user or a node
    "reached the maximum",  # a limit of channels
    "rate limit",
    "is down",  # a virtual host that is starting, or failed
    "timed out",  # so long unacknowledged that the broker takes it back
    "CONNECTION_FORCED",  # an operator, or a node that stops
    "RESOURCE_ERROR",
    *COMES_UP,
)
_SAYS = {
    2: "there is no such stream", 3: "subscribed twice", 4: "there is no such subscription", 5: "it exists",
    6: "the stream is not available", 7: "no such way to authenticate", 8: "wrong user or password",
    9: "authentication failed", 10: "the broker asks for more than a password", 11: "this user is for loopback only",
    12: "no access to the virtual host", 13: "an unknown command", 14: "a frame too large", 15: "an internal error",
    16: "access refused", 17: "a precondition failed", 18: "there is no such publisher", 19: "no offset is stored",
}  # fmt: skip
_CODE_PASSES = frozenset({2, 4, 6, 12, 15, 18, 19})  # 12: by a limit too; AMQP, which is asked first, says what it is


def trouble(what: str, error: BaseException | None) -> BusError:
    """An error of aiormq's in our words, and in those of the broker."""
    if isinstance(error, BusError):
        return error
    text = str(error) or type(error).__name__
    if isinstance(error, ConnectionClosed):
        text = " ".join(map(str, error.args))
    if isinstance(error, _LASTS) and not any(words in text for words in _PASSES):
        return BusRefused(f"{what}: refused: {text}")
    return BusUnavailable(f"{what}: {type(error).__name__}: {text}")


def stream_trouble(what: str, code: int) -> BusError:
    """What an answer other than OK of the stream protocol means."""
    kind = BusUnavailable if code in _CODE_PASSES else BusRefused
    return kind(f"{what}: the broker answered {_SAYS.get(code, 'an unknown code')} ({code})")
