"""Options of a bus: its cfg file, the environment and keywords, from weak to strong, in one small frozen dataclass.

The file has SAS's syntax: a section name, `{`, lines `key = "value"` or `key = word`, `}`, comments after `#`. The
dataclass says which keys exist, of what type, with what default; a field whose metadata is `SIZE` takes `64MiB`, one
with `DURATION` takes `500ms`. Each value keeps the place it came from, for complaints; none shows a secret.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_type_hints

from esp_pubsub.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Place = str | os.PathLike[str]
PREFIX = "ESP_PUBSUB_"
MAX_FILE = 1 << 20
SIZE = {"form": "size"}
_EVERYWHERE = "connect_timeout"  # a keyword of every bus, and an option of none
DURATION = {"form": "duration"}

_SECRET = r"(?:passw|passphrase|passcode|pass(?![a-z])|pwd|secret|token|credential|(?:api|private).?key|key.?pem)"
_SECRET_KEY = re.compile(_SECRET, re.I)
_NOT_WORD = re.compile(r"[^\w.-]")
_ENTRY = re.compile(r"([A-Za-z_][\w.-]*+)\s*+=\s*+(?:\"([^\"]*+)\"|([^\s\"'#{}=;]++)(?!#))\s*+(?:#.*)?")
_KEY = re.compile(r"([A-Za-z_][\w.-]*+)\s*+=")
_WORD = re.compile(r"[{}]|[^\s{}]+")
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_EXPECTED = {
    "name": "the name of a section that is not there yet, such as kafka or sas",
    "{": "'{' after the name of a section",
    "body": "key = value, or the '}' that ends the section",
}
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")
_BYTES = {"": 1.0, "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SWITCH = {"true": True, "1": True, "false": False, "0": False}


class Secret(str):
    """A string that prints as `***`, also formatted or inside a repr; `reveal()` gives the plain one.

    What takes the characters themselves (a vendor client, `+`, `join`, json) sees the real value.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return format("***", spec)

    def reveal(self) -> str:
        """The real value, as a plain string."""
        return str.__str__(self)


@dataclass(frozen=True, slots=True)
class SasOptions:
    """The keys of section `sas`, which every bus shares; their meaning is SAS's."""

    hotfailover: bool = False
    """An adapter is a member of a failover group."""
    numbufferedmsgs: int = 10_000
    """Blocks that a standby keeps ready."""
    failovergroup: str | None = None
    """The group's name; with it alone an adapter is redundant too."""
    zookeeperhostport: str | None = None
    """ZooKeeper elects the group's leader; unset: the bus."""
    dateformat: str | None = None
    """How dates and stamps are spelt in text, in strftime's words; unset: as integers."""
    buspersistence: bool = False
    """The bus keeps what nobody has read yet; each bus says how."""
    queuename: str | None = None
    """The group of subscribers that name none."""
    json: bool = False
    """Adapters refuse it: between them blocks travel in one form. `fstype` says how text is written."""
    protobuf: bool = False
    """As json."""
    protofile: Path | None = None
    """As json."""
    protomsg: str | None = None
    """As json."""


def check_type(name: str, given: object, kind: type, example: str) -> None:
    """ConfigError for a keyword that is of another class than the one it has to be of; None is always allowed."""
    if given is not None and not isinstance(given, kind):
        raise ConfigError(f"{name} is an esp.{kind.__name__}, such as {example}, not {given!r:.80}", key=name)


def connect_timeout(given: object) -> float:
    """The seconds of the keyword `connect_timeout`, else of the environment, else 0."""
    name = _variable(_EVERYWHERE)
    value, source = (os.environ.get(name, 0), f"environment {name}") if given is None else (given, "keyword")
    found = seconds(value)
    if found is None:
        raise ConfigError(
            f"{source}: connect_timeout = {value!r:.80} is not a duration, such as 500ms, 2s or 5min",
            key="connect_timeout",
        )
    return found


class _Given(NamedTuple):
    value: Any
    source: str


def parse_cfg(text: str, *, name: str = "kafka.cfg") -> dict[str, dict[str, str]]:
    """The sections of a cfg file. Values that look secret come as `Secret`; no error shows the value of a line."""
    return {section: {key: each.value for key, each in found.items()} for section, found in _read(text, name).items()}


def load_options(
    cls: type[T],
    *,
    section: str,
    config: Place | None = None,
    environ: Mapping[str, str] | None = None,
    keywords: Mapping[str, object] | None = None,
    bus: str | None = None,
) -> T:
    """Options of one section, each field from the strongest place that gives it, else its default.

    The file is `config` (a file, or a folder with `<bus>.cfg`), else `<bus>.cfg` in the current directory, else what
    ESP_PUBSUB_CONFIG names; `bus` is the section unless given, so `sas` of kafka.cfg is section="sas", bus="kafka".
    What stands in `sas` counts where the section has no such key.
    Then come ESP_PUBSUB_<KEY> and keywords; a keyword that is None counts as not given. Reads a small file, blocking.
    """
    environ = os.environ if environ is None else environ
    known = {field.name: field for field in fields(cls)}
    given = _from_file(section, bus or section, config, environ)
    if section != "sas":  # SAS has some keys of a bus there
        shared = _from_file("sas", bus or section, config, environ)
        given = {key: value for key, value in shared.items() if key in known} | given
    given |= {key: _Given(environ[name], f"environment {name}") for key in known if (name := _variable(key)) in environ}
    said = {key: value for key, value in (keywords or {}).items() if value is not None and key != _EVERYWHERE}
    given |= {key: _Given(value, f"keyword {key}") for key, value in said.items()}
    for key, (_, source) in given.items():
        if key not in known:
            near = "".join(get_close_matches(key.lower(), known, 1, 0.0))
            problem = f"{source}: {section} has no key {key!r}; the nearest known one is {near!r}"
            raise ConfigError(problem, key=key, source=source, known=tuple(known))
    for key, field in known.items():
        if key not in given and field.default is MISSING and field.default_factory is MISSING:
            ways = f"{key} = ... in section {section} of {bus or section}.cfg, {_variable(key)}, or the keyword {key}"
            raise ConfigError(f"{section} needs {key!r}: give {ways}", key=key, source=None)
    hints = get_type_hints(cls)
    return cls(**{key: _convert(key, each, known[key], hints[key]) for key, each in given.items()})


def _bad(at: str, expected: str) -> ConfigError:
    return ConfigError(f"{at}: expected {expected}", source=at, expected=expected)


def _read(text: str, name: str) -> dict[str, dict[str, _Given]]:
    sections: dict[str, dict[str, _Given]] = {}
    section, stage, at = "", "name", name
    for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line, at = raw.strip(), f"{name}:{number}"
        if stage == "body" and _KEY.match(line):
            key, value = _entry(line, at)
            if key in sections[section]:
                raise _bad(at, f"the key {key!r} once; it stands at {sections[section][key].source} too")
            sections[section][key] = _Given(value, at)
            continue
        for word in _WORD.findall(line.partition("#")[0]):
            if stage == "name" and _NAME.fullmatch(word) and word not in sections:
                section, stage, sections[word] = word, "{", {}
            elif (stage, word) in (("{", "{"), ("body", "}")):
                stage = "body" if word == "{" else "name"
            else:
                raise _bad(at, _EXPECTED[stage])
    if stage != "name":
        raise _bad(at, f"{_EXPECTED[stage]}; section {section} is not closed at the end of the file")
    return sections


def _entry(line: str, at: str) -> tuple[str, str]:
    if match := _ENTRY.fullmatch(line):
        key, quoted, word = match.groups()
        return key, _masked(key, word if quoted is None else quoted)
    key = line.partition("=")[0].strip()
    raise _bad(at, f"after '{key} =' one value in double quotes, or one word without blanks and \"'#{{}}=;")


def _from_file(section: str, bus: str, config: Place | None, environ: Mapping[str, str]) -> dict[str, _Given]:
    try:
        path = _find(Path(f"{bus}.cfg"), config, environ)
        if path is None:
            return {}
        with path.open("rb") as file:
            raw = file.read(MAX_FILE + 1)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}; name a cfg file that can be read"
        raise ConfigError(problem, source=error.filename) from error
    if len(raw) > MAX_FILE or "\ufffd" in (text := raw.decode("utf-8", "replace")):
        raise ConfigError(f"{path}: over {MAX_FILE} bytes or not UTF-8, so not a cfg file", source=str(path))
    sections = _read(text, str(path))
    if section not in sections and (get_close_matches(section, sections, 1) or (config and section == bus)):
        problem = f"{path}: expected a section {section}; it has {', '.join(sections) or 'none'}"
        raise ConfigError(problem, source=str(path), expected=section)
    return sections.get(section, {})


def _find(local: Path, config: Place | None, environ: Mapping[str, str]) -> Path | None:
    if not config and local.exists():
        return local
    place = Path(config or environ.get(_variable("config")) or local)
    path = place / local if place.is_dir() else place
    return path if config or (place != local and path == place) or path.exists() else None


def _variable(key: str) -> str:
    return PREFIX + key.upper()


def looks_secret(key: str, value: str) -> bool:
    """Whether a value is one that nobody should print: by its key, a name inside it, or because it names a user."""
    inside = (_NOT_WORD.split(part.rstrip())[-1] for part in value.split("=")[:-1])
    return any(map(_SECRET_KEY.search, (key, *inside))) or ":" in value.rpartition("@")[0]


def without_user(place: str) -> str:
    """An address as it may be shown: whatever stands in front of an `@` is `***`."""
    user, at, rest = place.rpartition("@")
    scheme, colon, _ = user.partition("://")
    return f"{scheme + colon if colon else ''}***@{rest}" if at else place


def _masked(key: str, value: str) -> str:
    return Secret(value) if looks_secret(key, value) else value


def _convert(key: str, given: _Given, field: Field[Any], hint: Any) -> object:
    kind = field.metadata.get("form") or next((t for t in get_args(hint) if t is not type(None)), hint)
    convert, allowed = _FORMS[kind]
    plain = str.__str__(given.value) if isinstance(given.value, str) else given.value
    value = convert(plain)
    if isinstance(value, str):
        return _masked(key, value)
    if value is None:
        shown = _masked(key, str(plain) if isinstance(plain, str | int | float) else f"a {type(plain).__name__}")
        problem = f"{given.source}: {key} = {shown!r:.80} is not {allowed}"
        raise ConfigError(problem, key=key, value=shown, source=given.source, allowed=allowed)
    return value


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: object) -> int | None:
    if isinstance(value, str):
        return int(value) if re.fullmatch("-?[0-9]{1,18}", value) else None
    return value if type(value) is int else None


def _quantity(value: object, units: Mapping[str, float]) -> float | None:
    if not isinstance(value, str):
        number = _number(value)
        return number if number is not None and number >= 0 else None
    match = _QUANTITY.fullmatch(value)
    return float(match[1]) * units[match[2]] if match and match[2] in units else None


def seconds(value: object) -> float | None:
    """A duration such as `500ms`, in seconds; None for what is none."""
    return _quantity(value, _SECONDS)


def _size(value: object) -> int | None:
    number = _quantity(value, _BYTES)
    return int(number) if number is not None and number.is_integer() else None


_FORMS: dict[object, tuple[Callable[[Any], object], str]] = {
    int: (_whole, "a whole number, such as 10"),
    float: (_number, "a number, such as 0.5"),
    bool: (lambda value: value if isinstance(value, bool) else _SWITCH.get(str(value).lower()), "true or false"),
    str: (lambda value: value if isinstance(value, str) else None, "a string"),
    Path: (lambda value: Path(value) if value and isinstance(value, str | os.PathLike) else None, "a path"),
    "size": (_size, "a size in bytes, such as 65536, 512KiB or 64MiB"),
    "duration": (seconds, "a duration, such as 500ms, 2s or 5min"),
}
