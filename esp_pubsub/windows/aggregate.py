"""A window with a row for each group of rows of another one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esp_pubsub import ConfigError, Out, Schema, SchemaError

from .changes import DELETED, EXPIRED, INSERTED, NEW, OLD, Changes, Row
from .group_functions import Function, Kit
from .loops import Group, Loops
from .window import NULL_KEY, Keys, Place, SchemaLike, Stream, index_of, key_type, row_type, schema_from

_NO_FIT = "a result does not fit its field, and is null"


class Aggregate:
    """One row for each group of rows. The keys of its schema say what is a group; a function computes each other field.

    A group's first row makes an insert, its last delete a delete, and all else an update.
    """

    def __init__(self, schema: SchemaLike, functions: Mapping[str, Function]) -> None:
        self.schema = schema_from(schema)
        self.functions = dict(functions)
        fields = {field.name for field in self.schema.fields if not field.key}
        if wrong := fields ^ self.functions.keys():
            name = min(wrong, key=str)
            what = "has no function" if name in fields else "is no field of its schema, or a key of it"
            raise ConfigError(f"{name!r} of an Aggregate {what}; its schema is {self.schema}", field=name)

    def after(self, before: Stream) -> Stream:
        """See `Window.after`."""
        for field in self.schema.fields:
            if field.key and field.type is not (theirs := _field(before.schema, field.name)).type:
                raise SchemaError(
                    f"the key {field.name!r} is {field.type}, and {theirs.type} in the window before", field=field.name
                )
        self._bind(before)
        return Stream(self.schema, False)

    def state(self, before: Stream) -> Mapping[str, Any]:
        """See `Window.state`."""
        kit, _ = self._bind(before)
        extras = [extra for part in kit.parts for extra in part.extras]
        key = key_type(self.schema)
        return {"rows": dict[key, row_type(self.schema)], "groups": dict[key, tuple[list[int | float], *extras]]}  # type: ignore[misc,valid-type]

    def open(self, place: Place) -> Aggregating:
        """See `Window.open`."""
        kit, results = self._bind(place.before)
        ats = [index_of(place.before.schema, name) for name in self.schema.keys]
        return Aggregating(Loops(kit.parts, ats, results), Keys(place.before.schema, self.schema.keys), place)

    def _bind(self, before: Stream) -> tuple[Kit, list[str]]:
        """The parts of a group, and the fields of a row, in Python."""
        kit, keys, results = Kit(before), self.schema.keys, []
        for field in self.schema.fields:
            if not field.key:
                results.append(self.functions[field.name].bind(kit, field))
            else:
                results.append("key" if len(keys) == 1 else f"key[{keys.index(field.name)}]")
        return kit, results


class Aggregating:
    """An Aggregate window at work."""

    def __init__(self, loops: Loops, keys: Keys, place: Place) -> None:
        self._rows: dict[Any, Row] = place.state["rows"]
        self._groups: dict[Any, Group] = place.state["groups"]
        self._reject = place.reject
        self._keys = keys
        schema = place.before.schema
        compiled = loops.compiled(Keys(schema, schema.keys).of, self._fit)
        self._change, self._results = compiled["change"], compiled["results"]

    def count(self) -> int:
        """How many groups there are."""
        return len(self._rows)

    def take(self, changes: Changes, out: Out) -> Changes:
        """What the rows of the groups are after these changes, and what they were."""
        removed = changes.removed()
        touched = self._change(self._groups, changes.added(), removed, self._reject_null)
        gone = [key for key, group in touched.items() if not group[0][0]] if removed else []
        for key in gone:
            del touched[key], self._groups[key]
        held, new = self._rows, self._results(touched)
        old = list(map(held.get, touched))
        held.update(zip(touched, new, strict=True))
        changed = _updates(new, old)
        return self._with_gone(changed, gone, changes) if gone else changed

    def _with_gone(self, changed: Changes, gone: list[Any], changes: Changes) -> Changes:
        """And the rows of groups that have no rows any more. Were all that did go now removed by retention?"""
        deleted = {
            self._keys.of(row) for kind, row in zip(changes.kinds, changes.rows, strict=True) if kind in (DELETED, OLD)
        }
        rows = [self._rows.pop(key) for key in gone]
        kinds = bytes(DELETED if key in deleted else EXPIRED for key in gone)
        return Changes(changed.rows + rows, changed.kinds + kinds)

    def _fit(self, value: int | None, most: int, key: Any) -> int | None:
        if value is None or -most <= value < most:
            return value
        self._reject(_NO_FIT, key if isinstance(key, tuple) else (key,))
        return None

    def _reject_null(self, row: Row) -> None:
        self._reject(NULL_KEY, row)


def _updates(new: list[Row], old: list[Row | None]) -> Changes:
    """Each row with the one that was there before."""
    rows: list[Any] = []
    if None not in old:
        rows = new + old
        rows[::2], rows[1::2] = new, old
        return Changes(rows, _UPDATED * len(new))
    kinds = bytearray()
    for row, before in zip(new, old, strict=True):
        rows += (row,) if before is None else (row, before)
        kinds += _INSERTED if before is None else _UPDATED
    return Changes(rows, bytes(kinds))


_INSERTED, _UPDATED = bytes((INSERTED,)), bytes((NEW, OLD))


def _field(schema: Schema, name: str) -> Any:
    return schema.fields[index_of(schema, name)]
