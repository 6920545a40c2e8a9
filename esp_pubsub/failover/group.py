"""The runner of a member: it follows the topic, campaigns when it may, and opens the gate of the sender while it leads.

What is decided is decided in member.py; this file only brings it the news and carries out what follows. Whatever fails
for good (another input, a higher run, another set-up) is raised out of `run`, and the publisher fails with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from .._news import News
from ..bus import Break, Bus, Deaths, Election, Feed, Message, parts
from ..errors import BusUnavailable, Closed, ConfigError
from ..sender import GRACE, Sender
from .control import Beat, Claim, Control, Identity, Setup, differences, read_to_behind
from .log_election import LogElection
from .member import Event, Member, Role

_log = logging.getLogger("esp_pubsub.failover")
_BACK = 1_000  # messages before the end in which a new member looks for its group's last block; beats tell it too
_PAUSE = 0.05
_LOOK_EVERY = 0.002  # seconds between two looks at a log: to follow much at once costs hardly more than a little
_CATCH_UP = 0.3  # seconds before an heir sends what it has: who reads on sends less twice, and is waited for
_POSITION_EVERY = 1.0
_HEARD = 2.0
_BEHIND = 0.5  # how far a candidate may fall behind the bus, in seconds, before it leaves the others alone


@dataclass(frozen=True, slots=True)
class Failover:
    """How a publisher takes part in a failover group: `failover=Failover("feed")` on every member."""

    group: str
    run: int = 0
    """A source's sequence begins anew with a higher run (for example 20261118); all members name the same."""
    buffer: int = 10_000
    """Blocks a standby keeps ready (SAS's numbufferedmsgs); it is never more than that ahead of the active."""
    overflow: Literal["wait", "leave"] = "wait"
    """What `inject` does on a standby whose buffer is full: wait, or leave the group with Overrun."""
    election: str | None = None
    """How the members agree on who leads: `log`, on the group's control topic; what the bus has of its own (`token` and
    `presence` on RabbitMQ, `flow` on Solace); or `zookeeper://host:port,host:port`. None: the bus's own, else `log`."""
    fence: Literal["kill"] | None = None
    """`kill`: end a process that is stopped while it holds a lock everybody needs (embedded bus)."""

    def __post_init__(self) -> None:
        if not self.group or not isinstance(self.group, str):
            raise ConfigError(f"a failover group has a name, and that is a text, not {self.group!r}")
        if not isinstance(self.election, str | None) or self.election == "":
            raise ConfigError(f"election is a name, or the place of a service, not {self.election!r}")
        if not _is_number(self.buffer) or self.buffer < 1:
            raise ConfigError(
                f"buffer is at least 1, not {self.buffer!r}: a standby has to keep what it may have to send"
            )
        if not _is_number(self.run) or not 0 <= self.run < 1 << 64:
            raise ConfigError(f"run is a number from 0 to 2**64 - 1, not {self.run!r}")
        if self.overflow not in ("wait", "leave"):
            raise ConfigError(f"overflow is wait or leave, not {self.overflow!r}")
        if self.fence not in (None, "kill"):
            raise ConfigError(f"fence is None or kill, not {self.fence!r}")


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A member took another role."""

    role: Role
    event: Event
    term: int
    m: int
    last: int
    at: float


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _line(group: str, run: int) -> str:
    """Where members stand in line to lead: each run has its own, or a new one would wait for the old one's end."""
    return f"{group}.{run}" if run else group


class Group:
    """One member of a failover group, at work."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        control_topic: str,
        setup: Setup,
        member: Member,
        sender: Sender,
        *,
        stall: float,
        fence: bool,
        elect: Callable[[str, str], Election] | None,
        told: Callable[[], None],
    ) -> None:
        """`elect` makes an election that is not the log's, of a group and a member's name; `told` is called whenever m,
        agreed or the role may have changed.
        """
        self.term = 0
        self.last_switch: RoleChange | None = None
        self._bus = bus
        self._setup = setup
        self._member = member
        self._sender = sender
        self._stall = stall
        self._fence = fence and bus.capabilities.deaths
        self._in_the_way = ""
        self._told = told
        self._news = News()
        self._topic = setup.topic
        process = cast(Deaths, bus).process if bus.capabilities.deaths else ""
        host, pid = socket.gethostname(), os.getpid()
        self.identity = Identity(f"{host}:{pid}", secrets.randbits(63), process, host, pid)
        self._control = Control(bus, control_topic, member.source, member.run, hear=self._hear)
        self._log_election = (
            LogElection(bus, self._control, self.identity, member.run, self._word, trouble=self.trouble)
            if elect is None
            else None
        )
        self._election: Election = self._log_election or elect(_line(name, member.run), self.identity.name)  # type: ignore[misc]
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._followed: int | None = None
        self._begun_at = self._end = 0
        self._heard_other_at = -_HEARD
        self._strangers_until = -1.0
        self._speaks = False  # others may have heard that it leads
        self._following = False
        self._ineligible = True
        # behind which block and up to which ours were confirmed, each time it led
        self._sent: list[tuple[int, int]] = []
        self._handing_over = 0  # how many wait for it
        self._hand_over: asyncio.Future[None] | None = None
        self._hand_over_to = 0  # the last block that had an id when it was asked for, last
        self._hands_over = False  # all is sent, and it resigns
        self._asked = News()  # for a hand-over
        self._changes: set[asyncio.Queue[RoleChange]] = set()

    async def run(self) -> None:
        """Be a member until cancelled. Raises what ends the membership for good."""
        _log.info("Hot failover state switched to standby: %s on %s", self.identity.name, self._topic)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._control.run())
                tasks.create_task(self._election.run())
                tasks.create_task(self._raise_failure())
                if self._fence:
                    tasks.create_task(self._end_who_is_in_the_way())
                while True:
                    self.term = self._sender.term = await self._stand_by()
                    event = await self._lead()
                    self._step(event)
                    self._hands_over = event == "handed over"
                    if event in ("stalled", "ineligible", "handed over"):
                        await self._election.resign()
                    if self._hands_over:
                        self._tell_handed_over()
        except ExceptionGroup as group:
            raise _first(group) from None
        finally:
            self.leave()

    async def _raise_failure(self) -> None:
        """What a callback found wrong for good, raised where it ends everything."""
        raise await self._failure

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    def trouble(self, error: BusUnavailable) -> None:
        """A write failed; if a stopped process was in its way and fencing is on, that is ended."""
        self._in_the_way = getattr(error, "process", None) or ""
        self._news.tell()

    async def _end_who_is_in_the_way(self) -> None:
        while True:
            process, self._in_the_way = self._in_the_way, ""
            if process and process != self.identity.process:
                ended = await cast(Deaths, self._bus).end(process)
                _log.warning(
                    "fence: process %s held a lock and did not go on: %s",
                    process,
                    "killed" if ended else "not stopped, or gone",
                )
            await self._news.wait()

    def given(self) -> None:
        """The member has one more block: to send, or to become eligible by."""
        if self._member.role == "active":
            self._sender.wake()
        elif self._ineligible and self._member.eligible:
            self._news.tell()

    def acked(self, id: int) -> None:
        """What we sent is about to be known as confirmed up to here. Blocks that another member had brought to the bus
        in the meantime are not ours.
        """
        (behind, last), m = self._sent[-1], self._member.m
        if m <= last:
            self._sent[-1] = (behind, id)
        elif m < id:
            self._sent.append((m, id))
        self._news.tell()

    def has_sent(self, id: int) -> bool:
        """It was this member whom the bus confirmed the block."""
        return any(behind < id <= last for behind, last in self._sent)

    @property
    def role(self) -> Role:
        """What this member is now."""
        return self._member.role

    # what is heard and seen

    def _hear(self, said: Beat | Claim) -> None:
        member = self._member
        if isinstance(said, Beat) and said.identity.nonce != self.identity.nonce:
            try:
                self._hear_other(said)
            except Exception as error:  # noqa: BLE001  # what ends the membership is raised out of run
                self._fail(error)
                return
        if said.run == member.run and self._log_election is not None:
            self._log_election.hear(said)
        self._told()
        self._news.tell()

    def _hear_other(self, said: Beat) -> None:
        """Another member leads. What a group said that is long gone binds nobody: only who speaks now is compared."""
        speaks_now, now = self._control.reading.is_set(), asyncio.get_running_loop().time()
        if said.setup.topic == self._setup.topic and said.run != self._member.run:
            self._member.heard(said.run, said.settled, said.chain)  # a higher one ends ours, a lower one is over
            return
        differ = differences(self._setup, said.setup)
        if differ is None:
            self._member.heard(said.run, said.settled, said.chain)
        elif speaks_now and not (self._speaks and (said.resigns or said.identity.nonce > self.identity.nonce)):
            raise differ  # of two that came to lead at the same moment, by other elections, one goes on
        else:  # whether that group is gone is known when it should have spoken again
            self._strangers_until = -1.0 if said.resigns else now + _HEARD
        if speaks_now and not said.resigns:
            self._heard_other_at = now

    @property
    def others_lead(self) -> bool:
        """Another member was heard to lead, a moment ago."""
        return asyncio.get_running_loop().time() - self._heard_other_at < _HEARD

    async def _follow(self) -> None:
        """Read the topic while somebody else sends. Trouble is waited out: m stays too low, which is safe."""
        while True:
            try:
                await self._follow_feed()
            except BusUnavailable:
                self._following = False
                await asyncio.sleep(_PAUSE)

    async def _follow_feed(self) -> None:
        feed = await self._bus.feed(self._topic, await self._begin_at(), None)
        self._member.rejoin()
        try:
            self._following = True
            while True:
                await asyncio.sleep(_LOOK_EVERY if self._bus.capabilities.replay else 0)
                if not self._bus.capabilities.replay or self._read_to() >= self._end - 1:
                    self._member.reached_end()
                found = await feed.read(10_000, 4 << 20)
                for broken, messages in parts(found):
                    if broken is not None:
                        await self._begin_anew(feed, broken)
                    self._take(messages)
                self._told()
                self._news.tell()
        finally:
            self._following = False
            await feed.aclose()

    def _take(self, messages: Sequence[Message]) -> None:
        """Messages between which nothing is missing."""
        self._member.follow_all(messages)
        if messages and self._bus.capabilities.replay:
            self._followed = messages[-1].position

    async def _begin_anew(self, feed: Feed, broken: Break) -> None:
        """Continuity ended: what was followed so far says nothing of what comes next."""
        self._member.rejoin()
        if self._bus.capabilities.replay:
            self._followed = await read_to_behind(feed, broken, self._read_to())
            if broken.incarnation:
                self._end = 0

    def _read_to(self) -> int:
        """The last position that was followed, or the one before the first that will be."""
        return self._begun_at - 1 if self._followed is None else self._followed

    async def _begin_at(self) -> int | Literal["latest"]:
        """A little before the end, so that the group's last block is found after a restart of all its members."""
        if not self._bus.capabilities.replay:
            return "latest"
        feed = await self._bus.feed(self._topic, "latest", None)
        try:
            bounds = await feed.bounds()
        finally:
            await feed.aclose()
        start = max(bounds.first, bounds.end - _BACK)
        if self._followed is not None:
            start = max(start, self._followed + 1)
            self._followed = start - 1
        self._begun_at, self._end = start, bounds.end
        return start

    # leading

    async def _stand_by(self) -> int:
        """Follow the topic until this member leads; returns the term."""
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._follow())
            waiting = tasks.create_task(self._handed_over_by_others())
            term = None
            while term is None:
                await self._until_eligible()
                term = await self._campaign()
                if term is not None:
                    await self._catch_up()
                    if not await self._keeps_up():
                        await self._election.resign()
                        self._step("ineligible")
                        term = None
            following.cancel()
            waiting.cancel()
        return term

    async def _until_eligible(self) -> None:
        self._ineligible = True
        loop = asyncio.get_running_loop()
        while not (
            self._member.eligible
            and self._following
            and self._control.reading.is_set()
            and loop.time() > self._strangers_until
        ):
            try:
                async with asyncio.timeout(_PAUSE):
                    await self._news.wait()
            except TimeoutError:
                continue
        self._ineligible = False
        self._step("eligible")

    async def _keeps_up(self) -> bool:
        """Whether it is eligible, or is again within a moment: what the active sends is on the bus before our own input
        has come to it, so a member that keeps up is behind by a block or two again and again.
        """
        if self._member.eligible:
            return True
        self._ineligible = True
        try:
            async with asyncio.timeout(_BEHIND):
                while not self._member.eligible:
                    await self._news.wait()
        except TimeoutError:
            return False
        finally:
            self._ineligible = False
        return True

    async def _campaign(self) -> int | None:
        """Campaign while it keeps up; None when that ended first."""
        campaign = asyncio.ensure_future(self._election.campaign())
        campaign.add_done_callback(lambda _: self._news.tell())
        try:
            while not campaign.done() and await self._keeps_up():
                if not campaign.done():
                    await self._news.wait()
        finally:
            campaign.cancel()
            await asyncio.wait([campaign])
        if campaign.cancelled():
            self._step("ineligible")
            return None
        return campaign.result()

    async def _catch_up(self) -> None:
        """Read the topic to its present end, so that little is sent twice. Bounded: m too low is safe."""
        if not self._bus.capabilities.replay:
            return
        try:
            async with asyncio.timeout(_CATCH_UP):
                feed = await self._bus.feed(self._topic, "latest", None)
                try:
                    end = (await feed.bounds()).end
                finally:
                    await feed.aclose()
                while (self._followed or 0) < end - 1 and self._begun_at < end:
                    await self._news.wait()
        except (TimeoutError, BusUnavailable):
            return

    async def _lead(self) -> Event:
        """Open the gate until leadership ends; says why it did."""
        member, sender = self._member, self._sender
        sender.settled = max(sender.settled, member.m)
        self._sent = [sent for sent in self._sent if sent[0] < sent[1]] + [(sender.settled, sender.settled)]
        _log.info(
            "Standby sending buffered messages, last message id = %d, current message id = %d",
            member.m,
            member.outbox.last,
        )
        self._step("won")
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(sender.run())
            others = [
                tasks.create_task(self._lost()),
                tasks.create_task(self._stalled()),
                tasks.create_task(self._left_behind()),
                tasks.create_task(self._handed_over()),
            ]
            background = [tasks.create_task(self._say_position()), tasks.create_task(self._synced(member.outbox.last))]
            await asyncio.wait([sending, *others], return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in others if task.done()]
            for task in (sending, *others, *background):
                task.cancel()
        return ended[0].result()

    async def _lost(self) -> Event:
        return await self._election.watch()

    async def _stalled(self) -> Event:
        """Unsent work, and nothing acknowledged for `stall` seconds since it came or since the last progress."""
        loop = asyncio.get_running_loop()
        before, since = self._sender.settled, loop.time()
        while len(self._member.outbox) == 0 or loop.time() - since < GRACE * self._stall:
            if len(self._member.outbox) == 0 or self._sender.settled != before:
                before, since = self._sender.settled, loop.time()
            await asyncio.sleep(self._stall / 20)
        return "stalled"

    async def _left_behind(self) -> Event:
        """The bus holds more than we were given, by late blocks of the one before, and our input does not go on: who
        has more is to lead.
        """
        member = self._member
        while True:
            last, was_eligible = member.outbox.last, member.eligible
            await asyncio.sleep(_BEHIND)
            if not was_eligible and not member.eligible and member.outbox.last == last:
                return "ineligible"

    async def _handed_over(self) -> Event:
        while True:
            asked = self._hand_over
            while asked is not None and self._hand_over is asked:
                if self._is_on_bus(self._hand_over_to):
                    return "handed over"
                await self._news.wait()
            if self._hand_over is None:
                await self._asked.wait()  # and not for what comes with each acknowledgement

    async def _handed_over_by_others(self) -> None:
        """Leadership ended before all was sent that was to be: what is missing is brought to the bus by who leads now,
        or by this member when it leads again.
        """
        while self._hand_over is not None:
            if self._hand_over_to <= max(self._sender.settled, self._member.covered):
                self._tell_handed_over()
                return
            await self._news.wait()

    def _is_on_bus(self, id: int) -> bool:
        """The bus holds the sequence up to this block, whoever sent it."""
        return max(self._sender.settled, self._member.m) >= id

    async def _synced(self, last: int) -> None:
        while not self._is_on_bus(last):
            await self._news.wait()
        _log.info("Standby synced, current message id = %d", last)
        _log.warning("Hot failover state switched to active: %s on %s", self.identity.name, self._topic)

    async def _say_position(self) -> None:
        """On every bus, with every election, the group's position is on the control topic at least once a second."""
        number = 0
        while self._log_election is None:
            number += 1
            with contextlib.suppress(BusUnavailable):
                await self._control.beat(self._word(self.term, number, False))
            await asyncio.sleep(_POSITION_EVERY)

    def _word(self, term: int, number: int, resigns: bool) -> Beat:
        if self._failure.done():  # who is about to leave says nothing more
            raise self._failure.result()
        member, self._speaks = self._member, not resigns
        return Beat(
            self._setup, self.identity, member.run, term, number, member.outbox.last, member.m,
            member.chain_at(member.m), resigns,
        )  # fmt: skip

    # roles

    def _step(self, event: Event) -> None:
        if self._member.role == "left":
            return
        before = self._member.role
        role = self._member.step(event)
        if role != "active":
            self._speaks = False
        self.last_switch = RoleChange(role, event, self.term, self._member.m, self._member.outbox.last, time.time())
        if before == "active":
            _log.warning("Hot failover state switched to %s (%s): %s", role, event, self.identity.name)
        for queue in self._changes:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(self.last_switch)
        self._told()
        self._news.tell()

    def leave(self) -> None:
        """This member takes part no more; idempotent."""
        given, m = self._member.outbox.last, self._member.m
        if given < m and self._member.role != "left":
            _log.warning("%s leaves with %d of the %d blocks that the bus holds", self.identity.name, given, m)
        self._step("leave")
        done, self._hand_over = self._hand_over, None
        if done is not None and not done.done():
            last = self._hand_over_to
            done.set_exception(
                Closed(
                    f"{self.identity.name} left its group before it had handed over: block {last} is not known to be "
                    "on the bus; another member sends it, or this one once it is opened again",
                    id=last,
                )
            )
            done.exception()  # it is seen, also if nobody waits any more

    async def hand_over(self) -> None:
        """Send what has an id, then let another member lead. Returns when that is done, or at once on a standby.

        When leadership ends meanwhile, by whatever, it waits until the bus holds all that had an id when it was asked
        for: another member that leads now has sent it, or this one has, when it led again, and has handed over then.
        Closed if this member leaves before. Cancelled, by all who wait for it: this member leads on, unless everything
        was sent already, and does not hand over later.
        """
        if self._hand_over is None:
            if self._member.role != "active":
                return
            self._hand_over = asyncio.get_running_loop().create_future()
            self._asked.tell()
        self._hand_over_to = self._member.outbox.last
        self._handing_over += 1
        try:
            await asyncio.shield(self._hand_over)
        finally:
            self._handing_over -= 1
            if not self._handing_over and not self._hands_over:
                self._hand_over = None
                self._news.tell()

    def _tell_handed_over(self) -> None:
        done, self._hand_over, self._hands_over = self._hand_over, None, False
        if done is not None and not done.done():
            done.set_result(None)

    def subscribe(self, queue: asyncio.Queue[RoleChange]) -> None:
        """Put every role change into a queue; a full one loses its oldest."""
        self._changes.add(queue)

    def unsubscribe(self, queue: asyncio.Queue[RoleChange]) -> None:
        """Undo `subscribe`."""
        self._changes.discard(queue)


def _first(group: ExceptionGroup[Exception]) -> Exception:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, ExceptionGroup) else found
