"""Fields and schemas: `id*:int64,symbol:string,price:double`. A star marks a key; every schema has at least one.

The canonical string has no blanks and one spelling per type. Its BLAKE2b-64 is the fingerprint that travels in every
frame, so two members, languages or versions that print the same schema agree by construction.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

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
