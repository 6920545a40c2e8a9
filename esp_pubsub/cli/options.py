"""What an adapter can be told, under SAS's names: by `-C key=value,...`, by the classic flags, or by those of `esp`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

from .. import Client, ConfigError, EventFlag, Failover, Opcode, Schema, SchemaError, init
from ..address import Side
from ..bus import Start
from ..client import Opening
from ..config import DURATION, SIZE, SasOptions, load_options, looks_secret
from ..registry import chosen_bus, driver
from ..text import CsvFormat

_PAIR = re.compile(r'([A-Za-z]\w*+)=(?:"([^"]*+)"|([^,"]*+))\s*+(?:,\s*+|\Z)')
_NOT_BINARY = ("json", "protobuf", "protofile", "protomsg")
_FLAGS = {"normal": EventFlag.NORMAL, "partialupdate": EventFlag.PARTIAL}
_ONLY = {
    "pub": (
        "blocksize", "quiesce", "growinginputfile", "rate", "repeatcount", "prebuffer", "transactional",
        "publishwithupsert", "ignorecsvparseerrors", "missingdot", "ignoreunknownfields", "hotfailover",
        "failovergroup", "numbufferedmsgs", "zookeeperhostport", "election", "run",
    ),
    "sub": ("group", "csvincludeschema", "periodicity", "maxfilesize"),
}  # fmt: skip
_LEVELS = {
    "trace": logging.DEBUG, "debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING,
    "error": logging.ERROR, "fatal": logging.CRITICAL, "off": logging.CRITICAL + 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """The keys of `-C`. Those that SAS does not have: side, schema, group, election and run."""

    url: str
    """The window, dfESP://host:port/project/query/window."""
    fsname: str
    """A file, - for standard input or output, :port to listen, host:port to connect."""
    type: str | None = None
    """pub or sub, where the command does not say so."""
    fstype: str | None = None
    """csv, json, or binary, which is ours, not SAS's; unset: as the file's name ends, else csv."""
    transport: str = field(default_factory=chosen_bus)
    """The bus."""
    transportconfigfile: str | None = None
    """Its cfg file, or the folder it is in."""
    side: str | None = None
    """in or out, the topic of the window; pub writes in, sub reads out unless told."""
    schema: str | None = None
    """The window's schema; unset: as retained on the bus."""
    group: str | None = None
    """Reads as a member of this group, and goes on where it left off."""
    dateformat: str | None = None
    """How dates and stamps are spelt, in strftime's words; unset: as integers."""
    blocksize: int | None = None
    """Events of a block; unset: 64 from a file, else 1."""
    quiesce: bool = False
    """When all is published, an engine that reads the bus is asked to work it off; an error if none answers."""
    header: str = "0"
    """Lines to pass over, or names: the first line tells the fields."""
    growinginputfile: bool = False
    """Goes on reading what is appended to the file."""
    rate: float = 0.0
    """Events a second, at most; 0: as fast as it goes."""
    repeatcount: int = 0
    """How many more times the input is read."""
    prebuffer: bool = False
    """All of the input is read before the first block is published."""
    maxevents: int = 0
    """Ends after so many; 0: with the input."""
    transactional: bool = False
    """Blocks are published as transactional."""
    publishwithupsert: bool = False
    """With addcsvopcode: the opcode is upsert, not insert."""
    ignorecsvparseerrors: bool = False
    """Bad lines are counted and passed over; else the first one ends it."""
    missingdot: bool = False
    """A number that is a point alone is null, as SAS spells a missing value."""
    ignoreunknownfields: bool = False
    """JSON objects may have fields that the schema has not."""
    csvfielddelimiter: str = ","
    """One character."""
    noautogenfield: bool = False
    """Lines have no key field; the bus's window generates it."""
    addcsvopcode: bool = False
    """Lines have no column of opcodes."""
    addcsvflags: str | None = None
    """Lines have no column of flags; all events have this one: normal, partialupdate."""
    csvincludeschema: str = "never"
    """The schema as a line of the output: never, once or pereventblock."""
    periodicity: float = field(default=0.0, metadata=DURATION)
    """A new output file each time so long has passed; 0: one file."""
    maxfilesize: int = field(default=0, metadata=SIZE)
    """A new output file when one is so large; 0: one file."""
    unbufferedoutputstreams: bool = True
    """Output never waits in a buffer of ours, whatever this says."""
    hotfailover: bool | None = None
    """A member of a failover group; unset: as section sas says."""
    failovergroup: str | None = None
    """The group's name."""
    numbufferedmsgs: int | None = None
    """Blocks that a standby keeps ready."""
    zookeeperhostport: str | None = None
    """ZooKeeper elects the leader."""
    election: str | None = None
    """Who elects it, by name or URL; unset: ZooKeeper if there is one, else the bus."""
    run: int | None = None
    """The run of the group; unset: the one it is in."""
    loglevel: str | None = None
    """What is said beside the results: trace, debug, info, warn, error, fatal, off; unset: warn."""

    def __post_init__(self) -> None:
        _check("type", self.type, (None, "pub", "sub"))
        _check("fstype", self.fstype, (None, "csv", "json", "binary"))
        _check("side", self.side, (None, "in", "out"))
        _check("addcsvflags", self.addcsvflags, (None, *_FLAGS))
        _check("csvincludeschema", self.csvincludeschema, ("never", "once", "pereventblock"))
        _check("loglevel", self.loglevel, (None, *_LEVELS))
        if not (self.header.isdecimal() or self.header in ("names", "true", "false", "full")):
            raise ConfigError(f"header is a number of lines, names, true, false or full, not {self.header!r}")
        for key in ("rate", "repeatcount", "maxevents", "periodicity", "maxfilesize"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{key} is not negative; it is {getattr(self, key)}", key=key)
        if self.blocksize is not None and self.blocksize < 1:
            raise ConfigError(f"a block has at least one event, not {self.blocksize}", key="blocksize")
        if self.prebuffer and self.growinginputfile:
            raise ConfigError(
                "prebuffer waits for the end of an input, which growinginputfile has not", key="prebuffer"
            )
        self._check_direction()
        self._check_schema()

    def _check_direction(self) -> None:
        """What the other direction alone has is no key of this one."""
        if self.type is None:
            return
        defaults = {each.name: each.default for each in fields(self)}
        for key in _ONLY["sub" if self.type == "pub" else "pub"]:
            if getattr(self, key) not in (defaults[key], False):
                raise ConfigError(f"{key} is not for {self.type}, where it would do nothing; leave it out", key=key)
        if self.type == "sub" and self.header.isdecimal() and int(self.header):
            raise ConfigError(f"header of sub is true, false or full, not {self.header!r}", key="header")

    def _check_schema(self) -> None:
        """Here, because a slip in it is one in the command line."""
        if self.schema:
            try:
                Schema(self.schema)
            except SchemaError as e:
                raise ConfigError(str(e), key="schema") from None

    def log(self) -> None:
        """Have the SDK say as much as `loglevel` wants."""
        if self.loglevel is not None:
            logging.getLogger("esp_pubsub").setLevel(_LEVELS[self.loglevel])

    @property
    def format(self) -> str:
        """`csv`, `json` or `binary`, as said or as the name of the file says."""
        return self.fstype or ("json" if self.fsname.endswith(".json") else "csv")

    @property
    def wanted_side(self) -> Side | None:
        """`side`, checked."""
        return cast("Side | None", self.side)

    def csv(self) -> CsvFormat:
        """What lines look like."""
        named: Literal["names"] | int = int(self.header) if self.header.isdecimal() else "names"
        return CsvFormat(
            delimiter=self.csvfielddelimiter,
            opcode=(Opcode.UPSERT if self.publishwithupsert else Opcode.INSERT) if self.addcsvopcode else None,
            flags=None if self.addcsvflags is None else _FLAGS[self.addcsvflags],
            header=0 if self.header == "false" else named,
            keyless=self.noautogenfield,
            dateformat=self.dateformat,
            missing_dot=self.missingdot,
        )


def _check(key: str, value: str | None, known: Sequence[str | None]) -> None:
    if value not in known:
        names = ", ".join(filter(None, known))
        raise ConfigError(f"{key} is one of {names}, not {value!r}", key=key, value=value)


def pairs(text: str | None) -> dict[str, str]:
    """What stands behind -C; a value with commas stands in double quotes."""
    found: dict[str, str] = {}
    at, text = 0, (text or "").lstrip()
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None or match[1] in found:
            what = f"see what follows {[*found][-1]!r}" if found else "see its beginning"  # a value may be a secret
            raise ConfigError(f"-C is key=value,key=value, each key once; {what}")
        found[match[1]] = match[3] if match[2] is None else match[2]
        at = match.end()
    return found


def settings(given: Sequence[str]) -> dict[str, str]:
    """What --set gives, for the bus."""
    found = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals:
            raise ConfigError("--set is key=value with a key of the bus's cfg file; one of them has no =")
        if not key.isidentifier() or key in ("bus", "config", "on_notice"):
            raise ConfigError(f"--set is key=value with a key of the bus's cfg file, which {key!r} is not")
        if looks_secret(key, value):
            raise ConfigError(
                f"--set {key}=... shows a secret to everybody on this machine, and to your shell's history. Put it "
                f"into the bus's cfg file, the environment (ESP_PUBSUB_{key.upper()}), or a descriptor: "
                "--config /dev/fd/3 3< <(...)",
                key=key,
            )
        found[key] = value
    return found


def adapter_options(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> AdapterOptions:
    """Of two places; what is None counts as not given."""
    given = {**weak, **{key: value for key, value in strong.items() if value is not None}}
    if str(given.get("periodicity", "")).isdecimal():
        given["periodicity"] = f"{given['periodicity']}s"  # SAS counts seconds
    nowhere = {"section": "-C", "bus": "esp", "config": os.devnull, "environ": {}}
    return load_options(AdapterOptions, keywords=given, **nowhere)  # type: ignore[arg-type]


def sas_options(bus: str, config: str | None) -> SasOptions:
    """Section `sas` of the bus's cfg file."""
    sas = load_options(SasOptions, section="sas", bus=bus, config=config)
    if set_keys := [key for key in _NOT_BINARY if getattr(sas, key)]:
        raise ConfigError(f"section sas has {set_keys[0]}, but blocks travel in binary only; take it out")
    return sas


def bus_start(options: AdapterOptions, keys: Mapping[str, Any]) -> Start | None:
    """Where reading begins by the settings of the bus, for whoever says nothing else."""
    found = load_options(
        driver(options.transport).Options, section=options.transport, config=options.transportconfigfile, keywords=keys
    )
    return getattr(found, "start", None)


def opened(options: AdapterOptions, keys: Mapping[str, Any]) -> Opening[Client]:
    """The bus that they name."""
    return init(options.transport, config=options.transportconfigfile, **keys)


def failover(options: AdapterOptions, sas: SasOptions, run: int) -> Failover | None:
    """By flags, or by two keys in the section `sas`; flags win."""
    group = options.failovergroup or sas.failovergroup
    if options.hotfailover is None:
        wanted = options.failovergroup is not None or sas.hotfailover
    else:
        wanted = options.hotfailover
    if not wanted:
        return None
    if group is None:
        raise ConfigError("hotfailover needs failovergroup, the same name on every member", key="failovergroup")
    keeper = options.zookeeperhostport or sas.zookeeperhostport
    election = options.election or (f"zookeeper://{keeper}" if keeper else None)
    buffer = sas.numbufferedmsgs if options.numbufferedmsgs is None else options.numbufferedmsgs
    return Failover(group, run=run, buffer=buffer, election=election)
