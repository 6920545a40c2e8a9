"""One line of a member: a sequence of blocks that it builds itself, and what it knows of the same sequence on the bus.

A publisher has one line; an engine has one for each output window. Pure: group.py feeds it, membership.py decides over
all lines of a member.

The theory (PROTOCOL 5)
    All members build the same blocks from the same input: id and chain follow from the input alone. A sender begins at
    some s <= m + 1, goes on in order and passes over only ids <= m, where m is how far it *knows* that the bus holds
    the sequence for every subscriber. So the first copy of a block always stands after a copy of the one before it (or,
    where single messages can be lost, is not settled until it does), and every reader drops duplicates by their id.
    That is all: whoever sends, and however many at once, each reader delivers 1, 2, 3, ...

    Nothing of it rests on a clock, a lease, a fence or an election. Two members that both believe to lead cost
    duplicates, which nobody sees. m too low costs duplicates as well. m too high would be a hole, so it is taken only
    from
        what this member had acknowledged itself,
        blocks that its own accept rule accepted: their id where only the end of a pipe can be lost, else `settled`,
        the `settled` of beats of the same run.
    The election decides who saves the others the work, and sees to it that somebody works.

    It does rest on equal input. Chains show where it is not: a member whose block has another chain than the one on the
    bus leaves its group, with both named.

m is `Outbox.settled`: the one place that says how far the sequence is on the bus.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..bus import Run
from ..errors import BadFrame, InputDiffers, Stale
from ..wire.frame import (
    BEAT,
    BLOCK,
    CHAIN_AT,
    LIMITS,
    MAGIC,
    SEALED_AT,
    WINDOW_FRAMES,
    Frame,
    Limits,
    Sealed,
    glance,
    parse,
)
from . import belief
from .accept import Accept, Dropped, Source
from .chains import Chains, chains_of
from .outbox import Outbox

_LINK_AT = CHAIN_AT - 4  # side by side
_HEARD_KEPT = 1_000  # chains that beats said, to a member that knows nothing of the line itself


class Position(NamedTuple):
    """How far a line is, as its beats say: the last id given, how far the bus holds it, and the chain of that block."""

    given: int
    settled: int
    chain: int | None


class Line:
    """What a member knows of one line. `agreed`: the highest id at which the bus is known to have our very block."""

    def __init__(
        self, source: int, run: int, outbox: Outbox, *, suffix_only: bool, buffer: int, shows_last: bool = False
    ) -> None:
        """`buffer`: how many ids back chains are kept, of its own blocks and of those on the bus. `shows_last`: as of
        the bus.
        """
        self.source = source
        self.run = run
        self.outbox = outbox
        self.agreed = 0
        self._suffix_only = suffix_only
        self._buffer = buffer
        self._shows_last = shows_last
        self._passed = Chains(buffer + 1)  # of our own blocks, those that are in the outbox no more
        self._known_to = 0  # neither m nor a chain of the bus is beyond
        self._seen = Chains(buffer if suffix_only else buffer + WINDOW_FRAMES)  # it is read so far beyond m
        self._heard: dict[int, int] = {}  # what beats said
        self._unjudged: tuple[int, int | None, bool] | None = None  # what the last one said, before the topic was read
        self._accept = self._new_accept()
        self._past = 0  # how far the topic was followed, in all its parts
        self._at_end = False
        self._leads = False
        self._delivered = 0  # by us, or while we led
        self._sent = [(0, 0)]  # after which block and up to which ours were confirmed, each time

    def _new_accept(self) -> Accept:
        return Accept(suffix_only=self._suffix_only, from_start=False)

    @property
    def m(self) -> int:
        """How far the bus is known to hold the sequence; see above."""
        return self.outbox.settled

    @property
    def eligible(self) -> bool:
        """It could go on where the bus stands: no block between m and its own next one is missing."""
        return self.outbox.last >= self.outbox.settled

    @property
    def covered(self) -> int:
        """Up to here the bus holds what this member was given: past m, and with equal chains there or further on.

        A block further back than the bus's chains are known can be compared by nobody. It counts once the topic is
        known to be past it; a user who waits for one block before giving the next would wait forever. Another input is
        found out at the first id that can be compared (decision 12).
        """
        last, known = self.outbox.last, self._accept.sources.get(self.source)
        followed = known.last if known is not None else self.m if self._at_end else 0
        if last <= max(followed, self._past) and self._on_bus(last) is None:
            return min(last, self.m)
        return min(self.agreed, self.m)

    @property
    def delivered(self) -> int:
        """Up to here the blocks of this member are delivered, by this member or by another one."""
        return max(self._delivered, self.m if self._leads else self.covered)

    @property
    def position(self) -> Position:
        """What beats say of it."""
        return Position(self.outbox.last, self.m, self.chain_at(self.m))

    def begin_after(self, last: int, chain: int) -> None:
        """Go on after this block of ours, which the bus is known to hold."""
        self.outbox.begin_after(last, chain)
        self.agreed = self._known_to = last
        if last:
            self._passed.add(last, chain)

    def lead(self, *, leads: bool) -> None:
        """This member begins or ends to send."""
        self._delivered = self.delivered
        self._leads = leads
        if leads:
            self._sent = [sent for sent in self._sent if sent[0] < sent[1]] + [(self.m, self.m)]

    def give(self, block: Sealed) -> None:
        """A block of our own input has its id. Raises InputDiffers if the bus has another one under it."""
        id, _, chain, _, _, _ = block
        self.outbox.add(block)
        if id > self._known_to:
            return
        if id <= self.m:
            self._passed.add(id, chain)
        if (theirs := self._on_bus(id)) is not None:
            self._compare(id, chain, theirs)

    def acked(self, id: int) -> None:
        """The bus confirmed what we sent, up to this id. What another member had sent meanwhile is not ours."""
        (after, last), m = self._sent[-1], self.m
        if m <= last:
            self._sent[-1] = (after, id)
        elif m < id:
            self._sent.append((m, id))
        self.agreed = max(self.agreed, id)
        self._delivered = max(self._delivered, id)
        self._advance(id)

    def has_sent(self, id: int) -> bool:
        """The bus confirmed this block to this member, and to no other."""
        return any(after < id <= last for after, last in self._sent)

    def follow_all(self, messages: Sequence[tuple[Any, bytes]], limits: Limits = LIMITS) -> None:
        """Messages of the topic, with their positions, in the order of the bus. Raises as `follow` does."""
        if not self._follow_line(messages):
            self._follow_each(messages, limits)

    def _follow_line(self, messages: Sequence[tuple[Any, bytes]]) -> bool:
        """Take them all if they are the next blocks: the first and the last are by their headers, and each between says
        that it follows the one before it.
        """
        source = self._followed_source()
        if source is None or not messages:
            return not messages
        ours, end = (MAGIC, BLOCK, self.source, self.run), source.last + len(messages)
        magic, link, _, *what, id = glance(messages[0][1])
        if (magic, *what, id, link) != (*ours, source.last + 1, source.chain):
            return False
        newest = messages[-1][1]
        magic, _, _, *what, id = glance(newest)
        if (magic, *what, id) != (*ours, end) or not _is_whole(newest):
            return False
        chains = _linked(messages)
        return chains is not None and self._take_line(source, chains)

    def _follow_each(self, messages: Sequence[tuple[Any, bytes]], limits: Limits) -> None:
        """On a bus that loses ends only, nearly all that a standby reads is the next block by its link, or a block once
        more. Those are taken by their headers alone; what else comes is looked at whole.
        """
        source = self._followed_source()
        last, chain = (source.last, source.chain) if source is not None else (0, None)
        line: list[bytes] = []
        for _, data in messages:
            magic, link, its_chain, kind, number, run, id = glance(data)
            if number != self.source:
                continue
            if source is not None and (run, kind, magic) == (self.run, BLOCK, MAGIC):
                if id == last + 1 and link == chain:
                    last, chain = id, its_chain
                    line.append(data)
                    continue
                if id < source.last:
                    continue  # a duplicate, whole or not
            self._follow_linked(source, line, limits)
            self._follow_message(data, limits)
            source = self._followed_source()
            last, chain = (source.last, source.chain) if source is not None else (0, None)
        self._follow_linked(source, line, limits)

    def _follow_linked(self, source: Source | None, line: list[bytes], limits: Limits) -> None:
        """Blocks that follow each other by their headers, up to the last that is whole, which proves those before."""
        while line and not _is_whole(line[-1]):
            line.pop()  # nobody delivers it
        chains = chains_of(b"".join([data[CHAIN_AT:SEALED_AT] for data in line]))
        if line and (source is None or not self._take_line(source, chains)):
            for data in line:
                self._follow_message(data, limits)
        line.clear()

    def _follow_message(self, data: bytes, limits: Limits) -> None:
        try:
            frame = parse(data, None, limits)
        except BadFrame:
            return  # foreign bytes say nothing
        self.follow(frame)

    def _followed_source(self) -> Source | None:
        """What is known of our sequence on the topic, if the next block of it is known by its link alone."""
        source = self._accept.sources.get(self.source) if self._suffix_only else None
        if source is None or source.chain is None or source.joining or source.diverged:
            return None
        return source

    def _take_line(self, source: Source, chains: array[int]) -> bool:
        """Accept the next blocks, of which these are the chains; False, and nothing is done, if they are not ours."""
        first, end = source.last + 1, source.last + len(chains)
        given, equal = min(end, self.outbox.last), False
        if given >= first and (ours := self._ours(given)) is not None:
            if ours != chains[given - first]:
                return False
            self.agreed, equal = max(self.agreed, given), True  # and so are all before it, by their links
        self._seen.extend(first, chains)
        source.last, source.chain = end, chains[-1]
        self._advance(end, chains[: given - first + 1] if equal else None, first)
        return True

    def follow(self, frame: Frame) -> None:
        """A frame of the topic, in the order of the bus. Raises InputDiffers, or Stale for a higher run."""
        if frame.source != self.source or frame.run < self.run or frame.kind not in (BLOCK, BEAT):
            return
        self._refuse_higher(frame.run)
        for outcome in self._accept.receive(frame):
            if isinstance(outcome, Frame):
                self._seen.add(outcome.id, outcome.chain)
                self._known_to = max(self._known_to, outcome.id)
                if (ours := self._ours(outcome.id)) is not None:
                    self._compare(outcome.id, ours, outcome.chain)
                self._advance(outcome.id if self._suffix_only else min(outcome.settled, outcome.id))
            elif isinstance(outcome, Dropped) and outcome.why == "beat":
                is_last = self._shows_last and not self._seen.last  # then no block is to be had that shows it
                self._advance(frame.settled if is_last else min(frame.settled, self._seen.last))

    def heard(self, run: int, settled: int, chain: int | None, *, beats_on: bool = True) -> bool:
        """A beat on the control topic: `settled`, and the chain of that block if its sender still knew it. False if
        that is not believed (belief.py). `beats_on`: the beat before was of the same member.

        Raises InputDiffers, or Stale for a higher run.
        """
        if run < self.run:
            return True
        self._refuse_higher(run)
        ours, shown = self._ours(settled), self._shown
        if not shown and not self._at_end:
            self._unjudged = settled, chain, beats_on  # what is read next may say more
            return True
        bus = ours if settled <= self.agreed else self._seen.get(settled)
        if not belief.position(
            settled,
            chain,
            bus=bus,
            ours=ours,
            shown=shown,
            sees_all=self._suffix_only and not self._leads,
            beats_on=beats_on,
        ):
            return False
        if chain is not None and settled:
            if not shown:
                self._heard[settled] = chain
                if len(self._heard) > _HEARD_KEPT:
                    del self._heard[min(self._heard)]
            if ours is not None:
                self._compare(settled, ours, chain)
        self._advance(settled)
        return True

    @property
    def _shown(self) -> int:
        """The last block of which this member knows itself that it is on the bus: it has read it, or sent it."""
        return max(self._seen.last, self.agreed)

    def rejoin(self) -> None:
        """The topic is read anew from another place: what was accepted so far says nothing of what comes next."""
        known = self._accept.sources.get(self.source)
        self._past = max(self._past, known.last if known is not None else 0)
        self._accept = self._new_accept()
        self._at_end = False

    def reached_end(self) -> None:
        """The topic is followed from where it ended when this member came; what it has not seen of it, it will not.

        Raises as `heard` does.
        """
        self._at_end = True
        said, self._unjudged = self._unjudged, None
        if said is not None:
            self.heard(self.run, *said[:2], beats_on=said[2])

    def chain_at(self, id: int) -> int | None:
        """The chain of a block, ours or the bus's, if it is still known."""
        ours = self._ours(id)
        return self._on_bus(id) if ours is None else ours

    def _ours(self, id: int) -> int | None:
        """The chain of our block: of those that fill a buffer, and of the one in front, which beats say."""
        if id < self.outbox.last - self._buffer:
            return None
        block = self.outbox.get(id)
        return self._passed.get(id) if block is None else block.chain

    def _on_bus(self, id: int) -> int | None:
        """The chain of the bus's block, if it is still known."""
        seen = self._seen.get(id)
        return self._heard.get(id) if seen is None and not self._shown else seen

    def _refuse_higher(self, run: int) -> None:
        if run > self.run:
            raise Stale(
                f"run {run} of this group replaced ours, {self.run}: whoever has read it drops our blocks; pass that "
                "run or a higher one",
                run=self.run,
                current=run,
            )

    def _compare(self, id: int, ours: int, theirs: int) -> None:
        if ours == theirs:
            self.agreed = max(self.agreed, id)
        else:
            raise InputDiffers(
                f"block {id} of this member has the chain {ours:08x}, the one on the bus {theirs:08x}: the members of "
                "this group do not build the same blocks (another input, order, block size or schema; in an engine, a "
                "model that was changed, or that looks at something besides its input and its state); to begin anew, "
                "give all of them a higher run (Failover(run=...) or EngineOptions(run=...), --run), or use esp purge",
                id=id,
                ours=ours,
                theirs=theirs,
            )

    def _advance(self, id: int, chains: array[int] | None = None, first: int = 0) -> None:
        """The bus holds the line up to here. `chains`: those of our blocks from `first` on, where they are at hand."""
        if id <= self.outbox.settled:
            return
        self._known_to = max(self._known_to, id)
        if not (taken := self.outbox.settle(id)):
            return
        begin = taken[0].id
        if chains is not None and begin >= first:
            self._passed.extend(begin, chains[begin - first :])
        else:
            self._passed.extend(begin, chains_of([block.chain for block in taken]))


def _linked(messages: Sequence[tuple[Any, bytes]]) -> array[int] | None:
    """The chains of messages each of which has the chain of the one before it as its link; None if one has another.

    A chain stands for all in front of it, so between two such messages there is no room for a block once more, another
    publisher's, or another run's.
    """
    if isinstance(messages, Run):
        pairs = messages.part(_LINK_AT, SEALED_AT)
    else:
        pairs = b"".join([data[_LINK_AT:SEALED_AT] for _, data in messages])
    if len(pairs) != len(messages) * (SEALED_AT - _LINK_AT):
        return None  # one of them is too short
    both = chains_of(pairs)
    links, chains = both[::2], both[1::2]
    return chains if links[1:] == chains[:-1] else None


def _is_whole(data: bytes) -> bool:
    try:
        parse(data)
    except BadFrame:
        return False
    return True
