"""What the real brokers under test promise: they serve, they can be harmed, and nothing is left of them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aio_pika
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError
from aiokafka.helpers import create_ssl_context
from kazoo.client import KazooClient
from rstream import AMQPMessage, Producer

from tests.support import install, server
from tests.support.brokers import Kafka, KafkaCluster, RabbitMQ, ServerFailed, ZooKeeper, exports
from tests.support.kafka import PLAIN_USER, SCRAM_USER

ROOT = Path(__file__).parents[2]
PATIENT = {"request_timeout_ms": 20_000, "retry_backoff_ms": 50}
PERSISTENT = aio_pika.DeliveryMode.PERSISTENT


async def make(topic, bootstrap, copies=1):
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, **PATIENT)
    await admin.start()
    made = await admin.create_topics([NewTopic(topic, 1, copies)])
    await admin.close()
    assert [error[1] for error in made.topic_errors] == [0]


async def produce(topic, value, bootstrap, **how):
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", **PATIENT | how)
    try:
        await producer.start()
        return (await producer.send_and_wait(topic, value, partition=0)).offset
    finally:
        await producer.stop()


async def consume(topic, count, bootstrap, **how):
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap, **PATIENT, **how) as consumer:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        async with asyncio.timeout(60):
            return [(await consumer.getone()).value for _ in range(count)]


@asynccontextmanager
async def channel(url):
    async with await aio_pika.connect(url) as connection:
        yield await connection.channel()


def leftovers(directory):
    """The processes that have to do with a directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{directory}/" in f"{os.readlink(process / 'cwd')}/ {(process / 'cmdline').read_text()}":
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it is gone, or a zombie
    return found


def gone(directory):
    """Whether directory and processes are gone, within the time that helpers of a killed Erlang take to see it."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (leftovers(directory) or directory.exists()):
        time.sleep(0.02)
    return not leftovers(directory) and not directory.exists()


async def test_a_killed_kafka_is_back_with_what_it_acknowledged(kafka):
    await make("killed", kafka.bootstrap)
    assert await produce("killed", b"one", kafka.bootstrap) == 0
    before = kafka.bootstrap, kafka.nodes[0].pid
    kafka.kill()
    assert not kafka.nodes[0].running
    await asyncio.to_thread(kafka.restart)
    assert kafka.bootstrap == before[0]
    assert kafka.nodes[0].pid != before[1]
    assert await produce("killed", b"two", kafka.bootstrap) == 1
    assert await consume("killed", 2, kafka.bootstrap) == [b"one", b"two"]


async def test_a_frozen_kafka_says_nothing_until_it_is_thawed(kafka):
    await make("frozen", kafka.bootstrap)
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, enable_idempotence=False, **PATIENT) as producer:
        await producer.send_and_wait("frozen", b"before")
        kafka.freeze()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await producer.send_and_wait("frozen", b"late")
        kafka.thaw()
        await producer.send_and_wait("frozen", b"after")
    assert await consume("frozen", 3, kafka.bootstrap) == [b"before", b"late", b"after"]


@pytest.mark.parametrize("harm", ["kill", "freeze", "stop"])
def test_a_shared_broker_serves_whatever_the_test_before_did_to_it(zookeeper, harm):
    assert zookeeper.nodes[0].serves()
    getattr(zookeeper, harm)()


async def test_no_client_finds_a_way_around_the_proxy_of_kafka(kafka):
    await make("proxied", kafka.bootstrap)
    async with kafka.proxy() as proxy:
        there = f"127.0.0.1:{proxy.port}"
        async with AIOKafkaProducer(bootstrap_servers=there, enable_idempotence=False, **PATIENT) as producer:
            await producer.send_and_wait("proxied", b"passes")
            proxy.swallow("up")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await producer.send_and_wait("proxied", b"is lost, and sent again")
            assert await consume("proxied", 1, kafka.bootstrap) == [b"passes"]
            assert await produce("proxied", b"passes by", kafka.bootstrap) == 1
            proxy.heal()
            await producer.send_and_wait("proxied", b"passes too")
    found = await consume("proxied", 4, kafka.bootstrap)
    assert found == [b"passes", b"passes by", b"is lost, and sent again", b"passes too"]


async def test_kafka_takes_more_configuration_and_clients_with_tls_and_passwords():
    async with Kafka(secure=True, config="message.max.bytes=4242") as kafka:
        await make("secure", kafka.bootstrap)
        context = create_ssl_context(cafile=str(kafka.certificate))
        for mechanism, (user, password) in {"PLAIN": PLAIN_USER, "SCRAM-SHA-256": SCRAM_USER}.items():
            name = {"sasl_mechanism": mechanism, "sasl_plain_username": user, "sasl_plain_password": password}
            for protocol in ("SASL_PLAINTEXT", "SASL_SSL"):
                how = {"security_protocol": protocol, "ssl_context": context, **name}
                await produce("secure", b"x", kafka.settings[protocol.lower()], **how)
        await produce("secure", b"x", kafka.settings["ssl"], security_protocol="SSL", ssl_context=context)
        assert await consume("secure", 5, kafka.bootstrap) == [b"x"] * 5
        with pytest.raises(KafkaError):
            wrong = {"sasl_mechanism": "PLAIN", "sasl_plain_username": "alice", "sasl_plain_password": "wrong"}
            await produce("secure", b"x", kafka.settings["sasl_plaintext"], security_protocol="SASL_PLAINTEXT", **wrong)
        with pytest.raises(KafkaError, match="TooLarge"):
            await produce("secure", b"x" * 5_000, kafka.bootstrap)


async def test_three_kafkas_go_on_without_one_of_them():
    async with KafkaCluster() as cluster:
        await make("three", cluster.bootstrap, copies=3)
        async with AIOKafkaProducer(bootstrap_servers=cluster.bootstrap, acks="all", **PATIENT) as producer:
            await producer.send_and_wait("three", b"before")
            leader = producer.client.cluster.leader_for_partition(TopicPartition("three", 0))
            cluster.nodes[leader - 1].kill()
            await producer.send_and_wait("three", b"without")
            await asyncio.to_thread(cluster.nodes[leader - 1].restart)
            await producer.send_and_wait("three", b"after")
        assert await consume("three", 3, cluster.bootstrap) == [b"before", b"without", b"after"]


def test_a_killed_zookeeper_is_back_with_its_nodes(zookeeper):
    client = KazooClient(hosts=zookeeper.hosts)
    client.start(timeout=60)
    client.create("/kept", b"value")
    client.create("/ephemeral", ephemeral=True)
    client.stop()
    client.close()
    zookeeper.kill()
    zookeeper.restart()
    client.start(timeout=60)
    assert client.get("/kept")[0] == b"value"
    assert client.exists("/ephemeral") is None
    client.stop()
    client.close()


def has_written(directory: Path, text: bytes) -> bool:
    """Whether the broker's list of durable queues says so on the disk."""
    files = [
        file for file in directory.rglob("*") if file.suffix in (".LOG", ".DCL", ".DCD", ".wal") and file.is_file()
    ]
    return any(text in file.read_bytes() for file in files)


async def test_a_killed_rabbitmq_is_back_with_what_it_confirmed(own_rabbitmq):
    with suppress(aio_pika.exceptions.AMQPError, OSError):  # nobody says good-bye to a killed broker
        async with channel(own_rabbitmq.url) as before:
            await before.declare_queue("killed", durable=True)
            await before.default_exchange.publish(aio_pika.Message(b"kept", delivery_mode=PERSISTENT), "killed")
            async with asyncio.timeout(60):
                while not await asyncio.to_thread(has_written, own_rabbitmq.directory, b"killed"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)  # the broker writes what queues there are a little later
            own_rabbitmq.kill()
    assert not own_rabbitmq.nodes[0].running
    await asyncio.to_thread(own_rabbitmq.restart)
    async with channel(own_rabbitmq.url) as after:
        queue = await after.get_queue("killed")
        message = await queue.get(timeout=60)
        assert message.body == b"kept"
        await message.ack()


async def test_a_frozen_rabbitmq_confirms_when_it_is_thawed(rabbitmq):
    async with channel(rabbitmq.url) as client:
        await client.declare_queue("frozen", auto_delete=True)
        rabbitmq.freeze()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.default_exchange.publish(aio_pika.Message(b"x"), "frozen")
        rabbitmq.thaw()
        async with asyncio.timeout(60):
            await client.default_exchange.publish(aio_pika.Message(b"y"), "frozen")


async def test_rabbitmq_has_streams_and_tells_events(rabbitmq):
    async with channel(rabbitmq.url) as client:
        await client.declare_exchange("amq.rabbitmq.event", "topic", durable=True, passive=True)
    async with Producer("127.0.0.1", rabbitmq.stream_port, username="guest", password="guest") as producer:
        await producer.create_stream("stream")
        assert await producer.send_wait("stream", AMQPMessage(body=b"x")) == 1
        await producer.delete_stream("stream")
    assert "rabbitmq_stream" in rabbitmq.ctl("list", "-e", "-m", tool="rabbitmq-plugins")


async def test_a_cluster_of_two_rabbitmqs_is_one_broker_and_comes_back():
    async with RabbitMQ(count=2, config="consumer_timeout = 3600000\n") as cluster:
        async with channel(cluster.nodes[0].url) as one, channel(cluster.nodes[1].url) as other:
            for each in one, other:  # the other node may hear of a queue of the one later than we do
                await each.declare_queue("q", durable=True)
            await other.default_exchange.publish(aio_pika.Message(b"x", delivery_mode=PERSISTENT), "q")
            assert (await (await one.get_queue("q")).get(timeout=60, no_ack=True)).body == b"x"
            cluster.nodes[1].kill()
            async with asyncio.timeout(60):
                await one.default_exchange.publish(aio_pika.Message(b"y", delivery_mode=PERSISTENT), "q")
        await asyncio.to_thread(cluster.nodes[1].restart)
        async with channel(cluster.nodes[1].url) as other:
            assert (await (await other.get_queue("q")).get(timeout=60, no_ack=True)).body == b"y"


def test_the_logs_are_kept_when_the_test_failed(capfd):
    with pytest.raises(AssertionError), ZooKeeper() as broker:
        raise AssertionError
    assert gone(broker.directory)
    said = capfd.readouterr().err
    assert "logs of ZooKeeper are kept in" in said
    kept = Path(said.split()[-1])
    assert [log.name for log in kept.iterdir()] == ["zookeeper.log"]
    kept.joinpath("zookeeper.log").unlink()
    kept.rmdir()


async def test_a_start_that_is_cancelled_leaves_nothing():
    broker = Kafka()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), broker:
            pass
    assert gone(broker.directory)
    with pytest.raises(ServerFailed):
        broker.nodes[0].restart()


@pytest.mark.parametrize("make_broker", [Kafka, ZooKeeper, RabbitMQ])
def test_a_port_that_somebody_took_is_replaced_and_nothing_is_left(make_broker, monkeypatch, capfd):
    real, tried = server.free_ports, []

    def first_taken(count):
        tried.append(real(count))
        if len(tried) == 1:
            taken.bind(("127.0.0.1", tried[0][-1] if make_broker is RabbitMQ else tried[0][0]))
            taken.listen()
        return tried[-1]

    monkeypatch.setattr(f"{make_broker.__module__}.free_ports", first_taken)
    with socket.socket() as taken, make_broker() as broker:
        assert len(tried) == 2
        assert all(node.serves() for node in broker.nodes)
        directory = broker.directory
        assert leftovers(directory)
        broker.freeze()
    assert gone(directory)
    assert "kept" not in capfd.readouterr().err


def test_a_broken_configuration_is_an_error_that_shows_the_log(capfd):
    with pytest.raises(ServerFailed, match="NumberFormatException"), ZooKeeper(config="tickTime=no"):
        pass
    kept = Path(capfd.readouterr().err.split()[-1])
    kept.joinpath("zookeeper.log").unlink()
    kept.rmdir()


def run(*arguments):
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_the_command_says_how_to_connect_and_ends_on_a_signal():
    with run("-m", "tests.support.brokers", "zookeeper") as process:
        assert process.stdout.readline().startswith("hosts=127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stdout.read() == ""


def test_a_line_for_a_shell_chooses_the_broker(kafka, rabbitmq):
    assert exports("kafka", kafka) == f"export ESP_PUBSUB_BUS=kafka ESP_PUBSUB_HOSTPORT={kafka.bootstrap}"
    node = rabbitmq.nodes[0]
    assert exports("rabbitmq", rabbitmq) == (
        f"export ESP_PUBSUB_BUS=rabbitmq ESP_PUBSUB_HOST=127.0.0.1:{node.port} "
        f"ESP_PUBSUB_STREAMPORT={rabbitmq.stream_port} ESP_PUBSUB_MODE=stream"
    )


def test_a_broker_ends_with_a_process_that_was_killed():
    code = "from tests.support.brokers import *; zookeeper = ZooKeeper(); zookeeper.start(); print(zookeeper.directory)"
    with run("-uc", code + "; import time; time.sleep(99)") as process:
        directory = Path(process.stdout.readline().strip())
        assert leftovers(directory)
        process.kill()
    assert gone(directory)


def test_what_is_missing_and_cannot_be_installed_is_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(install.Missing, match="as root: apt-get install some-package"):
        install.debian("no-such-program", "some-package")


def test_what_is_cached_is_whole_and_made_once(monkeypatch, tmp_path):
    monkeypatch.setattr(install, "CACHE", tmp_path)
    made = []

    def fill(place):
        made.append(place)
        (place / "file").write_text("")
        if len(made) == 1:
            raise OSError("in the middle")

    with pytest.raises(OSError, match="in the middle"):
        install.cached("it", fill)
    assert not (tmp_path / "it").exists()
    for _ in range(2):
        assert [file.name for file in install.cached("it", fill).iterdir()] == ["file"]
    assert len(made) == 2
