"""`esp top`: what flows, who leads and who led before, read from the bus alone.

Rates and ids come from the headers of what is published, the rest from what members say on their groups' control
topics: beats of who leads, and every two seconds a word of each that stands by.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from .. import BusError, Client, ConfigError, init
from ..address import Address
from ..backoff import Backoff
from ..bus import Bus, Message, Place, Start
from ..errors import BadFrame, BusRefused, BusUnavailable
from ..failover.ballot import Ballot
from ..failover.line import Position
from ..failover.words import Challenge, Claim, Pulse, StandBy, read_word
from ..follower import Follower, before_end
from ..groups import group_lags
from ..records import moment
from ..wire.frame import BLOCK, Frame, parse
from .look import is_published_to
from .running import plain

_EVERY = 1.0  # seconds between two pictures
_PAUSE = 0.5
_CAUGHT_UP = 10.0  # seconds that the first picture waits for what was there before
_BACK = 10_000  # messages of a control topic from before, a quarter of an hour
_MESSAGES, _BYTES = 1_000, 4 << 20
_PUBLISHES = 10.0  # seconds after its last block for which a publisher counts
_SILENT = 6.0  # seconds after its last word for which a member counts as alive
_MEMBERS, _SWITCHES = 4, 10
_CONTROL = "/M/F/"

Role = Literal["active", "handed over", "fell silent", "claims", "standby", "catching up"]
_SPEAK: tuple[Role, ...] = ("active", "standby", "catching up")  # as long as they live


class Topic:
    """What was read of a window's topic."""

    def __init__(self) -> None:
        self.sources: dict[int, float] = {}  # when each was last heard
        self._counts = self._shown = (0, 0, 0)
        self._last: tuple[str, str, int] | None = None

    def hear(self, frame: Frame, *, fresh: bool) -> None:
        """One more message. What was there before we came counts for no rate."""
        if frame.kind != BLOCK:
            return
        self._last = f"{frame.id:,}", str(frame.run), frame.sent_at
        if fresh:
            self.sources[frame.source] = time.monotonic()
            blocks, events, size = self._counts
            self._counts = blocks + 1, events + frame.count, size + len(frame.data)

    def row(self, name: str, held: str, seconds: float) -> list[str]:
        """Its line, with rates since the last time."""
        blocks, events, size = ((new - old) / seconds for new, old in zip(self._counts, self._shown, strict=True))
        self._shown = self._counts
        since = time.monotonic() - _PUBLISHES
        self.sources = {source: at for source, at in self.sources.items() if at > since}
        last = ["", "", ""] if self._last is None else [*self._last[:2], _ago(self._last[2])]
        return [name, held, f"{blocks:,.0f}", f"{events:,.0f}", f"{size / 1e6:,.1f}", str(len(self.sources)), *last]


@dataclass(slots=True)
class Member:
    """A member of a failover group by its last word. Given and settled are known of who leads or led."""

    name: str
    role: Role
    term: int
    at: int
    positions: Sequence[Position] = ()
    eligible: bool = False
    """It stands by, and could lead."""
    pulse: Pulse | None = None
    """Of an engine."""


class Switch(NamedTuple):
    """Another member began to lead."""

    group: str
    before: Member
    after: Member


class Control:
    """What was heard on a group's control topic, in the group's highest run."""

    def __init__(self, group: str, switches: deque[Switch]) -> None:
        self.topic: str | None = None
        self.topics: list[str] = []
        """Of each line."""
        self._group = group
        self._switches = switches
        self._election = ""
        self._begin(0)

    def _begin(self, run: int) -> None:
        self._run = run
        self._members: dict[int, Member] = {}
        self._ballot = Ballot(from_start=False)
        self._led: tuple[int, Member] | None = None  # who spoke last as the leader

    def hear(self, frame: Frame, *, fresh: bool) -> None:
        """A beat or a claim; anything else has no voice here."""
        said = read_word(frame.data)
        if said is None or isinstance(said, Challenge) or said.run < self._run:
            return
        nonce, name = said.identity.nonce, plain(said.identity.name)
        if said.run > self._run:
            self._begin(said.run)
        if isinstance(said, StandBy):
            standing: Role = "standby" if said.eligible else "catching up"
            self._spoke(
                nonce,
                Member(name, standing, said.term, frame.sent_at, said.positions, said.eligible, said.pulse),
            )
        elif isinstance(said, Claim):
            leads = self._ballot.claim(said.term, nonce, said.saw_nonce, said.saw_number)
            self._spoke(nonce, Member(name, "claims" if leads else "standby", said.term, frame.sent_at))
        elif self._ballot.beat(said.term, nonce, said.number, resigns=said.resigns):
            self.topic, self._election = plain(said.setup.topics[0]), plain(said.setup.election)
            self.topics = [plain(topic) for topic in said.setup.topics]
            role: Role = "handed over" if said.resigns else "active"
            self._leads(nonce, Member(name, role, said.term, frame.sent_at, said.positions, False, said.pulse))

    def _leads(self, nonce: int, member: Member) -> None:
        if self._led is not None and self._led[0] != nonce:
            before = self._led[1]
            if before.role == "active":
                before.role = "fell silent"
            self._switches.append(Switch(self._group, before, member))
        self._led = nonce, member
        self._spoke(nonce, member)

    def _spoke(self, nonce: int, member: Member) -> None:
        self._members.pop(nonce, None)
        self._members[nonce] = member
        if len(self._members) > _MEMBERS:
            del self._members[next(iter(self._members))]

    def rows(self) -> list[list[str]]:
        """A line for each member, first who spoke last."""
        rows = []
        for member in reversed(self._members.values()):
            silent = member.role in _SPEAK and time.time() - member.at / 1e6 > _SILENT
            ids = ["", "", ""]
            if member.positions:
                first = member.positions[0]
                ids = [f"{first.given:,}", f"{first.settled:,}", f"{max(0, first.given - first.settled):,}"]
            role = "silent" if silent else member.role
            rows.append([self._group, str(self._run), self._election, member.name, role, str(member.term), *ids,
                         _ago(member.at)])  # fmt: skip
        return rows

    def engine_rows(self) -> list[list[str]]:
        """Of an engine's group, a line for each member that speaks: steps, output windows, its last snapshot."""
        rows = []
        for member in reversed(self._members.values()):
            if member.pulse is None or time.time() - member.at / 1e6 > _SILENT:
                continue
            lines = ", ".join(
                f"{topic.split('/')[-2]} {at.given:,} ({max(0, at.given - at.settled):,} wait)"
                for topic, at in zip(self.topics, member.positions, strict=False)
            )
            snapshot = _ago(member.pulse.snapshot) if member.pulse.snapshot else "none"
            name = self._group.removeprefix("engine/")
            rows.append([name, member.name, member.role, f"{member.pulse.taken:,}", lines, snapshot])
        return rows

    @property
    def warning(self) -> str | None:
        """What is wrong with the group, if somebody leads it."""
        now = time.time()
        speaking = [member for member in self._members.values() if now - member.at / 1e6 <= _SILENT]
        if any(member.role == "active" for member in speaking) and not any(member.eligible for member in speaking):
            return f"{self._group}: no standby could take over now"
        return None


class _Past:
    """Of a topic, what was there before we came: we read it from a little before its end on."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.at: Place | None = None
        self.end = 0
        self._bus = bus
        self._name = name

    @property
    def is_over(self) -> bool:
        """What comes next is new."""
        return self.at is None or self.at.position >= self.end

    async def begin(self) -> Start:
        """Where a feed begins."""
        if not self._bus.capabilities.replay:
            return "latest"
        if self.at is None:
            self.at, self.end = await before_end(self._bus, self._name, _BACK if _CONTROL in self._name else 1)
        return self.at


class Top:
    """One run of it."""

    def __init__(self, client: Client, urls: Sequence[str], groups: Sequence[str]) -> None:
        self._bus = client.bus
        self._catalog = client.catalog() if client.bus.capabilities.catalog or not urls else None
        self._windows = [Address.parse(url) for url in urls]
        for window in self._windows:
            window.require_window()
        if groups and not urls:
            raise ConfigError("a failover group is found by the URL of its window: give it too")
        self._controls = [window.control(group) for window in self._windows for group in groups]
        self._seen: dict[str, Topic | Control] = {}
        self._followed: set[str] = set()  # those of them that are being read
        self._switches: deque[Switch] = deque(maxlen=_SWITCHES)
        self._behind: set[str] = set()  # topics of which not all is read that was there before
        self._caught_up = asyncio.Event()
        self._troubles: dict[str, str] = {}
        self._pictured_at = 0.0

    async def run(self, *, once: bool) -> None:
        """Show one picture after the other until cancelled, or a single one."""
        console = Console(markup=False, highlight=False)
        if not console.is_terminal:
            once, console = True, Console(markup=False, highlight=False, width=1_000)
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch())
                await self._first_look()
                if once:
                    console.print(await self._picture())
                else:
                    await self._live(console)
                watching.cancel()
        except ExceptionGroup as group:  # of the one that was raised here
            raise group.exceptions[0] from None

    async def _live(self, console: Console) -> None:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(await self._picture(), refresh=True)
                await asyncio.sleep(_EVERY)

    async def _first_look(self) -> None:
        """Until all is read that was there before, and there is something to reckon rates from."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CAUGHT_UP):
                await self._caught_up.wait()
        await self._picture()
        await asyncio.sleep(_EVERY)

    async def _watch(self) -> None:
        """Follow every topic there is, and those that come."""
        async with asyncio.TaskGroup() as followers:
            while True:
                try:
                    for name in await self._names():
                        if name not in self._followed:
                            self._followed.add(name)
                            if name not in self._seen:
                                group = name.partition(_CONTROL)[2]
                                self._seen[name] = Control(group, self._switches) if group else Topic()
                                self._behind.add(name)
                            followers.create_task(self._follow(name))
                    self._troubles.pop("", None)
                except BusError as error:
                    self._troubles[""] = str(error)
                if not self._behind:
                    self._caught_up.set()
                await asyncio.sleep(_EVERY)

    async def _names(self) -> list[str]:
        """Windows' topics and groups' control topics: all, or those of the windows that were named."""
        there = list(await self._catalog.topics()) if self._catalog is not None else None
        if not self._windows:
            return [name for name in there or [] if name.endswith(("/I", "/O")) or _CONTROL in name]
        names = list(self._controls)
        if there is not None and not names:
            places = tuple(window.metadata + "/F/" for window in self._windows)
            names = [name for name in there if name.startswith(places)]
        for window in self._windows:
            for side in ("in", "out") if window.options.side is None else (window.options.side,):
                name = window.topic(side)
                if name in there if there is not None else await is_published_to(self._bus, name):
                    names.append(name)
        return names

    async def _follow(self, name: str) -> None:
        """Read a topic from a little before its end on, through any trouble. What the bus refuses is tried again when
        the topics are looked for next.
        """
        past = _Past(self._bus, name)

        def look() -> None:
            if past.is_over:
                self._caught_up_with(name)

        def trouble(error: BusUnavailable) -> None:
            self._troubles[name] = str(error)

        follower = Follower(self._bus, name, past.begin, Backoff(_PAUSE, _PAUSE), opened=look, trouble=trouble)
        try:
            while True:
                for message in await follower.read(_MESSAGES, _BYTES):
                    if isinstance(message, Message):
                        self._hear(name, message.data, fresh=past.is_over)
                    else:
                        past.end = 0  # what was there is no more
                past.at = follower.place
                look()
        except BusRefused as error:
            self._troubles[name] = str(error)
            self._followed.discard(name)
        finally:
            await follower.aclose()

    def _caught_up_with(self, name: str) -> None:
        self._troubles.pop(name, None)
        self._behind.discard(name)
        if not self._behind:
            self._caught_up.set()

    def _hear(self, name: str, data: bytes, *, fresh: bool) -> None:
        with suppress(BadFrame, KeyError, TypeError, ValueError):  # what is foreign has no voice here
            self._seen[name].hear(parse(data), fresh=fresh)

    async def _picture(self) -> Group:
        now, before = time.monotonic(), self._pictured_at
        self._pictured_at = now
        topics = _table("topic", ">held", ">blocks/s", ">events/s", ">MB/s", ">publishers", ">last id", ">run", ">sent",
                        ">behind")  # fmt: skip
        groups = _table("group", ">run", "election", "member", "role", ">term", ">given", ">on bus", ">waiting",
                        ">heard")  # fmt: skip
        engines = _table("engine", "member", "role", ">steps", "output windows", ">last snapshot")
        warnings: list[str] = []
        switches = _table("failover (UTC)", "group", "from", "why", "to", ">term", ">behind id", ">pause")
        shown = {name for name, seen in self._seen.items() if isinstance(seen, Topic)}
        for name, seen in sorted(self._seen.items()):
            if isinstance(seen, Topic):
                topics.add_row(*seen.row(name, await self._held(name), now - before), await self._behind_most(name))
            elif seen.topic in shown or not self._windows:
                for row in seen.rows():
                    groups.add_row(*row)
                for row in seen.engine_rows():
                    engines.add_row(*row)
                if seen.warning is not None:
                    warnings.append(seen.warning)
        for group, old, new in reversed(self._switches):
            switches.add_row(
                f"{moment(0, new.at):%H:%M:%S.%f}"[:-3], group, old.name, old.role, new.name, str(new.term),
                f"{new.positions[0].settled:,}", f"{(new.at - old.at) / 1e6:.2f} s",
            )  # fmt: skip
        troubles = [f"{name or 'the list of topics'}: {text}" for name, text in sorted(self._troubles.items())]
        tables = [table for table in (topics, groups, engines, switches) if table.row_count or table is topics]
        return Group(*tables, *warnings, *troubles)

    async def _held(self, name: str) -> str:
        if not self._bus.capabilities.replay or name in self._troubles:
            return ""
        try:
            async with asyncio.timeout(_PAUSE):
                found = await self._bus.bounds(name)
        except (BusError, TimeoutError):
            return ""
        return f"{found.end - found.first:,}"

    async def _behind_most(self, name: str) -> str:
        """How many messages the group has to read yet that has most."""
        if not self._bus.capabilities.shows_groups or name in self._troubles:
            return ""
        try:
            async with asyncio.timeout(_PAUSE):
                lags = await group_lags(self._bus, name)
        except (BusError, TimeoutError):
            return ""
        return f"{max(lag.behind for lag in lags):,}" if lags else ""


def _table(*columns: str) -> Table:
    """Of columns whose names begin with `>` if they stand at the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(
            name.removeprefix(">"), justify="right" if name[0] == ">" else "left", no_wrap=number > 0, overflow="fold"
        )
    return table


def _ago(micros: int) -> str:
    seconds = max(0.0, time.time() - micros / 1e6)
    for size, unit, digits in ((1, "s", 1), (60, "min", 0), (3_600, "h", 0)):
        if seconds < 60 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / 86_400:.0f} d"


async def top(urls: Sequence[str], groups: Sequence[str], once: bool, bus: str, config: str | None,
              keys: Mapping[str, Any]) -> None:  # fmt: skip
    """Pictures of a bus."""
    async with init(bus, config=config, **keys) as client:
        await Top(client, urls, groups).run(once=once)
