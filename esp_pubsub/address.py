"""dfESP URLs and the names they stand for on every bus.

    dfESP://host:port[/project[/contquery[/window]]][?option=value[?|&option=value]...]

`host:port` is a label that all members of a cluster write alike; on a bus it is never dialled, so it is compared as
text and kept as written. One URL gives three portable names: a topic (one direction of one window), the metadata name,
and the control name of a failover group. Embedded, RabbitMQ and Solace use a portable name as it is; `kafka_topic` and
`tervela_topic` translate it. Names hold only letters, digits, '_' and '-': a '.' or '/' inside one would let two topics
share a name on a bus that separates with it, and a wildcard would let one stand for many.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from ipaddress import IPv6Address
from typing import Any, Literal

from esp_pubsub.config import without_user
from esp_pubsub.errors import AddressError, NotOffered

Side = Literal["in", "out"]

MAX_PART = 128
MAX_KAFKA_NAME = 249
FORM = "dfESP://host:port/project/contquery/window"
GET = ("schema", "projects", "projects_pubsubonly", "queries", "queries_pubsubonly", "windows", "windows_pubsubonly",
       "windows_sourceonly", "edges", "rowcount")  # fmt: skip

_SWITCHES = ("snapshot", "collapse", "rmretdel")
_PATH = ("project", "contquery", "window")
_DIRECTION = {"in": "I", "out": "O"}
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_BLANK = re.compile(r"[\s\x00-\x1f\x7f-\x9f]")
_NOT_NAME = re.compile(r"[^A-Za-z0-9_-]")
_NOT_HOST = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """What may follow the '?'. `snapshot` is there so that `snapshot=false` carries over; true raises NotOffered."""

    snapshot: bool = False
    collapse: bool = False
    rmretdel: bool = False
    side: Side | None = None
    get: str | None = None

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            value = getattr(self, name)
            if type(value) is not bool:
                raise _wrong(f"option {name}", value, "is neither true nor false: write it in lower case")
        if self.snapshot:
            problem = "snapshot=true needs an engine, which keeps a window's content: on a bus write snapshot=false"
            raise NotOffered(problem, capability="snapshot")
        _check_choice("side", self.side, tuple(_DIRECTION))
        _check_choice("get", self.get, GET)

    def __str__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return "".join(f"?{name}={'true' if value is True else value}" for name, value in given)


@dataclass(frozen=True, slots=True)
class Address:
    """A checked dfESP address: one that exists can be printed, parsed back and turned into names.

    A project alone, or a project with a contquery, is an address too; what needs a window asks `require_window`.
    """

    host: str
    port: int
    project: str | None = None
    contquery: str | None = None
    window: str | None = None
    options: AddressOptions = field(default_factory=AddressOptions)

    def __post_init__(self) -> None:
        _check_host(self.host)
        if type(self.port) is not int or not 1 <= self.port <= 65535:
            raise _wrong("port", self.port, "is not a whole number from 1 to 65535")
        missing = None
        for part in _PATH:
            value = getattr(self, part)
            if value is None:
                missing = missing or part
            elif missing:
                raise _wrong(missing, None, f"is missing in front of the {part}: write {FORM}")
            else:
                _check_name(part, value)

    @classmethod
    def parse(cls, url: str) -> Address:
        """Reads a URL; any slip is an AddressError with `part` and `value` that says what to write instead."""
        if not isinstance(url, str):
            raise _wrong("URL", url, f"is not a string: write '{FORM}'")
        if blank := _BLANK.search(url):
            raise _wrong("URL", url, f"has a blank or control character ({blank[0]!r}) at {blank.start()}: take it out")
        scheme, colon, rest = url.partition("://")
        if not colon or scheme != "dfESP":
            exact = " in exactly this case" if scheme.lower() == "dfesp" else ""
            raise _wrong("scheme", scheme if colon else "", f"is not dfESP: write {FORM}{exact}")
        path, question, query = rest.partition("?")
        authority, *names = path.split("/")
        if len(names) > len(_PATH):
            raise _wrong("path", "/" + "/".join(names), f"has {len(names)} parts, more than three: write {FORM}")
        if "@" in authority:
            raise _wrong("host", authority, f"names a user with '@', and no address here has one: write {FORM}")
        host, port = _split_authority(authority)
        project, contquery, window = [*names, None, None, None][:3]
        options = _parse_options(query) if question else AddressOptions()
        return cls(host, port, project, contquery, window, options)

    def __str__(self) -> str:
        path = [part for part in (self.project, self.contquery, self.window) if part is not None]
        return "dfESP://" + "/".join([self.hostport, *path]) + str(self.options)

    @property
    def hostport(self) -> str:
        """The cluster's label, `host:port`."""
        return f"{self.host}:{self.port}"

    @property
    def metadata(self) -> str:
        """The name on which this cluster's metadata is asked for and retained."""
        return f"{self.hostport}/M"

    def require_window(self) -> tuple[str, str, str]:
        """Project, contquery and window; an AddressError names the first of them that the address lacks."""
        if self.project is None or self.contquery is None or self.window is None:
            missing = next(part for part in _PATH if getattr(self, part) is None)
            raise _wrong(missing, None, f"is missing in {self}, and a window is needed here: write {FORM}")
        return self.project, self.contquery, self.window

    def topic(self, side: Side) -> str:
        """The portable name of one direction of the window. The option `side` is not looked at: the caller decides."""
        _check_side(side)
        return "/".join([self.hostport, *self.require_window(), _DIRECTION[side]])

    def control(self, group: str) -> str:
        """The name on which the members of a failover group talk among themselves."""
        _check_name("group", group)
        if group in _DIRECTION.values():
            raise _wrong("group", group, "would read like a window's direction on Kafka: choose another name")
        return f"{self.metadata}/F/{group}"

    @property
    def engine_control(self) -> str:
        """The name on which the members of the engine at this contquery talk among themselves."""
        if self.project is None or self.contquery is None:
            raise _wrong("contquery", None, f"is missing in {self}, and an engine needs one: write {FORM}")
        return f"{self.metadata}/F/engine/{self.project}/{self.contquery}"

    @property
    def engine_requests(self) -> str:
        """The name on which the engine at this contquery is asked, and told what to do."""
        if self.project is None or self.contquery is None:
            raise _wrong("contquery", None, f"is missing in {self}, and an engine needs one: write {FORM}")
        return f"{self.metadata}/E/{self.project}/{self.contquery}"


def order_topic(control: str, run: int) -> str:
    """The topic on which all that is decided stands which does not follow from the input alone; a run has its own."""
    return f"{control}/order-{run}" if run else f"{control}/order"


def is_control(topic: str) -> bool:
    """Whether nobody needs what stands on a topic for longer than seconds: the words of a group, but neither the order
    of an engine, whose topic has a longer name, nor a window of the project M and its query F.
    """
    _, found, group = topic.partition("/M/F/")
    return bool(found) and not re.fullmatch(".+/order(-[0-9]+)?|[^/]+/[IO]", group)


def other_side(topic: str) -> str:
    """The portable name of the same window's other direction; a metadata or control name has none."""
    stem, _, direction = topic.rpartition("/")
    if stem.count("/") != len(_PATH) or direction not in ("I", "O"):
        raise _wrong("topic", topic, "is not one direction of a window, host:port/project/contquery/window/I")
    return f"{stem}/{'O' if direction == 'I' else 'I'}"


def kafka_topic(name: str) -> str:
    """The Kafka name of a portable one. Different portable names never share one.

    A broker also refuses a topic that differs from an existing one only by '.' in place of '_'.
    """
    hostport, *parts = name.split("/")
    host, colon, port = hostport.rpartition(":")
    if not colon or not parts or any("." in part or not part for part in parts):
        raise _wrong("topic", name, "is not a portable name: take it from topic(), metadata or control() of an Address")
    kafka = ".".join([f"{host}_{port}", *parts])
    if bad := _NOT_HOST.search(kafka):
        allowed = "Kafka allows letters, digits, '.', '_' and '-': choose another label for host:port"
        raise _wrong("topic", name, f"has the character {bad[0]!r}, which no Kafka topic can have; {allowed}")
    if len(kafka) > MAX_KAFKA_NAME:
        raise _wrong("topic", name, f"has {len(kafka)} characters, Kafka allows {MAX_KAFKA_NAME}: use shorter names")
    return kafka


def tervela_topic(engine: str, address: Address, side: Side) -> str:
    """The Tervela name, for reading old set-ups: there is no driver for it."""
    _check_name("engine", engine)
    _check_side(side)
    return ".".join(["SAS.ENGINES", engine, *address.require_window(), side.upper()])


def _wrong(part: str, value: object, problem: str) -> AddressError:
    value = without_user(value) if isinstance(value, str) else value
    shown = "" if value in (None, "") else f" {value!r}" if len(repr(value)) <= 80 else f" {repr(value)[:77]}..."
    return AddressError(f"the {part}{shown} {problem}", part=part, value=value)


def _split_authority(authority: str) -> tuple[str, int]:
    host, colon, port = authority.rpartition(":")
    if not colon or port == "" or authority.endswith("]"):
        raise _wrong("port", None, f"is missing in {without_user(authority)[:MAX_PART]!r}: write {FORM}")
    if not _PORT.fullmatch(port):
        raise _wrong("port", port, "is not a whole number from 1 to 65535, without sign or leading zeros")
    return host, int(port)


def _check_host(host: str) -> None:
    if not isinstance(host, str) or not host:
        raise _wrong("host", host, f"is not there: write {FORM}")
    if len(host) > MAX_PART:
        raise _wrong("host", host, f"has {len(host)} characters, at most {MAX_PART} are allowed")
    if host.startswith("[") and host.endswith("]"):
        if not _is_ipv6(host[1:-1]):
            raise _wrong("host", host, "is not an IPv6 address in brackets, such as [::1]")
    elif bad := _NOT_HOST.search(host):
        hint = " (an IPv6 address goes into brackets, such as [::1])" if ":" in host else _escape_hint(bad[0])
        raise _wrong("host", host, f"has the character {bad[0]!r}: use letters, digits, '.', '_' and '-'{hint}")


def _is_ipv6(text: str) -> bool:
    try:
        return IPv6Address(text).scope_id is None
    except ValueError:
        return False


def _check_name(part: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise _wrong(part, value, f"is empty or not a string: write {FORM}, without a doubled or trailing '/'")
    if len(value) > MAX_PART:
        raise _wrong(part, value, f"has {len(value)} characters, at most {MAX_PART} are allowed")
    if bad := _NOT_NAME.search(value):
        hint = _escape_hint(bad[0])
        raise _wrong(part, value, f"has the character {bad[0]!r}: use letters, digits, '_' and '-'{hint}")


def _escape_hint(character: str) -> str:
    return "; percent escapes are not decoded" if character == "%" else ""


def _check_side(side: str) -> None:
    if side not in _DIRECTION:
        raise _wrong("side", side, "is neither 'in' (what goes into the window) nor 'out' (what comes out of it)")


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise _wrong(f"option {name}", value, f"is not one of {', '.join(known)}{_nearest(str(value), known)}")


def _nearest(word: str, known: tuple[str, ...]) -> str:
    return f"; the nearest is {get_close_matches(word[:MAX_PART].lower(), known, 1, 0.0)[0]!r}"


def _parse_options(query: str) -> AddressOptions:
    known = tuple(each.name for each in fields(AddressOptions))
    given: dict[str, Any] = {}
    for piece in re.split("[?&]", query):
        name, equals, value = piece.partition("=")
        if not name or not equals or not value:
            raise _wrong("option", piece, "is not complete: write ?name=value, further ones with '?' or '&' in front")
        if name not in known:
            raise _wrong("option", name, f"is not known (known: {', '.join(known)}){_nearest(name, known)}")
        if name in given:
            raise _wrong(f"option {name}", value, "is given twice: keep one")
        given[name] = {"true": True, "false": False}.get(value, value) if name in _SWITCHES else value
    return AddressOptions(**given)
