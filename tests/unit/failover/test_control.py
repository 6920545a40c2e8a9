"""The control topic: what counts as said there, and what is known once the topic itself is another one."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from esp_pubsub.bus import Bounds, Break, Capabilities, Message, Place
from esp_pubsub.errors import BusUnavailable
from esp_pubsub.failover.control import Control
from esp_pubsub.failover.line import Position
from esp_pubsub.failover.words import Beat, Challenge, Claim, Identity, Pulse, Setup, Word
from esp_pubsub.wire.frame import BEAT, CHALLENGE, CLAIM, frames
from esp_pubsub.wire.maps import seal_map
from tests.unit.sender.scripted import until

IDENTITY = Identity("host:1", 7, "", "host", 1)
SAID = {
    "setup": asdict(Setup(("t",), ("id*:int64",), "rows", "log")), "identity": asdict(IDENTITY), "number": 3,
    "positions": [[9, 2, None]], "resigns": False,
}  # fmt: skip


class Log:
    """A log that is what the test says: its messages, and what a reader is handed next."""

    capabilities = Capabilities(
        suffix_only=True, replay=True, retained=False, groups=False, incarnation=True, requests=False, catalog=False,
        max_message_bytes=1 << 20,
    )  # fmt: skip

    def __init__(self, *messages: Message | Break) -> None:
        self.bounds_now = Bounds(0, len(messages), 1)
        self.place: Place | None = None
        self.starts: list[Any] = []
        self.coming: asyncio.Queue[Sequence[Message | Break]] = asyncio.Queue()
        if messages:
            self.coming.put_nowait(messages)

    async def feed(self, topic: str, start: Any, group: str | None) -> "Log":
        self.starts.append(start)
        return self

    async def read(self, max_messages: int, max_bytes: int) -> Sequence[Message | Break]:
        found = await self.coming.get()
        last = found[-1]
        if isinstance(last, Exception):
            raise last
        self.place = Place(
            last.position + 1 if isinstance(last, Message) else self.bounds_now.end, self.bounds_now.incarnation
        )
        return found

    async def bounds(self, topic: str) -> Bounds:
        return self.bounds_now

    async def aclose(self) -> None:
        pass


def message(kind: int, values: dict[str, Any], position: int = 0) -> Message:
    return Message(position, frames([seal_map(kind, values, source=5, run=0)], 2, 0, 4)[0])


async def heard(*messages: Message) -> list[Word]:
    said: list[Word] = []
    control = Control(Log(*messages), "control", 5, 0, trouble=lambda error: None)  # type: ignore[arg-type]
    control.listen(said.append)
    running = asyncio.ensure_future(control.run())
    await until(control.reading.is_set)
    running.cancel()
    await asyncio.wait([running])
    return said


async def test_a_beat_says_what_its_writer_knows() -> None:
    assert await heard(message(BEAT, SAID)) == [
        Beat(Setup(("t",), ("id*:int64",), "rows", "log"), IDENTITY, 0, 4, 3, (Position(9, 2, None),), False)
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": "3"}, {"number": None}, {"resigns": 1}, {"more": 1},
        {"positions": [[1.5, 2, None]]}, {"positions": [[9, 2, "x"]]}, {"positions": [[9, 2]]}, {"positions": []},
        {"positions": [[9, 2, None]] * 2}, {"positions": 5}, {"positions": None},
        {"setup": {}}, {"setup": None}, {"setup": SAID["setup"] | {"topics": [5]}},
        {"setup": SAID["setup"] | {"topics": []}}, {"setup": SAID["setup"] | {"schemas": 5}},
        {"identity": 5}, {"identity": asdict(IDENTITY) | {"nonce": None}},
        {"identity": asdict(IDENTITY) | {"process": 7}}, {"identity": asdict(IDENTITY) | {"pid": "1"}},
        {"number": -1}, {"number": True}, {"identity": asdict(IDENTITY) | {"nonce": -5}},
        {"positions": [[-1, 2, None]]}, {"positions": [[9, -2, None]]}, {"positions": [[9, 2, -1]]},
        {"positions": [[9, 2, 1 << 32]]}, {"positions": [[9, True, None]]},
        {"setup": SAID["setup"] | {"beginning": 1 << 32}}, {"setup": SAID["setup"] | {"beginning": -1}},
        {"setup": SAID["setup"] | {"since": -1}}, {"setup": SAID["setup"] | {"since": True}},
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_not_of_the_types_of_a_beat_has_no_voice(wrong: dict[str, Any]) -> None:
    assert await heard(message(BEAT, SAID | wrong), message(BEAT, SAID, 1)) == await heard(message(BEAT, SAID))


@pytest.mark.parametrize("wrong", [{"saw_nonce": None}, {"saw_number": "1"}, {"identity": []}], ids=str)
async def test_what_is_not_of_the_types_of_a_claim_has_no_voice(wrong: dict[str, Any]) -> None:
    claim = {"identity": asdict(IDENTITY), "saw_nonce": 1, "saw_number": 2}
    assert await heard(message(CLAIM, claim | wrong), message(CLAIM, claim, 1)) == [Claim(IDENTITY, 0, 4, 1, 2)]


@pytest.mark.parametrize(
    "wrong",
    [{"read": None}, {"read": ["7"]}, {"read": [-1]}, {"read": [True]}, {"read": 7}, {"identity": []}, {"more": 1}],
    ids=str,
)
async def test_what_is_not_of_the_types_of_a_challenge_has_no_voice(wrong: dict[str, Any]) -> None:
    challenge = {"identity": asdict(IDENTITY), "read": [7, 0, 12]}
    said = await heard(message(CHALLENGE, challenge | wrong), message(CHALLENGE, challenge, 1))
    assert said == [Challenge(IDENTITY, 0, 4, (7, 0, 12))]


@pytest.mark.parametrize(
    "pulse",
    [
        [1, 2], [1, 2, 3, [4]], [1, 2, 3, 4, 0, False, ["4"]], [1, -2, 3], [1, 2, 3, 4, 0, False, 5], [1] * 8,
        "abc", [(1 << 62) + 1, 2, 3], [1, 2, 1 << 32], [1, 2, 3, -4], [1, 2, 3, 4, (1 << 62) + 1],
        [1, 2, 3, 4, 0, 1, [5]], [1, 2, 3, 4, 0, False, [-1]],
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_no_pulse_makes_no_beat(pulse: list[Any]) -> None:
    good = message(BEAT, SAID | {"pulse": [1, 2, 3, 4, 0, True, [5]]}, 1)
    [beat] = await heard(message(BEAT, SAID | {"pulse": pulse}), good)
    assert isinstance(beat, Beat)
    assert beat.pulse == Pulse(1, 2, 3, 4, 0, True, (5,))


async def test_once_the_topic_was_made_anew_its_new_end_is_all_there_is_to_know() -> None:
    log = Log(*(message(BEAT, SAID, position) for position in range(12)))
    control = Control(log, "control", 5, 0, trouble=lambda error: None)  # type: ignore[arg-type]
    running = asyncio.ensure_future(control.run())
    await until(control.reading.is_set)
    assert await control.is_current()
    log.bounds_now = Bounds(1_000, 1_000, 2)
    log.coming.put_nowait([Break("made anew", None, incarnation=True)])
    await until(log.coming.empty)
    await asyncio.sleep(0)
    assert await control.is_current()
    running.cancel()
    await asyncio.wait([running])


async def test_what_a_break_passed_at_the_end_counts_as_read() -> None:
    log = Log(*(message(BEAT, SAID, position) for position in range(12)))
    control = Control(log, "control", 5, 0, trouble=lambda error: None)  # type: ignore[arg-type]
    running = asyncio.ensure_future(control.run())
    await until(control.reading.is_set)
    log.bounds_now = Bounds(0, 15, 1)
    assert not await control.is_current()
    log.coming.put_nowait([Break("what stands here is damaged", 3)])
    await until(log.coming.empty)
    await asyncio.sleep(0)
    assert await control.is_current()
    running.cancel()
    await asyncio.wait([running])


async def test_after_trouble_it_goes_on_where_it_stood_in_that_incarnation_of_the_topic() -> None:
    log = Log(*(message(BEAT, SAID, position) for position in range(12)))
    control = Control(log, "control", 5, 0, trouble=lambda error: None)  # type: ignore[arg-type]
    running = asyncio.ensure_future(control.run())
    await until(control.reading.is_set)
    log.bounds_now = Bounds(0, 3, 2)  # made anew, and shorter than it was
    assert not await control.is_current()
    log.coming.put_nowait([BusUnavailable("the link is lost")])  # type: ignore[list-item]
    await until(lambda: len(log.starts) == 2)
    assert log.starts == [(0, 1), (12, 1)]
    log.coming.put_nowait([Break("made anew", None, incarnation=True)])
    await until(control.reading.is_set)
    await until(lambda: control._place == (3, 2))
    assert await control.is_current()
    running.cancel()
    await asyncio.wait([running])
