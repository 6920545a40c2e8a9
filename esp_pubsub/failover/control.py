"""The control topic of a group: beats and claims to and from the other members.

It reads from a little before the end, so that a newcomer hears the last beats at once, and goes on through any trouble.
What one member says of itself in a beat is compared by the others: members that are set up differently must not pass
for one group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from ..bus import Break, Bus, Feed, Pipe, Place
from ..errors import BadFrame, BusUnavailable, ConfigError
from ..wire.frame import BEAT, CLAIM, Sealed, frames, parse
from ..wire.maps import read_map, seal_map

_BACK = 256  # messages before the end with which a newcomer begins
_PAUSE = 0.05
_WRITE_DEADLINE = 10.0  # the driver has a shorter one of its own
_KINDS: dict[str, Any] = {"int": int, "str": str, "bool": bool, "int | None": int | None}


@dataclass(frozen=True, slots=True)
class Setup:
    """What the members of a group must have in common."""

    topic: str
    schema: str
    body: str
    election: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a member is. `process` is for the bus's death notices, `host` and `pid` are for people."""

    name: str
    nonce: int
    process: str
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A leader's sign of life: its number in the term, and how far the sequence is."""

    setup: Setup
    identity: Identity
    run: int
    term: int
    number: int
    given: int
    settled: int
    chain: int | None
    resigns: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A member wants to lead the next term; the last beat it read was `saw_number` of the member `saw_nonce`."""

    identity: Identity
    run: int
    term: int
    saw_nonce: int
    saw_number: int


T = TypeVar("T", Identity, Setup, Beat, Claim)


def differences(ours: Setup, theirs: Setup) -> ConfigError | None:
    """What two members should have in common and have not, both shown."""
    pairs = [(key, value, getattr(theirs, key)) for key, value in asdict(ours).items() if value != getattr(theirs, key)]
    if not pairs:
        return None
    text = "; ".join(f"{key}: ours {mine!r}, theirs {other!r}" for key, mine, other in pairs)
    return ConfigError(f"another member of this failover group is set up differently: {text}", differences=pairs)


async def read_to_behind(feed: Feed, broken: Break, read_to: int) -> int:
    """How far a log is read when a break is: to what it passed, or to where the log begins now."""
    first = (await feed.bounds()).first
    return first - 1 if broken.incarnation else max(first - 1, read_to + (broken.messages or 0))


def _sound(said: T) -> T:
    """What came from elsewhere, if it is of the types that stand above; else TypeError."""
    for field in fields(said):
        if not isinstance(getattr(said, field.name), _KINDS.get(str(field.type), object)):
            raise TypeError(f"{field.name} is not {field.type}")
    return said


class Control:
    """One member's end of the control topic."""

    def __init__(self, bus: Bus, topic: str, source: int, run: int, *, hear: Callable[[Beat | Claim], None]) -> None:
        """`hear` is called with everything that is said on the topic, in order, our own words too."""
        self.topic = topic
        self.from_start = True
        self._bus = bus
        self._source = source
        self._run = run
        self._hear = hear
        self._pipe: Pipe | None = None
        self._feed: Feed | None = None
        self._line = asyncio.Lock()
        self._place: Place | None = None  # behind what was read
        self._end = 0
        self.reading = asyncio.Event()

    async def run(self) -> None:
        """Read until cancelled. `reading` is set once what was there has been read, and cleared in trouble."""
        try:
            while True:
                try:
                    await self._read(await self._open())
                except BusUnavailable:
                    self.reading.clear()
                    await asyncio.sleep(_PAUSE)
        finally:
            await self._drop_pipe()

    async def _open(self) -> Feed:
        if self._place is not None:
            return await self._bus.feed(self.topic, self._place, None)
        if not self._bus.capabilities.replay:
            self.from_start = False
            return await self._bus.feed(self.topic, "latest", None)
        feed = await self._bus.feed(self.topic, "latest", None)
        try:
            bounds = await feed.bounds()
        finally:
            await feed.aclose()
        start = max(bounds.first, bounds.end - _BACK)
        self.from_start = start == 0
        self._place, self._end = Place(start, bounds.incarnation), bounds.end
        return await self._bus.feed(self.topic, self._place, None)

    async def is_current(self) -> bool:
        """Whether all that stands on the topic has been read. The bus is asked: one that does not answer says no."""
        if self._feed is None or self._place is None:
            return not self._bus.capabilities.replay
        try:
            bounds = await self._feed.bounds()
            return self._place.incarnation == bounds.incarnation and self._place.position >= bounds.end
        except BusUnavailable:
            return False

    async def _read(self, feed: Feed) -> None:
        self._feed = feed
        try:
            while True:
                await asyncio.sleep(0)  # it may be long
                if self._place is None or self._place.position >= self._end:
                    self.reading.set()
                for message in await feed.read(_BACK, 1 << 20):
                    if isinstance(message, Break):  # what was there is no more
                        self._end = 0
                    elif (heard := self._parse(message.data)) is not None:
                        self._hear(heard)
                self._place = feed.place
        finally:
            self._feed = None
            await feed.aclose()

    def _parse(self, data: bytes) -> Beat | Claim | None:
        """What a message says; None for anything foreign, which has no voice here."""
        try:
            frame = parse(data)
            if frame.kind not in (BEAT, CLAIM):
                return None
            values = read_map(frame)
            identity = _sound(Identity(**values.pop("identity")))
            if frame.kind == CLAIM:
                return _sound(Claim(identity=identity, run=frame.run, term=frame.term, **values))
            setup = _sound(Setup(**values.pop("setup")))
            return _sound(Beat(setup, identity, frame.run, frame.term, settled=frame.settled, **values))
        except (BadFrame, TypeError, KeyError, AttributeError):
            return None

    async def beat(self, beat: Beat) -> None:
        """Say that we live. BusUnavailable if the bus does not take and confirm it in time."""
        values = {
            "setup": asdict(beat.setup), "identity": asdict(beat.identity), "number": beat.number,
            "given": beat.given, "chain": beat.chain, "resigns": beat.resigns,
        }  # fmt: skip
        await self._write(self._sealed(BEAT, values), beat.settled, beat.term)

    async def claim(self, claim: Claim) -> None:
        """Say that we want to lead. BusUnavailable as for a beat."""
        values = {
            "identity": asdict(claim.identity), "saw_nonce": claim.saw_nonce, "saw_number": claim.saw_number
        }  # fmt: skip
        await self._write(self._sealed(CLAIM, values), 0, claim.term)

    def _sealed(self, kind: int, values: dict[str, Any]) -> Sealed:
        return seal_map(kind, values, source=self._source, run=self._run)

    async def _write(self, sealed: Sealed, settled: int, term: int) -> None:
        """Through a pipe that is dropped after any trouble, a cancelled write included."""
        message = frames([sealed], settled, time.time_ns() // 1000, term)
        async with self._line:
            try:
                async with asyncio.timeout(_WRITE_DEADLINE):
                    if self._pipe is None:
                        self._pipe, self._written = await self._bus.pipe(self.topic), 0
                    await self._pipe.write(message)
                    self._written = await self._pipe.confirmed(self._written)
            except TimeoutError:
                await self._drop_pipe()
                raise BusUnavailable(f"{self.topic} took no message within {_WRITE_DEADLINE:g} s") from None
            except BaseException:
                await self._drop_pipe()
                raise

    async def _drop_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            await pipe.aclose()
