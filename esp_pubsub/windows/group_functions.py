"""What an Aggregate window computes of a group of rows. Pure.

    Aggregate("symbol*:string,vwap:double,n:int64", {"vwap": WeightedAverage("price", "quantity"), "n": Count()})

Null is left out, and so is NaN; in sums, averages and deviations infinity, too. Of nothing, the result is null, but a
count is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from esp_pubsub import Field, FieldType, SchemaError

from .parts import Arrivals, ArrivalsOfInserts, Extremes, ExtremesOfInserts, Moments, Part, Total, Weighted
from .window import Stream, index_of, key_type, type_of

P = TypeVar("P", bound=Part)

_MOST = {FieldType.INT32: 1 << 31, FieldType.INT64: 1 << 63}
_INTEGERS = tuple(_MOST)
_NUMBERS = (*_INTEGERS, FieldType.DOUBLE)
_ARRAYS = (FieldType.ARRAY_INT32, FieldType.ARRAY_INT64, FieldType.ARRAY_DOUBLE)
_TEXTS = (FieldType.STRING, FieldType.RSTRING)


class Kit:
    """The parts of a group, each of which several functions may use."""

    def __init__(self, before: Stream) -> None:
        """`before`: what the window gets."""
        self._before = before
        self._found: dict[Any, Part] = {}
        self._one("rows", Part())

    @property
    def parts(self) -> list[Part]:
        """In the order in which they were asked for."""
        return list(self._found.values())

    def total(self, name: str) -> Total:
        """Of a field that is a number."""
        at, field = self._number(name)
        return self._one(("total", at), Total(at, type_of(field)))

    def weighted(self, name: str, weight: str) -> Weighted:
        """Of two fields that are numbers."""
        at, weight_at = self._number(name)[0], self._number(weight)[0]
        return self._one(("weighted", at, weight_at), Weighted(at, weight_at))

    def moments(self, name: str) -> Moments:
        """Of a field that is a number."""
        at, field = self._number(name)
        return self._one(("moments", at), Moments(at, type_of(field)))

    def extremes(self, name: str) -> Extremes:
        """Of a field whose values have an order."""
        at = index_of(self._before.schema, name)
        field = self._before.schema.fields[at]
        if field.type in _ARRAYS:
            raise SchemaError(f"the field {name!r} is {field.type}, and has no least value", field=name)
        kind = ExtremesOfInserts if self._before.only_inserts else Extremes
        return self._one(("extremes", at), kind(at, type_of(field)))

    def arrivals(self, name: str) -> tuple[Arrivals, int]:
        """Of all rows, with this field among others, and its place among them."""
        schema = self._before.schema
        at = index_of(schema, name)
        kind = ArrivalsOfInserts if self._before.only_inserts else Arrivals
        arrivals = self._one("arrivals", kind(key_type(schema)))
        return arrivals, arrivals.keep(at, type_of(schema.fields[at]))

    def field(self, name: str) -> Field:
        """A field of the rows."""
        return self._before.schema.fields[index_of(self._before.schema, name)]

    def _number(self, name: str) -> tuple[int, Field]:
        field = self.field(name)
        if field.type not in _NUMBERS:
            raise SchemaError(
                f"the field {name!r} is {field.type}, and has to be a number: int32, int64 or double", field=name
            )
        return index_of(self._before.schema, name), field

    def _one(self, name: Any, made: P) -> P:
        """The part of this name, which has its places from now on."""
        if name not in self._found:
            made.number = sum(len(part.numbers) for part in self.parts)
            made.extra = 1 + sum(len(part.extras) for part in self.parts)
            self._found[name] = made
        return cast(P, self._found[name])


class Function(Protocol):
    """What a field of an Aggregate is computed by."""

    def bind(self, kit: Kit, field: Field) -> str:
        """What it is for this field, in Python (`parts.py`). SchemaError if the field cannot hold it."""


@dataclass(frozen=True, slots=True)
class Count:
    """How many rows the group has."""

    def bind(self, kit: Kit, field: Field) -> str:
        """See `Function.bind`."""
        return _fitted("n[0]", FieldType.INT64, field)


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of a field: exact for integers, and null where it does not fit the result's field."""

    field: str

    def bind(self, kit: Kit, field: Field) -> str:
        """See `Function.bind`."""
        total = kit.total(self.field).sum()
        kind = kit.field(self.field).type
        if kind in _INTEGERS and field.type in _INTEGERS:
            return f"fit({total}, {_MOST[field.type]}, key)"
        return _fitted(total, kind, field)


@dataclass(frozen=True, slots=True)
class Average:
    """The average of a field."""

    field: str

    def bind(self, kit: Kit, field: Field) -> str:
        """See `Function.bind`."""
        return _fitted(kit.total(self.field).average(), FieldType.DOUBLE, field)


@dataclass(frozen=True, slots=True)
class WeightedAverage:
    """The average of a field, each value as often as another field says; null where those add up to nothing."""

    field: str
    weight: str

    def bind(self, kit: Kit, field: Field) -> str:
        """See `Function.bind`."""
        return _fitted(kit.weighted(self.field, self.weight).average(), FieldType.DOUBLE, field)


@dataclass(frozen=True, slots=True)
class StandardDeviation:
    """The standard deviation of a field, of the group as a whole population: of one row it is 0."""

    field: str

    def bind(self, kit: Kit, field: Field) -> str:
        """See `Function.bind`."""
        return _fitted(kit.moments(self.field).deviation(), FieldType.DOUBLE, field)


@dataclass(frozen=True, slots=True)
class Min:
    """The least value of a field."""

    field: str

    def bind(self, kit: Kit, field: Field) -> str:
        """See `Function.bind`."""
        return _fitted(kit.extremes(self.field).least(), kit.field(self.field).type, field)


@dataclass(frozen=True, slots=True)
class Max:
    """The greatest value of a field."""

    field: str

    def bind(self, kit: Kit, field: Field) -> str:
        """See `Function.bind`."""
        return _fitted(kit.extremes(self.field).greatest(), kit.field(self.field).type, field)


@dataclass(frozen=True, slots=True)
class First:
    """The field of the row that came first, of those in the group. A row that is updated comes anew."""

    field: str

    def bind(self, kit: Kit, field: Field) -> str:
        """See `Function.bind`."""
        arrivals, at = kit.arrivals(self.field)
        return _fitted(arrivals.first(at), kit.field(self.field).type, field)


@dataclass(frozen=True, slots=True)
class Last:
    """The field of the row that came last, of those in the group. A row that is updated comes anew."""

    field: str

    def bind(self, kit: Kit, field: Field) -> str:
        """See `Function.bind`."""
        arrivals, at = kit.arrivals(self.field)
        return _fitted(arrivals.last(at), kit.field(self.field).type, field)


GROUP_FUNCTIONS: Mapping[str, type[Function]] = {
    "ESP_aCount": Count,
    "ESP_aSum": Sum,
    "ESP_aAve": Average,
    "ESP_aWAve": WeightedAverage,
    "ESP_aStd": StandardDeviation,
    "ESP_aMin": Min,
    "ESP_aMax": Max,
    "ESP_aFirst": First,
    "ESP_aLast": Last,
}
"""By the names that SAS has for them. `ESP_aWAve` has the weight first: `ESP_aWAve(quantity,price)`."""


def _fitted(result: str, kind: FieldType, field: Field) -> str:
    """A result of this type as a value of the field."""
    if kind is field.type or (kind in _TEXTS and field.type in _TEXTS):
        return result
    if kind in _INTEGERS and field.type is FieldType.DOUBLE:
        return f"double({result})"
    if kind in _INTEGERS and field.type in _INTEGERS:
        return f"fit({result}, {_MOST[field.type]}, key)"
    raise SchemaError(f"the field {field.name!r} is {field.type}, and its function computes {kind}", field=field.name)
