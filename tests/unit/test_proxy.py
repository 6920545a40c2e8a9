"""Each fault of the proxy, as a socket sees it."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager, suppress

import pytest

from tests.support.proxy import CHUNK, ROOM, Proxy

QUIET = 0.05  # seconds in which nothing comes


class Broker:
    """Echoes, on any number of connections."""

    def __init__(self):
        self.got = bytearray()
        self.first = None  # when anything came
        self.ended = []


class Echo(asyncio.Protocol):
    def __init__(self, broker):
        self.broker = broker

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.broker.first = self.broker.first or time.monotonic()
        self.broker.got += data
        self.transport.write(data)

    def connection_lost(self, exc):
        self.broker.ended.append("reset" if exc else "end")


class Client:
    """A plain socket: what has come before a reset is still read."""

    def __init__(self, sock):
        self.sock = sock
        self.loop = asyncio.get_running_loop()

    async def send(self, data):
        async with asyncio.timeout(60):
            await self.loop.sock_sendall(self.sock, data)

    async def receive(self, count):
        got = b""
        async with asyncio.timeout(60):
            while len(got) < count and (data := await self.loop.sock_recv(self.sock, count - len(got))):
                got += data
        return got

    async def ask(self, data=b"ping"):
        await self.send(data)
        return await self.receive(len(data))

    async def hears_nothing(self):
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET):
                return await self.loop.sock_recv(self.sock, 1) is None
        return True

    async def is_reset(self):
        try:
            return await self.receive(1) is None
        except ConnectionResetError:
            return True


@pytest.fixture
async def broker():
    broker = Broker()
    server = await asyncio.get_running_loop().create_server(lambda: Echo(broker), "127.0.0.1", 0)
    broker.port = server.sockets[0].getsockname()[1]
    yield broker
    server.close()
    await server.wait_closed()


@pytest.fixture
async def proxy(broker):
    async with Proxy("127.0.0.1", broker.port) as proxy:
        yield proxy


@asynccontextmanager
async def connected(proxy):
    with socket.socket() as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", proxy.port))
        yield Client(sock)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def has_lost_some(proxy):
    return any(pipe.torn for pipes in proxy._links.values() for pipe in pipes)


async def test_without_a_fault_everything_passes_and_an_end_is_an_end(proxy, broker):
    async with connected(proxy) as client:
        sent = bytes(range(256)) * 8192
        async with asyncio.TaskGroup() as both:
            both.create_task(client.send(sent))
            assert await client.receive(len(sent)) == sent
        assert proxy.connections == 1
        client.sock.shutdown(socket.SHUT_WR)
        assert await client.receive(1) == b""
    await until(lambda: proxy.connections == 0)
    assert broker.ended == ["end"]


async def test_new_connections_are_refused_and_old_ones_stay(proxy):
    async with connected(proxy) as client:
        await client.ask()
        for _ in range(2):
            proxy.refuse()
            await asyncio.sleep(0)
            with pytest.raises(ConnectionRefusedError):
                async with connected(proxy):
                    pass
            assert await client.ask() == b"ping"
        proxy.heal()
        async with connected(proxy) as other:
            assert await other.ask() == b"ping"


async def test_a_broker_that_cannot_be_reached_is_a_reset():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with Proxy("127.0.0.1", port) as proxy, connected(proxy) as client:
        assert await client.is_reset()


async def test_a_cut_is_a_reset_on_both_sides(proxy, broker):
    async with connected(proxy) as one, connected(proxy) as other:
        await one.ask()
        await other.ask()
        proxy.cut()
        assert await one.is_reset()
        assert await other.is_reset()
        await until(lambda: broker.ended == ["reset", "reset"])
        async with connected(proxy) as again:
            assert await again.ask() == b"ping"


async def test_a_reset_of_one_side_comes_through(proxy, broker):
    async with connected(proxy) as client:
        await client.ask()
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    await until(lambda: broker.ended == ["reset"])


async def test_what_goes_up_is_swallowed(proxy, broker):
    proxy.swallow("up")
    async with connected(proxy) as client:
        await client.send(b"x" * CHUNK * ROOM * 4)
        await until(lambda: has_lost_some(proxy))
        assert await client.hears_nothing()
        assert broker.got == b""
        proxy.heal()
        assert await client.is_reset()
    await until(lambda: broker.ended == ["reset"])


async def test_what_comes_down_is_swallowed_and_connections_that_lost_nothing_live(proxy, broker):
    async with connected(proxy) as idle, connected(proxy) as client:
        await idle.ask()
        await client.ask()
        proxy.swallow("down")
        await client.send(b"lost")
        await until(lambda: has_lost_some(proxy))
        assert await client.hears_nothing()
        assert broker.got == b"pingpinglost"
        proxy.heal()
        assert await client.is_reset()
        assert await idle.ask() == b"ping"


async def test_a_swallowed_end_is_not_seen(proxy, broker):
    async with connected(proxy) as client:
        await client.ask()
        proxy.swallow()
    await until(lambda: has_lost_some(proxy))
    await asyncio.sleep(QUIET)
    assert broker.ended == []
    assert proxy.connections == 1
    proxy.heal()
    await until(lambda: broker.ended == ["reset"])


async def test_a_half_open_connection_has_no_answer_and_no_end_for_good_and_a_new_one_is_whole(proxy, broker):
    async with connected(proxy) as client, connected(proxy) as gone:
        await client.ask()
        await gone.ask()
        proxy.half_open()
        await client.send(b"lost")
        assert await client.hears_nothing()
        async with connected(proxy) as new:
            assert await new.ask(b"more") == b"more"
            proxy.heal()
            assert await client.hears_nothing()
            gone.sock.close()
            await new.ask(b"last")
    assert broker.got == b"pingpingmorelast"
    await until(lambda: broker.ended == ["end"])  # of the new one, and of no other


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_delay_is_a_delay_and_not_a_throttle(proxy, broker, way):
    async with connected(proxy) as client:
        proxy.delay(0.3, way)
        begun = time.monotonic()
        for number in range(20):
            await client.send(b"%d" % (number % 10))
            await asyncio.sleep(0.01)
        assert await client.receive(1) == b"0"
        way_up, way_down = broker.first - begun, time.monotonic() - broker.first
        assert (way_up if way == "up" else way_down) >= 0.3
        assert await client.receive(19) == b"123456789" + b"0123456789"
        assert time.monotonic() - begun < 0.3 * 20


@pytest.mark.parametrize("way", ["up", "down"])
async def test_what_is_not_delayed_does_not_wait_for_the_other_way(proxy, broker, way):
    async with connected(proxy) as client:
        proxy.delay(3_600, way)
        await client.send(b"late")
        if way == "down":
            await until(lambda: broker.got == b"late")
        assert await client.hears_nothing()
        assert broker.got == (b"late" if way == "down" else b"")


async def test_what_is_delayed_passes_when_healed(proxy, broker):
    async with connected(proxy) as client:
        proxy.delay(3_600)
        await client.send(b"late")
        assert await client.hears_nothing()
        proxy.heal()
        assert await client.receive(4) == b"late"


async def test_what_waits_is_bounded(proxy):
    proxy.delay(3_600, "up")
    async with connected(proxy) as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.loop.sock_sendall(client.sock, b"x" * (64 << 20))


async def test_a_throttle_lets_so_many_bytes_pass(proxy):
    async with connected(proxy) as client:
        proxy.throttle(100_000, "down")
        begun = time.monotonic()
        assert len(await client.ask(b"x" * 20_000)) == 20_000
        assert 0.15 < time.monotonic() - begun < 10
        proxy.throttle(1, "down")
        await client.send(b"x" * 20_000)
        await asyncio.sleep(QUIET)
        proxy.heal()
        assert len(await client.receive(20_000)) == 20_000


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("count", [0, 5])
async def test_a_connection_is_cut_behind_so_many_bytes_once(proxy, broker, way, count):
    async with connected(proxy) as client, connected(proxy) as other:
        await other.ask(b"")
        proxy.cut_after(count, way)
        await client.send(b"request")
        if way == "down":
            assert await client.receive(count) == b"request"[:count]
        assert await client.is_reset()
        await until(lambda: broker.got == (b"request" if way == "down" else b"request"[:count]))
        assert await other.ask() == b"ping"


async def test_one_way_ends_and_the_other_goes_on(proxy, broker):
    async with connected(proxy) as client:
        await client.ask()
        proxy.half_close("down")
        assert await client.receive(1) == b""
        await client.send(b"more")
        await until(lambda: broker.got == b"pingmore")
    async with connected(proxy) as client:
        await client.ask()
        proxy.half_close("up")
        assert await client.receive(1) == b""  # the broker saw the end, and ended
    await until(lambda: broker.ended == ["end", "end"])


async def test_nothing_is_left_when_it_closes_in_the_middle_of_everything(broker):
    async with Proxy("127.0.0.1", broker.port) as proxy, connected(proxy) as client, connected(proxy):
        proxy.delay(60)
        proxy.throttle(1)
        await client.send(b"x" * CHUNK)
        await asyncio.sleep(QUIET)
    with pytest.raises(ConnectionRefusedError):
        async with connected(proxy):
            pass
