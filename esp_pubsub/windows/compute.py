"""A window that computes fields of each row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from esp_pubsub import ConfigError, Out, Schema, SchemaError

from .changes import INSERTED, NEW, Changes, Row
from .values import value_of
from .window import Place, Reject, SchemaLike, Stream, bound, index_of, schema_from


class Compute:
    """A row for each row, with the same keys. A field is what its expression computes, or else the one of that name.

    An expression is a callable that takes a row, or has `bind(schema)`. It looks at nothing but the row: an update asks
    it again about the old one. A field that cannot be computed, or whose value does not fit, is null.
    """

    def __init__(self, schema: SchemaLike, fields: Mapping[str, Any]) -> None:
        self.schema = schema_from(schema)
        self.fields = dict(fields)
        computed = {field.name for field in self.schema.fields if not field.key}
        if wrong := self.fields.keys() - computed:
            name = min(wrong, key=str)
            raise ConfigError(f"{name!r} of a Compute is no field of its schema {self.schema}, or a key", field=name)

    def after(self, before: Stream) -> Stream:
        """See `Window.after`."""
        if {*self.schema.keys} != {*before.schema.keys}:
            raise SchemaError(
                f"a Compute keeps the keys of its rows, which are {', '.join(before.schema.keys)}, and its schema has "
                f"{', '.join(self.schema.keys)}"
            )
        self._parts(before.schema)
        return Stream(self.schema, before.only_inserts)

    def state(self, before: Stream) -> Mapping[str, Any]:
        """See `Window.state`."""
        return {}

    def open(self, place: Place) -> Computing:
        """See `Window.open`."""
        return Computing(self._parts(place.before.schema), place.reject)

    def _parts(self, before: Schema) -> list[_Part]:
        """How each field of a row is made."""
        parts = []
        for field in self.schema.fields:
            if field.name in self.fields:
                compute = bound(self.fields[field.name], before)
                parts.append(_Part(field.name, compute, value_of(field.type)))
                continue
            at = index_of(before, field.name)
            if (theirs := before.fields[at].type) is not field.type:
                raise SchemaError(
                    f"the field {field.name!r} is {field.type}, and {theirs} in the window before: compute it",
                    field=field.name,
                )
            parts.append(_Part(field.name, itemgetter(at), None))
        return parts


class _Part(NamedTuple):
    name: str
    compute: Callable[[Row], Any]
    fitted: Callable[[Any], Any] | None
    """None for a field that is as it was."""


class Computing:
    """A Compute window at work."""

    def __init__(self, parts: list[_Part], reject: Reject) -> None:
        self._parts = parts
        self._reject = reject

    def take(self, changes: Changes, out: Out) -> Changes:
        """The same changes, of the rows that are computed."""
        rows = [self._row(row, kind) for row, kind in zip(changes.rows, changes.kinds, strict=True)]
        return Changes(rows, changes.kinds)

    def _row(self, row: Row, kind: int) -> Row:
        values: list[Any] = []
        for name, compute, fitted in self._parts:
            try:
                value = compute(row)
                values.append(value if fitted is None else fitted(value))
            except Exception:  # noqa: BLE001  # whatever a user's callable raises: one value that it cannot compute
                if kind in (INSERTED, NEW):
                    self._reject(f"field {name} cannot be computed, and is null", row)
                values.append(None)
        return tuple(values)

    def count(self) -> int:
        """None: it holds no rows."""
        return 0
