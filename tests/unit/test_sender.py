"""The sender against a bus that does as the test says: what it writes, what it believes, when it begins anew."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from esp_pubsub import sender as sender_module
from esp_pubsub.bus import Capabilities
from esp_pubsub.errors import BusError, BusRefused, BusUnavailable
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.sender import Sender
from esp_pubsub.wire.frame import BEAT, BLOCK, ROWS, WINDOW_BYTES, WINDOW_FRAMES, Frame, parse, seal

SOURCE, RUN, TERM = 77, 3, 9


class ScriptedPipe:
    """Takes what is written; confirms and fails when told to."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.writes: list[int] = []
        self.closed = False
        self.write_gate = asyncio.Event()
        self.write_gate.set()
        self.close_gate = asyncio.Event()
        self.close_gate.set()
        self._count = 0
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def ids(self) -> list[int]:
        return [frame.id for frame in self.frames if frame.kind == BLOCK]

    @property
    def beats(self) -> list[int]:
        return [frame.settled for frame in self.frames if frame.kind == BEAT]

    def confirm(self, count: int) -> None:
        """So many messages of this pipe are confirmed, counted from its first."""
        self._count = count
        self._news.set()

    def confirm_all(self) -> None:
        self.confirm(len(self.frames))

    def fail(self, error: Exception | None = None) -> None:
        self._error = error or BusUnavailable("scripted")
        self._news.set()
        self.write_gate.set()

    async def write(self, frames: Sequence[bytes]) -> None:
        assert not self.closed
        self.frames += [parse(data) for data in frames]
        self.writes.append(len(frames))
        await self.write_gate.wait()
        if self._error is not None:
            raise self._error

    async def confirmed(self, past: int) -> int:
        while self._count <= past:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._count

    async def aclose(self) -> None:
        await self.close_gate.wait()
        self.closed = True


class ScriptedBus:
    """Hands out scripted pipes, one at a time."""

    def __init__(self, *, suffix_only: bool) -> None:
        self.capabilities = Capabilities(
            suffix_only=suffix_only, replay=False, retained=False, groups=False, incarnation=False, requests=False,
            catalog=False, max_message_bytes=1 << 30,
        )  # fmt: skip
        self.pipes: list[ScriptedPipe] = []
        self.errors: list[Exception] = []

    async def pipe(self, topic: str) -> ScriptedPipe:
        assert topic == "topic"
        assert all(pipe.closed for pipe in self.pipes), "two pipes at once"
        if self.errors:
            raise self.errors.pop(0)
        self.pipes.append(ScriptedPipe())
        return self.pipes[-1]


class Bench:
    """A sender at work, and what it told."""

    def __init__(self, *, suffix_only: bool, stall: float = 5.0) -> None:
        self.bus = ScriptedBus(suffix_only=suffix_only)
        self.outbox = Outbox(1 << 20, 1 << 40)
        self.acked: list[int] = []
        self.troubles: list[BusError | None] = []
        self.sender = Sender(
            self.bus, "topic", self.outbox,  # type: ignore[arg-type]
            source=SOURCE, run=RUN, stall=stall, acked=self._acked, trouble=self.troubles.append,
        )  # fmt: skip
        self.sender.term = TERM
        self.task = asyncio.ensure_future(self.sender.run())
        _benches.append(self)

    def _acked(self, id: int) -> None:
        self.acked.append(id)
        self.outbox.trim(id)

    def give(self, count: int = 1, size: int = 10) -> None:
        body = bytes(size)
        for _ in range(count):
            self.outbox.add(
                seal(BLOCK, ROWS, 0, 1, SOURCE, RUN, self.outbox.last + 1, 5, self.outbox.chain, body)
            )  # fmt: skip
        self.sender.wake()

    async def pipe(self, number: int = 0) -> ScriptedPipe:
        await until(lambda: len(self.bus.pipes) > number)
        return self.bus.pipes[number]


@pytest.fixture(params=[True, False], ids=["suffix-only", "with holes"])
async def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(suffix_only=request.param)


@pytest.fixture
async def suffix() -> Bench:
    return Bench(suffix_only=True)


@pytest.fixture
async def holes() -> Bench:
    return Bench(suffix_only=False)


_benches: list["Bench"] = []


@pytest.fixture(autouse=True)
async def _every_sender_ends() -> AsyncIterator[None]:
    yield
    benches = list(_benches)
    _benches.clear()
    for bench in benches:
        await end(bench)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(sender_module, "_LONGEST_PAUSE", 0.002)


async def end(bench: Bench) -> None:
    for pipe in bench.bus.pipes:
        pipe.close_gate.set()
    bench.task.cancel()
    done, _ = await asyncio.wait([bench.task], timeout=2)
    if not done:  # a sender that swallowed its cancellation; the test says so, and no task is left behind
        bench.task.cancel()
        await asyncio.wait([bench.task])
    assert done
    assert all(pipe.closed for pipe in bench.bus.pipes)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def ticks(count: int = 20) -> None:
    """Long enough for everything that does not wait for time."""
    for _ in range(count):
        await asyncio.sleep(0)


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


# rule 1 and 2: in order, and confirmed in order


async def test_blocks_are_written_in_order_as_they_come(bench: Bench) -> None:
    pipe = await bench.pipe()
    for count in (1, 3, 2):
        bench.give(count)
        await ticks()
    assert pipe.ids == ids(1, 6)
    assert bench.sender.sent == 6
    assert {(f.source, f.run, f.kind, f.term, f.settled) for f in pipe.frames} == {(SOURCE, RUN, BLOCK, TERM, 0)}


async def test_what_was_given_before_the_pipe_was_there_is_written_too(bench: Bench) -> None:
    bench.give(4)
    pipe = await bench.pipe()
    await ticks()
    assert pipe.ids == ids(1, 4)


async def test_settled_follows_the_confirmations_in_order(bench: Bench) -> None:
    pipe = await bench.pipe()
    bench.give(3)
    await ticks()
    bench.give(4)
    await ticks()
    for count in (1, 2, 5, 7):  # within a write, across writes, all of them
        pipe.confirm(count)
        await ticks()
        assert bench.sender.settled == count
    assert bench.acked == [1, 2, 5, 7]


async def test_a_frame_carries_what_was_settled_when_it_was_written(bench: Bench) -> None:
    pipe = await bench.pipe()
    bench.give(2)
    await ticks()
    pipe.confirm(1)
    await ticks()
    bench.give(1)
    await ticks()
    assert [frame.settled for frame in pipe.frames] == [0, 0, 1]


async def test_a_confirmation_may_overtake_the_write(bench: Bench) -> None:
    pipe = await bench.pipe()
    pipe.write_gate.clear()
    bench.give(3)
    await ticks()
    pipe.confirm(2)
    await ticks()
    assert (bench.sender.settled, bench.acked) == (2, [2])
    pipe.write_gate.set()
    pipe.confirm(3)
    await ticks()
    assert bench.sender.settled == 3


async def test_while_one_write_waits_no_other_is_begun(bench: Bench) -> None:
    pipe = await bench.pipe()
    pipe.write_gate.clear()
    for _ in range(3):
        bench.give(1)
        await ticks()
    assert pipe.writes == [1]
    pipe.write_gate.set()
    await ticks()
    assert pipe.writes == [1, 2]


async def test_one_write_is_bounded_however_much_there_is(suffix: Bench) -> None:
    suffix.give(3_000)
    pipe = await suffix.pipe()
    await until(lambda: len(pipe.frames) == 3_000)
    assert max(pipe.writes) <= 1_024
    suffix.give(10, size=1 << 19)
    await until(lambda: len(pipe.frames) == 3_010)
    assert max(pipe.writes[-5:]) <= 2


# rule 1: the window


async def test_no_more_than_the_window_of_frames_stands_between_settled_and_sent(holes: Bench) -> None:
    pipe = await holes.pipe()
    holes.give(2 * WINDOW_FRAMES)
    await until(lambda: len(pipe.frames) >= WINDOW_FRAMES)
    await ticks()
    assert pipe.ids == ids(1, WINDOW_FRAMES)
    pipe.confirm(10)
    await ticks()
    assert pipe.ids == ids(1, WINDOW_FRAMES + 10)
    pipe.confirm_all()
    await ticks()
    assert pipe.ids == ids(1, 2 * WINDOW_FRAMES)


async def test_no_more_than_the_window_of_bytes_stands_between_settled_and_sent(holes: Bench) -> None:
    pipe = await holes.pipe()
    holes.give(24, size=1 << 20)
    await ticks()
    assert 10 <= len(pipe.frames) < 16  # each is a little more than a MiB
    assert sum(len(frame.data) for frame in pipe.frames) <= WINDOW_BYTES
    before = len(pipe.frames)
    pipe.confirm(1)
    await ticks()
    assert len(pipe.frames) == before + 1
    while len(pipe.ids) < 24:
        pipe.confirm_all()
        await ticks()
        assert sum(len(f.data) for f in pipe.frames if f.id > holes.sender.settled) <= WINDOW_BYTES


async def test_one_frame_larger_than_the_window_goes_alone(holes: Bench) -> None:
    pipe = await holes.pipe()
    holes.give(1)
    await ticks()
    holes.give(1, size=WINDOW_BYTES + 1)
    holes.give(1)
    await ticks()
    assert pipe.ids == [1]
    pipe.confirm(1)
    await ticks()
    assert pipe.ids == [1, 2]
    pipe.confirm(len(pipe.frames))
    await ticks()
    assert pipe.ids == [1, 2, 3]


async def test_where_nothing_but_the_end_can_be_missing_there_is_no_window(suffix: Bench) -> None:
    pipe = await suffix.pipe()
    suffix.give(3 * WINDOW_FRAMES)
    await until(lambda: len(pipe.frames) == 3 * WINDOW_FRAMES)


# rule 3: trouble


async def test_after_trouble_a_new_pipe_begins_behind_what_is_settled(bench: Bench) -> None:
    first = await bench.pipe()
    bench.give(5)
    await ticks()
    first.confirm(2)
    await ticks()
    error = BusUnavailable("gone")
    first.fail(error)
    second = await bench.pipe(1)
    await ticks()
    assert first.closed
    assert second.ids == [3, 4, 5]
    assert {frame.settled for frame in second.frames} == {2}
    assert bench.troubles == [error, None]
    second.confirm(3)
    await ticks()
    assert (bench.sender.settled, bench.acked) == (5, [2, 5])


async def test_a_frame_is_the_same_each_time_it_is_written(bench: Bench) -> None:
    first = await bench.pipe()
    bench.give(2)
    await ticks()
    first.confirm(1)
    await ticks()
    first.fail()
    second = await bench.pipe(1)
    await ticks()
    assert second.frames[0].data[32:] == first.frames[1].data[32:]


async def test_a_late_confirmation_of_a_dropped_pipe_counts_for_nothing(bench: Bench) -> None:
    first = await bench.pipe()
    bench.give(5)
    await ticks()
    first.fail()
    second = await bench.pipe(1)
    first.confirm(5)
    await ticks()
    assert (bench.sender.settled, second.ids) == (0, ids(1, 5))
    second.confirm(1)
    await ticks()
    assert bench.sender.settled == 1


async def test_a_failed_write_goes_back_even_if_the_confirmations_are_silent(bench: Bench) -> None:
    first = await bench.pipe()
    first.write_gate.clear()
    bench.give(3)
    await ticks()
    first.fail()
    second = await bench.pipe(1)
    await ticks()
    assert second.ids == ids(1, 3)


async def test_what_was_confirmed_before_the_write_failed_still_counts(bench: Bench) -> None:
    first = await bench.pipe()
    first.write_gate.clear()
    bench.give(3)
    await ticks()
    first.confirm(1)
    await ticks()
    first.fail()
    second = await bench.pipe(1)
    await ticks()
    assert second.ids == [2, 3]


async def test_a_bus_that_leaves_blocks_unconfirmed_is_trouble() -> None:
    bench = Bench(suffix_only=False, stall=0.02)
    first = await bench.pipe()
    bench.give(3)
    await ticks()
    first.confirm(1)
    second = await bench.pipe(1)
    await ticks()
    assert first.closed
    assert second.ids == [2, 3]
    assert isinstance(bench.troubles[0], BusUnavailable)
    assert "blocks 2 to 3" in str(bench.troubles[0])


async def test_an_idle_pipe_never_stalls() -> None:
    bench = Bench(suffix_only=True, stall=0.2)
    pipe = await bench.pipe()
    bench.give(1)
    await ticks()
    pipe.confirm(1)
    await asyncio.sleep(0.3)
    assert (bench.troubles, len(bench.bus.pipes)) == ([], 1)


async def test_a_new_pipe_waits_until_the_old_one_is_closed(bench: Bench) -> None:
    first = await bench.pipe()
    first.close_gate.clear()
    bench.give(1)
    await ticks()
    first.fail()
    await asyncio.sleep(0.02)
    assert len(bench.bus.pipes) == 1
    first.close_gate.set()
    assert (await bench.pipe(1)).frames == [] or first.closed


async def test_a_bus_that_cannot_be_reached_is_tried_again(bench: Bench) -> None:
    first = await bench.pipe()
    bench.give(1)
    bench.bus.errors = [BusUnavailable("still away") for _ in range(5)]
    await ticks()
    first.fail()
    second = await bench.pipe(1)
    await ticks()
    assert second.ids == [1]
    assert [error is None for error in bench.troubles] == [False] * 6 + [True]


async def test_being_over_trouble_is_told_also_when_there_was_no_pipe_before() -> None:
    bench = Bench(suffix_only=True)
    bench.bus.errors = [BusUnavailable("away from the start")]
    await bench.pipe()
    await ticks()
    assert [error is None for error in bench.troubles] == [False, True]


@pytest.mark.parametrize("where", ["pipe", "write", "confirmed"])
async def test_a_bus_that_refuses_ends_it(bench: Bench, where: str) -> None:
    first = await bench.pipe()
    bench.give(1)
    if where == "write":
        first.write_gate.clear()
    await ticks()
    error = BusRefused("no")
    if where == "pipe":
        bench.bus.errors = [error]
        first.fail()
    else:
        first.fail(error)
    await asyncio.wait([bench.task], timeout=5)
    assert bench.task.exception() is error
    assert len(bench.bus.pipes) == 1


async def test_a_fault_of_the_driver_ends_it_and_is_not_taken_for_trouble(bench: Bench) -> None:
    pipe = await bench.pipe()
    bench.give(1)
    await ticks()
    pipe.fail(ZeroDivisionError("a bug"))
    await asyncio.wait([bench.task], timeout=5)
    error = bench.task.exception()
    assert isinstance(error, ZeroDivisionError) or (
        isinstance(error, ExceptionGroup) and isinstance(error.exceptions[0], ZeroDivisionError)
    )


async def test_confirmations_of_more_than_was_written_do_not_go_unnoticed(bench: Bench) -> None:
    pipe = await bench.pipe()
    bench.give(2)
    await ticks()
    pipe.confirm(3)
    await ticks()
    assert bench.sender.settled <= 2
    assert bench.task.done() or bench.troubles or bench.sender.settled == 2


@pytest.mark.parametrize("when", range(6))
async def test_cancelled_in_the_turn_of_a_trouble_it_ends(bench: Bench, when: int) -> None:
    pipe = await bench.pipe()
    bench.give(1)
    await ticks()
    pipe.fail()
    await ticks(when)
    bench.task.cancel()
    done, _ = await asyncio.wait([bench.task], timeout=0.5)
    assert done, "the cancellation was lost"
    assert bench.task.cancelled()


async def test_cancelled_it_closes_its_pipe(bench: Bench) -> None:
    pipe = await bench.pipe()
    bench.give(1)
    await ticks()
    bench.task.cancel()
    await asyncio.wait([bench.task], timeout=1)
    assert bench.task.cancelled()
    assert pipe.closed


# rule 5: the beat


async def test_an_idle_pipe_carries_the_last_settled_once(holes: Bench) -> None:
    pipe = await holes.pipe()
    holes.give(2)
    await ticks()
    pipe.confirm(1)
    await ticks()
    assert pipe.beats == []  # block 2 is not confirmed: not idle
    pipe.confirm(2)
    await ticks()
    assert pipe.beats == [2]
    beat = pipe.frames[-1]
    assert (beat.source, beat.run, beat.id, beat.body) == (SOURCE, RUN, 0, b"")
    pipe.confirm(3)
    await ticks()
    assert pipe.beats == [2]
    assert (holes.sender.settled, holes.acked) == (2, [1, 2])


async def test_every_pause_ends_with_one_beat(holes: Bench) -> None:
    pipe = await holes.pipe()
    for _ in range(3):
        holes.give(2)
        await ticks()
        pipe.confirm_all()
        await ticks()
        pipe.confirm_all()  # the beat
        await ticks()
    assert [frame.id or f"beat {frame.settled}" for frame in pipe.frames] == [
        1, 2, "beat 2", 3, 4, "beat 4", 5, 6, "beat 6",
    ]  # fmt: skip


async def test_blocks_behind_an_unconfirmed_beat_count_as_they_should(holes: Bench) -> None:
    pipe = await holes.pipe()
    holes.give(2)
    await ticks()
    pipe.confirm(2)
    await ticks()
    holes.give(2)
    await ticks()
    assert [frame.id for frame in pipe.frames] == [1, 2, 0, 3, 4]
    pipe.confirm(3)
    await ticks()
    assert holes.sender.settled == 2
    pipe.confirm(4)
    await ticks()
    assert holes.sender.settled == 3


async def test_a_new_pipe_with_nothing_to_send_carries_the_settled_of_the_old_one(holes: Bench) -> None:
    first = await holes.pipe()
    holes.give(2)
    await ticks()
    first.confirm(2)
    await ticks()
    first.fail()  # the beat is not confirmed
    second = await holes.pipe(1)
    await ticks()
    assert (second.ids, second.beats) == ([], [2])


async def test_a_sender_that_takes_over_says_how_far_it_knows() -> None:
    bench = Bench(suffix_only=False)
    bench.sender.settled = bench.sender.sent = 7  # what a standby learnt from the topic
    bench.outbox = bench.sender._outbox
    pipe = await bench.pipe()
    await ticks()
    assert pipe.beats == [7]


async def test_a_beat_that_is_not_confirmed_is_trouble() -> None:
    bench = Bench(suffix_only=False, stall=0.02)
    first = await bench.pipe()
    bench.give(1)
    await ticks()
    first.confirm(1)
    second = await bench.pipe(1)
    await ticks()
    assert first.beats == second.beats == [1]


async def test_where_nothing_is_ever_held_there_is_no_beat(suffix: Bench) -> None:
    pipe = await suffix.pipe()
    suffix.give(2)
    await ticks()
    pipe.confirm(2)
    await ticks()
    assert len(pipe.frames) == 2


# all of it


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_the_rules_hold(bench: Bench, seed: int) -> None:
    chance = random.Random(seed)
    moves: list[Callable[[ScriptedPipe], Any]] = [
        lambda pipe: bench.give(chance.choice((1, 5, 300))),
        lambda pipe: pipe.confirm(chance.randint(pipe._count, len(pipe.frames))),
        lambda pipe: pipe.confirm_all(),
        lambda pipe: pipe.write_gate.clear(),
        lambda pipe: pipe.write_gate.set(),
        lambda pipe: pipe.fail(),
    ]
    begins: dict[int, int] = {}
    for _ in range(300):
        pipe = await bench.pipe(max(0, len(bench.bus.pipes) - 1))
        settled = bench.sender.settled
        chance.choices(moves, (6, 6, 2, 1, 3, 0.3))[0](pipe)
        await ticks(chance.randint(1, 5))
        assert bench.sender.settled >= settled
        for number, each in enumerate(bench.bus.pipes):
            if each.ids and number not in begins:
                begins[number] = bench.sender.settled
        last = bench.bus.pipes[-1]
        if last.ids and not bench.bus.capabilities.suffix_only:
            assert all(f.id <= f.settled + 2 * WINDOW_FRAMES for f in last.frames)
            assert last.ids[-1] - bench.sender.settled <= WINDOW_FRAMES
    for number, each in enumerate(bench.bus.pipes):
        assert each.ids == ids(each.ids[0], each.ids[-1]) if each.ids else True
        assert not each.ids or each.ids[0] <= begins[number] + 1
    for _ in range(50):
        pipe = bench.bus.pipes[-1]
        pipe.write_gate.set()
        pipe.confirm_all()
        await ticks(5)
        if pipe.closed or pipe._error:
            await bench.pipe(len(bench.bus.pipes) - (not pipe._error))
    assert bench.sender.settled == bench.outbox.last
    assert len(bench.outbox) == 0
