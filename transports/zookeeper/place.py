"""Where an election takes place: ZooKeeper's servers, a root path, and how long a session is."""

from __future__ import annotations

import re
from typing import NamedTuple

from esp_pubsub.config import seconds, without_user
from esp_pubsub.errors import ConfigError

ROOT = "/ESP"
SESSION = 1.2
SHORTEST = 1.0  # kazoo may let 0.4 s and a third of the session pass between two pings
LONGEST = 3600.0
FORM = f"zookeeper://host:port,host:port{ROOT}?session=1200ms, where root and session may be left out"

_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_REFUSED = re.compile(r"[/\0-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff]")


class Place(NamedTuple):
    """A place that can be used."""

    hosts: str
    root: str
    session: float


def read_place(place: str) -> Place:
    """Read what follows `zookeeper://`. Raises ConfigError that shows the right form."""
    address, _, query = place.partition("?")
    hosts, slash, root = address.partition("/")
    for host in hosts.split(","):
        found = _HOST.fullmatch(host)
        if not found or not 0 < int(found[1]) < 1 << 16:
            raise _bad(place, f"{without_user(host)!r} is no host:port")
    for segment in root.split("/") if slash else ():
        if problem := segment_problem(segment):
            raise _bad(place, f"the root /{root} cannot be a path: {problem}")
    if root.split("/")[0] == "zookeeper":
        raise _bad(place, "the root /zookeeper is ZooKeeper's own")
    return Place(hosts, f"/{root}" if slash else ROOT, _session(place, query))


def segment_problem(name: str) -> str | None:
    """Why this cannot be one segment of a ZooKeeper path; None where it can."""
    if name in ("", ".", ".."):
        return f"{name!r} is no name"
    refused = sorted(set(_REFUSED.findall(name)))
    return f"{name!r} has {', '.join(map(ascii, refused))} in it" if refused else None


def _session(place: str, query: str) -> float:
    if not query:
        return SESSION
    key, _, value = query.partition("=")
    session = seconds(value)
    if key != "session" or session is None:
        raise _bad(place, f"{without_user(query)!r} is no session=<duration>")
    if not SHORTEST <= session <= LONGEST:
        raise _bad(place, f"a session is {SHORTEST:g}s to {LONGEST:g}s long")
    return session


def _bad(place: str, problem: str) -> ConfigError:
    shown = without_user(place)
    return ConfigError(f"zookeeper://{shown}: {problem}; expected {FORM}", place=shown)
