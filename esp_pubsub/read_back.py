"""What a publisher with `resume` reads back: whether the bus holds its blocks, or another publisher's.

Ids and chains of a resumed sequence come from its user, so two publishers may send under one name, at once or one after
the other. Equal blocks are duplicates, which nobody sees. Of different ones readers take those that stand first on the
topic, and a confirmation does not say which those are. So this publisher follows the topic by the readers' own rule: a
block counts as acknowledged when it is confirmed *and* the topic was read up to its id with equal chains. A chain that
differs ends the publisher.

Only a bus with `replay` can be read back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ._tasks import run_all
from .backoff import Backoff
from .bus import Break, Bus, Message, Place, parts
from .errors import BusUnavailable, InputDiffers
from .failover.accept import Accept, Outcome
from .failover.chains import Chains
from .failover.outbox import Outbox
from .follower import Follower
from .sender import Sender
from .wire.frame import Frame, Sealed, source_of

_BACK = 1_000  # messages before the end in which the sequence is looked for first, then ten times as many
_BACK_FOR_NOTHING = 10_000  # where none of them is of this sequence, it is taken to be new
_QUIET = 2.0  # seconds: a log may end in positions that hold no message
_PAUSE = 0.05
_READ = 10_000, 4 << 20
_ALL = 1 << 62


class ReadBack:
    """The bus's side of one resumed sequence."""

    def __init__(
        self, bus: Bus, topic: str, outbox: Outbox, *, source: int, name: str, acked: Callable[[int], None]
    ) -> None:
        """`outbox` begins after the last block that the user names; `acked` is told each time more was read back."""
        self._bus = bus
        self._topic = topic
        self._outbox = outbox
        self._source = source
        self._name = name
        self._acked = acked
        self._last, self._chain = outbox.last, outbox.chain
        self._confirmed = outbox.last
        self._place = Place(0, None)  # after what was read
        self._begin()

    def _begin(self) -> None:
        self._accept = Accept(suffix_only=self._bus.capabilities.suffix_only, from_start=False)
        self._read_to = 0  # the highest id that readers deliver
        self._joined = False  # what follows the user's last block was read from its begin
        self._ahead = Chains(_ALL)  # of blocks that the bus has and we have not been given; four bytes a block
        self._lost = False  # a part of the topic can be read no more, and nothing of the sequence came behind it

    async def look_back(self) -> None:
        """Find what the bus has of the sequence. Raises InputDiffers for another block `last`, and BusUnavailable."""
        bounds = await self._bus.bounds(self._topic)
        self._place, back = Place(bounds.first, bounds.incarnation), _BACK
        while True:
            begin = max(bounds.first, bounds.end - back)
            differs = await self._look(begin, bounds.end)
            is_new = not self._read_to and back >= _BACK_FOR_NOTHING
            if begin == bounds.first or is_new or (self._joined and differs is None):
                break
            back *= 10
        if differs is not None:
            raise differs

    async def _look(self, begin: int, end: int) -> InputDiffers | None:
        self._begin()
        self._place = Place(begin, self._place.incarnation)
        follower = self._follower(None)
        try:
            await follower.open(self._place)
            while self._place.position < end:
                async with asyncio.timeout(_QUIET):
                    found = await follower.read(*_READ)
                self._read(found, follower)
        except InputDiffers as differs:  # further back there may be what makes it the other one that differs
            return differs
        except TimeoutError:
            return None
        finally:
            await follower.aclose()
        return None

    async def run(self, sender: Sender) -> None:
        """Send, and read it back, until cancelled. Raises InputDiffers, or what ends the sender."""
        await run_all(sender.run(), self._follow_on())

    async def _follow_on(self) -> None:
        """Trouble is waited out: nothing is acknowledged meanwhile."""
        follower = self._follower(lambda _: None)
        try:
            while True:
                self._read(await follower.read(*_READ), follower)
        finally:
            await follower.aclose()

    def _follower(self, trouble: Callable[[BusUnavailable], None] | None) -> Follower:
        return Follower(self._bus, self._topic, self._where, Backoff(_PAUSE, _PAUSE), trouble=trouble)

    async def _where(self) -> Place:
        return self._place

    def _read(self, found: Sequence[Message | Break], follower: Follower) -> None:
        for broken, messages in parts(found):
            if broken is not None:
                self._break(broken)
            self._take(messages)
        self._place = follower.place or self._place
        self._tell()

    def _break(self, broken: Break) -> None:
        if broken.incarnation:
            self._begin()
        self._lost = True

    def _take(self, messages: Sequence[Message]) -> None:
        """Messages between which nothing is missing."""
        ours = [message for message in messages if source_of(message.data) == self._source]
        for outcome in self._accept.receive_all(ours):
            self._judge(outcome)

    def _judge(self, outcome: Outcome) -> None:
        """What readers drop says nothing: of blocks that differ it is not the first."""
        if not isinstance(outcome, Frame):
            return
        id, theirs, ours = outcome.id, outcome.chain, self._ours(outcome.id)
        if id > self._outbox.last:
            self._ahead.add(id, theirs)
        elif ours is not None and ours != theirs:
            raise self._differs(id, ours, theirs)
        self._joined = self._joined or id in (1, self._last)
        self._read_to, self._lost = id, False

    def _ours(self, id: int) -> int | None:
        """The chain of one of our blocks, if it is still needed."""
        if id == self._last:
            return self._chain
        block = self._outbox.get(id)
        return None if block is None else block.chain

    def add(self, block: Sealed) -> None:
        """Into the outbox, unless the bus has another block of this id: InputDiffers."""
        theirs = self._ahead.get(block.id)
        if theirs is not None and theirs != block.chain:
            raise self._differs(block.id, block.chain, theirs)
        self._outbox.add(block)

    def confirmed(self, id: int) -> None:
        """The bus confirmed our blocks up to this one."""
        self._confirmed = id
        self._tell()

    def _tell(self) -> None:
        done = self._confirmed if self._lost else min(self._confirmed, self._read_to)
        if done >= self._outbox.first:
            self._acked(done)

    def _differs(self, id: int, ours: int, theirs: int) -> InputDiffers:
        return InputDiffers(
            f"block {id} of the sequence {self._name!r} has the chain {ours:08x} here and {theirs:08x} on "
            f"{self._topic}: another publisher resumes under this name, or what is sent again is not what was sent "
            "before; end the other one, or resume behind the bus's last block with its chain, or take another name",
            id=id,
            ours=ours,
            theirs=theirs,
        )
