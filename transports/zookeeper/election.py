"""The election by ZooKeeper: who has the smallest node leads.

Each member that campaigns has one node `<root>/<group>/server-n_<seq>`, ephemeral and sequential as SAS has it, and
watches only the node just before its own; so the end of one wakes one. A leader watches its own node: who deletes it
by hand deposes it. The term is the node's number and 1: it grows with every node of the group, fits the four bytes
that a frame has for it, and can be seen in ZooKeeper, none of which holds for a transaction id. (It begins anew when
somebody removes the group's path; a term decides nothing.)

One campaign, one session
    A group is stuck for as long as a node stands in it whose member does not know of it: made by a request whose answer
    was lost, or that was cancelled, or was on its way yet when its sender gave up. We look for no such node. A node
    lives in a session, and whatever ends a campaign or a leadership ends its session, which takes everything along, and
    first of all what we know nothing of. The next campaign has a session and a node of its own, behind the others.
    So what we must get right is one thing only: no session is kept alive but for a campaign or a leader.
    A session whose link is gone is kept a while, to be ended when the link is back: that is sooner than its expiry.
    And one whose campaign is cancelled lingers a moment, as long as it stands behind somebody else: a group under load
    cancels and campaigns again with every few blocks, and that must cost nothing. It never leads: when its turn comes,
    or the moment is over, it ends.

What is noticed when, with a session of 1.2 s
    A leader that dies: after 0.8 to 1.2 s and a tick of the server. A link that hangs: by the leader after 0.8 s at
    most (then it is suspended), by the server after 1.2 s. A process that stood still for longer than its session is
    told by our own clock as soon as it goes on, before kazoo has found out.

Trouble is waited out: in bounded steps, in new sessions where need be, forever. The log tells it once. A standby
keeps its session and its place while a link is gone; a request that came to nothing costs it both.

SAS's engines take every child of `/ESP` for one of theirs. Where they use the same ZooKeeper, name another root.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, Literal

from esp_pubsub._news import News
from esp_pubsub.backoff import Backoff
from esp_pubsub.errors import ConfigError

from .place import Place, segment_problem
from .session import Session, Trouble

PREFIX = "server-n_"
_KEPT = 5.0  # seconds, or two sessions, for which a link may be gone before the session is given up
_LOOK_AGAIN = 30.0  # seconds after which a standby looks who is there, whatever it was told
_PAUSE, _LONGEST_PAUSE = 0.2, 2.0  # between sessions that came to nothing
_RESIGN = 1.0
_LINGER = 0.5
_ENDING = 8  # sessions that end in the background; one more campaign waits for them

_log = logging.getLogger("esp_pubsub.zookeeper")


class ZooKeeperElection:
    """An `Election`."""

    def __init__(self, place: Place, group: str, member: str) -> None:
        if problem := segment_problem(group):
            raise ConfigError(f"a group's name is part of a ZooKeeper path, and {problem}", group=group)
        self._place = place
        self._folder = f"{place.root}/{group}"
        self._member = member
        self._news = News()
        self._open = False
        self._sessions: set[Session] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._leading: Session | None = None
        self._spare: Session | None = None
        self._lingering: asyncio.Task[None] | None = None
        self._node = ""  # of the session that campaigns, leads or lingers; there is one at most
        self._behind: int | None = None  # its stirs when it was seen to stand behind somebody that is watched
        self._lapses = 0  # its lapses when it was seen to stand first
        self._troubled = False
        self._granted = place.session

    async def run(self) -> None:
        """See `Election.run`. Cancelled, it takes a few seconds at most to end the threads, cancelled again or not."""
        loop = asyncio.get_running_loop()
        self._open = True
        self._news.tell()
        try:
            while True:
                before = loop.time()
                await asyncio.sleep(self._place.session / 4)
                if self._leading is not None and loop.time() - before > self._leading.length:
                    self._lapses = -1
                    self._news.tell()
        finally:
            self._open = False
            self._leading = self._spare = None
            for session in list(self._sessions):
                self._retire(session)
            self._news.tell()
            while self._ending:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(self._ending)

    async def campaign(self) -> int:
        """See `Election.campaign`. Cancelled, it returns at once, and the session ends in the background."""
        self._step_down()
        backoff = Backoff(_PAUSE, _LONGEST_PAUSE)
        while True:
            while not self._open or len(self._ending) >= _ENDING:
                await self._news.wait()
            session, term = self._session(), None
            try:
                term = await self._rise(session)
                return term
            except Trouble as trouble:
                if not self._troubled:
                    backoff.reset()
                if self._open:
                    self._say(str(trouble))
            finally:
                if term is None:
                    self._leave(session)
            await asyncio.sleep(backoff.next())

    def _session(self) -> Session:
        """The last campaign's, if that stands in line still, or a new one."""
        session, self._spare = self._spare, None
        if session is not None and self._lingering is not None:
            self._lingering.cancel()
            return session
        session = Session(self._place.hosts, self._place.session, self._news.tell)
        self._sessions.add(session)
        self._node, self._behind = "", None
        return session

    async def _rise(self, session: Session) -> int:
        """Wait in one session until we lead. Trouble when it is of no use any more."""
        if not self._node:
            await session.open()
            await self._connected(session)
            self._compare(session)
            self._node = await session.create(f"{self._folder}/{PREFIX}", self._member)
            _log.info("Created zookeeper node %s", self._node)
        while True:
            await self._connected(session)
            if self._behind != session.stirs and await self._stands_first(session):
                self._leading = session
                return _number(self._node) + 1
            await self._stirred(session)

    async def _connected(self, session: Session) -> None:
        try:
            async with asyncio.timeout(self._kept):
                while session.state != "connected":
                    if session.state == "lost":
                        raise Trouble("the session is lost")
                    if session.state == "suspended":
                        self._say("the connection is lost")
                    await self._news.wait()
        except TimeoutError:
            raise Trouble(f"no connection for {self._kept:g} s") from None

    @property
    def _kept(self) -> float:
        return max(_KEPT, 2 * self._place.session)

    def _compare(self, session: Session) -> None:
        """Complain about a server that has other ideas of a session."""
        if session.length != self._granted:
            self._granted = session.length
            _log.warning(
                "ZooKeeper at %s makes sessions of %g s where %g s were asked for: a dead leader is noticed that late; "
                "see its tickTime, minSessionTimeout and maxSessionTimeout",
                self._place.hosts,
                session.length,
                self._place.session,
            )

    async def _stands_first(self, session: Session) -> bool:
        """Look who stands before us, and watch the last of them, or ourselves where there is nobody."""
        loop = asyncio.get_running_loop()
        asked, stirs, lapses, node = loop.time(), session.stirs, session.lapses, self._node
        paths = [f"{self._folder}/{name}" for name in await session.children(self._folder)]
        before = [path for path in paths if _number(path) < _number(node)]
        watched = await session.watch(max(before, key=_number, default=node))
        if node not in paths:
            raise Trouble(f"somebody deleted {node}")
        self._say(None)
        if watched and not before:
            self._lapses = lapses
            return lapses == session.lapses and loop.time() - asked < session.length  # else it is old news
        if watched:
            self._behind = stirs
            _log.info("Watching zookeeper node %s", max(before, key=_number))
        return False

    async def _stirred(self, session: Session) -> None:
        """Wait for a reason to look again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_AGAIN):
                while session.stirs == self._behind:
                    await self._news.wait()
                return
        self._behind = None

    async def watch(self) -> Literal["suspended", "lost"]:
        """See `Election.watch`."""
        while (verdict := self._verdict()) is None:
            await self._news.wait()
        if self._leading is not None:
            self._say(f"{verdict} while {self._node} led")
        self._step_down()
        return verdict

    def _verdict(self) -> Literal["suspended", "lost"] | None:
        session = self._leading
        if session is None or session.state == "lost" or self._node in session.deleted:
            return "lost"
        return None if session.lapses == self._lapses else "suspended"

    async def resign(self) -> None:
        """See `Election.resign`. The next campaign has a new node, behind all others."""
        ending = self._step_down()
        if ending is not None:
            await asyncio.wait([ending], timeout=_RESIGN)

    def _step_down(self) -> asyncio.Task[None] | None:
        session, self._leading = self._leading, None
        return None if session is None else self._retire(session)

    def _leave(self, session: Session) -> None:
        """Leave the line; but not yet, if somebody is known to stand before us."""
        if self._open and self._behind is not None and session.stirs == self._behind:
            self._spare = session
            self._lingering = self._in_background(self._linger(session))
        else:
            self._retire(session)

    async def _linger(self, session: Session) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while session.stirs == self._behind and self._open:
                    await self._news.wait()
        self._spare = None
        self._retire(session)

    def _retire(self, session: Session) -> asyncio.Task[None] | None:
        """End a session; `run` does not end before that has."""
        if session not in self._sessions:
            return None
        self._sessions.remove(session)
        return self._in_background(self._end(session))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _end(self, session: Session) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._kept):
                while session.state == "suspended" and self._open:
                    await self._news.wait()
        await session.close()

    def _ended(self, ending: asyncio.Task[None]) -> None:
        self._ending.discard(ending)
        self._news.tell()

    def _say(self, trouble: str | None) -> None:
        """Log it when trouble begins, and when it is over."""
        if trouble is not None and not self._troubled:
            _log.warning("election by ZooKeeper at %s, %s: %s", self._place.hosts, self._folder, trouble)
        elif trouble is None and self._troubled:
            _log.info("election by ZooKeeper at %s, %s: goes on", self._place.hosts, self._folder)
        self._troubled = trouble is not None


def _number(path: str) -> int:
    """The number at the end of a node's name. What is no member's node counts as one that comes last."""
    name = path.rpartition("/")[2]
    digits = name.removeprefix(PREFIX)
    return int(digits) if digits != name and digits.isdecimal() else 1 << 32
