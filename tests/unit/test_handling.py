"""Handlers: each block in order, once it is done confirmed, and what happens to one that cannot be handled."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import esp_pubsub as esp
from esp_pubsub import dead_letters
from tests.unit.workbench import SYMBOLS, TOPIC, URL, Bench, block, outcome, until

IN = f"{URL}?side=in"
DEAD = "dfESP://test:5555/project/query/dead"
DEAD_TOPIC = "test:5555/project/query/dead/I"


@asynccontextmanager
async def handling(bench: Bench, function: Any, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
    """A handler at work, as in a service: a task that is cancelled at the end."""
    task = asyncio.ensure_future(esp.handle(bench.client, IN, function, **{"group": "g"} | options))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def seen_by(seen: list[int], *fails: int, times: int = 1_000_000) -> Callable[[esp.Block], Any]:
    """A handler that raises on these numbers, so many times each."""
    left = dict.fromkeys(fails, times)

    async def function(block: esp.Block) -> None:
        number = block.rows()[0][0]
        seen.append(number)
        if left.get(number):
            left[number] -= 1
            raise LookupError(f"no such thing as {number}")

    return function


async def dead(bench: Bench, count: int) -> list[esp.Block]:
    """The dead letters, once there are so many."""
    async with asyncio.timeout(60):
        while (await bench.inner.bounds(DEAD_TOPIC)).end < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        async with bench.client.subscriber(DEAD, side="in", start="earliest") as sub:
            return [await anext(sub) for _ in range(count)]


async def test_blocks_are_handled_in_order_and_the_next_reader_goes_on_after_them(bench: Bench) -> None:
    await bench.publish(1, 2, 3)
    seen: list[int] = []
    async with handling(bench, seen_by(seen)):
        await until(lambda: len(seen) == 3)
    await bench.publish(4)
    async with handling(bench, seen_by(seen)):
        await until(lambda: len(seen) == 4)
    assert seen == [1, 2, 3, 4]


async def test_a_handler_that_raises_stops_and_its_block_comes_again(bench: Bench) -> None:
    await bench.publish(1, 2, 3)
    seen: list[int] = []
    async with handling(bench, seen_by(seen, 2)) as task:
        stopped = await outcome(task)
    assert isinstance(stopped, esp.HandlerFailed) and isinstance(stopped.__cause__, LookupError)
    assert stopped.block.endswith(":0:2")
    assert f"the handler raised LookupError on block {stopped.block} of {TOPIC}: no such thing as 2" in str(stopped)
    async with handling(bench, seen_by(seen)):
        await until(lambda: len(seen) == 4)
    assert seen == [1, 2, 2, 3]


async def test_a_block_may_be_skipped(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.publish(1, 2, 3)
    seen: list[int] = []
    async with handling(bench, seen_by(seen, 2), on_error="skip"):
        await until(lambda: 3 in seen)
    assert seen == [1, 2, 3]
    assert "is skipped: LookupError: no such thing as 2" in caplog.text
    [record] = caplog.records
    assert vars(record)["esp_topic"] == TOPIC and vars(record)["esp_block"].endswith(":0:2")


async def test_a_handler_is_tried_again_before_it_is_given_up(bench: Bench) -> None:
    await bench.publish(1, 2)
    seen: list[int] = []
    policy = esp.retry(3, delay=0.001, multiplier=1).then("skip")
    async with handling(bench, seen_by(seen, 1), on_error=policy):
        await until(lambda: 2 in seen)
    assert seen == [1, 1, 1, 1, 2]


async def test_a_try_that_succeeds_ends_the_tries(bench: Bench) -> None:
    await bench.publish(1, 2)
    seen: list[int] = []
    async with handling(bench, seen_by(seen, 1, times=2), on_error=esp.retry(3, delay=0.001)):
        await until(lambda: 2 in seen)
    assert seen == [1, 1, 1, 2]


async def test_a_dead_letter_is_the_block_with_what_went_wrong(bench: Bench) -> None:
    async with bench.client.publisher(URL, SYMBOLS) as pub:
        delivery = await pub.inject([(1, "a"), (2, None)], opcode=[1, 3], transactional=True)
    async with handling(bench, seen_by([], 1), on_error=esp.dead_letter(DEAD)):
        [letter] = await dead(bench, 1)
    name = f"{pub.source:016x}:0:{delivery.id}"
    assert [(opcode, row[:-1]) for opcode, row in letter.changes()] == [
        (esp.Opcode.INSERT, (1, "a", name, f"{URL}?side=in", "LookupError: no such thing as 1")),
        (esp.Opcode.DELETE, (2, None, name, f"{URL}?side=in", "LookupError: no such thing as 1")),
    ]
    assert letter.transactional


async def test_a_block_that_comes_again_is_a_dead_letter_once(bench: Bench) -> None:
    await bench.publish(1, 2, 3)
    for _ in range(3):
        bench.faults.hang("confirm")  # what was done is never confirmed, as if the process was killed before
        seen: list[int] = []
        async with handling(bench, seen_by(seen, 2), on_error=esp.dead_letter(DEAD)):
            await until(lambda: 3 in seen)  # noqa: B023
            bench.faults.lose_link()
        bench.faults.restore()
        bench.faults.heal()
    assert [letter.rows()[0][0] for letter in await dead(bench, 1)] == [2]
    assert (await bench.inner.bounds(DEAD_TOPIC)).end == 1


async def test_a_block_that_cannot_be_read_is_no_dead_letter_and_stops(bench: Bench) -> None:
    await bench.publish(1)
    await bench.raw(block(1, body=b"nonsense"))
    async with handling(bench, reads, on_error=esp.dead_letter(DEAD)) as task:
        stopped = await outcome(task)
    assert isinstance(stopped, esp.HandlerFailed) and isinstance(stopped.__cause__, esp.BadBody)


async def reads(block: esp.Block) -> None:
    block.rows()


async def test_dead_letters_are_replayed_to_where_they_came_from_and_once(bench: Bench) -> None:
    async with bench.client.publisher(URL, SYMBOLS) as pub:
        await pub.inject([(1, "a"), (2, None)], opcode=[4, 3])
    await bench.publish(7)
    async with handling(bench, seen_by([], 1, 7), on_error=esp.dead_letter(DEAD)):
        await dead(bench, 2)
    assert await dead_letters.replay(bench.client, DEAD, wait=0.1) == 2
    assert await dead_letters.replay(bench.client, DEAD, wait=0.1) == 0
    blocks = await bench.blocks(4)
    assert [block.changes() for block in blocks[2:]] == [block.changes() for block in blocks[:2]]


async def test_what_is_no_window_of_dead_letters_is_not_replayed(bench: Bench) -> None:
    await bench.publish(1)
    with pytest.raises(esp.ConfigError, match="is no window of dead letters: its schema is id"):
        await dead_letters.replay(bench.client, URL, wait=0.1)


async def test_a_block_that_is_at_work_is_done_before_a_cancelled_handler_ends(bench: Bench) -> None:
    await bench.publish(1, 2)
    begun, may_end, seen = asyncio.Event(), asyncio.Event(), list[int]()

    async def slow(block: esp.Block) -> None:
        begun.set()
        await may_end.wait()
        seen.append(block.rows()[0][0])

    async with handling(bench, slow) as task:
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
    assert task.cancelled() and seen == [1]
    async with handling(bench, seen_by(seen)):
        await until(lambda: len(seen) == 2)
    assert seen == [1, 2]


async def test_a_block_that_takes_too_long_to_end_comes_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.publish(1)
    begun, seen = asyncio.Event(), list[int]()

    async def stuck(block: esp.Block) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with handling(bench, stuck, drain=0.01):
        await begun.wait()
    assert "took more than 0.01 s to end; its block comes again" in caplog.text
    async with handling(bench, seen_by(seen)):
        await until(lambda: seen == [1])


async def test_a_handler_that_is_cancelled_from_within_has_failed(bench: Bench) -> None:
    await bench.publish(1)

    async def gives_up(block: esp.Block) -> None:
        raise asyncio.CancelledError

    async with handling(bench, gives_up) as task:
        stopped = await outcome(task)
    assert isinstance(stopped, esp.HandlerFailed) and "the handler raised CancelledError" in str(stopped)


async def test_a_handler_works_in_the_lifespan_of_a_web_service_and_ends_with_it() -> None:
    begun, seen = asyncio.Event(), list[int]()

    async def function(block: esp.Block) -> None:
        begun.set()
        await asyncio.sleep(0.02)
        seen.append(block.rows()[0][0])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            esp.init("memory", name="web") as client,
            client.publisher(IN, SYMBOLS) as app.state.pub,
            asyncio.TaskGroup() as tasks,
        ):
            handling = tasks.create_task(esp.handle(client, IN, function, group="g"))
            yield
            handling.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.put("/{number}")
    async def put(number: int) -> None:
        await app.state.pub.inject([(number, "a")])

    async with (
        asyncio.timeout(60),
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as web,
    ):
        assert (await web.put("/7")).status_code == 200
        await begun.wait()
    assert seen == [7]


async def test_a_pause_between_two_tries_does_not_hold_up_the_end(bench: Bench) -> None:
    await bench.publish(1)
    seen: list[int] = []
    async with asyncio.timeout(5):
        async with handling(bench, seen_by(seen, 1), on_error=esp.retry(1, delay=3600)):
            await until(lambda: seen == [1])


async def test_while_the_bus_is_away_handling_goes_on_and_is_confirmed_later(bench: Bench) -> None:
    await bench.publish(1, 2)
    seen: list[int] = []
    async with handling(bench, seen_by(seen)):
        await until(lambda: len(seen) == 2)
        bench.faults.lose_link()
        bench.faults.restore()
        await bench.publish(3)
        await until(lambda: 3 in seen)
    async with bench.client.subscriber(IN, group="g") as sub:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(sub)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"function": print}, "a handler is a function that is defined by `async def`, not <built-in"),
        ({"group": None}, "group is a name, such as 'billing', not None"),
        ({"on_error": esp.dead_letter("dead")}, "the scheme is not dfESP"),
        ({"on_error": "retry"}, r"it is 'stop', 'skip' or esp\.dead_letter\(url\), not 'retry'"),
    ],
)
async def test_what_cannot_be_meant_is_refused(bench: Bench, wrong: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"function": reads, "group": "g"} | wrong
    with pytest.raises(esp.ConfigError, match=words):
        await esp.handle(bench.client, IN, given.pop("function"), **given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: esp.retry(-1), r"retry\(times\) is a number from 0 on, not -1"),
        (lambda: esp.retry(delay="1s"), r"retry\(delay=\.\.\.\) is a number from 0 on, not '1s'"),  # type: ignore[arg-type]
        (lambda: esp.retry(multiplier=0.5), r"retry\(multiplier=\.\.\.\) is a number from 1 on, not 0\.5"),
        (lambda: esp.retry().then("ignore"), "after the last try it is 'stop', 'skip' or"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_that_cannot_be_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(esp.ConfigError, match=words):
        make()
