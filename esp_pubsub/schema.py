"""Fields and schemas: `id*:int64,symbol:string,price:double`. A star marks a key; every schema has at least one.

The canonical string has no blanks and one spelling per type. Its BLAKE2b-64 is the fingerprint that travels in every
frame, so two members, languages or versions that print the same schema agree by construction.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from hashlib import blake2b
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from .errors import SchemaError

MAX_FIELDS = 1_000
_NAME = re.compile(r"[^\s,:*\"'\\\x00-\x1f\x7f\ud800-\udfff]{1,128}")


class FieldType(StrEnum):
    """The types of an event's fields, spelt as the schema string spells them."""

    INT32 = "int32"
    INT64 = "int64"
    DOUBLE = "double"
    STRING = "string"
    RSTRING = "rstring"
    DATE = "date"
    STAMP = "stamp"
    MONEY = "money"
    BLOB = "blob"
    ARRAY_INT32 = "array(i32)"
    ARRAY_INT64 = "array(i64)"
    ARRAY_DOUBLE = "array(dbl)"


SchemaLike = Union["Schema", str, type[Any]]
"""A schema, its text, or a class that `Schema.of` takes."""

_SPELLINGS = {str(t): t for t in FieldType} | {
    "array(int32)": FieldType.ARRAY_INT32,
    "array(int64)": FieldType.ARRAY_INT64,
    "array(double)": FieldType.ARRAY_DOUBLE,
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a schema."""

    name: str
    type: FieldType
    key: bool = False

    def __str__(self) -> str:
        """The field as the schema string has it."""
        return f"{self.name}{'*' if self.key else ''}:{self.type}"


class Key:
    """Marks a key in a class of which a schema is made: `id: Annotated[int, esp.Key]`."""


class Schema:
    """The fields of an event, in order. Immutable; equal when the canonical strings are equal."""

    __slots__ = ("fields", "fingerprint", "names", "text")

    fields: tuple[Field, ...]
    names: tuple[str, ...]
    text: str
    fingerprint: int

    def __init__(self, fields: str | Iterable[Field]) -> None:
        parsed = _parse(fields) if isinstance(fields, str) else tuple(fields)
        _check(parsed)
        text = ",".join(map(str, parsed))
        digest = blake2b(text.encode(), digest_size=8).digest()
        for name, value in (
            ("fields", parsed),
            ("names", tuple(f.name for f in parsed)),
            ("text", text),
            ("fingerprint", int.from_bytes(digest, "little")),
        ):
            object.__setattr__(self, name, value)

    @staticmethod
    def of(cls: type[Any], /) -> Schema:
        """The schema of a dataclass, a msgspec Struct or a pydantic model: its fields, in its order, without aliases.

        `Annotated[int, esp.Key]` is a key; at least one field is. `| None` changes nothing, since every field but a key
        may be null. Where a type can be sent in several ways, `Annotated[int, esp.FieldType.INT32]` says which:

        | annotation | field type | or |
        |---|---|---|
        | `int` | `INT64` | `INT32`, `STAMP`, `DATE` |
        | `float` | `DOUBLE` | |
        | `str` | `STRING` | `RSTRING` |
        | `bytes` | `BLOB` | |
        | `Decimal` | `MONEY` | |
        | `datetime` | `STAMP` | `DATE` |
        | `date` | `DATE` | |
        | `list[int]`, `tuple[int, ...]` | `ARRAY_INT64` | `ARRAY_INT32` |
        | `list[float]`, `tuple[float, ...]` | `ARRAY_DOUBLE` | |

        Anything else raises SchemaError, with the class as `cls` and the field's name as `field`.
        """
        try:
            fields = _fields_of(cls)
            if fields and not any(field.key for field in fields):
                raise SchemaError(f"no field is a key; mark one, such as {fields[0].name}: Annotated[..., esp.Key]")
            return Schema(fields)
        except SchemaError as e:
            raise SchemaError(f"no schema can be made of {_shown(cls)}: {e}", **vars(e) | {"cls": cls}) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Schema is immutable; make a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Schema is immutable; make a new one")

    def __reduce__(self) -> tuple[type[Schema], tuple[str]]:
        return Schema, (self.text,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and other.text == self.text

    def __hash__(self) -> int:
        return self.fingerprint

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Schema({self.text!r})"

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the key fields."""
        return tuple(f.name for f in self.fields if f.key)


def as_schema(given: SchemaLike) -> Schema:
    """What a user gave as a schema."""
    if isinstance(given, Schema):
        return given
    if isinstance(given, str):
        return Schema(given)
    if isinstance(given, type):
        return Schema.of(given)
    raise SchemaError(
        f"a schema is a text such as 'id*:int64,price:double', an esp.Schema, or a class that Schema.of takes, not "
        f"{given!r:.80}"
    )


def _parse(text: str) -> tuple[Field, ...]:
    return tuple(_parse_field(part, number) for number, part in enumerate(text.split(","), 1))


def _parse_field(part: str, number: int) -> Field:
    name, colon, spelling = (piece.strip() for piece in part.strip().partition(":"))
    where = f"field {number} of the schema, {part.strip()!r},"
    if not colon or not name or not spelling:
        raise SchemaError(f"{where} is not of the form name:type or name*:type (example: id*:int64)", part=part)
    key = name.endswith("*")
    if key:
        name = name[:-1].rstrip()
    kind = _SPELLINGS.get(spelling)
    if kind is None:
        near = difflib.get_close_matches(spelling.lower(), _SPELLINGS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known types: {', '.join(FieldType)}"
        raise SchemaError(f"{where} has the unknown type {spelling!r}; {hint}", part=part, type=spelling)
    return Field(name, kind, key)


def _check(fields: tuple[Field, ...]) -> None:
    if not 1 <= len(fields) <= MAX_FIELDS:
        raise SchemaError(f"a schema has 1 to {MAX_FIELDS} fields, not {len(fields)}")
    seen: set[str] = set()
    for field in fields:
        if not isinstance(field, Field) or not isinstance(field.type, FieldType):
            raise SchemaError(f"a schema is made of Field(name, FieldType, key), not of {field!r}")
        if not _NAME.fullmatch(field.name):
            raise SchemaError(
                f"the field name {field.name!r} cannot be used: 1 to 128 characters without blanks, "
                "commas, colons, stars, quotes or backslashes",
                field=field.name,
            )
        if field.name in seen:
            raise SchemaError(f"the field name {field.name!r} stands twice in the schema", field=field.name)
        seen.add(field.name)
    if not any(field.key for field in fields):
        raise SchemaError(f"no field is a key; mark one with a star: {fields[0].name}*:{fields[0].type}")


_HELD_BY: tuple[tuple[Any, tuple[FieldType, ...]], ...] = (
    (int, (FieldType.INT64, FieldType.INT32, FieldType.STAMP, FieldType.DATE)),
    (float, (FieldType.DOUBLE,)),
    (str, (FieldType.STRING, FieldType.RSTRING)),
    (bytes, (FieldType.BLOB,)),
    (Decimal, (FieldType.MONEY,)),
    (datetime, (FieldType.STAMP, FieldType.DATE)),
    (date, (FieldType.DATE,)),
    (list[int], (FieldType.ARRAY_INT64, FieldType.ARRAY_INT32)),
    (list[float], (FieldType.ARRAY_DOUBLE,)),
    (tuple[int, ...], (FieldType.ARRAY_INT64, FieldType.ARRAY_INT32)),
    (tuple[float, ...], (FieldType.ARRAY_DOUBLE,)),
)  # what a row can give back as it was; the first is meant where none is named


def _fields_of(cls: type[Any]) -> list[Field]:
    if not isinstance(cls, type):
        raise SchemaError("it is not a class; pass a class, and for a generic one a class of its own with all types")
    names = names_of(cls)
    try:
        hints = get_type_hints(cls, include_extras=True)
    except (NameError, AttributeError, TypeError, SyntaxError) as e:
        raise SchemaError(
            f"{e}; annotations are evaluated in the class's module, so what they name is imported or defined there"
        ) from None
    for name, hint in hints.items():
        if isinstance(hint, dataclasses.InitVar):
            raise SchemaError(f"field {name!r} is an InitVar, which no event could give back", field=name)
    return [_field_of(name, hints[name]) for name in names]


def names_of(cls: type[Any]) -> Iterable[str]:
    """The fields of a class, as its own library has them. None but dataclasses is imported: classes of others have
    their marks.
    """
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            if not field.init:
                raise SchemaError(
                    f"field {field.name!r} has init=False, so no event could give it back", field=field.name
                )
        return [field.name for field in dataclasses.fields(cls)]
    names = getattr(cls, "__struct_fields__", getattr(cls, "model_fields", None))
    if not isinstance(names, tuple | dict):
        raise SchemaError("it is no dataclass, no msgspec.Struct and no pydantic.BaseModel")
    return names


def _field_of(name: str, hint: Any) -> Field:
    plain, marks, optional = taken_apart(hint)
    key = any(mark is Key or isinstance(mark, Key) for mark in marks)
    named = list(dict.fromkeys(mark for mark in marks if isinstance(mark, FieldType)))
    may_be = next((types for held, types in _HELD_BY if held == plain), ())
    if plain is bool:
        why = "is bool, which no field type holds; make it an int: Annotated[int, esp.FieldType.INT32]"
    elif not may_be:
        ways = ", ".join(_shown(held) for held, _ in _HELD_BY)
        why = f"is {_shown(plain)}, which no field type holds; it may be {ways}"
    elif len(named) > 1:
        why = f"has two field types, {named[0].name} and {named[1].name}; name one"
    elif named and named[0] not in may_be:
        ways = " or ".join(kind.name for kind in may_be)
        why = f"is {_shown(plain)}, which esp.FieldType.{named[0].name} does not hold; {_shown(plain)} may be {ways}"
    elif key and optional:
        why = f"is a key, and a key is never None; make it Annotated[{_shown(plain)}, esp.Key]"
    else:
        return Field(name, named[0] if named else may_be[0], key)
    raise SchemaError(f"field {name!r} {why}", field=name, type=hint)


def taken_apart(hint: Any) -> tuple[Any, list[Any], bool]:
    """The type without `Annotated` and `| None`, what it was annotated with, and whether None is allowed."""
    marks: list[Any] = []
    optional = False
    while True:
        args = get_args(hint)
        if get_origin(hint) is Annotated:
            hint = args[0]
            marks += args[1:]
        elif get_origin(hint) in (Union, UnionType) and len(args) == 2 and NoneType in args:
            hint = args[0] if args[1] is NoneType else args[1]
            optional = True
        else:
            return hint, marks, optional


def _shown(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) else repr(hint)
