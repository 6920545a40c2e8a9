"""Options of the data source, from Spark's map of texts. Pure.

Spark prints options in plans and keeps them in checkpoints, so what looks secret is refused here: it belongs into the
bus's cfg file or into the environment of the workers. `bus.<key>` is a setting of the bus, as a keyword of `init` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Literal, cast

from esp_pubsub.address import Address, Side
from esp_pubsub.bus import Start
from esp_pubsub.config import looks_secret
from esp_pubsub.errors import ConfigError
from esp_pubsub.events import View
from esp_pubsub.schema import Schema

EXTRA = ("opcode", "flags", "id", "source", "run", "sent_at")
KNOWN = (
    "url", "side", "bus", "config", "schema", "start", "end", "columns", "maxrowspertrigger", "confirmas", "timeout",
    "checkpointlocation",  # Spark's own, which it hands to a sink too
)  # fmt: skip
Extra = Literal["opcode", "flags", "id", "source", "run", "sent_at"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a query says about where its events come from, or go to."""

    urls: tuple[str, ...]
    topics: tuple[str, ...]
    side: Side
    bus: str
    config: str | None
    settings: tuple[tuple[str, str], ...]
    schema: Schema | None
    start: Start
    end: Start
    views: tuple[View, ...]
    """Of each topic: what its URL says of collapse and rmretdel."""
    columns: tuple[Extra, ...]
    most_rows: int | None
    confirm_as: str | None
    timeout: float

    @property
    def connection(self) -> tuple[str, str | None, tuple[tuple[str, str], ...]]:
        """What makes two clients the same."""
        return self.bus, self.config, self.settings


def read_options(found: Mapping[str, str], side: Side) -> Options:
    """Read Spark's options. ConfigError names the one that is wrong. `side` is that of who says nothing."""
    given = {key.lower(): value for key, value in found.items()}
    for key in given:
        name = key.removeprefix("bus.")
        if looks_secret(name, given[key]):
            raise ConfigError(
                f"the option {key!r} holds a secret, and Spark shows options in plans and checkpoints: put it into the "
                "bus's cfg file (option config), or into ESP_PUBSUB_<KEY> in the environment of driver and executors",
                key=key,
            )
        if key not in KNOWN and not key.startswith("bus."):
            near = get_close_matches(key, KNOWN, 1, 0.0)[0]
            raise ConfigError(f"the source esp has no option {key!r}; the nearest is {near!r}", key=key)
    if "url" not in given:
        raise ConfigError("the source esp needs the option url: dfESP://host:port/project/query/window", key="url")
    chosen = cast(Side | None, given.get("side"))
    if chosen not in ("in", "out", None):
        raise ConfigError(f"side is in or out, not {chosen!r}", key="side")
    urls = tuple(given["url"].replace(",", " ").split())
    addresses = [Address.parse(url) for url in urls]
    for address in addresses:
        address.require_window()
    sides = [chosen or address.options.side or side for address in addresses]
    topics = tuple(address.topic(each) for address, each in zip(addresses, sides, strict=True))
    if not topics or len(set(topics)) < len(topics):
        raise ConfigError("the option url names one window, or several different ones", key="url")
    return Options(
        urls,
        topics,
        sides[0],
        given.get("bus", "embedded"),
        given.get("config"),
        tuple(sorted((key.removeprefix("bus."), value) for key, value in given.items() if key.startswith("bus."))),
        Schema(given["schema"]) if "schema" in given else None,
        _place("start", given.get("start", "earliest")),
        _place("end", given.get("end", "latest")),
        tuple(View(each.options.collapse, each.options.rmretdel) for each in addresses),
        _columns(given.get("columns", "")),
        _number("maxRowsPerTrigger", given["maxrowspertrigger"]) if "maxrowspertrigger" in given else None,
        given.get("confirmas"),
        float(_number("timeout", given.get("timeout", "30"))),
    )


def _place(key: str, text: str) -> Start:
    if text in ("earliest", "latest"):
        return cast(Start, text)
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(
            f"{key} is earliest, latest, a position, or a time with its zone (2026-01-31T09:30:00+00:00), not {text!r}",
            key=key,
        )
    return moment


def _columns(text: str) -> tuple[Extra, ...]:
    names = text.replace(",", " ").split()
    for name in names:
        if name not in EXTRA:
            raise ConfigError(f"columns are some of {', '.join(EXTRA)}, not {name!r}", key="columns")
    return tuple(cast(Extra, name) for name in names)


def _number(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{key} is a whole number from 1 on, not {text!r}", key=key)
    return int(text)
