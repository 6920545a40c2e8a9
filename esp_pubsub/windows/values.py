"""What a callable computed, as a value of a field. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from math import nan
from typing import Any

from esp_pubsub import FieldType

_MONEY_DIGITS = 96
_ARRAY_ITEMS = 1 << 16


def value_of(kind: FieldType) -> Callable[[Any], Any]:
    """What makes a value of a field of this type, or raises TypeError, ValueError or OverflowError. Null is null."""
    return _MADE[kind]


def _integer(bits: int) -> Callable[[Any], Any]:
    most = 1 << (bits - 1)

    def made(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, int):
            raise TypeError("it is no integer")
        if not -most <= value < most:
            raise ValueError(f"it has more than {bits} bits")
        return int(value)

    return made


def _double(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise TypeError("it is no number")
    value = float(value)
    return value if value == value else nan


def _text(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError("it is no text")
    if not value.isascii():
        value.encode()  # a lone surrogate could not be sent
    return str(value)


def _money(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise TypeError("it is no Decimal")
    value = Decimal(value)
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or len(digits) + abs(exponent) > _MONEY_DIGITS:
        raise ValueError(f"it is not finite, or has more than {_MONEY_DIGITS} digits")
    return value


def _blob(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, bytes | bytearray):
        raise TypeError("it is no bytes")
    return bytes(value)


def _array(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def made(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise TypeError("it is no list")
        values = tuple([of(each) for each in value])
        if None in values or len(values) > _ARRAY_ITEMS:
            raise ValueError(f"it has a null in it, or more than {_ARRAY_ITEMS} values")
        return values

    return made


_MADE: Mapping[FieldType, Callable[[Any], Any]] = {
    FieldType.INT32: _integer(32),
    FieldType.INT64: _integer(64),
    FieldType.DOUBLE: _double,
    FieldType.STRING: _text,
    FieldType.RSTRING: _text,
    FieldType.DATE: _integer(64),
    FieldType.STAMP: _integer(64),
    FieldType.MONEY: _money,
    FieldType.BLOB: _blob,
    FieldType.ARRAY_INT32: _array(_integer(32)),
    FieldType.ARRAY_INT64: _array(_integer(64)),
    FieldType.ARRAY_DOUBLE: _array(_double),
}
