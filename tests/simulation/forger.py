"""One who may write on the topics of a group and is no member of it. He copies what he reads there, and changes it.

He never pretends to be a member that is there, nor is he heard twice by one name: nobody can tell such words apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from esp_pubsub.errors import BadFrame
from esp_pubsub.failover.belief import CHAIN_MAX, NUMBER_MAX, TERM_MAX, TIME_MAX
from esp_pubsub.testing._sim_bus import Broker, Queue
from esp_pubsub.wire.frame import BEAT, BLOCK, CHALLENGE, CLAIM, ENTRY, MAP, STANDBY, Frame, frames, parse, seal
from esp_pubsub.wire.maps import read_map, seal_map

Said = dict[str, Any]


def _positions(said: Said, change: Callable[[int, int | None], list[Any]]) -> None:
    said["positions"] = [[given, *change(settled, chain)] for given, settled, chain in said["positions"]]


def _settled_far(said: Said, _: random.Random) -> None:
    _positions(said, lambda settled, chain: [settled + 10**12, None])


def _settled_next(said: Said, rng: random.Random) -> None:
    _positions(said, lambda settled, chain: [settled + 1 + rng.randrange(4), None])


def _another_chain(said: Said, rng: random.Random) -> None:
    _positions(said, lambda settled, chain: [settled, rng.randrange(CHAIN_MAX)])


def _another_chain_next(said: Said, rng: random.Random) -> None:
    _positions(said, lambda settled, chain: [settled + 1 + rng.randrange(4), rng.randrange(CHAIN_MAX)])


def _another_setup(said: Said, rng: random.Random) -> None:
    said["setup"] |= rng.choice(({"election": "token"}, {"body": "arrow"}, {"beginning": 12_345}))


def _no_number(said: Said, rng: random.Random) -> None:
    said[rng.choice(("number", "positions", "pulse"))] = rng.choice((-1, [[-1, -1, -1]], [-1, -1, -1], NUMBER_MAX))


def _another_version(said: Said, rng: random.Random) -> None:
    said["setup"]["since"] += 1 + rng.randrange(4)
    rng.choice((_settled_far, _settled_next, _another_chain, _another_chain_next))(said, rng)


def _another_time(said: Said, rng: random.Random) -> None:
    said["pulse"] = [
        rng.choice((0, 1, TIME_MAX)), rng.choice((0, 10, NUMBER_MAX)), rng.randrange(CHAIN_MAX),
        rng.choice((0, NUMBER_MAX)), 0, False, [rng.choice((0, NUMBER_MAX))],
    ]  # fmt: skip


def _stops(said: Said, _: random.Random) -> None:
    said["pulse"] = [*(said["pulse"] or [0] * 5)[:5], True, []]


def _resigns(said: Said, _: random.Random) -> None:
    said["resigns"] = True


FORGED: dict[str, Callable[[Said, random.Random], None]] = {
    "settled far ahead": _settled_far,
    "settled a little ahead": _settled_next,
    "another chain": _another_chain,
    "another chain, ahead": _another_chain_next,
    "another setup": _another_setup,
    "no number": _no_number,
    "another version": _another_version,
    "another time": _another_time,
    "all are to stop": _stops,
    "somebody resigns": _resigns,
    "a term": lambda said, rng: None,
    "a claim": lambda said, rng: None,
    "a challenge": lambda said, rng: None,
    "a standby": lambda said, rng: None,
    "a beat on a line": lambda said, rng: None,
    "an entry": lambda said, rng: None,
    "noise": lambda said, rng: None,
}


class Forger:
    """Forges with numbers of his own, so that all else of a history stays as it would be."""

    def __init__(self, broker: Broker, control: str, lines: list[str], order: str | None, seed: int) -> None:
        self._broker = broker
        self._control, self._lines, self._order = control, lines, order
        self._rng = random.Random(seed)
        self._heard = Queue()
        if broker.kind == "queues":
            broker.topic(control).queues["forger"] = self._heard

    def forge(self, what: str) -> None:
        """Write one message."""
        rng, said = self._rng, self._last_beat()
        if what == "noise":
            self._write(rng.choice([self._control, self._order or self._control]), rng.randbytes(rng.randrange(200)))
        elif said is None:
            return
        elif what == "a beat on a line" and not self._broker.capabilities.suffix_only and self._broker.faults:
            return  # where a block is missing it says that it will not come, and nobody can tell that it does not know
        elif what == "a beat on a line":
            for topic, source in zip(self._lines, self._sources(), strict=False):
                self._write(topic, frames([seal(BEAT, source=source)], rng.choice((10**12, NUMBER_MAX)), 0)[0])
        elif what == "an entry":
            if (entry := self._entry()) is not None:
                self._write(self._order or "", entry)
        else:
            self._write(self._control, self._word(what, *said))

    def _word(self, what: str, term: int, source: int, values: Said) -> bytes:
        rng = self._rng
        values["identity"] |= {"nonce": rng.randrange(1 << rng.choice((30, 63))), "name": "forger", "process": ""}
        values["number"] = rng.choice((1, 7, NUMBER_MAX))
        FORGED[what](values, rng)
        who, kind = {"identity": values["identity"]}, BEAT
        if what == "a claim":
            kind, values = CLAIM, who | {"saw_nonce": 0, "saw_number": rng.choice((0, NUMBER_MAX))}
        elif what == "a challenge":
            kind, values = CHALLENGE, who | {"read": [NUMBER_MAX] * 3}
        elif what == "a standby":
            _settled_far(values, rng)
            kind, values = STANDBY, who | {"eligible": True, "positions": values["positions"], "pulse": None}
        term = rng.choice((0, term + 9, TERM_MAX, *((term, term + 1) if kind != CLAIM else ())))
        return frames([seal_map(kind, values, source=source)], 0, 0, min(term, TERM_MAX))[0]

    def _entry(self) -> bytes | None:
        frame = next((frame for frame in self._read(self._order) if frame.kind == ENTRY and frame.id < 1_000), None)
        if frame is None:
            return None
        link, id = self._rng.choice(((frame.chain ^ 1, frame.id + 1), (frame.chain, NUMBER_MAX), (0, frame.id)))
        return frames([seal(ENTRY, MAP, 3, 0, frame.source, 0, id, 0, link, self._rng.randbytes(9))], 0, 0)[0]

    def _last_beat(self) -> tuple[int, int, Said] | None:
        """The last one that a member wrote."""
        for frame in self._read(self._control):
            if frame.kind == BEAT and (said := read_map(frame))["identity"]["name"] != "forger":
                return frame.term, frame.source, said
        return None

    def _read(self, topic: str | None) -> Iterator[Frame]:
        """The frames of a topic, the last one first."""
        came = self._broker.topics[topic].log if topic in self._broker.topics else []
        for data in reversed(came or (self._heard.unread if topic == self._control else [])):
            with suppress(BadFrame):
                yield parse(data)

    def _sources(self) -> list[int]:
        """Of each line, as its first block says."""
        found = []
        for topic in map(self._broker.topic, self._lines):
            came = topic.log or next((queue.came for queue in topic.queues.values()), [])
            found += [frame.source for frame in map(parse, came[:1]) if frame.kind == BLOCK]
        return found

    def _write(self, topic: str, data: bytes) -> None:
        found = self._broker.topics.get(topic)
        if found is None:
            return
        if found.is_log:
            found.log.append(data)
        for queue in found.queues.values():
            queue.unread.append(data)
        self._broker.tell_news()
