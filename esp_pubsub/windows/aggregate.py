"""A window with a row for each group of rows of another one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, get_origin

from esp_pubsub import ConfigError, FieldType, Out, Schema, SchemaError

from .accumulators import Group, Pairs
from .changes import DELETED, EXPIRED, INSERTED, NEW, OLD, Changes, Row
from .group_functions import Function, Kit
from .window import NULL_KEY, Keys, Place, SchemaLike, Stream, index_of, is_key, key_type, row_type, schema_from

_NO_FIT = "a result does not fit its field, and is null"
_RANGES = {FieldType.INT32: 1 << 31, FieldType.INT64: 1 << 63}


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
        extras = tuple(extra for each in kit.all for extra in each.extras)
        key = key_type(self.schema)
        return {"rows": dict[key, row_type(self.schema)], "groups": dict[key, tuple[(list[int | float], *extras)]]}  # type: ignore[misc,valid-type]

    def open(self, place: Place) -> Aggregating:
        """See `Window.open`."""
        kit, results = self._bind(place.before)
        return Aggregating(self.schema, kit, results, place)

    def _bind(self, before: Stream) -> tuple[Kit, list[Any]]:
        kit = Kit(before)
        results = [self.functions[field.name].bind(kit, field) for field in self.schema.fields if not field.key]
        return kit, results


class Aggregating:
    """An Aggregate window at work."""

    def __init__(self, schema: Schema, kit: Kit, results: list[Any], place: Place) -> None:
        self._rows: dict[Any, Row] = place.state["rows"]
        self._groups: dict[Any, Group] = place.state["groups"]
        self._reject = place.reject
        self._keys = Keys(place.before.schema, schema.keys)
        self._accumulators = kit.all
        self._results = results
        numbers: list[int | float] = []
        extras: list[type[Any]] = []
        for each in kit.all:
            each.place(len(numbers), len(extras) + 1)
            numbers += each.numbers
            extras += [list if get_origin(extra) is list else dict for extra in each.extras]
        self._numbers, self._extras = numbers, extras
        names = [*schema.keys, *(field.name for field in schema.fields if not field.key)]
        self._single = len(schema.keys) == 1
        self._order = None if names == [*schema.names] else itemgetter(*map(names.index, schema.names))
        self._ranges = [
            (at, _RANGES[field.type])
            for at, field in enumerate(field for field in schema.fields if not field.key)
            if field.type in _RANGES
        ]

    def count(self) -> int:
        """How many groups there are."""
        return len(self._rows)

    def take(self, changes: Changes, out: Out) -> Changes:
        """What the rows of the groups are after these changes, and what they were."""
        touched: dict[Any, Group] = {}
        added = self._pairs(changes.added(), touched, True)
        removed = self._pairs(changes.removed(), touched, False)
        for each in self._accumulators:
            if removed:
                each.remove(removed)
            each.add(added)
        rows: list[Row] = []
        kinds = bytearray()
        held = self._rows
        gone = []
        for key, group in touched.items():
            old = held.get(key)
            if not group[0][0]:
                gone.append(key)
                continue
            new = held[key] = self._row(key, group)
            rows.append(new)
            if old is None:
                kinds.append(INSERTED)
            else:
                rows.append(old)
                kinds += _UPDATED
        for key, kind in self._kinds_of(gone, changes):
            del self._groups[key]
            rows.append(held.pop(key))
            kinds.append(kind)
        return Changes(rows, bytes(kinds))

    def _pairs(self, rows: list[Row], touched: dict[Any, Group], added: bool) -> Pairs:
        """The groups of these rows, which are touched now; one that there is not yet is made."""
        keys = self._keys.of_all(rows)
        if keys is None:
            rows = self._with_keys(rows, added)
            keys = list(map(self._keys.of, rows))
        groups, pairs = self._groups, []
        for key, row in zip(keys, rows, strict=True):
            if (group := groups.get(key)) is None:
                group = groups[key] = (self._numbers[:], *[make() for make in self._extras])
            touched[key] = group
            pairs.append((group, row))
        return pairs

    def _with_keys(self, rows: list[Row], added: bool) -> list[Row]:
        found = []
        for row in rows:
            if is_key(self._keys.of(row)):
                found.append(row)
            elif added:
                self._reject(NULL_KEY, row)
        return found

    def _row(self, key: Any, group: Group) -> Row:
        values = [result(group) for result in self._results]
        for at, most in self._ranges:
            if (value := values[at]) is not None and not -most <= value < most:
                self._reject(_NO_FIT, key if not self._single else (key,))
                values[at] = None
        row = (key, *values) if self._single else (*key, *values)
        return row if self._order is None else self._order(row)

    def _kinds_of(self, gone: list[Any], changes: Changes) -> list[tuple[Any, int]]:
        """These groups have no rows any more: whether retention removed all that did go now."""
        if not gone:
            return []
        deleted = {
            self._keys.of(row) for kind, row in zip(changes.kinds, changes.rows, strict=True) if kind in (DELETED, OLD)
        }
        return [(key, DELETED if key in deleted else EXPIRED) for key in gone]


_UPDATED = bytes((NEW, OLD))


def _field(schema: Schema, name: str) -> Any:
    return schema.fields[index_of(schema, name)]
