"""What an engine is asked, and answers: by the member that leads it, on two topics.

    host:port/M                         SAS's name, shared by all engines of a cluster; what is meant for another one
                                        is passed on to it
    host:port/M/E/project/contquery     the engine's own

One request is served at a time, so each is answered at once. What takes time is answered with a mark, and asked again
with it until it is done (requests.ask). A mark says only what is the same for all members: positions of inputs, ids of
blocks, steps. So whoever leads by then can answer, and a request that comes twice does no harm.

    {ask: ..., after: [source, run, id]}    the model answers, once it has stepped on that block
    {do: quiesce}                           what the inputs hold now is stepped on, and what came of it is on the bus
    {do: persist}                           a snapshot counts that was taken from now on
    {do: status}                            how far this member is
    {do: stop}                              all members stop; the one that leads leaves a snapshot of all it sent
    {get: ..., url: ...}                    projects, queries, windows, rowcount
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from .._news import News
from .._tasks import run_until_one_ends
from ..address import Address
from ..backoff import Backoff
from ..bus import Bus, Catalog, Requests
from ..errors import BusError, BusRefused, NotOffered
from ..failover.line import Line
from ..requests import ask_once, names_below, serve
from .options import EngineStats
from .snapshots import Snapshots
from .stepping import Stepping

if TYPE_CHECKING:
    from .engine import Ordered

_log = logging.getLogger("esp_pubsub.engine")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
_PASSED_ON = 1.0  # seconds that another engine has to answer what it was not asked directly
_BETWEEN = 0.25  # seconds to wait for the end of the entry at hand

Answer = dict[str, Any]


class Quiet(msgspec.Struct, frozen=True, array_like=True):
    """Where an engine has to be for what was asked to be done."""

    ends: list[int | None]
    """Of each input; None for a queue, of which nothing may be left."""
    lines: list[int] | None = None
    """The last block of each output window that came of that, once it is known."""


class Stopping:
    """How far the stop of a whole engine is, on the member that leads it."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.is_said = False
        """To all members, from now on."""
        self.is_heard = asyncio.Event()
        """That was read back."""
        self.outcome: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class Questions:
    """Answers for one member."""

    def __init__(
        self,
        bus: Bus,
        address: Address,
        topics: Sequence[str],
        order: Ordered,
        stepping: Stepping,
        lines: Sequence[Line],
        snapshots: Snapshots | None,
        stopping: Stopping,
        stats: Callable[[], EngineStats],
    ) -> None:
        """`bus` is that of the output windows, `topics` are those of all windows."""
        self._bus = bus
        self._address = address
        self._topics = topics
        self._order = order
        self._stepping = stepping
        self._steps = stepping.steps
        self._lines = lines
        self._snapshots = snapshots
        self._stopping = stopping
        self._stats = stats

    async def run(self, leads: Callable[[], bool], changed: News) -> None:
        """Answer while this member leads, until cancelled. `changed` is told when that may be different."""
        if not self._bus.capabilities.requests:
            return
        requests, backoff = cast(Requests, self._bus), Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)

        async def until(wanted: bool) -> None:
            while leads() is not wanted:
                await changed.wait()

        while True:
            await until(True)
            try:
                await run_until_one_ends(
                    serve(requests, self._address.metadata, self._for_the_cluster),
                    serve(requests, self._address.engine_requests, self.answer),
                    until(False),
                )
                backoff.reset()
            except BusError as error:
                _log.log(
                    logging.WARNING if isinstance(error, BusRefused) else logging.INFO,
                    "the engine at %s cannot be asked for now: %s", self._address, error,
                )  # fmt: skip
                await asyncio.sleep(backoff.next())

    async def _for_the_cluster(self, said: Answer) -> Mapping[str, Any]:
        """A request to whoever serves the cluster, which may be meant for another engine."""
        meant = Address.parse(str(said.get("url") or self._address))
        if meant.project in (None, self._address.project) and meant.contquery in (None, self._address.contquery):
            if "do" in said and meant.contquery is None:
                await self._check_alone()
            return await self.answer(said)
        if meant.contquery is None:
            raise NotOffered(f"name the contquery of the engine, dfESP://host:port/project/contquery, not {meant}")
        return await ask_once(cast(Requests, self._bus), meant.engine_requests, said, _PASSED_ON)

    async def _check_alone(self) -> None:
        """A project that has several engines has to be asked about each of them."""
        if not self._bus.capabilities.catalog:
            return
        own = self._address.engine_control
        above = own.rpartition("/")[0] + "/"
        others = [name for name in await cast(Catalog, self._bus).topics() if name.startswith(above) and name != own]
        engines = sorted({name[len(above) :] for name in others if "/" not in name[len(above) :]})
        if engines:
            known = ", ".join([str(self._address.contquery), *engines])
            raise NotOffered(f"project {self._address.project} has several engines: name a contquery of {known}")

    async def answer(self, said: Answer) -> Mapping[str, Any]:
        """What this member says. Raises EspError for what it cannot answer."""
        match said:
            case {"ask": question}:
                return await self._ask(question, said.get("after"))
            case {"do": "quiesce"}:
                return await self._quiesce(said.get("mark"))
            case {"do": "persist"}:
                return await self._persist(said.get("mark"))
            case {"do": "status"}:
                return {"answer": await self._status()}
            case {"do": "stop"}:
                self._stopping.is_asked.set()
                return {"answer": await asyncio.shield(self._stopping.outcome)}
            case {"get": str(what), "url": str(url)}:
                return {"answer": self._get(what, url)}
        raise NotOffered("an engine answers ask, get, and do: persist, quiesce, status, stop; this is none of them")

    async def _ask(self, question: Any, after: Any) -> Answer:
        asked = self._steps.calls.ask
        if asked is None:
            raise NotOffered("this engine's model answers nothing: give it a method ask(question)")
        if after is not None:
            source, run, id = msgspec.convert(after, tuple[int, int, int])
            if not await self._between(lambda: self._steps.has_stepped_on(source, run, id)):
                return {"later": 0}
        return {"answer": asked(question), "step": self._steps.taken}

    async def _between(self, look: Callable[[], bool]) -> bool:
        """What this says where no entry is stepped on in part; False if that cannot be had soon."""
        try:
            async with asyncio.timeout(_BETWEEN), self._stepping.between:
                return look()
        except TimeoutError:
            return False

    async def _quiesce(self, mark: Any) -> Answer:
        left = await self.left_of(await self.quiet() if mark is None else msgspec.convert(mark, Quiet))
        return {"answer": True} if left is None else {"later": msgspec.to_builtins(left)}

    async def quiet(self) -> Quiet:
        """What there is to be worked off now."""
        return Quiet(list(await self._order.ends()))

    async def left_of(self, quiet: Quiet) -> Quiet | None:
        """What is still to be done of it; None if nothing is."""
        if quiet.lines is None:
            if not await self._between(lambda: self._order.has_taken(quiet.ends)):
                return quiet
            quiet = Quiet(quiet.ends, [line.outbox.last for line in self._lines])
        on_bus = all(line.m >= id for line, id in zip(self._lines, quiet.lines or (), strict=True))
        return None if on_bus else quiet

    async def _persist(self, mark: Any) -> Answer:
        if self._snapshots is None:
            raise NotOffered("this engine has no snapshots: start its members with a directory for them")
        step = self._steps.taken if mark is None else msgspec.convert(mark, int)
        if self._snapshots.want(step, again=mark is not None):
            return {"answer": True}
        return {"later": step}

    async def _status(self) -> Answer:
        stats = self._stats()
        needed = None if self._snapshots is None else await self._snapshots.needed()
        return {
            "role": stats.role, "term": stats.term, "steps": stats.steps, "hindered": stats.hindered,
            "inputs": list(zip(stats.positions, await self._order.ends(), strict=True)),
            "lines": [(line.window, line.given, line.on_bus, line.waiting_blocks) for line in stats.lines],
            "last_snapshot": stats.last_snapshot, "needed": needed,
        }  # fmt: skip

    def _get(self, what: str, url: str) -> list[str]:
        if what != "rowcount":
            return names_below(self._topics, Address.parse(url))
        counts = self._steps.calls.counts
        window = Address.parse(url).require_window()[2]
        if counts is None:
            raise NotOffered("this engine's model counts no rows: give it a method counts()")
        found = counts()
        if window not in found:
            raise NotOffered(f"this engine's model counts no rows of {window}; it does of {', '.join(found)}")
        return [str(found[window][1])]
