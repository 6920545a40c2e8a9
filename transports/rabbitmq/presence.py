"""Election by presence, as SAS's engines do it: members bind to an exchange that tells who is bound, the first leads.

The exchange is called as ours is, with `_failoverpresence` behind it, and is of the type `x-presence`, from a plug-in
that no stock broker has. A binding without a key hears of all others: who is there, then who comes and goes. One with a
key is what is heard of. A member has a queue with one of each, which goes with its link.

The list must have the same order for everybody, and the exchange does not see to that: it tells who is there in any
order, and two that come at once are told in one order to one and in the other to the other. So a member first hears
who is there, and then says in its key a number higher than theirs. Who has the lowest leads. Of two with the same
number, who came at once, the key decides; should the other one lead already, it steps down.

The key also says which line it is in, because all groups share the exchange; keys that are none of ours are passed
over. A member has a new key for each campaign: so what went stays away, also if the news of its coming is heard behind
that of its going. The rest stands in election.py.

Who deletes the exchange tells nobody. So members bind again and again, which does nothing where they are bound.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from typing import TYPE_CHECKING

from esp_pubsub.errors import BusError, BusRefused

from .channel import Channel, Delivery, unused
from .election import ChannelElection
from .feed import BIND_AGAIN
from .pipe import RabbitPipe

if TYPE_CHECKING:
    from .bus import RabbitBus

TYPE, SUFFIX = "x-presence", "_failoverpresence"
_LONGEST_KEY = 255
_MEMORY = 1_000


class Line:
    """The list of who stands in a line, from what is heard."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._present: dict[str, int] = {}
        self._gone: deque[str] = deque(maxlen=_MEMORY)

    def hear(self, action: object, key: object) -> None:
        """Somebody is there or comes (`bind`), or goes (`unbind`)."""
        number, *_, line = key.split(" ", 3) if isinstance(key, str) and key.count(" ") > 2 else ("", "")
        if not isinstance(key, str) or line != self._name or not number.isdecimal():
            return
        if action == "unbind":
            self._present.pop(key, None)
            self._gone.append(key)
        elif action == "bind" and key not in self._gone:
            self._present[key] = int(number)

    def key_behind(self, member: str) -> str:
        """A new key, behind those of all who are there."""
        number = max(self._present.values(), default=0) + 1
        return f"{number} {member.replace(' ', '_')} {secrets.token_hex(4)} {self._name}"

    @property
    def keys(self) -> list[str]:
        """Of all who are there; the first leads."""
        return sorted(self._present, key=lambda key: (self._present[key], key))

    def left(self, key: str) -> bool:
        """Whether it was heard to go."""
        return key in self._gone


class PresenceElection(ChannelElection):
    """An `Election`."""

    def __init__(self, bus: RabbitBus, line: str, member: str) -> None:
        self._exchange = bus.link.options.exchange + SUFFIX
        super().__init__(bus, line, f"standing in line at the exchange {self._exchange!r}")
        self._member = member
        self._list = Line(line)
        key = self._list.key_behind(member)
        if max(len(self._exchange), len(key.encode()) + 9) > _LONGEST_KEY:
            raise BusRefused(
                f"an exchange's name and a key have at most {_LONGEST_KEY} bytes, {self._exchange!r} or {key!r} has "
                "more: use shorter names"
            )
        self._queue = ""
        self._key: str | None = None
        self._told = self._leads = False

    async def run(self) -> None:
        """See `Election.run`."""
        try:
            while True:
                await asyncio.sleep(BIND_AGAIN)
                await self._bind_again()
        finally:
            self._drop()

    async def _bind_again(self) -> None:
        channel, key = self._channel, self._key
        if channel is None or key is None or await channel.is_blocked():
            return
        try:
            await self._bind(channel, "")
            await self._bind(channel, key)
        except BusError:
            self._end(channel, "suspended")

    async def _bind(self, channel: Channel, key: str) -> None:
        await self._link.ask(self._what, channel.queue_bind(self._queue, self._exchange, key))

    async def _find_exchange(self) -> None:
        """On a connection that nobody else needs: a broker that does not know the type closes it."""
        what = f"the exchange {self._exchange!r}"
        channel = await self._link.channel("electing", what)
        try:
            await self._link.ask(what, channel.exchange_declare(self._exchange, exchange_type=TYPE))
        except BusRefused as error:
            text = str(error)
            if "unknown exchange type" in text:
                raise BusRefused(
                    f"{what}: this broker has no exchanges of type {TYPE}; install its plug-in presence-exchange, or "
                    "choose another election on all members: token, log, or zookeeper://host:port"
                ) from None
            if "inequivalent" not in text or "'type'" in text:  # another durability will do
                raise
        finally:
            self._link.drop(channel)

    async def _stand_in_line(self, channel: Channel) -> None:
        self._list, self._key = Line(self._line), None
        self._told = self._leads = False
        await self._find_exchange()
        channel.on_message = lambda said: self._hear(channel, said)
        declaring = channel.queue_declare("", exclusive=True, auto_delete=True)
        self._queue = str((await self._link.ask(self._what, declaring)).queue)
        await self._link.ask(self._what, channel.basic_consume(self._queue, unused, no_ack=True))
        await self._bind(channel, "")
        # Who is there was put into the queue when it was bound; so this comes behind it.
        await RabbitPipe(self._link, channel, "", self._queue, {}).write([b"that is all"])
        await self._until(lambda: self._told)
        self._key = key = self._list.key_behind(self._member)
        await self._bind(channel, key)
        await self._until(lambda: self._list.keys[:1] == [key])
        self._leads = True

    def _hear(self, channel: Channel, said: Delivery) -> None:
        if channel is not self._channel:
            return
        headers = said.properties.headers or {}
        self._told = self._told or bool(said.data)
        self._list.hear(headers.get("action"), headers.get("key"))
        key = self._key
        if key is not None and (self._list.left(key) or (self._leads and self._list.keys[:1] != [key])):
            self._end(channel, "lost")
        self._news.tell()
