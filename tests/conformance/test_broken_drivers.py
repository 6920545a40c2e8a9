"""The suite can fail: a driver that is broken on purpose fails the check that is named after what it broke."""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sample_bus

from esp_pubsub.bus import Break, Bus, Message, Place
from esp_pubsub.errors import BusError, BusRefused, NoAnswer
from esp_pubsub.registry import driver
from esp_pubsub.testing import conformance


class Altered:
    """What it does not define is the inner one's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class AlteredBus(Altered):
    """A bus whose pipes and feeds are wrapped."""

    def __init__(self, inner: Any, pipe: Any = None, feed: Any = None, **claims: Any) -> None:
        super().__init__(inner)
        self.wrap_pipe, self.wrap_feed = pipe or (lambda inner: inner), feed or (lambda inner: inner)
        self.capabilities = dataclasses.replace(inner.capabilities, **claims)

    async def pipe(self, topic: str) -> Any:
        return self.wrap_pipe(await self.inner.pipe(topic))

    async def feed(self, topic: str, start: Any, group: str | None) -> Any:
        return self.wrap_feed(await self.inner.feed(topic, start, group))


# pipes


class Reorders(Altered):
    async def write(self, frames: Sequence[bytes]) -> None:
        await self.inner.write(frames[::-1])


class Loses(Altered):
    count = lost = 0

    async def write(self, frames: Sequence[bytes]) -> None:
        kept = []
        for frame in frames:
            self.count += 1
            if self.count % 7:
                kept.append(frame)
        self.lost += len(frames) - len(kept)
        await self.inner.write(kept)

    async def confirmed(self, past: int) -> int:
        return self.lost + int(await self.inner.confirmed(past - self.lost))


class Doubles(Altered):
    async def write(self, frames: Sequence[bytes]) -> None:
        await self.inner.write([frame for frame in frames for _ in "12"])

    async def confirmed(self, past: int) -> int:
        return int(await self.inner.confirmed(2 * past)) // 2


class ConfirmsTwice(Altered):
    async def confirmed(self, past: int) -> int:
        return 2 * int(await self.inner.confirmed(past))


class ConfirmsAtOnce(Altered):
    async def confirmed(self, past: int) -> int:
        return past + 1


class CountsForAll(Altered):
    """Confirmations of all pipes are thrown together."""

    total = 0

    async def write(self, frames: Sequence[bytes]) -> None:
        await self.inner.write(frames)
        type(self).total += len(frames)

    async def confirmed(self, past: int) -> int:
        return self.total if self.total > past else int(await self.inner.confirmed(past))


class ConfirmsPastHoles(Altered):
    count = 0

    async def write(self, frames: Sequence[bytes]) -> None:
        with contextlib.suppress(BusError):
            await self.inner.write(frames)
        self.count += len(frames)

    async def confirmed(self, past: int) -> int:
        while self.count <= past:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return self.count


class SaysNothing(Altered):
    async def confirmed(self, past: int) -> Any:
        try:
            return await self.inner.confirmed(past)
        except BusError:
            await asyncio.Event().wait()


class TakesAnySize(Altered):
    async def write(self, frames: Sequence[bytes]) -> None:
        await self.inner.write([frame[:1000] for frame in frames])


class Revives(Altered):
    """A pipe that was refused something takes more, over another inner one."""

    async def write(self, frames: Sequence[bytes]) -> None:
        try:
            await self.inner.write(frames)
        except BusRefused:
            self.inner = sample_bus.SamplePipe(self.inner._queues, self.inner._limit)
            raise


class DropsEmpty(Altered):
    async def write(self, frames: Sequence[bytes]) -> None:
        await self.inner.write([frame or b"?" for frame in frames])


class NeverCloses(Altered):
    async def aclose(self) -> None:
        await asyncio.Event().wait()


# feeds


class LateInPlace(AlteredBus):
    """Takes its place when it is first read."""

    async def feed(self, topic: str, start: Any, group: str | None) -> Any:
        bus = self.inner

        class Feed(Altered):
            async def read(self, *bounds: int) -> Any:
                if self.inner is None:
                    self.inner = await bus.feed(topic, start, group)
                return await self.inner.read(*bounds)

            async def aclose(self) -> None:
                if self.inner is not None:
                    await self.inner.aclose()

        return Feed(None)


class LosesWhenCancelled(Altered):
    async def read(self, *bounds: int) -> Any:
        found = await self.inner.read(*bounds)
        await asyncio.sleep(0)
        return found


class DoublesWhenCancelled(Altered):
    """Gives again what it may not have given."""

    kept: Any = None

    async def read(self, *bounds: int) -> Any:
        if self.kept:
            found, self.kept = self.kept, None
            return found
        self.kept = await self.inner.read(*bounds)
        await asyncio.sleep(0)
        found = self.kept
        if secrets.randbelow(4):
            self.kept = None
        return found


class Unbounded(Altered):
    async def read(self, max_messages: int, max_bytes: int) -> Any:
        return await self.inner.read(1000, 1 << 30)


class ReadsNothing(Altered):
    async def read(self, *bounds: int) -> Any:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                return await self.inner.read(*bounds)
        return []


class SleepsOn(Altered):
    """Nobody wakes its read when it is closed."""

    async def read(self, *bounds: int) -> Any:
        try:
            return await self.inner.read(*bounds)
        except BusError:
            await asyncio.Event().wait()


class Miscounts(Altered):
    async def read(self, *bounds: int) -> Any:
        found = await self.inner.read(*bounds)
        return [dataclasses.replace(f, messages=(f.messages or 0) + 1) if isinstance(f, Break) else f for f in found]


class HidesBreaks(Altered):
    async def read(self, *bounds: int) -> Any:
        while not (found := [f for f in await self.inner.read(*bounds) if isinstance(f, Message)]):
            pass
        return found


class StartsLate(AlteredBus):
    async def feed(self, topic: str, start: Any, group: str | None) -> Any:
        return await self.inner.feed(topic, start + 1 if isinstance(start, int) else start, group)


class ForgetsTheIncarnation(AlteredBus):
    """A place is a number like any other."""

    async def feed(self, topic: str, start: Any, group: str | None) -> Any:
        return await self.inner.feed(topic, start.position if isinstance(start, Place) else start, group)


class StandsStill(Altered):
    first: Any = None

    @property
    def place(self) -> Any:
        self.first = self.first or self.inner.place
        return self.first


class HasAPlace(Altered):
    place = Place(0, None)


class TellsTogether(Altered):
    """A break and what follows come in one read."""

    async def read(self, *bounds: int) -> Any:
        found = await self.inner.read(*bounds)
        return [*found, *await self.inner.read(*bounds)] if isinstance(found[0], Break) else found


class KeepsOldStates(Altered):
    state: Any = None

    async def read(self, *bounds: int) -> Any:
        found = await self.inner.read(*bounds)
        self.state = self.inner.state or self.state
        return found


class OneTopic(AlteredBus):
    async def pipe(self, topic: str) -> Any:
        return await self.inner.pipe(topic.rstrip("x"))

    async def feed(self, topic: str, start: Any, group: str | None) -> Any:
        return await self.inner.feed(topic.rstrip("x"), start, group)


# groups


class LosesPositions(Altered):
    async def confirm(self, position: Any, state: bytes) -> None:
        await self.inner.confirm(None, state)


class LosesStates(Altered):
    state = None


class ForgetsTheRest(Altered):
    """Whatever was read counts as done."""

    async def read(self, *bounds: int) -> Any:
        found = await self.inner.read(*bounds)
        await self.inner.release([message.position for message in found])
        return found


class KeepsTheGroup(Altered):
    async def aclose(self) -> None:
        self.inner._closed = True
        self.inner._queue.wake()


class GivesBackBehind(Altered):
    """What comes back goes behind what came back before: a quorum queue does so."""

    async def read(self, *bounds: int) -> Any:
        found = await self.inner.read(*bounds)
        self.given = getattr(self, "given", set()) | {message.position for message in found}
        return found

    async def aclose(self) -> None:
        await self.inner.aclose()
        queue, given = self.inner._queue, getattr(self, "given", set())
        back = queue.__dict__.setdefault("back", set())
        back |= given
        waiting = sorted(queue.waiting, key=lambda message: (message.position not in back, message.position in given))
        queue.waiting.clear()
        queue.waiting.extend(waiting)


class StateOfAnother(Altered):
    """State and position in two steps, and cancelled in between."""

    async def confirm(self, position: Any, state: bytes) -> None:
        await self.inner.confirm(position, self.inner._queue.state)
        await asyncio.sleep(0)
        await self.inner.confirm(None, state)


class Blocks(Altered):
    """A prefetch of twenty messages, of which those released never come free."""

    taken = 0

    async def read(self, *bounds: int) -> Any:
        if self.taken >= 20:
            await asyncio.Event().wait()
        found = await self.inner.read(*bounds)
        self.taken += len(found)
        return found


class NaiveGroups(AlteredBus):
    """A position and a state a group, stored by whoever comes: nobody is alone, nothing is compared."""

    stored: dict[tuple[str, str], tuple[int, bytes]] = {}  # noqa: RUF012  # shared on purpose: it is the system

    async def feed(self, topic: str, start: Any, group: str | None) -> Any:
        if group is None:
            return await self.inner.feed(topic, start, None)
        stored, place = self.stored, (topic, group)
        begin, known = stored.get(place, (start, None))

        class Feed(Altered):
            state = known

            async def confirm(self, position: int | None, state: bytes) -> None:
                stored[place] = (begin if position is None else position + 1, state)

        return Feed(await self.inner.feed(topic, begin, None))


# roles


class NeverForgets(AlteredBus):
    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        if value is not None:
            await self.inner.retain(topic, key, value)


class OneKey(AlteredBus):
    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        await self.inner.retain(topic, key[:1], value)

    async def retained(self, topic: str, key: str) -> Any:
        return await self.inner.retained(topic, key[:1])


class TextValues(AlteredBus):
    async def retained(self, topic: str, key: str) -> Any:
        return (await self.inner.retained(topic, key) or b"").decode("ascii", "replace").encode() or None


class RetainsLater(AlteredBus):
    before: Any = None

    async def retain(self, topic: str, key: str, value: bytes | None) -> None:
        if self.before:
            await self.inner.retain(*self.before)
        self.before = topic, key, value


class AsksTwice(AlteredBus):
    async def request(self, topic: str, data: bytes, timeout: float) -> Any:
        await self.inner.request(topic, data, timeout)
        return await self.inner.request(topic, data, timeout)


class WaitsForEver(AlteredBus):
    async def request(self, topic: str, data: bytes, timeout: float) -> Any:
        return await self.inner.request(topic, data, timeout + 60)


class AnswersInTurn(AlteredBus):
    """Answers go to askers in the order of asking, whosever they are."""

    late: list[bytes] = []  # noqa: RUF012  # shared on purpose

    async def serve(self, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        async def swapped(data: bytes) -> bytes:
            if data == b"ready?":
                return await answer(data)
            self.late.append(await answer(data))
            return self.late.pop(0) if len(self.late) > 1 else b""

        await self.inner.serve(topic, swapped)


class ServesOn(AlteredBus):
    """A server that is cancelled is still asked: a task that nobody ends goes on."""

    async def serve(self, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        tasks.append(asyncio.ensure_future(self.inner.serve(topic, answer)))
        await asyncio.shield(tasks[-1])


class AnswersAtOnce(AlteredBus):
    """As many questions at a time as there are."""

    async def serve(self, topic: str, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(self.inner.serve(topic, answer))


class NoNoAnswer(AlteredBus):
    async def request(self, topic: str, data: bytes, timeout: float) -> Any:
        try:
            return await self.inner.request(topic, data, timeout)
        except NoAnswer:
            return b""


class EndsWithTheLast(AlteredBus):
    """The end of its bounds is the last position, and not the one after it."""

    async def bounds(self, topic: str) -> Any:
        found = await self.inner.bounds(topic)
        return dataclasses.replace(found, end=max(found.first, found.end - 1))


class BeginsTooEarly(AlteredBus):
    async def bounds(self, topic: str) -> Any:
        found = await self.inner.bounds(topic)
        return dataclasses.replace(found, first=found.first - 1)


class KnowsTheFirstIncarnation(AlteredBus):
    first: dict[str, int | None] = {}  # noqa: RUF012  # of all its connections

    async def bounds(self, topic: str) -> Any:
        found = await self.inner.bounds(topic)
        return dataclasses.replace(found, incarnation=self.first.setdefault(topic, found.incarnation))


class BoundsOfOneConnection(AlteredBus):
    """What others wrote shows in its bounds one question later."""

    last: Any = None

    async def bounds(self, topic: str) -> Any:
        found, self.last = self.last, await self.inner.bounds(topic)
        return found or self.last


class Unsorted(AlteredBus):
    async def topics(self) -> Any:
        return list(await self.inner.topics())[::-1]


tasks: list[asyncio.Future[None]] = []


def pipe(kind: Any, **claims: Any) -> Any:
    return lambda inner: AlteredBus(inner, pipe=kind, **claims)


def feed(kind: Any) -> Any:
    return lambda inner: AlteredBus(inner, feed=kind)


ON_QUEUES = {
    "order_of_one_pipe": pipe(Reorders),
    "confirmed_means_readable": pipe(Loses),
    "order_of_several_pipes": pipe(Doubles),
    "confirmations_count_in_order": pipe(ConfirmsTwice),
    "confirmed_waits_for_the_next": pipe(ConfirmsAtOnce),
    "each_pipe_counts_for_itself": pipe(CountsForAll),
    "prefix_rule": pipe(ConfirmsPastHoles),
    "prefix_rule ": pipe(None, suffix_only=True),
    "prefix_rule_in_one_write": pipe(ConfirmsPastHoles),
    "oversized_message_is_refused": pipe(TakesAnySize),
    "largest_message": pipe(TakesAnySize),
    "any_bytes": pipe(TakesAnySize),
    "dead_pipe_stays_dead": pipe(Revives),
    "dead_pipe_confirms_no_more": pipe(SaysNothing),
    "nothing_and_empty": pipe(DropsEmpty),
    "closed_pipe": pipe(NeverCloses),
    "cancelled_write": pipe(Doubles),
    "latest_is_in_place": LateInPlace,
    "cancelled_read": feed(LosesWhenCancelled),
    "cancelled_read ": feed(DoublesWhenCancelled),
    "bounded_reads": feed(Unbounded),
    "read_waits": feed(ReadsNothing),
    "closed_feed": feed(SleepsOn),
    "closed_bus": feed(SleepsOn),
    "cancelled_close": feed(NeverCloses),
    "two_topics": OneTopic,
    "come_back": feed(HasAPlace),
    "group_keeps_its_place": feed(LosesPositions),
    "group_keeps_its_place ": feed(LosesStates),
    "history_of_a_group": feed(LosesPositions),
    "two_groups": feed(LosesPositions),
    "confirm_is_cumulative": feed(LosesPositions),
    "state_may_be_any_bytes": feed(LosesStates),
    "confirm_without_position": feed(LosesStates),
    "unconfirmed_is_redelivered": feed(ForgetsTheRest),
    "readers_that_die_in_a_row": feed(GivesBackBehind),
    "hand_over_at_close": feed(KeepsTheGroup),
    "cancelled_confirm": feed(StateOfAnother),
    "released_messages_do_not_block": feed(Blocks),
    "last_value_wins": NeverForgets,
    "last_value_wins ": RetainsLater,
    "values_by_topic_and_key": OneKey,
    "values_of_any_bytes": TextValues,
    "each_request_once": AsksTwice,
    "each_request_once ": AnswersInTurn,
    "nobody_answers": WaitsForEver,
    "late_answer": NoNoAnswer,
    "slow_server": AnswersAtOnce,
    "former_server": ServesOn,
}
ON_A_LOG = {
    "bounds_of_a_log": EndsWithTheLast,
    "bounds_of_a_log ": BoundsOfOneConnection,
    "bounds_of_a_topic_that_nobody_knows": BeginsTooEarly,
    "purge_is_a_break  ": KnowsTheFirstIncarnation,
    "retention_passes_a_reader": feed(Miscounts),
    "start_at_an_expired_number": feed(HidesBreaks),
    "purge_is_a_break": feed(HidesBreaks),
    "purge_is_a_break ": feed(TellsTogether),
    "purge_under_a_group": feed(KeepsOldStates),
    "come_back": feed(StandsStill),
    "come_back_after_a_purge": ForgetsTheIncarnation,
    "group_comes_back_after_a_purge": ForgetsTheIncarnation,
    "start_at_a_number": StartsLate,
    "position_never_goes_back": NaiveGroups,
    "one_reader_at_a_time": NaiveGroups,
    "former_reader_moves_nothing": NaiveGroups,
    "topics_are_listed": Unsorted,
}


def context(opener: Callable[[], Awaitable[Any]], broken: Any, **hooks: Any) -> conformance.Context:
    async def open_bus() -> Bus:
        found: Bus = broken(await opener())
        return found

    return conformance.Context(open_bus=open_bus, patience=0.5, limit=5.0, **hooks)


async def fails(name: str, broken: conformance.Context) -> None:
    (result,) = (await conformance.run(**vars(broken), only=[name.strip()])).results
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
    assert result.outcome == "failed", f"{name} is {result.outcome}: {result.reason}"


@pytest.mark.parametrize("name", ON_QUEUES)
async def test_fails_on_queues(name: str) -> None:
    @contextlib.asynccontextmanager
    async def overflow(bus: Bus, topic: str) -> Any:
        yield b"x" * bus.capabilities.max_message_bytes

    options = sample_bus.Options(hub=secrets.token_hex(4), queue_size=1 << 20)
    hooks = {"fail_in_the_middle": overflow, "cut": lambda bus: bus.aclose()}
    await fails(name, context(lambda: sample_bus.open_bus(options), ON_QUEUES[name], **hooks))


@pytest.mark.parametrize("name", ON_A_LOG)
async def test_fails_on_a_log(name: str, bus_directory: Path) -> None:
    found = driver("embedded")

    async def trim(topic: str) -> None:
        bus = await found.open_bus(found.Options(dir=bus_directory, ring_records=10))
        await (await bus.pipe(topic)).write([b"trim"])
        await bus.aclose()

    opener = lambda: found.open_bus(found.Options(dir=bus_directory))  # noqa: E731
    await fails(name, context(opener, ON_A_LOG[name], trim=trim))
