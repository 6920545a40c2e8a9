"""Windows and edges as the model of an engine. Pure.

    project = Project(
        {
            "Trades": Source("id*:int64,symbol:string,price:double,at:stamp", insert_only=True, indexed=False),
            "Hour": Copy(retention=Retention("sliding", "time", 3_600_000_000, "at")),
            "Symbols": Aggregate("symbol*:string,trades:int64,high:double", {"trades": Count(), "high": Max("price")}),
        },
        [("Trades", "Hour"), ("Hour", "Symbols")],
        outputs=["Symbols"],
    )

The state of a project is the dicts and lists of its windows. Their types follow from the schemas, so each project has
a class of its own, with a field for each of them. Everything else is made anew when the state is restored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from functools import partial
from typing import Any, ClassVar, get_origin

from esp_pubsub import Block, ConfigError, Out, model

from .changes import Changes, Row
from .graph import Node, in_order
from .source import Source
from .window import Place, Window

_log = logging.getLogger("esp_pubsub.windows")


class Project:
    """Windows and edges as the model of an engine: sources are its inputs, and what changes in windows its outputs."""

    _nodes: ClassVar[Sequence[Node]] = ()
    _emits: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        windows: Mapping[str, Source | Window],
        edges: Sequence[tuple[str, str]],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> None:
        """`edges` lead from one window to another. `outputs`: the windows whose changes are published; all if None. For
        `version` see `esp.model`.

        ConfigError or SchemaError for what cannot be run, with the window's name as `window`.
        """
        nodes = in_order(windows, edges)
        emits = frozenset(nodes if outputs is None else outputs)
        if unknown := sorted(map(str, emits - nodes.keys())):
            raise ConfigError(f"{unknown[0]!r} of outputs= is no window of the project", window=unknown[0])
        fields = [
            (_field_name(number, name), kind)
            for number, node in enumerate(nodes.values())
            for name, kind in {**node.state, _REJECTED: dict[str, int]}.items()
        ]
        made: Any = make_dataclass(
            type(self).__name__, fields, bases=(type(self),), init=False, eq=False, repr=False,
            namespace={"_nodes": tuple(nodes.values()), "_emits": emits},
        )  # fmt: skip
        model(
            inputs={node.name: node.stream.schema for node in nodes.values() if node.before is None},
            outputs={node.name: node.stream.schema for node in nodes.values() if node.name in emits},
            version=version,
            timers=any(getattr(node.window, "timed", False) for node in nodes.values()),
        )(made)
        self.__class__ = made
        for name, kind in fields:
            setattr(self, name, get_origin(kind)())
        self.__post_init__()

    def __post_init__(self) -> None:
        """Put the windows to work, on a state that is new or restored."""
        self._operators: dict[str, Any] = {}
        self._rejected: dict[str, dict[str, int]] = {}
        self._routes: dict[str, list[tuple[str, str]]] = {}
        for number, node in enumerate(self._nodes):
            name, before = node.name, node.before
            state = {field: getattr(self, _field_name(number, field)) for field in node.state}
            self._rejected[name] = getattr(self, _field_name(number, _REJECTED))
            reject = partial(self._reject, name)
            if before is None:
                self._operators[name] = node.window.open(state, reject)
            else:
                self._operators[name] = node.window.open(Place(name, before.stream, state, reject))
            self._routes[name] = []
            while before is not None:
                self._routes[before.name].append((node.before.name, name))  # type: ignore[union-attr]
                before = before.before

    def step(self, window: str, block: Block, out: Out) -> None:
        """A block has come into a source. The engine calls this."""
        self._pass_on(window, self._operators[window].take(block), out)

    def timer(self, key: str, out: Out) -> None:
        """Rows of this window go now. The engine calls this."""
        self._pass_on(key, self._operators[key].due(out), out)

    def _pass_on(self, window: str, changes: Changes, out: Out) -> None:
        """Have the windows after this one take what has changed; then emit it all."""
        changed = {window: changes}
        for before, name in self._routes[window]:
            if (found := changed[before]).rows:
                found = self._operators[name].take(found, out)
            changed[name] = found
        for name, found in changed.items():
            if found.rows and name in self._emits:
                found.emit(name, out)

    def counts(self) -> dict[str, tuple[str, int]]:
        """The kind of each window and how many rows it holds; of a source that holds none, how many it has taken."""
        return {
            node.name: (type(node.window).__name__.lower(), self._operators[node.name].count()) for node in self._nodes
        }

    @property
    def rejected(self) -> dict[str, dict[str, int]]:
        """How many events each window has not taken, by the reason. They are the same on all members of an engine."""
        return {name: dict(reasons) for name, reasons in self._rejected.items() if reasons}

    def _reject(self, window: str, reason: str, row: Row) -> None:
        """Count it, and say so when it is the first, the tenth, the hundredth."""
        count = self._rejected[window].get(reason, 0) + 1
        self._rejected[window][reason] = count
        if count == 10 ** (len(str(count)) - 1):
            _log.warning(
                "window %s has rejected %d of its events so far: %s; the last is %.200r", window, count, reason, row
            )


_REJECTED = "rejected"


def _field_name(number: int, name: str) -> str:
    return f"w{number}_{name}"
