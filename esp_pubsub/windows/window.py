"""What all windows have in common: what a project asks of one, the types of its state, and its rejections. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from esp_pubsub import ConfigError, Field, FieldType, Out, Schema, SchemaError

from .changes import Changes, Row

SchemaLike = Schema | str | type[Any]
NULL_KEY = "its key is null"
DUPLICATE = "insert of a key that is there"

Reject = Callable[[str, Row], None]
"""Counts a row that a window does not take, with the reason."""

_PYTHON: Mapping[FieldType, Any] = {
    FieldType.INT32: int,
    FieldType.INT64: int,
    FieldType.DOUBLE: float,
    FieldType.STRING: str,
    FieldType.RSTRING: str,
    FieldType.DATE: int,
    FieldType.STAMP: int,
    FieldType.MONEY: Decimal,
    FieldType.BLOB: bytes,
    FieldType.ARRAY_INT32: tuple[int, ...],
    FieldType.ARRAY_INT64: tuple[int, ...],
    FieldType.ARRAY_DOUBLE: tuple[float, ...],
}


class Stream(NamedTuple):
    """What a window gives to those after it."""

    schema: Schema
    only_inserts: bool
    """It never updates or deletes a row."""


class Place(NamedTuple):
    """Where a window is at work."""

    name: str
    before: Stream
    state: Mapping[str, Any]
    reject: Reject


class Operator(Protocol):
    """A window at work."""

    def take(self, changes: Changes, out: Out) -> Changes:
        """What follows from the changes of the window before it."""

    def count(self) -> int:
        """How many rows it holds."""


class Window(Protocol):
    """What a project asks of a window that takes what another one gives."""

    def after(self, before: Stream) -> Stream:
        """What it gives. SchemaError or ConfigError if it cannot take what the window before it gives."""

    def state(self, before: Stream) -> Mapping[str, Any]:
        """The names and types of the dicts and lists that are its state."""

    def open(self, place: Place) -> Operator:
        """The window at work on the state that `place` has."""


def type_of(field: Field) -> Any:
    """The Python type of a field's values, without None."""
    return _PYTHON[field.type]


def row_type(schema: Schema) -> Any:
    """The Python type of a row."""
    return tuple[tuple(type_of(field) | None for field in schema.fields)]  # type: ignore[misc]


def key_type(schema: Schema) -> Any:
    """The Python type of what `keys_of` makes of a row."""
    types = tuple(type_of(field) for field in schema.fields if field.key)
    return types[0] if len(types) == 1 else tuple[types]  # type: ignore[valid-type]


def index_of(schema: Schema, name: str) -> int:
    """Where a field stands in a row. SchemaError if there is none of this name."""
    try:
        return schema.names.index(name)
    except ValueError:
        raise SchemaError(f"there is no field {name!r} in {schema}", field=name) from None


class Keys:
    """The keys of rows: the value of one field, or a tuple of several."""

    def __init__(self, schema: Schema, names: tuple[str, ...]) -> None:
        """`names`: the fields that make up the key."""
        ats = [index_of(schema, name) for name in names]
        self.of = itemgetter(*ats)
        """The key of one row."""
        kinds = {schema.fields[at].type for at in ats}
        self._plain = len(ats) == 1 and not {FieldType.DOUBLE, FieldType.ARRAY_DOUBLE} & kinds  # no NaN

    def of_all(self, rows: list[Row]) -> list[Any] | None:
        """The keys of all rows; None if one of them may be no key."""
        keys = list(map(self.of, rows))
        if self._plain:
            return None if None in keys else keys
        return keys if all(map(is_key, keys)) else None


def is_key(key: Any) -> bool:
    """Whether a row can be found by it again: it is not null, and nothing in it is null or NaN."""
    if isinstance(key, tuple):
        return all(map(is_key, key))
    return key is not None and key == key


def bound(expression: Any, schema: Schema) -> Callable[[Row], Any]:
    """What computes this expression of a row: a callable does, and anything with `bind(schema)` makes one that does."""
    if callable(bind := getattr(expression, "bind", None)):
        made: Callable[[Row], Any] = bind(schema)
        return made
    if not callable(expression):
        raise ConfigError(f"an expression is a callable that takes a row, or has bind(schema), not {expression!r}")
    compute: Callable[[Row], Any] = expression
    return compute


def schema_from(given: SchemaLike) -> Schema:
    """A Schema of what stands for one: a schema string, or a class that `Schema.of` takes."""
    if isinstance(given, Schema):
        return given
    return Schema(given) if isinstance(given, str) else Schema.of(given)
