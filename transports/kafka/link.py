"""What we ask of aiokafka, and what its errors mean: connections with one set of settings, and the broker's facts.

Nothing of the client leaves this folder. Every question has the client's own deadline, `timeout`; where the client is
known to wait without one, ours stands around it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.abc import AbstractTokenProvider
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import (
    AuthenticationFailedError,
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    IllegalSaslStateError,
    InvalidReplicationFactorError,
    InvalidTimestampError,
    InvalidTopicError,
    KafkaError,
    MessageSizeTooLargeError,
    NodeNotReadyError,
    PolicyViolationError,
    SaslAuthenticationFailed,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    UnsupportedSaslMechanismError,
    UnsupportedVersionError,
    for_code,
)
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest

from esp_pubsub.errors import BusRefused, BusUnavailable, EspError

from .client import prepare
from .options import Settings
from .topic_id import TopicId

_REFUSED = (
    AuthenticationFailedError,
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    IllegalSaslStateError,
    InvalidReplicationFactorError,
    InvalidTimestampError,
    InvalidTopicError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnsupportedSaslMechanismError,
    UnsupportedVersionError,
)
_AS_SET = -1
_LARGEST = 1_048_588  # a broker's message.max.bytes unless it is set otherwise
_log = logging.getLogger("esp_pubsub.kafka")


@contextmanager
def words(what: str) -> Iterator[None]:
    """Say the client's errors in ours: BusRefused where the broker answered no, BusUnavailable for all the rest.

    All the rest: from inside the client comes whatever Python raises, and none of it is to end more than a connection.
    """
    try:
        yield
    except EspError:
        raise
    except _REFUSED as e:
        raise BusRefused(f"{what}: the broker refused ({type(e).__name__}: {e})") from e
    except Exception as e:
        raise BusUnavailable(f"{what}: {type(e).__name__}: {e}") from e


class _Token(AbstractTokenProvider):
    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def token(self) -> str:
        """The file's content; read anew each time, because tokens are replaced."""
        return (await asyncio.to_thread(self._path.read_text)).strip()


_AT_WORK = ("_coordinator", "_fetcher", "_sender")  # the parts of a client that have tasks


class Link:
    """Connections to one cluster."""

    def __init__(self, settings: Settings, context: ssl.SSLContext | None) -> None:
        self.settings = settings
        self.timeout = settings.options.timeout
        self._context = context
        self._common: dict[str, Any] = {
            "bootstrap_servers": settings.options.hostport,
            "client_id": settings.client_id,
            "request_timeout_ms": round(self.timeout * 1000),
            "retry_backoff_ms": 20,
            "security_protocol": settings.protocol,
            "ssl_context": context,
            "sasl_mechanism": settings.mechanism,
            "sasl_plain_username": settings.username,
            "sasl_plain_password": settings.password,
        }
        if settings.options.tokenfile:
            self._common["sasl_oauth_token_provider"] = _Token(settings.options.tokenfile)
        self._admin: AIOKafkaAdminClient | None = None
        self._asker: AIOKafkaConsumer | None = None
        self._answered = -1  # the broker that answered last
        self._starting = asyncio.Lock()
        self._stopping: set[asyncio.Task[None]] = set()
        self._closed = False

    def producer(self, batch_bytes: int) -> AIOKafkaProducer:
        """A producer that is not started yet. Not idempotent unless told so: then it would never give a batch up."""
        settings = self.settings
        producer = AIOKafkaProducer(
            **self._common,
            acks="all",
            max_batch_size=batch_bytes,
            max_request_size=batch_bytes + (1 << 20),
            compression_type=settings.compression,
            enable_idempotence=settings.idempotent,
        )
        prepare(producer.client)
        return producer

    def consumer(self, unsure: Callable[[], None] = lambda: None, **more: Any) -> AIOKafkaConsumer:
        """A consumer that is not started yet, commits nothing by itself, and, unless told otherwise, says when a
        position is not there. `unsure`: see `prepare`.
        """
        ours = {
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "fetch_max_wait_ms": 100,  # how fresh it is known that fetches are answered; no message waits for it
            "max_partition_fetch_bytes": self.settings.options.fetch_size,
        }
        consumer = AIOKafkaConsumer(**{**self._common, **ours, **more})
        prepare(consumer._client, unsure)  # noqa: SLF001
        return consumer

    @asynccontextmanager
    async def started(self, client: Any, what: str) -> AsyncIterator[None]:
        """Start a client; stop it again if that fails or the body does.

        A start that is cancelled leaves sockets behind. So who is cancelled here leaves it to itself, and does not wait
        for its end; only one that has no end is cancelled: an idempotent producer waits as long as the broker does.
        """
        starting = asyncio.ensure_future(client.start())
        hosts = self.settings.options.hostport.count(",") + 1
        try:
            with words(what):
                async with asyncio.timeout((hosts + 2) * self.timeout):
                    await asyncio.shield(starting)
            yield
        except asyncio.CancelledError:
            self._begin_to_stop(client, starting)
            raise
        except BaseException:
            starting.cancel()  # if it is not done by now
            await asyncio.shield(self._begin_to_stop(client, starting))
            raise

    async def stopped(self, client: Any) -> None:
        """Stop a client, within a bound, whatever state the broker is in; carried out even if the caller goes away."""
        await asyncio.shield(self._begin_to_stop(client, None))

    def _begin_to_stop(self, client: Any, starting: asyncio.Future[None] | None) -> asyncio.Task[None]:
        return self.finish(self._stop(client, starting))

    def finish(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Carry out work that has a bound, even if the caller is cancelled. `aclose` waits for it."""
        finishing = asyncio.create_task(work)
        self._stopping.add(finishing)
        finishing.add_done_callback(self._stopping.discard)
        return finishing

    async def _stop(self, client: Any, starting: asyncio.Future[None] | None) -> None:
        try:
            async with asyncio.timeout(3 * self.timeout + 1):
                if starting is not None:
                    await asyncio.wait([starting], timeout=2 * self.timeout)
                    starting.cancel()
                    await asyncio.wait([starting])
                    _ = starting.cancelled() or starting.exception()  # taken, though nobody asked
                await (client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop())
        except Exception:  # noqa: BLE001  # nobody could do anything about it
            _log.debug("stopping a client", exc_info=True)
            await self._cut_off(client)
        except asyncio.CancelledError:  # a consumer between two attempts to connect stops so, and leaves its sockets
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            await self._cut_off(client)

    async def _cut_off(self, client: Any) -> None:
        """End by force what is left of a client that did not stop in its time: its tasks would go on forever."""
        inner = client.client if isinstance(client, AIOKafkaProducer) else client._client  # noqa: SLF001
        for connection in inner._conns.values():  # noqa: SLF001
            if connection._writer is not None:  # noqa: SLF001
                connection._writer.transport.abort()  # noqa: SLF001  # else it waits for a broker that takes nothing
        owners = [vars(owner) for name in _AT_WORK if (owner := getattr(client, name, None)) is not None]
        tasks = {task for owner in owners for task in owner.values() if isinstance(task, asyncio.Task)}
        tasks |= {task for owner in owners for task in owner.get("_pending_tasks", ())}
        with suppress(Exception):
            async with asyncio.timeout(1):
                while tasks:
                    for task in tasks:
                        task.cancel()
                    _, tasks = await asyncio.wait(tasks, timeout=0.05)  # one that waits for its own is told twice
                if (taken := getattr(client, "_message_accumulator", None)) is not None:
                    batches = taken._pending_batches  # noqa: SLF001
                    batches.update(*taken._batches.values())  # noqa: SLF001  # which each leaves when it ends
                    for batch in list(batches):
                        batch.future.cancel()  # else who flushes them waits forever
                await inner.close()

    async def begin(self) -> None:
        """See that there is a cluster that lets us in. The client itself tells all failures alike, so look closer."""
        try:
            await self._asking()
        except BusUnavailable:
            await self._find_reason()
            raise

    async def _find_reason(self) -> None:
        (host, port, _), *_ = collect_hosts(self.settings.options.hostport, randomize=False)
        common = {
            key: value for key, value in self._common.items() if key not in ("bootstrap_servers", "retry_backoff_ms")
        }
        with words(f"Kafka at {self.settings.options.hostport.split(',')[0]}"):
            connection = await create_conn(host, port, **common)
            connection.close()

    async def _asking(self) -> tuple[AIOKafkaAdminClient, AIOKafkaConsumer]:
        """The clients for questions, started when first needed."""
        async with self._starting:
            if self._closed:
                raise BusUnavailable("this bus was closed")
            if self._admin is None or self._asker is None:
                where = f"Kafka at {self.settings.options.hostport}"
                asker = self.consumer()
                async with self.started(asker, where):
                    admin = AIOKafkaAdminClient(**self._common)
                    prepare(admin._client)  # noqa: SLF001
                    async with self.started(admin, where):
                        self._admin, self._asker = admin, asker
            return self._admin, self._asker

    async def largest_message(self) -> int:
        """The largest batch the cluster takes; what it is by default, where we may not ask."""
        broker = await self._a_broker()
        try:
            return await self._largest(ConfigResourceType.BROKER, broker, "message.max.bytes")
        except BusRefused as refused:
            if not isinstance(refused.__cause__, ClusterAuthorizationFailedError):
                raise
            _log.info("this user may not see the cluster's message.max.bytes; taken for %d", _LARGEST)
            return _LARGEST

    async def _a_broker(self) -> str:
        """The number of a broker. One that has just come up may know of none for a moment, itself included."""
        admin, asker = await self._asking()
        with words("asking for the cluster's brokers"):
            async with asyncio.timeout(self.timeout):
                while True:
                    try:
                        return str((await admin.describe_cluster())["brokers"][0]["node_id"])
                    except (NodeNotReadyError, IndexError):
                        await asyncio.sleep(0.1)
                        for each in (admin._client, asker._client):  # noqa: SLF001  # neither has a public way
                            await each.force_metadata_update()

    async def largest_of(self, topic: str) -> int:
        """The largest batch that a topic takes."""
        return await self._largest(ConfigResourceType.TOPIC, topic, "max.message.bytes")

    async def _largest(self, kind: ConfigResourceType, name: str, key: str) -> int:
        admin, _ = await self._asking()
        with words(f"asking for {key} of {name}"):
            (answer,) = await admin.describe_configs([ConfigResource(kind, name, {key: None})])
            error, message, _, _, entries = answer.resources[0]
            if error:
                raise for_code(error)(message)
            return int(entries[0][1])

    async def _ask(self, request: Any) -> Any:
        """What a broker says: the one that answered last, or, if it does not in its part of the time, another one."""
        _, asker = await self._asking()
        client = asker._client  # noqa: SLF001  # the producer's is public, a consumer's not; both send the same
        nodes = [broker.nodeId for broker in client.cluster.brokers()]
        nodes.sort(key=lambda node: (node != self._answered, random.random()))
        trouble: Exception = NodeNotReadyError("no broker is known")
        for node in nodes:
            try:
                async with asyncio.timeout(self.timeout / len(nodes)):
                    answer = await client.send(node, request)
            except (KafkaError, OSError) as error:
                trouble = error
            else:
                self._answered = node
                return answer
        raise trouble

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has. BusUnavailable if the broker that is asked knows of none."""
        with words(f"asking for {topic}"):
            error, *_, partitions, _, _ = (await self._ask(TopicId(topic))).topics[0]
            if error:
                raise for_code(error)(topic)
        return len(partitions)

    async def create(self, topic: str, partitions: int, replication: int, configs: Mapping[str, str]) -> None:
        """Make a topic, unless somebody else has by now.

        Nothing is made while the brokers are fenced, as they are for a moment after they began or stood still.
        """
        admin, _ = await self._asking()
        with words(f"making the topic {topic}"):
            # without a number of copies the client wants to be told which brokers hold them: none in particular
            new = NewTopic(topic, partitions, replication or _AS_SET, None if replication else {}, dict(configs))
            try:
                answer = await admin.create_topics([new])
            except AttributeError:  # of the controller that nobody knows yet
                raise NodeNotReadyError("no controller is known") from None
            _, error, *rest = answer.topic_errors[0]
            reason = str(rest[0]) if rest else ""
            if error == InvalidReplicationFactorError.errno and "currently fenced" in reason:
                return
            if error not in (0, TopicAlreadyExistsError.errno):
                raise for_code(error)(reason)

    async def topics(self) -> list[str]:
        """All topics but Kafka's own."""
        admin, _ = await self._asking()
        with words("asking for topics"):
            return sorted(name for name in await admin.list_topics() if not name.startswith("__"))

    async def topic_id(self, topic: str) -> bytes | None:
        """What tells a topic from one made anew under its name; None while there is none."""
        with words(f"asking for the id of {topic}"):
            error, _, found = (await self._ask(TopicId(topic))).topics[0][:3]
            if error not in (0, UnknownTopicOrPartitionError.errno):
                raise for_code(error)(topic)
        return None if error else bytes(found)

    async def bounds(self, at: TopicPartition) -> tuple[int, int]:
        """The first position that is kept, and the one behind the last."""
        _, asker = await self._asking()
        with words(f"asking for the bounds of {at.topic}"):
            async with asyncio.timeout(self.timeout):
                first, end = await asyncio.gather(asker.beginning_offsets([at]), asker.end_offsets([at]))
        return int(first[at]), int(end[at])

    async def position_at(self, at: TopicPartition, micros: int) -> int | None:
        """The first position written at or after a time, None if there is none."""
        _, asker = await self._asking()
        with words(f"asking {at.topic} for a time"):
            async with asyncio.timeout(self.timeout):
                found = await asker.offsets_for_times({at: -(-micros // 1000)})
        return None if found[at] is None else int(found[at].offset)

    async def committed(self, group: str, at: TopicPartition) -> tuple[int, str] | None:
        """What a group stored: the position to go on with, and the text that was stored with it."""
        _, asker = await self._asking()
        with words(f"asking for the position of group {group}"):
            coordinator = await self._ask(FindCoordinatorRequest(group, 0))
            if coordinator.error_code:
                raise for_code(coordinator.error_code)(group)
            # the client's own way takes a coordinator that is just loading for one that has nothing stored
            question = OffsetFetchRequest(group, [(at.topic, [at.partition])])
            async with asyncio.timeout(self.timeout):
                answer = await asker._client.send(coordinator.coordinator_id, question)  # noqa: SLF001
            ((_, ((_, offset, text, error),)),) = answer.topics or ((at.topic, ((at.partition, -1, "", 0),)),)
            if answer.error_code or error:
                raise for_code(answer.error_code or error)(group)
        return None if offset < 0 else (int(offset), text or "")

    async def groups(self, at: TopicPartition) -> list[tuple[str, str]]:
        """The groups of a topic, as Kafka names them, and the host of the member that reads."""
        admin, _ = await self._asking()
        with words(f"asking for the groups of {at.topic}"):
            async with asyncio.timeout(self.timeout):
                names = [name for name, *_ in await admin.list_consumer_groups() if name.endswith(f"@{at.topic}")]
                answers = await admin.describe_consumer_groups(names) if names else []
        found = []
        for answer in answers:
            for error, name, _, _, _, members, *_ in answer.groups:
                if error:
                    raise for_code(error)(name)
                hosts = [host.lstrip("/") for _, _, host, _, given in members if _has_partition(given)]
                found.append((name, ", ".join(hosts)))
        return sorted(found)

    async def remove(self, topic: str) -> None:
        """Remove a topic, if it is still there."""
        admin, _ = await self._asking()
        with words(f"removing {topic}"):
            ((_, error),) = (await admin.delete_topics([topic])).topic_error_codes
            if error not in (0, UnknownTopicOrPartitionError.errno):
                raise for_code(error)(topic)

    async def delete_before(self, at: TopicPartition, position: int) -> None:
        """Let go of everything in front of a position."""
        admin, _ = await self._asking()
        with words(f"emptying {at.topic}"):
            await admin.delete_records({at: RecordsToDelete(position)})

    async def aclose(self) -> None:
        """Bounded; twice is harmless."""
        async with self._starting:
            self._closed = True
            admin, asker, self._admin, self._asker = self._admin, self._asker, None, None
            for client in (asker, admin):
                if client is not None:
                    await self.stopped(client)
        if self._stopping:
            await asyncio.wait(self._stopping)


def _has_partition(assignment: bytes) -> bool:
    return bool(assignment) and bool(ConsumerProtocolMemberAssignment.decode(assignment).partitions())


def security(settings: Settings) -> ssl.SSLContext | None:
    """The TLS context; reads files, blocking. ConfigError-free: a file that is missing is an OSError to be told."""
    if not settings.encrypted:
        return None
    context = ssl.create_default_context(cafile=settings.ca)
    if settings.certificate:
        # without a password it would be asked for at the terminal
        context.load_cert_chain(settings.certificate, settings.key, settings.key_password or "")
    context.check_hostname = settings.verify and settings.verify_name
    if not settings.verify:
        context.verify_mode = ssl.CERT_NONE
    return context
