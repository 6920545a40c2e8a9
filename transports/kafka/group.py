"""Groups: the broker gives a topic's one partition to one member at a time and refuses the commits of any other.

What is stored with the position is a text of at most 4 KB: the topic's id, so that a topic made anew is told from the
old one, and the accept state, or, where that is too long, the name of the retained value that holds it. Such a value
has a name of its own each time, because a member that lost the group must not replace what the next one stored.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.structs import OffsetAndMetadata

from esp_pubsub.errors import BusRefused, BusUnavailable

from .link import Link, words

if TYPE_CHECKING:
    from .bus import KafkaBus

LONGEST = 4_000


class Membership(ConsumerRebalanceListener):
    """One reader's place in a group."""

    def __init__(self, bus: KafkaBus, name: str, group: str, at: TopicPartition) -> None:
        self.group = (
            f"{group}@{at.topic}"  # Kafka's groups span topics, ours do not: one's comings and goings are its own
        )
        self.owned = asyncio.Event()
        self.changes = 0
        """How often the partition was given or taken."""
        self.stored: tuple[int, str] | None = None
        """What the group has stored, as far as this reader knows."""
        self._bus = bus
        self._link: Link = bus.link
        self._name = name
        self._at = at
        self._state_key = ""

    def consumer(self, unsure: Callable[[], None]) -> AIOKafkaConsumer:
        """A consumer to be started, then to `join`. `unsure`: see `prepare`."""
        options = self._link.settings.options
        session = round(options.session * 1000)
        return self._link.consumer(
            unsure,
            group_id=self.group,
            session_timeout_ms=session,
            heartbeat_interval_ms=min(round(self._link.settings.heartbeat * 1000), session // 3),
            max_poll_interval_ms=round(options.lease * 1000),
            metadata_max_age_ms=2_000,  # how soon a topic that was made anew is seen, and shared out again
            # Who reads keeps reading when others come. The client keeps who it was in the class.
            partition_assignment_strategy=(type("Sticky", (StickyPartitionAssignor,), {}),),
        )

    def join(self, consumer: AIOKafkaConsumer) -> None:
        """Take a place in the group, if there is none yet: who does not read must not keep others from it."""
        if not consumer.subscription():
            consumer.subscribe([self._at.topic], listener=self)

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """The client's word: a rebalance begins."""
        self.owned.clear()
        self.changes += 1

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """The client's word: a rebalance ended."""
        self.changes += 1
        if self._at in assigned:
            self.owned.set()

    async def look_up(self) -> tuple[int, str] | None:
        """What the group has stored now."""
        return await self._link.committed(self.group, self._at)

    async def resume(self, stored: tuple[int, str] | None) -> tuple[int, bytes, bytes] | None:
        """Position, topic id and state of what was stored. BusRefused for what somebody else stored."""
        self.stored = stored
        if stored is None:
            return None
        position, text = stored
        try:
            version, topic_id, kind, value = text.split(":")
            if version != "1" or kind not in ("state", "key"):
                raise ValueError
            if kind == "state":
                return position, bytes.fromhex(topic_id), base64.b64decode(value, validate=True)
        except ValueError:
            raise BusRefused(
                f"the position of group {self.group!r} on {self._at.topic} was stored by another program; "
                "use another group, or delete this one"
            ) from None
        self._state_key = value
        state = await self._bus.retained(self._name, value)
        if state is None:
            raise BusRefused(f"the state of group {self.group!r} on {self._at.topic} is gone from the retained values")
        return position, bytes.fromhex(topic_id), state

    async def store(self, consumer: AIOKafkaConsumer, position: int, topic_id: bytes, state: bytes) -> None:
        """Store the position to go on with and the state, in one step as readers see it."""
        changes, old, key = self.changes, self._state_key, ""
        text = f"1:{topic_id.hex()}:state:{base64.b64encode(state).decode()}"
        if len(text) > LONGEST:
            key = f"state-{self.group}-{secrets.token_hex(8)}"
            await self._bus.retain(self._name, key, state)
            text = f"1:{topic_id.hex()}:key:{key}"
        if changes != self.changes:  # another reader may have stored more since
            raise BusUnavailable(f"group {self.group!r} on {self._at.topic} was given anew meanwhile")
        with words(f"storing the position of group {self.group} on {self._at.topic}"):
            try:
                async with asyncio.timeout(self._link.timeout):
                    await consumer.commit({self._at: OffsetAndMetadata(position, text)})
            except (TimeoutError, asyncio.CancelledError):
                _see_to_commits()
                raise
        if changes != self.changes:
            raise BusUnavailable(f"group {self.group!r} on {self._at.topic} was given anew meanwhile")
        self.stored, self._state_key = (position, text), key
        if old:
            await self._bus.forget(self._name, old)


def _see_to_commits() -> None:
    """A commit that nobody waits for any more goes on in a task of aiokafka's, which nobody would ask how it ended."""
    for task in asyncio.all_tasks():
        if getattr(task.get_coro(), "__name__", "") == "_do_commit_offsets":
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
