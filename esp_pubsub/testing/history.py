"""A checker of histories: was anything lost, doubled, reordered, invented, or not going on?

Every process of a test writes down what it does, one JSON line each, as it happens:

    publishers    Published before `inject` ("unknown"), and again once the outcome is known
    subscribers   Opened at start, Delivered for each block, Confirmed after each `confirm`, Told for each notice
    the parent    Present for each stretch of time in which a process was there and running, and Ended for a reader that
                  it ended before everything had come

and whoever has all the lines asks:

    verdict = check(read(lines), progress=5.0, ends={(source, run): 10_000})
    assert verdict.ok, verdict

What it finds, as `Fault.kind`:

    lost        acknowledged, and neither delivered nor told as missed
    doubled     delivered twice, or although it was confirmed or told as missed
    reordered   delivered after a later one, for the first time
    stale       a lower run after a higher one
    invented    content that nobody published under that id
    gap         ids passed over without a word, whether acknowledged or not
    unfinished  a reader that never came to the end named in `ends`
    stuck       nothing delivered for longer than `progress` seconds, though there was something to deliver, somebody
                running who could send it, and the reader was running too

A reader that was told Joined is owed what comes from that block on, any other one everything. A reader without a group
that starts anew is another reader and takes another name. A reader of a group keeps its name: when it is Opened again,
what it had not confirmed may come once more, beginning anywhere behind what it had confirmed. Times are seconds by any
one clock that all processes share: `time.monotonic` on one machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal

from ..notices import Joined, Missed, NewRun, Notice

Outcome = Literal["unknown", "acked", "covered"]
Kind = Literal["lost", "doubled", "reordered", "stale", "invented", "gap", "unfinished", "stuck"]


@dataclass(frozen=True, slots=True)
class Published:
    """A block and what became of it. Written as `unknown` before it is injected, so that a kill cannot hide it."""

    publisher: str
    source: int
    run: int
    id: int
    digest: str
    outcome: Outcome
    at: float


@dataclass(frozen=True, slots=True)
class Delivered:
    """A subscriber was given a block."""

    subscriber: str
    source: int
    run: int
    id: int
    digest: str
    at: float


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A `confirm` of this block, and with it of all delivered before, has returned."""

    subscriber: str
    source: int
    run: int
    id: int
    at: float


@dataclass(frozen=True, slots=True)
class Opened:
    """A subscriber began, perhaps again."""

    subscriber: str
    at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A subscriber was ended on purpose, and nothing more is owed to it, unless it is Opened again."""

    subscriber: str
    at: float


@dataclass(frozen=True, slots=True)
class Told:
    """A notice. Those about ids say which: Missed its range, Joined its first one; see `told`."""

    subscriber: str
    notice: str
    source: int
    run: int
    first: int
    last: int
    at: float


@dataclass(frozen=True, slots=True)
class Present:
    """A process was there and running. One of which nothing is said is taken to be there all the time."""

    name: str
    since: float
    until: float


Record = Published | Delivered | Confirmed | Opened | Ended | Told | Present
_KINDS: dict[str, type[Record]] = {
    kind.__name__: kind for kind in (Published, Delivered, Confirmed, Opened, Ended, Told, Present)
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that must not happen, at a reader: ids first..last of one source and run."""

    kind: Kind
    subscriber: str
    source: int
    run: int
    first: int
    last: int
    at: float
    detail: str = ""

    def __str__(self) -> str:
        ids = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        text = f"{self.kind}: {self.subscriber}, source {self.source:016x} run {self.run} block {ids} at {self.at:.3f}"
        return f"{text}: {self.detail}" if self.detail else text


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `check` found. `missed` counts the ids that readers were told of as missed: a loss, but not a silent one."""

    faults: list[Fault]
    published: int
    acked: int
    delivered: int
    missed: int

    @property
    def ok(self) -> bool:
        """No fault. Look at `missed` too where nothing may be missed."""
        return not self.faults

    def count(self, kind: Kind) -> int:
        """How many faults of one kind there are."""
        return sum(fault.kind == kind for fault in self.faults)

    def __str__(self) -> str:
        counts = Counter(fault.kind for fault in self.faults)
        head = (
            f"{self.published} blocks published, {self.acked} acknowledged, {self.delivered} deliveries, "
            f"{self.missed} told as missed; faults: {dict(counts) or 'none'}"
        )
        return "\n".join([head, *(f"  {fault}" for fault in self.faults[:20])])


def digest(content: object) -> str:
    """A short digest of anything whose `repr` tells it apart, for example a block's rows."""
    return blake2b(repr(content).encode(), digest_size=8).hexdigest()


def told(subscriber: str, notice: Notice, at: float) -> Told:
    """A notice as a record."""
    first, last = 0, 0
    if isinstance(notice, Missed):
        first, last = notice.first, notice.last
    elif isinstance(notice, Joined):
        first = last = notice.id
    run = notice.new if isinstance(notice, NewRun) else getattr(notice, "run", 0)
    return Told(subscriber, type(notice).__name__, getattr(notice, "source", 0), run, first, last, at)


def line(record: Record) -> str:
    """A record as one line of JSON, with its end. Write it at once and unbuffered: then a kill loses nothing."""
    return json.dumps({"record": type(record).__name__, **asdict(record)}, separators=(",", ":")) + "\n"


def read(lines: Iterable[str]) -> Iterator[Record]:
    """Records again. A last line without its end, of a process that was killed, is passed over; else ValueError."""
    for text in lines:
        if not text.endswith("\n"):
            continue
        try:
            values: dict[str, Any] = json.loads(text)
            yield _KINDS[values.pop("record")](**values)
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"no record of a history: {text[:200]!r}: {e}") from None


def check(
    records: Iterable[Record],
    *,
    progress: float | None = None,
    ends: Mapping[tuple[int, int], int] | None = None,
) -> Verdict:
    """Judge a history. The records of one subscriber must come in the order in which it wrote them.

    `progress`: how many seconds may pass without a delivery. `ends`: for (source, run), the id that every reader must
    come to. A block of a run that was already being replaced when it was acknowledged need not be delivered.
    """
    history = _History()
    for record in records:
        history.add(record)
    for reader in history.readers.values():
        history.judge_losses(reader)
        for (source, run), end in (ends or {}).items():
            history.judge_end(reader, source, run, end)
        if progress is not None:
            history.judge_progress(reader, progress, ends or {})
    readers = history.readers.values()
    return Verdict(
        faults=sorted((fault for reader in readers for fault in reader.faults), key=lambda fault: fault.at),
        published=sum(len(run.given) for run in history.runs.values()),
        acked=sum(len(run.acked) for run in history.runs.values()),
        delivered=sum(reader.deliveries for reader in readers),
        missed=sum(len(ids) for reader in readers for ids in reader.missed.values()),
    )


@dataclass(slots=True)
class _Run:
    """One run of one source, as its publishers tell it. Times are the first ones."""

    digests: dict[int, set[str]] = field(default_factory=dict)
    given: dict[int, float] = field(default_factory=dict)
    acked: dict[int, float] = field(default_factory=dict)


_Spans = list[tuple[float, float]]
_Key = tuple[int, int]


class _History:
    def __init__(self) -> None:
        self.runs: dict[_Key, _Run] = {}
        self.readers: dict[str, _Reader] = {}
        self.publishers: dict[int, set[str]] = {}
        self.present: dict[str, _Spans] = {}
        self.end = float("-inf")

    def add(self, record: Record) -> None:
        """Take one record. Whether content was invented is judged at the end: its publisher may write it later."""
        if isinstance(record, Present):
            self.present.setdefault(record.name, []).append((record.since, record.until))
            self.end = max(self.end, record.until)
            return
        self.end = max(self.end, record.at)
        if isinstance(record, Published):
            self._published(record)
            return
        reader = self.readers.get(record.subscriber)
        if reader is None:
            reader = self.readers[record.subscriber] = _Reader(record.subscriber, record.at)
        reader.add(record)

    def _published(self, record: Published) -> None:
        run = self.runs.setdefault((record.source, record.run), _Run())
        self.publishers.setdefault(record.source, set()).add(record.publisher)
        run.digests.setdefault(record.id, set()).add(record.digest)
        run.given[record.id] = min(record.at, run.given.get(record.id, record.at))
        if record.outcome != "unknown":
            run.acked[record.id] = min(record.at, run.acked.get(record.id, record.at))

    def _replaced_at(self, key: _Key) -> float:
        """When a higher run of the same source began."""
        source, number = key
        later = [run for (other, higher), run in self.runs.items() if other == source and higher > number]
        return min((at for run in later for at in run.given.values()), default=float("inf"))

    def judge_losses(self, reader: _Reader) -> None:
        """What was acknowledged and did not come; what came and was never published."""
        for (source, number, id), (seen, at) in reader.content.items():
            known = self.runs.get((source, number), _Run()).digests.get(id, set())
            for unknown in sorted(seen - known):
                reader.fault("invented", source, number, id, id, at, f"{unknown}, published: {sorted(known)}")
        for key, run in self.runs.items():
            replaced = self._replaced_at(key)
            there = reader.seen.get(key, set()) | reader.missed.get(key, set())
            for id in sorted(run.acked.keys() - there):
                if reader.owed(key, id) and run.acked[id] < replaced:
                    reader.fault("lost", *key, id, id, run.acked[id], "acknowledged then")

    def judge_end(self, reader: _Reader, source: int, run: int, end: int) -> None:
        """Whether a reader came as far as it should."""
        key = source, run
        if reader.ended is not None:
            return
        last = max(reader.seen.get(key, set()) | reader.missed.get(key, set()), default=0)
        if last < end:
            reader.fault("unfinished", source, run, last + 1, end, self.end, f"came to {last} of {end}")

    def judge_progress(self, reader: _Reader, bound: float, ends: Mapping[_Key, int]) -> None:
        """Long times without a delivery, per source."""
        for source, names in self.publishers.items():
            times = [(reader.begun, -1, 0), *reader.times.get(source, [])]
            finished = all(end in reader.seen.get(key, set()) for key, end in ends.items() if key[0] == source) and any(
                key[0] == source for key in ends
            )
            if not finished and reader.ended is None:
                times.append((self.end, -1, 0))
            somebody = _union([span for name in names for span in self._spans(name)])
            for (since, run, last), (until, _, _) in pairwise(times):
                if until - since > bound:
                    there = _common(_union(self._spans(reader.name)), somebody)
                    self._judge_pause(reader, source, (since, run, last), until, there, bound)

    def _judge_pause(
        self, reader: _Reader, source: int, after: tuple[float, int, int], until: float, there: _Spans, bound: float
    ) -> None:
        since, run, last = after
        had = reader.until(source, since)
        waiting = [
            at
            for (other, number), known in self.runs.items()
            if other == source and number >= run
            for id, at in known.given.items()
            if (number, id) > (run, last)
            and at < until
            and (number, id) not in had
            and reader.owed((other, number), id)
        ]
        if not waiting:
            return
        spans = _common(there, [(max(since, min(waiting)), until)])
        longest = max((end - begin for begin, end in spans), default=0.0)
        if longest > bound:
            detail = f"nothing came for {longest:.2f} s, the bound is {bound:g} s"
            reader.fault("stuck", source, max(run, 0), last + 1, last + 1, since, detail)

    def _spans(self, name: str) -> _Spans:
        return self.present.get(name, [(float("-inf"), float("inf"))])


class _Reader:
    """One subscriber's records, judged as they come, as far as they can be judged alone."""

    def __init__(self, name: str, begun: float) -> None:
        self.name = name
        self.begun = begun
        self.ended: float | None = None
        self.faults: list[Fault] = []
        self.deliveries = 0
        self.seen: dict[_Key, set[int]] = {}
        self.missed: dict[_Key, set[int]] = {}
        self.joined: dict[_Key, int] = {}
        self.content: dict[tuple[int, int, int], tuple[set[str], float]] = {}
        self.times: dict[int, list[tuple[float, int, int]]] = {}
        self._at: dict[int, _Key] = {}
        self._unconfirmed: list[tuple[Delivered, _Key | None]] = []
        self._reopened = False

    def fault(self, kind: Kind, source: int, run: int, first: int, last: int, at: float, detail: str = "") -> None:
        self.faults.append(Fault(kind, self.name, source, run, first, last, at, detail))

    def joined_late(self, key: _Key) -> bool:
        """It began in the middle of this run or of a later one."""
        return any(source == key[0] and run >= key[1] for source, run in self.joined)

    def owed(self, key: _Key, id: int) -> bool:
        """It did not join behind this block, nor end in front of it."""
        if self.ended is not None and (key[1], id) > self._at.get(key[0], (-1, 0)):
            return False
        return id >= self.joined[key] if key in self.joined else not self.joined_late(key)

    def until(self, source: int, at: float) -> set[_Key]:
        """What had come from a source by then, as (run, id)."""
        return {(run, id) for when, run, id in self.times.get(source, []) if when <= at}

    def add(self, record: Delivered | Confirmed | Opened | Ended | Told) -> None:
        if isinstance(record, Delivered):
            self._delivered(record)
        elif isinstance(record, Confirmed):
            self._confirmed(record)
        elif isinstance(record, Opened):
            self._reopened, self.ended = True, None
        elif isinstance(record, Ended):
            self.ended = record.at
        elif record.notice == "Missed":
            missed = self.missed.setdefault((record.source, record.run), set())
            missed.update(range(record.first, record.last + 1))
        elif record.notice == "Joined":
            self.joined.setdefault((record.source, record.run), record.first)

    def _delivered(self, block: Delivered) -> None:
        if self._reopened:
            self._go_back(block)
        self.deliveries += 1
        self.times.setdefault(block.source, []).append((block.at, block.run, block.id))
        digests, _ = self.content.setdefault((block.source, block.run, block.id), (set(), block.at))
        digests.add(block.digest)
        key = block.source, block.run
        before = self._at.get(block.source)
        run, last = before or (block.run, self.joined.get(key, 1) - 1)
        if block.run < run:
            self.fault("stale", *key, block.id, block.id, block.at, f"after run {run}")
            return
        if block.run > run:
            last = self.joined.get(key, 1) - 1
        self._judge_place(block, last)
        self._unconfirmed.append((block, before))
        self.seen.setdefault(key, set()).add(block.id)
        self._at[block.source] = (block.run, max(last, block.id))

    def _judge_place(self, block: Delivered, last: int) -> None:
        key, id = (block.source, block.run), block.id
        missed, seen = self.missed.get(key, set()), self.seen.get(key, set())
        if id in seen:
            self.fault("doubled", *key, id, id, block.at, f"after {last}")
        elif id in missed:
            self.fault("doubled", *key, id, id, block.at, "it was told as missed")
        elif id <= last:
            self.fault("reordered", *key, id, id, block.at, f"after {last}")
        for first, until in _ranges(set(range(last + 1, id)) - missed):
            self.fault("gap", *key, first, until, block.at, f"{id} came after {last}")

    def _confirmed(self, block: Confirmed) -> None:
        for index in range(len(self._unconfirmed) - 1, -1, -1):
            delivered = self._unconfirmed[index][0]
            if (delivered.source, delivered.run, delivered.id) == (block.source, block.run, block.id):
                del self._unconfirmed[: index + 1]
                return

    def _go_back(self, block: Delivered) -> None:
        """The first block after a new start: if it is one of those not confirmed, it goes on from there."""
        self._reopened = False
        same = [
            index
            for index, (delivered, _) in enumerate(self._unconfirmed)
            if (delivered.source, delivered.run, delivered.id) == (block.source, block.run, block.id)
        ]
        if not same:
            return
        for delivered, before in reversed(self._unconfirmed[same[0] :]):
            self.seen[delivered.source, delivered.run].discard(delivered.id)
            if before is None:
                self._at.pop(delivered.source, None)
            else:
                self._at[delivered.source] = before
        del self._unconfirmed[same[0] :]


def _ranges(ids: set[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for id in sorted(ids):
        if found and found[-1][1] == id - 1:
            found[-1] = (found[-1][0], id)
        else:
            found.append((id, id))
    return found


def _union(spans: _Spans) -> _Spans:
    found: _Spans = []
    for since, until in sorted(spans):
        if found and since <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], until))
        else:
            found.append((since, until))
    return found


def _common(ours: _Spans, theirs: _Spans) -> _Spans:
    return [(max(a, c), min(b, d)) for a, b in ours for c, d in theirs if max(a, c) < min(b, d)]
