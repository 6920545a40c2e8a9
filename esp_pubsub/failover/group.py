"""The runner of a member: it carries out what membership.py decides.

In each state of the machine it runs the activities that its table names: it follows the lines, campaigns, catches up,
watches its leadership, sends, says its position. It brings back what happened, and asks what is due. Whatever fails for
good (another input, a higher run, another setup) is raised out of `run`, and the publisher fails with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from .._news import News
from .._tasks import first_error, run_all
from ..bus import Bus, Election
from ..errors import BusUnavailable, Closed
from ..sender import Sender
from .control import Control
from .fence import Fence
from .following import Following
from .line import Line
from .membership import ACTIVITIES, RESIGNS, Activity, Event, Membership, Role
from .roles import HandOver, Roles
from .words import Beat, Challenge, Word

_log = logging.getLogger("esp_pubsub.failover")

_LAST_WORD = 0.2  # seconds that the word of a hand-over may take: others wait to lead meanwhile


class Group:
    """One member of a failover group, at work. Its lines and senders are in the same order."""

    def __init__(
        self,
        bus: Bus,
        membership: Membership,
        senders: Sequence[Sender],
        control: Control,
        election: Election,
        fence: Fence | None,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called whenever what is delivered, or the role, may have changed."""
        self.membership = membership
        self.roles = Roles()
        self._senders = senders
        self._control = control
        self._election = election
        self._fence = fence
        self._changed = changed
        self._name, self._topics = membership.identity.name, ", ".join(membership.setup.topics)
        self._loop = asyncio.get_running_loop()
        self._news = News()
        self._followings = [
            Following(bus, topic, line, self._read)
            for topic, line in zip(membership.setup.topics, membership.lines, strict=True)
        ]
        self._does: dict[Activity, asyncio.Task[None]] = {}
        self._hand_over = HandOver()
        self._resigns = False
        control.listen(self._hear)

    async def run(self) -> None:
        """Be a member until cancelled. Raises what ends the membership for good."""
        self._say_role(logging.INFO, "standby")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._control.run())
                tasks.create_task(self._election.run())
                if self._fence is not None:
                    tasks.create_task(self._fence.run())
                while True:
                    await self._do_what_the_state_asks(tasks)
                    await self._take(await self._next_event())
        except ExceptionGroup as group:
            raise first_error(group) from None
        finally:
            self.leave()

    @property
    def role(self) -> Role:
        """What this member is now."""
        return self.membership.role

    async def _next_event(self) -> Event:
        """Wait until the machine says that something is due."""
        loop, membership = self._loop, self.membership
        while True:
            now = loop.time()
            membership.hears(all_of_it=self._control.reading.is_set())
            for at, following in enumerate(self._followings):
                membership.follows(at, follows=following.reads)
            if membership.was_handed_over:
                membership.keep_leading()
                self._hand_over.done()
            if (event := membership.due(now)) is not None:
                return event
            try:
                async with asyncio.timeout_at(membership.look_at(now)):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _take(self, event: Event) -> None:
        """Take the event, then stop what the new state does not ask for, and resign if leadership was given up."""
        before = self.membership.state
        self._report(event)
        self._step(event)
        await self._stop(*(self._does.keys() - set(ACTIVITIES[self.membership.state])))
        if (before, event) in RESIGNS:
            self._resigns = True
            if event == "handed over":
                await self._say_resigned()
            await self._election.resign()
            self._resigns = False
        if event == "handed over":
            self._hand_over.done()

    async def _say_resigned(self) -> None:
        """Others need to know that this member did not fall silent; the log election says it itself."""
        if self.membership.setup.election != "log":
            with suppress(BusUnavailable, Closed, TimeoutError):
                async with asyncio.timeout(_LAST_WORD):
                    await self._control.write(self.membership.beat(self.membership.term, 0, resigns=True))

    async def _do_what_the_state_asks(self, tasks: asyncio.TaskGroup) -> None:
        for activity in ACTIVITIES[self.membership.state]:
            if activity not in self._does:
                self._does[activity] = tasks.create_task(self._activity(activity), name=f"esp {activity}")

    async def _stop(self, *activities: Activity) -> None:
        """Cancel these and wait until they have ended, which is bounded."""
        tasks = [self._does.pop(activity) for activity in activities]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self.membership.declines():
            await self._election.resign()

    async def _activity(self, activity: Activity) -> None:
        match activity:
            case "follow":
                await run_all(*[following.run() for following in self._followings])
            case "campaign":
                self.membership.elected(await self._election.campaign())
            case "catch up":
                await run_all(*[following.catch_up() for following in self._followings])
                self.membership.caught_up()
            case "watch":
                self.membership.ended(await self._election.watch())
            case "send":
                await run_all(*[sender.run() for sender in self._senders])
            case "say position":
                await self._control.repeat(partial(self.membership.beat, self.membership.term, resigns=False))
            case "say standing by":
                await self._control.mention(self.membership.standing_by)
            case "challenge":
                await self._challenge()
        self._news.tell()

    async def _challenge(self) -> None:
        """Look again and again whether the leader of an engine goes on, and say so if it does not."""
        while self.membership.reach is not None:
            await asyncio.sleep(self.membership.patience / 20)
            if (said := self.membership.challenge(self._loop.time())) is not None:
                _log.warning(
                    "the leader does not go on in its inputs: %s challenges it", self._name, extra=self._fields()
                )
                with suppress(BusUnavailable):
                    await self._control.write(said)

    # what happens

    def listen(self, hear: Callable[[Word], None]) -> None:
        """Call this with every word of the group too. What it raises ends `run`."""
        self._control.listen(hear)

    def given(self, at: int = 0) -> None:
        """A line has one more block: to send, or to become eligible by."""
        if self.membership.state == "active":
            self._senders[at].wake()
        elif self.membership.is_behind and self.membership.eligible:
            self._news.tell()

    def acked(self, line: Line, id: int) -> None:
        """The bus confirmed what this member sent in this line, up to here."""
        line.acked(id)
        if self.membership.waits_for_the_bus:
            self._news.tell()

    def _hear(self, said: Word) -> None:
        if isinstance(said, Beat):
            membership = self.membership
            membership.hears(all_of_it=self._control.reading.is_set())
            membership.hear(said, self._loop.time())
        elif isinstance(said, Challenge):
            self.membership.hear_challenge(said, self._loop.time())
        self._changed()
        self._news.tell()

    def _read(self) -> None:
        """Some of a line was read."""
        self._changed()
        if self.membership.waits_for_its_lines:
            self._news.tell()

    def trouble(self, error: BusUnavailable) -> None:
        """A sender could not write."""
        if self._fence is not None:
            self._fence.trouble(error)

    def others_lead(self) -> bool:
        """Another member was heard to lead, a moment ago."""
        return self.membership.others_lead(self._loop.time())

    # roles

    def _report(self, event: Event) -> None:
        if event == "won":
            for m, last, extra in self._lines():
                text = "Standby sending buffered messages, last message id = %d, current message id = %d"
                _log.info(text, m, last, extra=extra)
        elif event == "synced":
            for _, last, extra in self._lines():
                _log.info("Standby synced, current message id = %d", last, extra=extra)
            silent = self.membership.fell_silent
            after = f", after {silent} fell silent" if silent else ""
            self._say_role(logging.WARNING if silent else logging.INFO, "active", event, after=after)

    def _say_role(self, level: int, role: Role, event: Event | None = None, why: str = "", after: str = "") -> None:
        text = "Hot failover state switched to %s%s: %s on %s%s"
        extra = self._fields(esp_role=role, esp_event=event)
        _log.log(level, text, role, why, self._name, self._topics, after, extra=extra)

    def _lines(self) -> Iterator[tuple[int, int, dict[str, object]]]:
        """Of each line how far the bus has it, the last block that was given, and the fields of a record."""
        for topic, line in zip(self.membership.setup.topics, self.membership.lines, strict=True):
            m, last = line.m, line.outbox.last
            yield m, last, self._fields(esp_topic=topic, esp_m=m, esp_last=last)

    def _fields(self, **more: object) -> dict[str, object]:
        """The fields of a record of the log."""
        return {"esp_topic": self._topics, "esp_member": self._name, "esp_term": self.membership.term} | more

    def _step(self, event: Event) -> None:
        before = self.membership.role
        change = self.membership.step(event, self._loop.time(), time.time())
        if event == "won":
            for sender in self._senders:
                sender.term = self.membership.term
        if change is None:
            return
        if before == "active":
            level = logging.INFO if event == "handed over" else logging.WARNING
            self._say_role(level, change.role, event, f" ({event})")
        self.roles.changed(change)
        self._changed()
        self._news.tell()

    def leave(self) -> None:
        """This member takes part no more; idempotent."""
        if self.membership.state == "left":
            return
        for m, last, extra in self._lines():
            if last < m:
                text = "%s leaves with %d of the %d blocks that the bus holds"
                _log.warning(text, self._name, last, m, extra=extra)
        self._step("leave")
        topic, last = self.membership.not_handed_over
        self._hand_over.failed(
            Closed(
                f"{self._name} left its group before it had handed over: block {last} is not known to be on the bus, "
                f"on {topic}; another member sends it, or this one once it is opened again",
                id=last,
            )
        )

    async def hand_over(self) -> None:
        """Send what has an id, then let another member lead. Returns when that is done, or at once on a standby.

        When leadership ends meanwhile, for whatever reason, it waits until the bus holds all that had an id when it was
        asked for: another member has sent it, or this one has when it led again. Closed if this member leaves before.
        Cancelled, by all who wait for it: this member leads on, unless everything was sent already.
        """
        if not self._hand_over.waiting and self.membership.role != "active":
            return
        self.membership.ask_hand_over()
        self._news.tell()
        try:
            await self._hand_over.wait()
        finally:
            if not self._hand_over.waiting and not self._resigns:
                self._hand_over.given_up()
                self.membership.keep_leading()
                self._news.tell()
