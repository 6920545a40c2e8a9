"""What stands on a bus: `esp topics`, `esp tail`, `esp groups`, `esp replay`, `esp purge`, `esp schema`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from .. import BadBody, Block, Client, EspError, NotOffered, Schema, SchemaError, dead_letters, init, retained
from ..address import Address, AddressOptions, Side
from ..backoff import Backoff
from ..bus import Break, Bus, Message, Start
from ..events import PLAIN
from ..failover.accept import Accept, Dropped, Outcome
from ..follower import Follower
from ..groups import group_lags
from ..notices import BadMessage, Joined, Missed
from ..records import moment
from ..retained import has_schema, retained_schema
from ..wire.frame import BEAT, LIMITS, Frame
from .running import counted, plain, say

_AT_ONCE = 256
_BYTES = 4 << 20
_COLUMNS = (
    f"{'position':>12}  what   run  id            events     bytes  term  settled   {'sent at (UTC)':<26}  source"
)


async def is_published_to(bus: Bus, topic: str) -> bool:
    """Whether anybody has; True where the bus cannot tell."""
    return not bus.capabilities.retained or await has_schema(bus, topic)


async def topics(bus: str, config: str | None, keys: Mapping[str, Any]) -> None:
    """One line a topic: how much it holds, its name, its schema."""
    async with init(bus, config=config, **keys) as client:
        offered = client.bus.capabilities
        names = await client.catalog().topics()
        if names:
            held = f"{'held':>12}  " if offered.replay else ""
            print(f"{held}topic{'  schema' if offered.retained else ''}")
        for name in names:
            held = ""
            if offered.replay:
                found = await client.bus.bounds(name)
                held = f"{found.end - found.first:>12,}  "
            print(f"{held}{plain(name)}  {plain(await _schema(client.bus, name))}".rstrip())


async def _schema(bus: Bus, topic: str) -> str:
    """As text. What another program left there must not end the list."""
    try:
        schema = await retained_schema(bus, topic)
    except SchemaError as error:
        return f"({error})"
    return "" if schema is None else schema.text


class Part(NamedTuple):
    """What of a topic is shown."""

    last: int
    """So many messages."""
    follow: bool
    """And those that come."""
    rows: bool
    """What is in a block, too."""


async def tail(url: str, side: Side | None, part: Part, bus: str, config: str | None, keys: Mapping[str, Any]) -> None:
    """One line a message, with what a subscriber makes of it."""
    address = Address.parse(url)
    async with init(bus, config=config, **keys) as client:
        offered = client.bus.capabilities
        known = await client.catalog().topics() if offered.catalog else None
        topic = await _topic(client, address, side, known)
        if topic is None and (part.follow or known is None):
            raise EspError(f"there is no topic of {address}: pass --side in or out{_nearest(address, known)}")
        if known is not None and topic not in known:
            say(f"nobody has published to {topic or address} yet{_nearest(address, known)}")
        if topic is None or (known is not None and topic not in known and not part.follow):
            return  # to open it would make it
        if not offered.replay and not part.follow:
            raise NotOffered("this bus keeps nothing to read again: pass --follow", capability="replay")
        first, end = 0, 0
        if offered.replay:
            found = await client.bus.bounds(topic)
            first, end = max(found.first, found.end - part.last), found.end
        accept = Accept(suffix_only=offered.suffix_only, from_start=first == 0)
        print(_COLUMNS)

        async def begin() -> Start:
            return first if offered.replay else "latest"

        schema = await retained_schema(client.bus, topic) if part.rows else None
        if part.rows and schema is None:
            say(f"no schema is retained for {topic}, so its rows cannot be read")
        follower = Follower(client.bus, topic, begin, Backoff(0, 0))
        try:
            await _print(follower, accept, schema, first, None if part.follow else end)
        finally:
            await follower.aclose()


def _nearest(address: Address, known: Sequence[str] | None) -> str:
    """Which window may have been meant."""
    there = {f"dfESP://{name.rpartition('/')[0]}" for name in known or () if name.endswith(("/I", "/O"))}
    near = get_close_matches(_plain(address), there, n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""


async def _print(follower: Follower, accept: Accept, schema: Schema | None, at: int, end: int | None) -> None:
    while end is None or at < end:
        got = await follower.read(_AT_ONCE if end is None else min(_AT_ONCE, end - at), _BYTES)
        for each in got:
            if isinstance(each, Break):
                print(f"{'':>12}  break  {each.reason}")
                if each.incarnation:
                    accept.restart(from_start=True)
        messages = [each for each in got if isinstance(each, Message)]
        for outcome in accept.receive_all(messages, LIMITS):
            if not isinstance(outcome, Joined):  # we begin somewhere
                print(_shown(outcome), flush=True)
            if schema is not None and isinstance(outcome, Frame):
                for line in _rows(Block(outcome, schema, PLAIN)):
                    print(f"{'':>14}{line}", flush=True)
        at = messages[-1].position + 1 if messages and end is not None else at


def _rows(block: Block) -> Sequence[str]:
    """A line for each event: its opcode, and its values by name."""
    try:
        changes = block.changes()
    except BadBody as error:
        return [str(error)]
    names = block.schema.names
    return [
        f"{opcode.name.lower():<10} {' '.join(f'{name}={value!r}' for name, value in zip(names, row, strict=True))}"
        for opcode, row in changes
    ]


def _shown(outcome: Outcome) -> str:
    match outcome:
        case Frame():
            return _header("block", outcome)
        case Dropped(frame, why):
            return _header("beat" if frame.kind == BEAT else why, frame)
        case BadMessage(position, reason):
            return f"{position!s:>12}  bad    {reason}"
        case Missed(source, run, first, last):
            return f"{'':>12}  gap    {run:<4} {first} to {last} of source {source:016x} will not come"
        case _:
            return f"{'':>12}  {outcome}"


def _header(what: str, frame: Frame) -> str:
    return (
        f"{frame.position!s:>12}  {what:<6} {frame.run:<4} {frame.id:<12} {frame.count:>7} {len(frame.data):>9}  "
        f"{frame.term:>4}  {frame.settled:<8}  {_sent(frame):<26}  {frame.source:016x}"
    )


def _sent(frame: Frame) -> str:
    try:
        return f"{moment(0, frame.sent_at):%Y-%m-%d %H:%M:%S.%f}"
    except OverflowError:  # nothing guards it on its way
        return "after the year 9999"


async def _topic(client: Client, address: Address, side: Side | None, known: Sequence[str] | None) -> str | None:
    """As said, else the side that has been published to; None where neither has."""
    address.require_window()
    wanted: Sequence[Side] = (side,) if side else (address.options.side,) if address.options.side else ("out", "in")
    if len(wanted) == 1:
        return address.topic(wanted[0])
    names = [address.topic(each) for each in wanted]
    found = [name for name in names if name in (known or [])]
    if len(found) > 1:
        found = [name for name in found if await is_published_to(client.bus, name)]
    if len(found) > 1:
        raise EspError(f"there is more than one topic of {address}: pass --side in or out")
    return found[0] if found else None


async def groups(url: str | None, bus: str, config: str | None, keys: Mapping[str, Any]) -> None:
    """One line for each group of a window, or of every window."""
    async with init(bus, config=config, **keys) as client:
        if url is None and not client.bus.capabilities.catalog:
            raise NotOffered(
                "this bus cannot list its topics: name a window, as in esp groups URL", capability="catalog"
            )
        if url is None:
            topics = [name for name in await client.catalog().topics() if name.endswith(("/I", "/O"))]
        else:
            address = Address.parse(url)
            sides = _sides(address.options.side)
            topics = [each for side in sides if await is_published_to(client.bus, each := address.topic(side))]
        found = [lag for topic in topics for lag in await group_lags(client.bus, topic)]
        if not found:
            return say("no group reads there")
        print(f"{'behind':>12} {'for':>9}  {'position':>12}  {'reader':<16}  {'since (UTC)':<19}  group on topic")
        for lag in found:
            since = "" if lag.since is None else f"{lag.since:%Y-%m-%d %H:%M:%S}"
            late = "" if lag.seconds is None else f"{lag.seconds:,.0f} s"
            place = "" if lag.position is None else f"{lag.position:,}"
            print(f"{lag.behind:>12,} {late:>9}  {place:>12}  {lag.reader or 'nobody':<16}  "
                  f"{since:<19}  {lag.name} on {lag.topic}")  # fmt: skip


async def replay(
    url: str, to: str | None, group: str, wait: float, bus: str, config: str | None, keys: Mapping[str, Any]
) -> None:
    """Dead letters, once more."""
    async with init(bus, config=config, **keys) as client:
        count = await dead_letters.replay(client, url, to, group=group, wait=wait)
        say(f"{counted(count, 'block')} published again")


async def purge(
    url: str, side: Side | None, schema: bool, bus: str, config: str | None, keys: Mapping[str, Any]
) -> None:
    """Empty a window's topics and begin the next run of every failover group that published there."""
    address = Address.parse(url)
    address.require_window()
    async with init(bus, config=config, **keys) as client:
        there = await client.catalog().topics()
        sides = [each for each in _sides(side) if address.topic(each) in there]
        if not sides:
            raise EspError(f"there is no topic of {address}")
        for each in sides:
            topic = address.topic(each)
            begun = await client.purge(url, side=each)
            if schema:
                await retained.forget_schema(client.bus, topic)
            after = "its schema is forgotten" if schema else "it keeps its schema, which --schema forgets"
            say(f"{topic} is empty; a new run begins for {counted(begun, 'failover group')}; {after}")


async def show_schema(url: str, side: Side | None, bus: str, config: str | None, keys: Mapping[str, Any]) -> None:
    """One line for each side that has a schema."""
    address = Address.parse(url)
    address.require_window()
    async with init(bus, config=config, **keys) as client:
        found = [(each, await retained_schema(client.bus, address.topic(each))) for each in _sides(side)]
        for each, schema in found:
            if schema is not None:
                print(f"{each:<4} {schema}")
        if not any(schema for _, schema in found):
            raise EspError(f"{address} has no schema: nobody has published to it yet")


async def forget_schema(url: str, side: Side | None, bus: str, config: str | None, keys: Mapping[str, Any]) -> None:
    """Of each side that has one."""
    address = Address.parse(url)
    address.require_window()
    async with init(bus, config=config, **keys) as client:
        topics = [topic for each in _sides(side) if await has_schema(client.bus, topic := address.topic(each))]
        if not topics:
            raise EspError(f"{address} has no schema: nobody has published to it yet")
        for topic in topics:
            await retained.forget_schema(client.bus, topic)
            left = await _messages(client.bus, topic)
            after = f"; under another schema nobody can read the {counted(left, 'message')} there" if left else ""
            say(f"{topic} has no schema: the next publisher says it{after}")


async def _messages(bus: Bus, topic: str) -> int:
    """How many messages a log holds; 0 for a queue."""
    if not bus.capabilities.replay:
        return 0
    found = await bus.bounds(topic)
    return found.end - found.first


def _sides(side: Side | None) -> Sequence[Side]:
    return ("in", "out") if side is None else (side,)


def _plain(address: Address) -> str:
    """The window, without options."""
    return str(replace(address, options=AddressOptions()))
