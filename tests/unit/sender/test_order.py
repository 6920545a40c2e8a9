"""The sender: what it writes, how much at once, and when it says how far it is."""

from esp_pubsub.wire.frame import BLOCK, WINDOW_BYTES, WINDOW_FRAMES
from tests.unit.sender.scripted import RUN, SOURCE, TERM, Bench, ids, ticks, until

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
        assert bench.outbox.settled == count
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
    assert (bench.outbox.settled, bench.acked) == (2, [2])
    pipe.write_gate.set()
    pipe.confirm(3)
    await ticks()
    assert bench.outbox.settled == 3


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
        assert sum(len(f.data) for f in pipe.frames if f.id > holes.outbox.settled) <= WINDOW_BYTES


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
    assert (holes.outbox.settled, holes.acked) == (2, [1, 2])


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
    assert holes.outbox.settled == 2
    pipe.confirm(4)
    await ticks()
    assert holes.outbox.settled == 3


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
    bench.outbox.settle(7)  # what a standby learnt from the topic
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


async def test_an_open_pipe_passes_over_what_another_member_settled_and_nothing_else(bench: Bench) -> None:
    pipe = await bench.pipe()
    bench.give(3)
    await ticks()
    bench.outbox.settle(2)  # not past what the pipe has written: it goes on as it would have
    bench.give(1)
    await ticks()
    bench.give(3)
    bench.outbox.settle(6)  # another leader's blocks are on the bus up to here, before this pipe has written 5 and 6
    bench.sender.wake()
    await ticks()
    assert pipe.ids == [1, 2, 3, 4, 7]
    pipe.confirm(4)
    await ticks()
    assert (bench.outbox.settled, bench.acked) == (6, [])
    pipe.confirm(5)
    await ticks()
    assert (bench.outbox.settled, bench.acked) == (7, [7])


async def test_what_another_member_settled_in_between_leaves_the_window_open() -> None:
    bench = Bench(suffix_only=False)
    pipe = await bench.pipe()
    bench.give(WINDOW_FRAMES)
    await ticks()
    bench.give(WINDOW_FRAMES)
    bench.outbox.settle(2 * WINDOW_FRAMES)  # another leader's beat says that all of it is there
    bench.give(3)
    await until(lambda: bench.sender.sent == 2 * WINDOW_FRAMES + 3)
    assert pipe.ids[-3:] == ids(2 * WINDOW_FRAMES + 1, 2 * WINDOW_FRAMES + 3)
    assert pipe.frames[-1].settled == 2 * WINDOW_FRAMES
