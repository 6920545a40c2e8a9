"""One session over the vendor's client, `solace-pubsubplus`. No object, exception or thread of it leaves this file.

Threads
    The client calls back on threads of its own, several for each publisher and receiver, and its calls may block. So
    its calls are made on a few threads of ours, each with a deadline, and what it says crosses to the loop by `_cross`
    alone. A call that failed, was given up, or cancelled, is undone when it comes to an end. One that hangs keeps its
    thread, so there may be many; each is made when no other is free.

The client can connect anew, and bring back its flows, without anybody being told what was lost meanwhile. It is told
not to.

It logs by handlers that it hangs up itself, on import, what it raises as well; and what a thread that is not Python's
logs leaves a thread object behind for good. So its loggers are silent, unless somebody has set their level anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Literal, TypeVar

from solace.messaging.config._sol_constants import (
    SOLCLIENT_ENDPOINT_PROP_ACCESSTYPE,
    SOLCLIENT_ENDPOINT_PROP_ACCESSTYPE_EXCLUSIVE,
    SOLCLIENT_FLOW_PROP_MAX_RECONNECT_TRIES,
)
from solace.messaging.config.missing_resources_creation_configuration import MissingResourcesCreationStrategy
from solace.messaging.config.receiver_activation_passivation_configuration import (
    ReceiverState,
    ReceiverStateChangeListener,
)
from solace.messaging.config.replay_strategy import ReplayStrategy
from solace.messaging.config.solace_constants import authentication_constants
from solace.messaging.config.solace_properties import (
    authentication_properties,
    service_properties,
    transport_layer_properties,
    transport_layer_security_properties,
)
from solace.messaging.config.sub_code import SolClientSubCode
from solace.messaging.core._core_api_utility import prepare_array
from solace.messaging.messaging_service import MessagingService, ServiceInterruptionListener
from solace.messaging.publisher.direct_message_publisher import PublishFailureListener
from solace.messaging.publisher.persistent_message_publisher import MessagePublishReceiptListener
from solace.messaging.receiver.message_receiver import MessageHandler
from solace.messaging.resources.queue import Queue
from solace.messaging.resources.share_name import ShareName
from solace.messaging.resources.topic import Topic
from solace.messaging.resources.topic_subscription import TopicSubscription
from solace.messaging.utils.life_cycle_control import TerminationNotificationListener

from esp_pubsub.errors import BusError, BusRefused, BusUnavailable

from .link import Ended, Hear, Inbound, NotFirst, NotSubscribed, Taken, UnknownQueue
from .options import SolaceOptions, plain

T = TypeVar("T")

_MISSED = 3  # signs of life
_THREADS = 64
_GRACE = 1  # millisecond that a receiver has to hand over what it holds, which nobody wants any more
_POLL = 200  # milliseconds after which a browser looks whether it is closed
_SLACK = 1.0  # seconds that our deadline is behind the client's own
_NAME = re.compile(r"SOLCLIENT_SUBCODE_([A-Z_]+)")
_CONTENTS = re.compile(r"'error_info_contents': [\"'](.*)[\"']}")
_CODES = {each.value for each in SolClientSubCode}  # its library has some that its Python does not know
_UNKNOWN = {"UNKNOWN_QUEUE_NAME", "QUEUE_NOT_FOUND"}
_NOT_FIRST = "CLIENT_INITIATED_REPLAY_INACTIVE_FLOW_NOT_ALLOWED"
_REFUSED = {
    "LOGIN_FAILURE": "check username and password",
    "BASIC_AUTHENTICATION_IS_SHUTDOWN": "the message VPN takes no passwords: set sslcert and sslkey",
    "CLIENT_CERTIFICATE_AUTHENTICATION_IS_SHUTDOWN": "the message VPN takes no certificates: leave sslcert out",
    "UNTRUSTED_CLIENT_CERTIFICATE": "check sslcert",
    "CLIENT_CERTIFICATE_DATE_INVALID": "check sslcert",
    "CLIENT_USERNAME_IS_SHUTDOWN": "have the client username enabled",
    "MSG_VPN_NOT_ALLOWED": "check vpn_name",
    "CLIENT_ACL_DENIED": "have the ACL profile let this client connect",
    "SUBSCRIPTION_ACL_DENIED": "have the ACL profile let it subscribe",
    "PUBLISH_ACL_DENIED": "have the ACL profile let it publish",
    "PERMISSION_NOT_ALLOWED": "have the queue, or the client profile, let it",
    "ENDPOINT_PROPERTY_MISMATCH": "a queue of that name was made otherwise",
    "MAX_CLIENTS_FOR_QUEUE": "raise the queue's max-bind-count",
    "ASSURED_MESSAGING_NOT_ESTABLISHED": "the message spool of the broker, or of the client profile, is off",
    "FAILED_LOADING_TRUSTSTORE": "check sslcacert, a folder of certificates",
    "FAILED_LOADING_CERTIFICATE_AND_KEY": "check sslcert and sslkey",
    "UNTRUSTED_CERTIFICATE": "check sslcacert, and that host is a name of the certificate",
    "UNTRUSTED_COMMONNAME": "check that host is a name of the certificate",
    "CERTIFICATE_DATE_INVALID": "the broker's certificate is out of date",
    "MESSAGE_TOO_LARGE": "set maxmessage lower",
    "SUBSCRIPTION_INVALID": "topics have neither empty levels nor wildcards",
    "INVALID_TOPIC_SYNTAX": "topics have neither empty levels nor wildcards",
    "TOPIC_TOO_LARGE": "use shorter names",
    "QUEUENAME_TOO_LARGE": "use shorter names",
    "SHARED_SUBSCRIPTIONS_NOT_ALLOWED": "have the client profile allow shared subscriptions",
    "DYNAMIC_CLIENTS_NOT_ALLOWED": "have the client username made",
    "CLIENT_NAME_INVALID": "have the client username made otherwise",
    _NOT_FIRST: "another reader stands first",
    "REPLAY_DISABLED": "the broker keeps no replay log: leave replaylog out",
    "REPLAY_NOT_SUPPORTED": "the broker keeps no replay log: leave replaylog out",
    "REPLAY_START_TIME_NOT_AVAILABLE": "the replay log does not go back so far: start is later, or earliest",
}
_UNAVAILABLE = {
    "COMMUNICATION_ERROR": "check that it runs, and host",
    "UNRESOLVED_HOST": "nobody knows that name: check host",
    "TIMEOUT": "check that it runs, and that the port is one for what host says",
    "QUEUE_SHUTDOWN": "have the queue's ingress and egress enabled",
    "SPOOL_OVER_QUOTA": "read the queue, or raise its quota, or that of the message VPN",
    "MAX_MESSAGE_USAGE_EXCEEDED": "read the queue, or raise the message VPN's most messages",
    "NO_MORE_NON_DURABLE_QUEUE_OR_TE": "raise the most endpoints of the client profile, or of the message VPN",
    "PROTOCOL_ERROR": "that is no Solace broker, or its port wants TLS or compression: check host",
}

for _each in ("", ".publisher", ".receiver", ".connections", ".core", ".core.api"):
    logging.getLogger(f"solace.messaging{_each}").setLevel(logging.CRITICAL + 1)


def trouble(what: str, error: BaseException) -> BusError:
    """An error of the client's in our words: BusRefused where the broker answered no, BusUnavailable for the rest."""
    if isinstance(error, BusError):
        return error
    text, code = str(error), getattr(error, "sub_code", None)
    found = _NAME.search(SolClientSubCode(code).name if code in _CODES else text)
    name = found[1] if found else "UNRESOLVED_HOST" if "resolved" in text else type(error).__name__
    contents = _CONTENTS.search(text)
    why = f"{what}: {contents[1] if contents else text or type(error).__name__} ({name})"
    if name in _UNKNOWN:
        return UnknownQueue(why)
    if name in _REFUSED:
        kind = NotSubscribed if name.startswith("SUBSCRIPTION_") else NotFirst if name == _NOT_FIRST else BusRefused
        return kind(f"{why}; {_REFUSED[name]}")
    return BusUnavailable(f"{why}; {_UNAVAILABLE[name]}" if name in _UNAVAILABLE else why)


def properties(options: SolaceOptions) -> dict[str, Any]:
    """The client's words for what is set."""
    transport, security = transport_layer_properties, transport_layer_security_properties
    authentication = authentication_properties
    found = {
        transport.HOST: options.host,
        transport.CONNECTION_ATTEMPTS_TIMEOUT: int(options.timeout * 1000),
        transport.CONNECTION_RETRIES: 0,
        transport.CONNECTION_RETRIES_PER_HOST: 0,
        transport.RECONNECTION_ATTEMPTS: 0,
        transport.KEEP_ALIVE_INTERVAL: int(options.keepalive * 1000),
        transport.KEEP_ALIVE_WITHOUT_RESPONSE_LIMIT: _MISSED,
        transport.COMPRESSION_LEVEL: options.compression,
        service_properties.VPN_NAME: options.vpn_name,
    }
    if options.encrypted:
        found |= {
            security.CERT_VALIDATED: True,
            security.CERT_REJECT_EXPIRED: True,
            security.CERT_VALIDATE_SERVERNAME: True,
            security.TRUST_STORE_PATH: str(options.sslcacert),
        }
    if options.sslcert is None:
        return found | {
            authentication.SCHEME_BASIC_USER_NAME: options.username,
            authentication.SCHEME_BASIC_PASSWORD: plain(options.password),
        }
    return found | {
        authentication.SCHEME: authentication_constants.AUTHENTICATION_SCHEME_CLIENT_CERT,
        authentication.SCHEME_CLIENT_CERT_USER_NAME: options.username,
        authentication.SCHEME_SSL_CLIENT_CERT_FILE: str(options.sslcert),
        authentication.SCHEME_SSL_CLIENT_PRIVATE_KEY_FILE: str(options.sslkey),
    }


class SolaceLink:
    """A `Link`."""

    def __init__(self, options: SolaceOptions) -> None:
        self.lost: BusError | None = None
        self.on_lost: set[Ended] = set()
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._workers = ThreadPoolExecutor(_THREADS, "esp solace")
        self._service: Any = None
        self._ending = threading.Lock()

    # threads

    def cross(self, function: Callable[..., None], *arguments: Any) -> None:
        """The one bridge to the loop. A loop that is closed is told nothing more."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    async def ask(
        self, what: str, call: Callable[[], T], undo: Callable[[], object] | None = None, within: float | None = None
    ) -> T:
        """The result of a call to the client. `undo` is for one that fails half-way, or that nobody waits for."""
        if self.lost is not None:
            raise self.lost
        within = within or self._options.timeout + _SLACK
        asked = self._loop.run_in_executor(self._workers, call)
        try:
            async with asyncio.timeout(within):
                return await asyncio.shield(asked)
        except BaseException as error:
            asked.add_done_callback(lambda done: self._later(done, undo))
            if isinstance(error, TimeoutError):
                raise BusUnavailable(f"{what}: no answer within {within:g} s") from None
            if isinstance(error, BusError) or not isinstance(error, Exception):
                raise
            raise trouble(what, error) from error

    def _later(self, done: asyncio.Future[Any], undo: Callable[[], object] | None) -> None:
        done.cancelled() or done.exception()  # seen
        if undo is not None:
            with contextlib.suppress(RuntimeError):  # all is over, this too
                self._workers.submit(undo)

    async def do(self, call: Callable[[], object]) -> None:
        """Something bounded that nobody minds to fail."""
        with contextlib.suppress(RuntimeError):
            doing = self._loop.run_in_executor(self._workers, quietly(call))
            await asyncio.wait([doing], timeout=self._options.timeout + _SLACK)

    # the session

    async def connect(self) -> None:
        """Reach a broker. Cancelled, it is left at once, and what was begun ends by itself within its time.

        The client's own disconnect is no way to end it sooner: a connect that begins meanwhile hangs, forever.
        """
        within = (self._options.host.count(",") + 1) * self._options.timeout + _SLACK
        try:
            await self.ask(f"Solace at {self._options.host}", self._connect, self._leave, within)
        except BaseException:
            self.lose(BusUnavailable("this session was closed"))
            raise

    def _connect(self) -> None:
        try:
            self._build()
            if self.lost is None:
                self._service.connect()
        except BaseException:
            self._leave()
            raise
        if self.lost is not None:  # nobody waits any more, and perhaps there is no loop to say so
            self._leave()

    def _leave(self) -> None:
        self._disconnect()
        self._workers.shutdown(wait=False)

    def _build(self) -> None:
        failed = None
        try:
            self._service = MessagingService.builder().from_properties(properties(self._options)).build()
        except Exception as error:  # noqa: BLE001  # raised in our words
            failed = trouble(f"Solace at {self._options.host}", error)
        if failed is not None:
            gc.collect()  # what was made half has threads and descriptors, and hangs in circles
            raise failed
        link = self

        class Interrupted(ServiceInterruptionListener):
            def on_service_interrupted(self, event: Any) -> None:
                link.cross(link.lose, trouble("the link to Solace was lost", event.get_cause()))

        self._service.add_service_interruption_listener(Interrupted())

    def _disconnect(self) -> None:
        with self._ending:  # twice would be the end of the process
            service, self._service = self._service, None
        if service is not None:
            quietly(service.disconnect)()
            # It forgets to end its context, which is a thread and three descriptors, for as long as the process lives.
            quietly(lambda: service.session._context._finalizer())()  # noqa: SLF001

    def lose(self, error: BusError) -> None:
        """It is over."""
        if self.lost is None:
            self.lost = error
            for told in list(self.on_lost):
                told(error)

    async def aclose(self) -> None:
        """See `Link.aclose`."""
        self.lose(BusUnavailable("this session was closed"))
        await self.do(self._leave)

    # what stands on it

    async def publisher(self, taken: Taken, *, guaranteed: bool) -> SolacePublisher:
        """See `Link.publisher`. What waits in it is bounded by its user, who waits for confirmation."""
        publisher = SolacePublisher(self, taken, guaranteed)
        await self.ask("opening a publisher", publisher.start, publisher.stop)
        return publisher

    async def subscribe(self, topic: str, hear: Hear, share: str | None = None) -> ReceiverFlow:
        """See `Link.subscribe`."""

        def make() -> Any:
            builder = self._service.create_direct_message_receiver_builder().with_subscriptions(
                [TopicSubscription.of(topic)]
            )
            return builder.build(ShareName.of(share)) if share else builder.build()

        flow = ReceiverFlow(self, make, hear)
        await self.ask(f"subscribing to {topic}", flow.start, flow.stop)
        return flow

    async def bind(
        self,
        queue: str | None,
        hear: Hear,
        ended: Ended,
        *,
        topic: str | None = None,
        make: bool = False,
        active: Callable[[bool], None] | None = None,
        replay: Literal["earliest"] | datetime | None = None,
    ) -> ReceiverFlow:
        """See `Link.bind`."""

        def made() -> Any:
            strategies = MissingResourcesCreationStrategy
            builder = self._service.create_persistent_message_receiver_builder()
            builder = builder.with_message_client_acknowledgement().with_missing_resources_creation_strategy(
                strategies.CREATE_ON_START if make else strategies.DO_NOT_CREATE
            )
            if topic is not None:
                builder = builder.with_subscriptions([TopicSubscription.of(topic)])
            if active is not None:
                builder = builder.with_activation_passivation_support(flow.turns(active))
            if replay is not None:
                since = ReplayStrategy.time_based(replay) if isinstance(replay, datetime) else None
                builder = builder.with_message_replay(since or ReplayStrategy.all_messages())
            named = Queue.durable_exclusive_queue(queue) if queue else Queue.non_durable_exclusive_queue()
            return of_its_own(builder.build(named))

        flow = ReceiverFlow(self, made, hear, ended)
        await self.ask(f"the queue {queue or 'of our own'}", flow.start, flow.stop)
        return flow

    async def browse(self, queue: str, hear: Hear) -> BrowserFlow:
        """See `Link.browse`."""
        flow = BrowserFlow(self, queue, hear)
        await self.ask(f"browsing {queue}", flow.start, flow.stop)
        return flow

    @property
    def service(self) -> Any:
        """The client's own session. For its threads."""
        if self._service is None:
            raise BusUnavailable("this session was closed")
        return self._service

    @property
    def timeout(self) -> float:
        """Seconds."""
        return self._options.timeout


def quietly(call: Callable[[], object]) -> Callable[[], None]:
    """It raises nothing: what it ends may be over already, in any state."""

    def do() -> None:
        with contextlib.suppress(Exception):
            call()

    return do


def of_its_own(receiver: Any) -> Any:
    """A receiver of an exclusive queue, which is not bound anew by the client in silence.

    The client has the properties of queues to make in one dict for the whole process: each call, by any thread, leaves
    in it what it wanted. And it offers no word for how often a flow is bound anew; the default is forever.
    """
    receiver._end_point_props = {  # noqa: SLF001
        **receiver._end_point_props,  # noqa: SLF001
        SOLCLIENT_ENDPOINT_PROP_ACCESSTYPE: SOLCLIENT_ENDPOINT_PROP_ACCESSTYPE_EXCLUSIVE,
    }
    receiver._config[SOLCLIENT_FLOW_PROP_MAX_RECONNECT_TRIES] = "0"  # noqa: SLF001
    receiver._flow_arr = prepare_array(receiver._config)  # noqa: SLF001
    return receiver


class SolacePublisher:
    """A `Publisher`."""

    def __init__(self, link: SolaceLink, taken: Taken, guaranteed: bool) -> None:
        self._link = link
        self._taken = taken
        self._guaranteed = guaranteed
        self._sent = 0
        self._closed = False
        self._publisher: Any = None

    def start(self) -> None:
        """On a thread."""
        service, publisher = self._link.service, self
        if not self._guaranteed:

            class Failures(PublishFailureListener):
                def on_failed_publish(self, failed_publish_event: Any) -> None:
                    error = trouble("publishing", failed_publish_event.get_exception())
                    publisher._link.cross(publisher._told, 0, error)

            self._publisher = service.create_direct_message_publisher_builder().on_back_pressure_elastic().build()
            self._publisher.set_publish_failure_listener(Failures())
            self._publisher.start()
            return

        class Receipts(MessagePublishReceiptListener):
            def on_publish_receipt(self, publish_receipt: Any) -> None:
                error = publish_receipt.exception
                refused = None if error is None else trouble("publishing", error)
                publisher._link.cross(publisher._told, publish_receipt.user_context, refused)

        self._publisher = service.create_persistent_message_publisher_builder().on_back_pressure_elastic().build()
        self._publisher.start()
        self._publisher.set_message_publish_receipt_listener(Receipts())

    def stop(self) -> None:
        """On a thread."""
        if self._publisher is not None:
            quietly(lambda: self._publisher.terminate(0))()

    def _told(self, number: int, error: BusError | None) -> None:
        if not self._closed:
            self._taken(number, error)

    async def send(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """See `Publisher.send`."""
        await self._link.ask("publishing", lambda: self._send(messages))

    def _send(self, messages: Sequence[tuple[str, bytes]]) -> None:
        for topic, data in messages:
            self._sent += 1
            about = {"user_context": self._sent} if self._guaranteed else {}
            self._publisher.publish(bytearray(data), Topic.of(topic), **about)

    async def aclose(self) -> None:
        """See `Publisher.aclose`."""
        self._closed = True
        await self._link.do(self.stop)


class ReceiverFlow:
    """A `Flow` by one of the client's receivers."""

    def __init__(self, link: SolaceLink, make: Callable[[], Any], hear: Hear, ended: Ended | None = None) -> None:
        self._link = link
        self._make = make
        self._hear = hear
        self._ended = ended
        self._closed = False
        self._receiver: Any = None

    def start(self) -> None:
        """On a thread."""
        flow = self

        class Handler(MessageHandler):
            def on_message(self, message: Any) -> None:
                flow._link.cross(flow._told, flow._hear, inbound(message, direct=flow._ended is None))

        class Termination(TerminationNotificationListener):
            def on_termination(self, event: Any) -> None:
                if flow._ended is not None:
                    flow._link.cross(flow._told, flow._ended, trouble("the flow ended", event.cause))

        self._link.service  # noqa: B018  # complains
        self._receiver = self._make()
        self._receiver.set_termination_notification_listener(Termination())
        self._receiver.start()
        self._receiver.receive_async(Handler())

    def turns(self, active: Callable[[bool], None]) -> Any:
        """What tells whose turn it is."""
        flow = self

        class Turns(ReceiverStateChangeListener):
            def on_change(self, old_state: Any, new_state: Any, change_time_stamp: float) -> None:
                flow._link.cross(flow._told, active, new_state == ReceiverState.ACTIVE)

        return Turns()

    def _told(self, tell: Callable[[Any], None], what: Any) -> None:
        if not self._closed:
            tell(what)

    def stop(self) -> None:
        """On a thread."""
        if self._receiver is not None:
            quietly(lambda: self._receiver.terminate(_GRACE))()

    async def settle(self, receipts: Sequence[Any]) -> None:
        """See `Flow.settle`."""
        await self._link.ask("letting messages go", lambda: [self._receiver.ack(each) for each in receipts])

    async def aclose(self) -> None:
        """See `Flow.aclose`."""
        self._closed = True
        await self._link.do(self.stop)


class BrowserFlow:
    """A `Flow` by one of the client's browsers, which has to be asked for messages."""

    def __init__(self, link: SolaceLink, queue: str, hear: Hear) -> None:
        self._link = link
        self._queue = queue
        self._hear = hear
        self._closed = False
        self._browser: Any = None
        self._thread = threading.Thread(target=quietly(self._look), name="esp solace browser", daemon=True)

    def start(self) -> None:
        """On a thread."""
        builder = self._link.service.create_message_queue_browser_builder().with_reconnection_attempts(0)
        self._browser = builder.build(Queue.durable_exclusive_queue(self._queue))
        self._browser.start_async().result(self._link.timeout)
        self._thread.start()

    def _look(self) -> None:
        while not self._closed:
            message = self._browser.receive_message(_POLL)
            if message is not None:
                self._link.cross(self._told, inbound(message, direct=False))

    def _told(self, message: Inbound) -> None:
        if not self._closed:
            self._hear(message)

    def stop(self) -> None:
        """On a thread."""
        self._closed = True
        if self._browser is not None:
            quietly(self._browser.terminate)()
        if self._thread.ident is not None:
            self._thread.join()

    async def settle(self, receipts: Sequence[Any]) -> None:
        """See `Flow.settle`."""
        await self._link.ask("taking messages out", lambda: [self._browser.remove(each) for each in receipts])

    async def aclose(self) -> None:
        """See `Flow.aclose`."""
        self._closed = True
        await self._link.do(self.stop)


def inbound(message: Any, *, direct: bool) -> Inbound:
    """One of the client's messages in our words."""
    data = bytes(message.get_payload_as_bytes() or b"")
    if not direct:
        return Inbound(data, message)
    dropped = message.get_message_discard_notification()
    return Inbound(data, None, dropped.has_broker_discard_indication() or dropped.has_internal_discard_indication())


async def connect(options: SolaceOptions) -> SolaceLink:
    """A session with a broker. BusUnavailable or BusRefused say why not."""
    link = SolaceLink(options)
    await link.connect()
    return link
