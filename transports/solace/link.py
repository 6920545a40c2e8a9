"""What the driver asks of one session with a broker, in our words. session.py says it in the vendor's.

Calls are made on the loop, and so are all callbacks, which must not raise. Every call ends within the session's
`timeout`. A session that was lost stays lost: whoever needs one makes another, and all that stood on it is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol

from esp_pubsub.errors import BusError, BusRefused


class UnknownQueue(BusRefused):
    """There is no such queue."""


class NotSubscribed(BusRefused):
    """A topic is kept from us. The queue that was to get it may have been made."""


class NotFirst(BusRefused):
    """Another one stands first in the line of the queue."""


class Inbound(NamedTuple):
    """One message as the broker handed it over."""

    data: bytes
    receipt: Any
    """What `settle` wants; None where there is nothing to settle."""
    discarded: bool = False
    """The broker, or the client in front of us, dropped messages between the last one and this."""


Hear = Callable[[Inbound], None]
Taken = Callable[[int, BusError | None], None]
Ended = Callable[[BusError], None]


class Publisher(Protocol):
    """Sends messages, in the order of its calls."""

    async def send(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Each to its topic. Returns when the client took them all over; waits while it has no room."""

    async def aclose(self) -> None:
        """Let go of it. Bounded; raises nothing."""


class Flow(Protocol):
    """Messages that come to us, from a topic or from a queue."""

    async def settle(self, receipts: Sequence[Any]) -> None:
        """These are done: the queue lets them go."""

    async def aclose(self) -> None:
        """Hear nothing more. What was not settled comes to the queue's next consumer. Bounded; raises nothing."""


class Link(Protocol):
    """One session."""

    lost: BusError | None
    """Why there is none any more."""
    on_lost: set[Ended]
    """Who is told of it, once."""

    async def publisher(self, taken: Taken, *, guaranteed: bool) -> Publisher:
        """`taken` is told of each guaranteed message, by its number from 1 on, when the broker has taken or refused it;
        of direct ones, as number 0, only when the client could not send one.
        """

    async def subscribe(self, topic: str, hear: Hear, share: str | None = None) -> Flow:
        """Direct messages of a topic, from now on; each to one only of those who share."""

    async def bind(
        self,
        queue: str | None,
        hear: Hear,
        ended: Ended,
        *,
        topic: str | None = None,
        make: bool = False,
        active: Callable[[bool], None] | None = None,
        replay: Literal["earliest"] | datetime | None = None,
    ) -> Flow:
        """Consume an exclusive queue, beside others in line. None: a queue of our own, which goes with the flow.

        `topic`: what the queue has to get. `make`: with the queue, if it is not there; else UnknownQueue. `active` is
        told when we become or stop being the one who gets messages. `ended`: the flow is gone and the session is not.
        """

    async def browse(self, queue: str, hear: Hear) -> Flow:
        """Look at a queue's messages, in order, and at those that come to it; what is settled is taken out.

        UnknownQueue where there is none.
        """

    async def aclose(self) -> None:
        """End the session. Bounded, whatever state the broker is in; raises nothing."""
