"""One member of a failover group: what it knows, and what it may do with it. Pure: the runner is group.py.

The theory (PROTOCOL 5)
    All members build the same blocks from the same input: id and chain follow from the input alone. A sender begins at
    some s <= m + 1, goes on in order and passes over only ids <= m, where m is how far it *knows* that the bus holds
    the sequence for every subscriber. So the first copy of a block always stands behind a copy of the one before it
    (or, where single messages can be lost, is not settled until it does), and every reader drops what comes twice by
    its id. That is all: whoever sends, and however many at once, each reader delivers 1, 2, 3, ...

    Nothing of it rests on a clock, a lease, a fence or an election. Two members that both believe to lead cost doubles,
    which nobody sees. m too low costs doubles as well. m too high would be a hole, so it is taken only from
        what this member had acknowledged itself,
        blocks that its own accept rule accepted: their id where a bus loses ends only, else their `settled`,
        the `settled` of beats of the same run.
    The election decides who saves the others the work, and sees to it that somebody works.

    It does rest on equal input. Chains show where it is not: a member whose block has another chain than the one on the
    bus leaves its group, with both named.

Who may do what
    standby      follows the topic, gives ids to its own blocks, keeps those past m, sends nothing
    candidate    a standby that could go on where the bus stands, and campaigns
    active       sends from m + 1
    left         closed, or found out to differ; never comes back

    Eligible to campaign is who has given ids up to m at least: then its outbox begins at m + 1 and no block is missing.
    One restarted in the middle reads its input from the start and catches up first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Literal

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
from .accept import Accept, Dropped, Source
from .chains import Chains, chains_of
from .outbox import Outbox

_LINK_AT = CHAIN_AT - 4  # side by side
_HEARD_KEPT = 1_000  # chains that beats said: ten a second, when a block comes with each

Role = Literal["standby", "candidate", "active", "left"]
Event = Literal["eligible", "ineligible", "won", "lost", "suspended", "stalled", "handed over", "leave"]

TABLE: dict[tuple[Role, Event], Role] = {
    ("standby", "eligible"): "candidate",
    ("candidate", "ineligible"): "standby",
    ("candidate", "won"): "active",
    ("active", "lost"): "standby",
    ("active", "suspended"): "standby",
    ("active", "stalled"): "standby",
    ("active", "ineligible"): "standby",
    ("active", "handed over"): "standby",
    ("standby", "leave"): "left",
    ("candidate", "leave"): "left",
    ("active", "leave"): "left",
}


class Member:
    """What a member knows. `m`: see above; `agreed`: the highest id at which its chain was seen to equal the bus's."""

    def __init__(self, source: int, run: int, outbox: Outbox, *, suffix_only: bool, buffer: int) -> None:
        """`buffer`: how many ids back chains are kept, of its own blocks and of those on the bus."""
        self.source = source
        self.run = run
        self.outbox = outbox
        self.role: Role = "standby"
        self.m = 0
        self.agreed = 0
        self._suffix_only = suffix_only
        self._buffer = buffer
        self._passed = Chains(buffer + 1)  # of our own blocks, those that are in the outbox no more
        self._known_to = 0  # neither m nor a chain of the bus is beyond
        self._seen = Chains(buffer if suffix_only else buffer + WINDOW_FRAMES)  # it is read so far beyond m
        self._heard: dict[int, int] = {}  # what beats said
        self._accept = self._new_accept()
        self._past = 0  # how far the topic was followed, in all its parts
        self._at_end = False

    def _new_accept(self) -> Accept:
        return Accept(suffix_only=self._suffix_only, from_start=False)

    @property
    def eligible(self) -> bool:
        """It could go on where the bus stands."""
        return self.outbox.first <= self.m + 1 and self.outbox.last >= self.m

    @property
    def covered(self) -> int:
        """Up to here the bus holds what this member was given: past m, and with equal chains there or further on.

        A block further back than the bus's chains are known can be compared by nobody. It counts once the topic is
        known to be past it: who waits for one block before giving the next would wait for ever. Another input is found
        out at the first id that can be compared.
        """
        last, known = self.outbox.last, self._accept.sources.get(self.source)
        followed = known.last if known is not None else self.m if self._at_end else 0
        if last <= max(followed, self._past) and self._on_bus(last) is None:
            return min(last, self.m)
        return min(self.agreed, self.m)

    def step(self, event: Event) -> Role:
        """Take a transition of the table. KeyError for one that is not in it."""
        self.role = TABLE[self.role, event]
        return self.role

    def give(self, block: Sealed) -> None:
        """A block of our own input has its id. Raises InputDiffers if the bus has another one under it."""
        id, _, chain, _, _, _ = block
        if id > self._known_to:
            self.outbox.add(block)
            return
        if id > self.m:
            self.outbox.add(block)
        else:
            self.outbox.pass_over(block)
            self._passed.add(id, chain)
        if (theirs := self._on_bus(id)) is not None:
            self._compare(id, chain, theirs)

    def acked(self, id: int) -> None:
        """The bus confirmed what we sent, up to this id."""
        self._advance(id)

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
        given = min(end, self.outbox.last)
        if given >= first and (ours := self._ours(given)) is not None:
            if ours != chains[given - first]:
                return False
            self.agreed = max(self.agreed, given)  # and so are all before it, by their links
        self._seen.extend(first, chains)
        source.last, source.chain = end, chains[-1]
        self._advance(end)
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
                self._advance(outcome.frame.settled)

    def heard(self, run: int, settled: int, chain: int | None) -> None:
        """A beat on the control topic: `settled`, and the chain of that block if its sender still knew it."""
        if run < self.run:
            return
        self._refuse_higher(run)
        if chain is not None and settled:
            self._heard[settled] = chain
            if len(self._heard) > _HEARD_KEPT:
                del self._heard[min(self._heard)]
            if (ours := self._ours(settled)) is not None:
                self._compare(settled, ours, chain)
        self._advance(settled)

    def rejoin(self) -> None:
        """The topic is read anew from another place: what was accepted so far says nothing of what comes next."""
        known = self._accept.sources.get(self.source)
        self._past = max(self._past, known.last if known is not None else 0)
        self._accept = self._new_accept()
        self._at_end = False

    def reached_end(self) -> None:
        """The topic is followed from where it ended when this member came; what it has not seen of it, it will not."""
        self._at_end = True

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
        return self._heard.get(id) if seen is None else seen

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
                f"block {id} of our input has the chain {ours:08x}, the one on the bus {theirs:08x}: the members of "
                "this group do not build the same blocks (another input, order, block size or schema); to begin anew "
                "with other input, give all of them a higher run (Failover(run=...), esp pub --run), or use esp purge",
                id=id,
                ours=ours,
                theirs=theirs,
            )

    def _advance(self, id: int) -> None:
        if id > self.m:
            self.m = id
            self._known_to = max(self._known_to, id)
            if taken := self.outbox.trim(id):
                self._passed.extend(taken[0].id, chains_of([block.chain for block in taken]))


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


def diagram() -> str:
    """The transition table as a Mermaid state diagram; the docs show what this returns."""
    lines = [f"    {before} --> {after}: {event}" for (before, event), after in TABLE.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> standby", *lines, "    left --> [*]"])
