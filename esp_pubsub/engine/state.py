"""The state of a model, as bytes and back. Pure.

The state of a dataclass is its fields, encoded by their types. What comes back has to be what it was: exact types, in
the same order, nothing mutable reached by two ways. So each part is decoded again as soon as it is encoded, and
compared; the member goes on with that copy, so that its next blocks prove it. A model with `snapshot() -> bytes` and
`restore(data)` says itself what its state is; then the copy is a new instance, as after a restart.

A large dict or list is encoded a slice at a time, so that the loop has its turns.

The state of another version of the model is handed to the model's `migrate(version, data)`, which returns its own.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import islice
from types import FunctionType, NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec

from ..errors import ConfigError, StateRefused
from .steps import line_of

_SLICE = 2_000  # entries of a dict or a list
_PLAIN = frozenset((int, float, str, bytes, bool, NoneType))  # their bytes say all of them, their type too
_VALUES = (Decimal, datetime, date, time, timedelta, UUID)
_encode = msgspec.msgpack.Encoder().encode


class Part(NamedTuple):
    """Some of the state: a field, or a slice of one."""

    field: str
    body: bytes


class State:
    """Encodes and restores the models of one class. `fresh` is a model that has not stepped, as after a restart."""

    def __init__(self, fresh: Any) -> None:
        """ConfigError for a model whose state cannot be had."""
        kind = type(fresh)
        self._own = callable(getattr(fresh, "snapshot", None)) and callable(getattr(fresh, "restore", None))
        self._fields: dict[str, _Field] = {}
        self._kind = kind
        self._fresh = fresh
        if isinstance(fresh, FunctionType):
            return
        if self._own:
            try:
                self._fresh = copy.deepcopy(fresh)
            except Exception as e:  # whatever a user's object may do
                raise ConfigError(f"no snapshot can be taken of {kind.__name__}: it cannot be copied ({e})") from e
        elif dataclasses.is_dataclass(fresh):
            self._fields = {field.name: _field(kind, field.name) for field in dataclasses.fields(fresh)}
        else:
            raise ConfigError(
                f"no snapshot can be taken of {kind.__name__}: make it a dataclass, whose fields are its state, or "
                "give it snapshot() and restore(data)"
            )

    def copy(self, model: Any) -> Generator[Part, None, Any]:
        """The state of a model, in parts; returns a model that was restored from them. The model must not step
        meanwhile. StateRefused, with the path, for what would come back different.
        """
        if isinstance(model, FunctionType):
            return model
        if self._own:
            data = model.snapshot()
            if type(data) is not bytes:
                raise StateRefused(f"snapshot() of {self._kind.__name__} returned no bytes, but {data!r:.80}", path="")
            yield Part("", data)
            restored = self._restored_by_itself(data)
            if restored.snapshot() != data:
                raise StateRefused(
                    f"no snapshot can be taken: the snapshot() of a restored {self._kind.__name__} is not the one that "
                    "its restore(data) was given",
                    path="",
                )
            return restored
        seen: set[int] = set()
        found: dict[str, Any] = {}
        for name, field in self._fields.items():
            found[name] = yield from field.copied(name, getattr(model, name), seen)
        made = self._made(found)
        for name, value in found.items():
            if (its := getattr(made, name)) is not value and its != value:
                raise _refused(name, "is set to something else by __post_init__, which runs after a restart too")
        for name in sorted(getattr(model, "__dict__", {}).keys() - getattr(made, "__dict__", {}).keys()):
            raise _refused(name, "is no field of the dataclass, and would be missing: declare it as one")
        return made

    def restored(self, parts: Iterable[Part]) -> Any:
        """The model whose parts these are. ValueError for parts that are none of such a model's."""
        if isinstance(self._fresh, FunctionType):
            return self._fresh
        if self._own:
            return self._restored_by_itself(b"".join(part.body for part in parts))
        found = {name: field.empty() for name, field in self._fields.items()}
        try:
            with _nothing_collected():
                for name, body in parts:
                    found[name] = self._fields[name].extended(found[name], body)
        except (KeyError, msgspec.MsgspecError) as e:
            raise ValueError(f"the state is not that of a {self._kind.__name__}: {e}") from None
        if missing := [name for name, value in found.items() if value is _MISSING]:
            raise ValueError(f"the state has no {', '.join(missing)}")
        return self._made(found)

    @property
    def kinds(self) -> dict[str, str]:
        """What the fields are, that are in slices: `dict` or `list`."""
        return {name: field.container.__name__ for name, field in self._fields.items() if field.container is not None}

    def migrated(self, version: str, kinds: Mapping[str, str], parts: Sequence[Part]) -> Any:
        """The model that goes on with the state of another version, of which these are the parts. StateRefused where it
        cannot.
        """
        if isinstance(self._fresh, FunctionType):
            return self._fresh
        data: Any = b"".join([part.body for part in parts])
        if any(part.field for part in parts) or not parts:
            data = _plain(kinds, parts)
        if callable(migrate := getattr(self._fresh, "migrate", None)):
            try:
                data = migrate(version, data)
            except Exception as e:  # whatever the user's own code raises
                raise _not_migrated(self._kind, version, f"its migrate raised {e!r}{line_of(e)}") from e
        try:
            if self._own:
                return self._restored_by_itself(data)
            return self._made({name: self._fields[name].made(name, data[name]) for name in self._agreed(data)})
        except Exception as e:  # whatever does not fit
            raise _not_migrated(self._kind, version, f"{e}; {_MIGRATE}") from e

    def _agreed(self, data: Any) -> Iterable[str]:
        """The fields, if data has these and no others. ValueError else."""
        names = data.keys() if isinstance(data, dict) else None
        if names != self._fields.keys():
            has = "no fields" if names is None else f"the fields {', '.join(map(str, names))}"
            raise ValueError(f"it has {has}, and {self._kind.__name__} has {', '.join(self._fields)}")
        return self._fields

    def _restored_by_itself(self, data: bytes) -> Any:
        model = copy.deepcopy(self._fresh)
        model.restore(data)
        return model

    def _made(self, fields: dict[str, Any]) -> Any:
        model = object.__new__(self._kind)
        for name, value in fields.items():
            object.__setattr__(model, name, value)
        if callable(complete := getattr(model, "__post_init__", None)):
            complete()
        return model


_MISSING: Any = object()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """All that is made here stays. To search it for garbage again and again takes as long as to make it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """How a field is encoded: as it is, or, a dict or a list, in slices."""

    decode: Callable[[bytes], Any]
    container: type | None

    def empty(self) -> Any:
        return _MISSING if self.container is None else self.container()

    def extended(self, value: Any, body: bytes) -> Any:
        if self.container is None:
            return self.decode(body)
        (value.update if self.container is dict else value.extend)(self.decode(body))
        return value

    def made(self, name: str, value: Any) -> Any:
        """What this value is when it is of the field's type."""
        if self.container is None:
            return self.decode(_encode(value))
        if not isinstance(value, self.container):
            raise TypeError(f"{name} is a {type(value).__name__}, and declared as a {self.container.__name__}")
        return self.extended(self.container(), _encode(list(value.items()) if isinstance(value, dict) else value))

    def copied(self, name: str, value: Any, seen: set[int]) -> Generator[Part, None, Any]:
        if self.container is None:
            body = _encoded(name, value)
            copied = _decoded(self.decode, name, body)
            _compare(name, value, copied, seen)
            _prove(name, copied, body)
            yield Part(name, body)
            return copied
        if type(value) is not self.container:
            raise _refused(name, f"is a {type(value).__name__}, and declared as a {self.container.__name__}")
        _only_once(name, value, seen)
        found: Any = self.container()
        compare = _compare_entries if self.container is dict else _compare_items
        for some in _slices(value):
            body = _encoded(name, some)
            copied = _decoded(self.decode, name, body)
            compare(name, some, copied, seen)
            _prove(name, copied, body)
            yield Part(name, body)
            (found.update if self.container is dict else found.extend)(copied)
        if len(found) != len(value):  # type: ignore[arg-type]  # it is a dict or a list
            raise _refused(name, "has keys that become one")
        return found


def _field(kind: type, name: str) -> _Field:
    try:
        hint = get_type_hints(kind, include_extras=True)[name]
        container = get_origin(hint) or hint
        if container in (dict, list):
            arguments = get_args(hint)
            inner = list[arguments or (Any,)] if container is list else list[tuple[arguments or (Any, Any)]]  # type: ignore[misc]
            return _Field(msgspec.msgpack.Decoder(inner).decode, container)
        return _Field(msgspec.msgpack.Decoder(hint).decode, None)
    except Exception as e:  # noqa: BLE001  # whatever a type hint may raise when it is looked at
        raise ConfigError(
            f"no snapshot can be taken of {kind.__name__}: the type of its field {name} cannot be used ({e})"
        ) from None


def _plain(kinds: Mapping[str, str], parts: Iterable[Part]) -> dict[str, Any]:
    """The fields of another version's state, as what any msgpack is: numbers, texts, bytes, lists and dicts."""
    found: dict[str, Any] = {name: {} if kind == "dict" else [] for name, kind in kinds.items()}
    for name, body in parts:
        value = msgspec.msgpack.decode(body)
        if name not in kinds:
            found[name] = value
        elif kinds[name] == "dict":
            found[name].update((_hashable(key), each) for key, each in value)
        else:
            found[name].extend(value)
    return found


def _hashable(key: Any) -> Any:
    """Tuples became lists."""
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


def _slices(value: Any) -> Iterator[list[Any]]:
    """The entries of a dict, or the items of a list, some at a time."""
    entries = iter(value.items() if type(value) is dict else value)
    while some := list(islice(entries, _SLICE)):
        yield some


def _encoded(path: str, value: Any) -> bytes:
    try:
        return _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as e:
        raise _refused(path, f"cannot be encoded: {e}") from None


def _decoded(decode: Callable[[bytes], Any], path: str, body: bytes) -> Any:
    try:
        return decode(body)
    except msgspec.MsgspecError as e:
        raise _refused(path, f"is not of its declared type: {e}") from None


def _prove(path: str, copied: Any, body: bytes) -> None:
    if _encode(copied) != body:
        raise _refused(path, "comes back with another value")


def _compare(path: str, ours: Any, theirs: Any, seen: set[int]) -> None:
    """Raise StateRefused where the copy is of another type, or something would not be kept as it is."""
    kind = type(ours)
    if kind is not type(theirs):
        raise _refused(path, f"is a {kind.__name__}, and comes back as a {type(theirs).__name__}")
    if kind in _VALUES and repr(ours) != repr(theirs):  # what is equal may have another time zone, or another hour
        raise _refused(path, f"is {ours!r}, and comes back as {theirs!r}")
    if kind in _PLAIN or kind in _VALUES or issubclass(kind, Enum):
        return
    if kind is tuple:
        _compare_items(path, ours, theirs, seen)
        return
    _only_once(path, ours, seen)
    if kind is list:
        _compare_items(path, ours, theirs, seen)
    elif kind is dict:
        _compare_entries(path, list(ours.items()), list(theirs.items()), seen)
    elif dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        for name in _names(kind):
            _compare(f"{path}.{name}", getattr(ours, name), getattr(theirs, name), seen)
    else:
        raise _refused(path, f"is a {kind.__name__}; {_SET if issubclass(kind, set | frozenset) else _OTHER}")


def _compare_items(path: str, ours: Any, theirs: Any, seen: set[int]) -> None:
    if not {*map(type, ours), *map(type, theirs)} <= _PLAIN:
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            _compare(f"{path}[{at}]", one, other, seen)


def _compare_entries(path: str, ours: Any, theirs: Any, seen: set[int]) -> None:
    for (key, value), (its_key, its_value) in zip(ours, theirs, strict=True):
        if type(key) not in _PLAIN:
            _compare(f"{path} key {key!r:.40}", key, its_key, seen)
        if type(value) not in _PLAIN:
            _compare(f"{path}[{key!r:.40}]", value, its_value, seen)


_MIGRATE = "give the model migrate(version, data), which returns what its fields, or its restore(data), are to get"


def _not_migrated(kind: type, version: str, why: str) -> StateRefused:
    return StateRefused(f"{kind.__name__} cannot go on with the state of version {version!r}: {why}", path="")


_SET = "a set has no order that is kept: use the keys of a dict"
_OTHER = (
    "only plain types come back as they were: int, float, str, bytes, bool, None, list, dict, tuple, dataclasses, "
    "Decimal, dates and enums, and no subclasses of them"
)


def _names(kind: type) -> Iterable[str]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]


def _only_once(path: str, value: Any, seen: set[int]) -> None:
    if id(value) in seen:
        raise _refused(path, "is reached by two ways, and would come back as two: keep it in one place")
    seen.add(id(value))


def _refused(path: str, why: str) -> StateRefused:
    return StateRefused(f"no snapshot can be taken: the state's {path} {why}", path=path)
