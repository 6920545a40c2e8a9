"""The seam. A driver moves ordered batches of bytes and tells the truth about what happened.

What a driver is
    One `Bus` object is a connection to one external system. It hands out pipes (writers) and feeds (readers) of topics.
    All of numbering, encoding, retry, order across senders, doubles, gaps and failover live above it, once. So a driver
    never retries a write, never drops or merges messages, never counts ids, and never waits without an end of its own,
    except where a method says "waits": then the caller's cancellation ends the wait.

What it raises
    `BusUnavailable` when the bus cannot be reached or does not answer within the driver's own deadline, `BusRefused`
    when it answered and said no; nothing else, whatever the vendor's library throws. A pipe or feed that raised either
    is dead: nobody calls it again but for `aclose`, and a new one takes its place.

Cancellation
    Every method may be cancelled at any await. After a cancelled `read` the messages it did not return come with the
    next one. After a cancelled `write` or `confirmed` the pipe is used no more, just as after trouble. `aclose`
    finishes what must be finished within its bound even when it is cancelled.

The prefix rule
    What one pipe puts on the bus stands there in the order of its writes. What is missing is either a suffix of what
    was written (`suffix_only`), or else a hole that the pipe reports as trouble. A driver claims `suffix_only` only
    if a message that was refused, lost or timed out can never be followed by a later one of the same pipe, whatever
    fails. Confirmed means: in every queue bound, or in the log, at that time, to the durability that the bus is set
    to.

Threads
    Everything is called on the loop on which the bus was opened. A driver may use threads inside; no callback,
    exception or object of the vendor's leaves it.

Whoever passes `esp_pubsub.testing.conformance` is a driver.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, cast, overload

_new = tuple.__new__
Position = Any  # hashable; an int on a log, opaque on a queue


class Place(NamedTuple):
    """Where a reader of a log stands: the position that it wants next, and the incarnation that this is one of.

    A reader that had trouble goes on from its place, and so hears of it if the topic was emptied or made anew since.
    """

    position: int
    incarnation: int | None
    """None where the bus has none (capability `incarnation`)."""


Start = Literal["earliest", "latest"] | int | datetime | Place


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a bus offers. A driver claims only what the conformance suite has seen."""

    suffix_only: bool
    """What is missing of a pipe is always its end, whatever fails."""
    replay: bool
    """A feed may start anywhere that is still kept; positions are ints and `bounds` works."""
    retained: bool
    """`retain` and `retained` work."""
    groups: bool
    """Feeds may have a group: one reader at a time, a stored position and state."""
    incarnation: bool
    """A topic that was emptied or made anew shows as a Break with `incarnation`, also to a feed opened at a `Place`."""
    requests: bool
    """The bus is also a `Requests`."""
    catalog: bool
    """The bus is also a `Catalog`."""
    max_message_bytes: int
    """The largest message it takes."""
    deaths: bool = False
    """The bus is also a `Deaths`."""
    elections: tuple[str, ...] = ()
    """The bus is also an `Elections`, with these; the first is what groups have that name none."""
    logs: bool = False
    """The bus is also a `Logs`."""
    brief_groups: bool = False
    """Without `groups`: feeds may have a group, whose queue is gone a minute after its last reader, with what it
    holds. An engine reads such a queue; nobody else is offered it.
    """
    shows_groups: bool = False
    """The bus is also a `Groups`."""
    shows_last: bool = False
    """Without `replay`: a member that takes over is shown the last message of its topics, where the bus keeps it."""
    replays_with: str = ""
    """Without `replay`: the setting with which this bus has it, for those who are refused."""


class Message(NamedTuple):
    """One message as it stands on the bus."""

    position: Position
    data: bytes


@dataclass(frozen=True, slots=True)
class Break:
    """Continuity ended in front of what comes next: retention or a purge passed the reader, or it was away."""

    reason: str
    messages: int | None
    """How many messages were passed over, None where nobody knows."""
    incarnation: bool = False
    """The topic is another one than before: nothing known of its sources holds any more."""
    cut: Position | None = None
    """The topic lost what it had from this position on, and other messages come to stand there. What is known of its
    sources holds."""


class Run(Sequence[Message]):
    """Messages of a log that follow each other, as one read found them: batches, which are taken apart when somebody
    wants more than the first message or the last.

    Several feeds may return the very same one: what one reader has found out about it can be of use to the others.
    """

    __slots__ = ("__weakref__", "_batches", "_first", "_length", "_messages")

    def __init__(self, first: int, batches: Sequence[tuple[bytes, Sequence[int]]]) -> None:
        """`first`: the position of the first message. A batch: bytes, and where in them its messages begin and end."""
        self._first = first
        self._batches = batches
        self._length = sum([len(bounds) - 1 for _, bounds in batches])
        self._messages: list[Message] = []

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Message]:
        return iter(self._all())

    @overload
    def __getitem__(self, at: int) -> Message: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Message]: ...

    def __getitem__(self, at: int | slice) -> Message | Sequence[Message]:
        if not self._messages and self._length > 2:
            if at == 0:
                data, bounds = self._batches[0]
                return Message(self._first, data[bounds[0] : bounds[1]])
            if at == -1:
                data, bounds = self._batches[-1]
                return Message(self._first + self._length - 1, data[bounds[-2] : bounds[-1]])
        return self._all()[at]

    def part(self, begin: int, end: int) -> bytes:
        """These bytes of each message, one behind the other; all messages are known to have as many."""
        if self._messages:
            return b"".join([data[begin:end] for _, data in self._messages])
        return b"".join([data[at + begin : at + end] for data, bounds in self._batches for at in bounds[:-1]])

    def _all(self) -> list[Message]:
        messages = self._messages
        if not messages:
            position = self._first
            for data, bounds in self._batches:
                messages += [
                    _new(Message, (at, data[begin:end])) for at, (begin, end) in enumerate(pairwise(bounds), position)
                ]
                position += len(bounds) - 1
            self._batches = ()
        return messages


def parts(read: Sequence[Message | Break]) -> Iterator[tuple[Break | None, Sequence[Message]]]:
    """What a feed returned, cut at its breaks: messages between which nothing is missing, each time with the break in
    front of them.
    """
    broken, begin = None, 0
    for at in [] if isinstance(read, Run) else [at for at, kind in enumerate(map(type, read)) if kind is Break]:
        yield broken, cast(Sequence[Message], read[begin:at])
        broken, begin = cast(Break, read[at]), at + 1
    yield broken, cast(Sequence[Message], read[begin:] if begin else read)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a log holds now: positions first..end-1."""

    first: int
    end: int
    incarnation: int | None


class Pipe(Protocol):
    """An ordered writer, used by one task, dead after the first trouble."""

    async def write(self, frames: Sequence[bytes]) -> None:
        """Put messages on the bus, in order. Returns when the bus took them over, which may be before they are
        confirmed.

        Waits while the bus applies back-pressure; a bus that does not answer at all is BusUnavailable within the
        driver's deadline. Cancelled or failed: some prefix of what was written is or will be on the bus.
        """

    async def confirmed(self, past: int) -> int:
        """How many messages of this pipe are confirmed, counted from its first, in order and without a hole.

        Waits until that is more than `past`; raises when that can no longer happen. May be awaited while another task
        is in `write`.
        """

    async def aclose(self) -> None:
        """Let go of the pipe, confirmed or not, within a bound, whatever state the bus is in. Never raises BusError."""


class Feed(Protocol):
    """An ordered reader, used by one task, dead after the first trouble."""

    state: bytes | None
    """What was confirmed together with the group's position; set once `read` has returned. None after a Break with
    `incarnation`, unless the group has confirmed something behind it: what it confirmed before counts no more."""

    unconfirmed: int | None
    """How many of the messages that it returned could be confirmed now; None: all. Whoever reads sets it before each
    `read`. The others wait for one that has not come. A queue that hands out only so many unconfirmed messages hands
    out as many more as are waiting, because that one may be next."""

    @property
    def place(self) -> Place | None:
        """After what `read` returned last; set once it has returned. None on a queue."""

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        """Messages in the order of the bus, at least one; more than one stay within both bounds. A Break with
        `incarnation` comes alone.

        Waits until there is something; where there is, it may return without giving others of the loop a turn, so who
        reads in a loop does. With a group it also waits until this reader is the one that reads for it.
        """

    async def release(self, positions: Sequence[Position]) -> None:
        """Messages that will never be confirmed because nobody needs them: a queue lets them go, a log does nothing."""

    async def confirm(self, position: Position | None, state: bytes) -> None:
        """Store that every message up to and including `position` is done, together with `state` (capability `groups`).

        None: nothing more is done in order, only `state` is stored. Waits while the bus applies back-pressure.
        The next reader of the group starts behind it and is handed `state`. State and position are stored in one step,
        or the state first: where the link is lost at once, a queue may hand out once more what is done. A reader that
        is no longer the group's one moves nothing and gets BusUnavailable.
        """

    async def aclose(self) -> None:
        """Stop reading; a group's next reader may go on at once. Bounded; never raises BusError."""


class Bus(Protocol):
    """One connection to one external system."""

    capabilities: Capabilities

    async def pipe(self, topic: str) -> Pipe:
        """A new writer; makes the topic if the bus needs that."""

    async def feed(self, topic: str, start: Start, group: str | None) -> Feed:
        """A new reader. It is in place when this returns: what is written from then on, it reads.

        `start` counts where a group has nothing stored, and where there is no group. A number is the position of the
        first message wanted, of the topic as it is now; one that is no longer kept gives a Break first, one beyond the
        end waits. A `Place` of another incarnation gives a Break with `incarnation` first, then all that the topic has.

        What a group stored in another incarnation counts no more: its next reader gets a Break with `incarnation` and
        begins with the first message, where its `start` is a Place of this incarnation without that Break, of which
        this reader has heard.
        """

    async def bounds(self, topic: str) -> Bounds:
        """What the log holds at this moment (capability `replay`), without a reader; makes the topic if the bus needs
        that. A feed at `Place(end, incarnation)` reads what is written from then on.
        """

    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        """Keep a small last value (None: forget it); it is there for whoever asks once this has returned."""

    async def retained(self, topic: str, key: str) -> bytes | None:
        """The value retained last, None if there is none."""

    async def aclose(self) -> None:
        """Close what is still open, within a bound, whatever state the bus is in. Never raises BusError."""


class Requests(Protocol):
    """A role that a bus may also have: questions to whoever serves a topic."""

    async def request(self, topic: str, data: bytes, timeout: float) -> bytes:
        """Ask; exactly one server gets it, and the answer comes to this caller alone. NoAnswer after `timeout`
        seconds.
        """

    async def serve(self, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer requests, one at a time, until cancelled. `answer` must not raise."""


class Catalog(Protocol):
    """A role that a bus may also have: what topics there are."""

    async def topics(self) -> Sequence[str]:
        """The names of all topics, sorted."""

    async def purge(self, topic: str) -> None:
        """Empty a topic. Its readers get a Break with `incarnation`; positions are not used again."""


class GroupState(NamedTuple):
    """What a bus knows of a group."""

    name: str
    position: int | None
    """Where its next reader begins; None: nothing is confirmed."""
    reader: str
    """Who reads for it now, for people; empty: nobody."""
    since: float | None
    """Since when, in seconds since 1970, where that is known."""
    waiting: int | None = None
    """Messages that wait for it, where the bus keeps them for each group; `position` means nothing there."""


class Groups(Protocol):
    """A role that a bus may also have: what groups there are."""

    async def group_states(self, topic: str) -> Sequence[GroupState]:
        """The groups of a topic that have confirmed something there, or that somebody reads for. Without `waiting` they
        are on a log.
        """


class Logs(Protocol):
    """A role that a bus of queues may also have: logs in the same system."""

    async def log(self) -> Bus:
        """A bus with `replay`, under the same settings; the same one each time. It is closed with this one."""


class Deaths(Protocol):
    """A role that a bus of one machine may also have: to know at once that a process is gone."""

    process: str
    """What names this process to the others; they take it as it is."""

    async def gone(self, process: str) -> None:
        """Wait until the process of that name is gone; forever, where that cannot be known."""

    async def end(self, process: str) -> bool:
        """Kill the process of that name if it is stopped, and no other one whatever its number; False where it is not,
        or that cannot be done.
        """


class Election(Protocol):
    """How the members of a failover group agree on who works. Progress and economy rest on it, safety does not.

    One task calls `campaign`, then `watch`, then `resign` or `campaign` again, while `run` is a task beside it.
    Trouble with the election's own service is never raised: it is "suspended", or a longer wait.
    """

    async def run(self) -> None:
        """Whatever must happen all the while; ends by cancellation, and then leadership ends too."""

    async def campaign(self) -> int:
        """Wait until we lead; returns the term, a number that grows. Cancelled: we do not lead, nor will by this."""

    async def watch(self) -> Literal["suspended", "lost"]:
        """Wait until we lead no more, or can no longer know that we do."""

    async def resign(self) -> None:
        """Lead no more and let others go first. Bounded; without leadership nothing happens."""


class Elections(Protocol):
    """A role that a bus may also have: elections by its own means."""

    def election(self, kind: str, line: str, member: str) -> Election:
        """One of `capabilities.elections`, for whoever stands in this line; `member` is a name for people."""
