"""Windows and edges, checked and in the order in which changes pass through them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from esp_pubsub import ConfigError, SchemaError

from .source import Source
from .window import Stream

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


class Node(NamedTuple):
    """A window, and where it stands in its project."""

    name: str
    window: Any
    before: Node | None
    """The one whose changes it takes; None for a source."""
    stream: Stream
    state: Mapping[str, Any]


def in_order(windows: Mapping[str, Any], edges: Sequence[tuple[str, str]]) -> dict[str, Node]:
    """Each window after the one whose changes it takes. ConfigError or SchemaError where that cannot be."""
    if not isinstance(windows, Mapping) or not windows:
        raise ConfigError("a project has at least one window: Project({'Trades': Source(...)}, [])")
    for name, window in windows.items():
        _check_window(name, window)
    parents = _parents(windows, edges)
    nodes: dict[str, Node] = {}
    for name in windows:
        _add(name, windows, parents, nodes)
    return nodes


def _check_window(name: Any, window: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a window: use letters, digits, '_' and '-'", window=name)
    methods = () if isinstance(window, Source) else ("after", "state", "open")
    if isinstance(window, type) or not all(callable(getattr(window, method, None)) for method in methods):
        raise ConfigError(
            f"window {name} is {window!r}; it has to be a Source, Copy, Filter, Compute or Aggregate", window=name
        )


def _parents(windows: Mapping[str, Any], edges: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The one window before each that is no source."""
    parents: dict[str, str] = {}
    for edge in edges:
        if not isinstance(edge, tuple | list) or len(edge) != 2:
            raise ConfigError(f"an edge is a pair of names of windows, not {edge!r}")
        before, after = edge
        for name in edge:
            if not isinstance(name, str) or name not in windows:
                raise ConfigError(
                    f"the edge from {before!r} to {after!r} names a window that there is not: the project has "
                    f"{', '.join(windows)}",
                    window=name,
                )
        if isinstance(windows[after], Source):
            raise ConfigError(f"window {after} is a source, and an edge leads to it from {before}", window=after)
        if after in parents:
            raise ConfigError(
                f"two edges lead to window {after}, from {parents[after]} and {before}: it takes one", window=after
            )
        parents[after] = before
    for name, window in windows.items():
        if name not in parents and not isinstance(window, Source):
            raise ConfigError(f"no edge leads to window {name}, and it is no source", window=name)
    return parents


def _add(name: str, windows: Mapping[str, Any], parents: Mapping[str, str], nodes: dict[str, Node]) -> None:
    """This window's node, and those of all windows before it."""
    path = [name]
    while path[-1] in parents and path[-1] not in nodes:
        path.append(parents[path[-1]])
        if path[-1] in path[:-1]:
            circle = path[path.index(path[-1]) :]
            raise ConfigError(f"the edges make a circle: {' from '.join(circle)}", window=path[-1])
    for each in reversed(path):
        if each not in nodes:
            nodes[each] = _node(each, windows[each], nodes.get(parents.get(each, "")))


def _node(name: str, window: Any, before: Node | None) -> Node:
    if before is None:
        return Node(name, window, None, window.stream, window.state())
    try:
        stream = window.after(before.stream)
        return Node(name, window, before, stream, window.state(before.stream))
    except (ConfigError, SchemaError) as e:
        raise type(e)(f"window {name}, after {before.name}: {e}", **vars(e) | {"window": name}) from None
