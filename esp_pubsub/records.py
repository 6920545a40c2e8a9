"""Instances of a user's class from rows, and which classes have such instances. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

from .errors import SchemaDiffers, SchemaError, ValueRefused
from .schema import Field, FieldType, Schema, names_of, taken_apart

T = TypeVar("T")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment(seconds: int, micros: int = 0) -> datetime:
    """An aware UTC datetime, exact to the microsecond (floats would not be). Raises OverflowError past year 9999."""
    return _EPOCH + timedelta(seconds=seconds, microseconds=micros)


@lru_cache(maxsize=256)
def is_record(cls: type[Any]) -> bool:
    """Whether it is a dataclass, a msgspec Struct or a pydantic model."""
    try:
        names_of(cls)
    except SchemaError:
        return False
    return True


class _Part(NamedTuple):
    """One field of a class."""

    field: Field
    keyword: str
    """What its constructor calls it."""
    convert: Callable[[Any], Any] | None
    """None: as a row has it."""
    optional: bool
    shown: str


def instances(cls: type[T], schema: Schema, rows: Sequence[tuple[Any, ...]]) -> list[T]:
    """An instance for each row. SchemaDiffers or ValueRefused; see `Block.as_`."""
    parts = _parts(cls, schema)  # type: ignore[arg-type]  # every type is hashable
    return [_instance(cls, parts, number, row) for number, row in enumerate(rows)]


def _instance(cls: type[T], parts: Sequence[_Part], number: int, row: tuple[Any, ...]) -> T:
    values: dict[str, Any] = {}
    for (field, keyword, convert, optional, shown), value in zip(parts, row, strict=True):
        if value is None and not optional:
            raise ValueRefused(
                f"row {number}, field {field.name!r} ({field.type}): null is no {shown}; in {cls.__qualname__} make it "
                f"{shown} | None",
                row=number, field=field.name, value=None,
            )  # fmt: skip
        try:
            values[keyword] = value if convert is None or value is None else convert(value)
        except OverflowError:
            text = f"row {number}, field {field.name!r} ({field.type}): {value} is no moment that Python can show"
            raise ValueRefused(text, row=number, field=field.name, value=value) from None
    try:
        return cls(**values)
    except (TypeError, ValueError) as e:  # of the class's own checks
        raise ValueRefused(f"row {number} is no {cls.__qualname__}: {e}", row=number, field="", value=row) from e


@lru_cache(maxsize=256)
def _parts(cls: type[Any], schema: Schema) -> list[_Part]:
    ours = Schema.of(cls)
    kinds = [(field.name, field.type) for field in ours.fields]
    if kinds != [(field.name, field.type) for field in schema.fields]:
        raise SchemaDiffers(
            f"{cls.__qualname__} has the fields {ours}, the block {schema}: {_difference(ours, schema)}",
            given=ours.text, retained=schema.text,
        )  # fmt: skip
    hints = get_type_hints(cls, include_extras=True)
    return [_part(cls, field, hints[field.name]) for field in ours.fields]


def _difference(ours: Schema, theirs: Schema) -> str:
    """The first field in which they differ."""
    there = {field.name: field.type for field in theirs.fields}
    for field in ours.fields:
        if field.name not in there:
            return f"the block has no {field.name!r} ({field.type})"
        if there[field.name] != field.type:
            return f"{field.name!r} is {there[field.name]}, and not {field.type}"
    unknown = [name for name in theirs.names if name not in ours.names]
    return f"the class has no {unknown[0]!r} ({there[unknown[0]]})" if unknown else "they stand in another order"


def _part(cls: type[Any], field: Field, hint: Any) -> _Part:
    plain, _, optional = taken_apart(hint)
    shown = plain.__qualname__ if isinstance(plain, type) else repr(plain)
    return _Part(field, _keyword(cls, field.name), _conversion(field.type, plain), optional, shown)


def _keyword(cls: type[Any], name: str) -> str:
    """Pydantic's constructor wants the alias of a field that has one."""
    info = getattr(cls, "model_fields", {}).get(name)
    aliases = (getattr(info, which, None) for which in ("validation_alias", "alias"))
    return next((alias for alias in aliases if isinstance(alias, str)), name)


def _conversion(kind: FieldType, plain: Any) -> Callable[[Any], Any] | None:
    if plain is datetime:
        return moment if kind is FieldType.DATE else lambda micros: moment(0, micros)
    if plain is date:
        return lambda seconds: moment(seconds).date()
    return list if plain in (list[int], list[float]) else None
