"""What aiokafka's clients do not do by themselves: give up a connection that answers nothing, ask seldom for a topic
that is not there, and keep passwords, and what they have just said, out of the log.

Clients of other code in the same process are left as they are, but for what the two loggers say.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, CloseReason

from esp_pubsub.backoff import Backoff

_SAID_AGAIN, _SAID_KEPT = 60.0, 100  # seconds after which the client may say the same again, and of how many texts
_ASKED_AGAIN = 0.02, 0.5  # seconds between two questions for a topic that is not there
_AUTHENTICATE = 36  # the protocol's number of what carries passwords and tokens


class _NoPasswords(logging.Filter):
    """The client shows at DEBUG whatever it sends, the password of mechanism PLAIN too."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                f"{type(each).__name__}(***)" if getattr(each, "API_KEY", None) == _AUTHENTICATE else each
                for each in record.args
            )
        return True


class _Seldom(logging.Filter):
    """The client says with each answer of a broker that a topic is not there; once in a while is enough."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.created < self._said.get(text, -math.inf) + _SAID_AGAIN:
            return False
        if len(self._said) >= _SAID_KEPT:
            del self._said[next(iter(self._said))]
        self._said[text] = record.created
        return True


logging.getLogger("aiokafka.conn").addFilter(_NoPasswords())
logging.getLogger("aiokafka.cluster").addFilter(_Seldom())


def prepare(client: AIOKafkaClient, unsure: Callable[[], None] = lambda: None) -> None:
    """See the head of this file. To be called before the client is started. `unsure` is called when the client finds
    that it does not know its topics any more, and before it gives out anything that it reads after that.
    """
    paced(client)
    watched(client)
    ask = client.force_metadata_update

    def asks() -> Any:
        unsure()
        return ask()

    client.force_metadata_update = asks


def paced(client: AIOKafkaClient) -> None:
    """Have a client ask again a little later each time for a topic that is not there: it asks without a pause."""
    update, backoff = client._metadata_update, Backoff(*_ASKED_AGAIN)  # noqa: SLF001

    async def asked(cluster: ClusterMetadata, topics: Sequence[str]) -> Any:
        answer = await update(cluster, topics)
        if all(cluster.partitions_for_topic(topic) for topic in topics):
            backoff.reset()
        else:
            await asyncio.sleep(backoff.next())
        return answer

    client._metadata_update = asked  # noqa: SLF001


def watched(client: AIOKafkaClient) -> None:
    """Have a client close each connection on which a request is not answered in its time, whoever waits for it.

    It does so itself only where `AIOKafkaClient.send` waits to the end. Else it uses the connection again, for as long
    as TCP keeps it.
    """
    connect = client._get_conn  # noqa: SLF001

    async def connected(node: Any, **more: Any) -> AIOKafkaConnection | None:
        connection = await connect(node, **more)
        if connection is not None and "send" not in vars(connection):
            connection.send = _watching(connection)
        return connection

    client._get_conn = connected  # noqa: SLF001


def _watching(connection: AIOKafkaConnection) -> Callable[..., Any]:
    send, time = connection.send, connection._request_timeout  # noqa: SLF001

    def end(number: int) -> None:
        """Also of a request for which nobody waits any more: that it was cancelled is no answer."""
        if any(number == unanswered for unanswered, *_ in connection._requests):  # noqa: SLF001
            connection._writer.transport.abort()  # noqa: SLF001  # else it waits until what was written is gone
            connection.close(CloseReason.CONNECTION_TIMEOUT, TimeoutError(f"no answer in {time:g} s"))

    def watch(request: Any, expect_response: bool = True) -> Any:
        answer = send(request, expect_response)
        if expect_response:
            number, _, arrives = connection._requests[-1]  # noqa: SLF001
            ending = asyncio.get_running_loop().call_later(time, end, number)
            arrives.add_done_callback(lambda done: None if done.cancelled() else ending.cancel())
        return answer

    return watch
