"""What an adapter can be told, under SAS's names: by `-C key=value,...`, by the classic flags, or by those of `esp`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from .. import Client, ConfigError, EventFlag, Failover, Opcode, init
from ..address import Side
from ..client import Opening
from ..config import DURATION, SIZE, SasOptions, load_options
from ..text import CsvFormat

_PAIR = re.compile(r'\s*([A-Za-z]\w*)=(?:"([^"]*)"|([^,"]*))\s*(?:,|\Z)')
_NOT_BINARY = ("json", "protobuf", "protofile", "protomsg")
_FLAGS = {"normal": EventFlag.NORMAL, "partialupdate": EventFlag.PARTIAL}


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """The keys of `-C`. Those that SAS does not have: side, schema, group, election and run."""

    url: str
    fsname: str
    type: str | None = None
    fstype: str | None = None
    transport: str = "embedded"
    transportconfigfile: str | None = None
    side: str | None = None
    schema: str | None = None
    group: str | None = None
    dateformat: str | None = None
    blocksize: int | None = None
    quiesce: bool = False
    header: str = "0"
    growinginputfile: bool = False
    rate: float = 0.0
    repeatcount: int = 0
    maxevents: int = 0
    transactional: bool = False
    publishwithupsert: bool = False
    ignorecsvparseerrors: bool = False
    csvfielddelimiter: str = ","
    noautogenfield: bool = False
    addcsvopcode: bool = False
    addcsvflags: str | None = None
    csvincludeschema: str = "never"
    periodicity: float = field(default=0.0, metadata=DURATION)
    maxfilesize: int = field(default=0, metadata=SIZE)
    unbufferedoutputstreams: bool = True
    """Output never waits in a buffer of ours, whatever this says."""
    hotfailover: bool | None = None
    failovergroup: str | None = None
    numbufferedmsgs: int | None = None
    zookeeperhostport: str | None = None
    election: str | None = None
    run: int | None = None

    def __post_init__(self) -> None:
        _check("type", self.type, (None, "pub", "sub"))
        _check("fstype", self.fstype, (None, "csv", "json"))
        _check("side", self.side, (None, "in", "out"))
        _check("addcsvflags", self.addcsvflags, (None, *_FLAGS))
        _check("csvincludeschema", self.csvincludeschema, ("never", "once", "pereventblock"))
        if not (self.header.isdecimal() or self.header in ("names", "true", "false", "full")):
            raise ConfigError(f"header is a number of lines, names, true, false or full, not {self.header!r}")
        for key in ("rate", "repeatcount", "maxevents", "periodicity", "maxfilesize"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{key} is not negative; it is {getattr(self, key)}", key=key)
        if self.blocksize is not None and self.blocksize < 1:
            raise ConfigError(f"a block has at least one event, not {self.blocksize}", key="blocksize")
        if self.quiesce:
            raise ConfigError("-Q: there is no engine behind a bus that could be quiesced; leave it out", key="quiesce")

    @property
    def format(self) -> str:
        """`csv` or `json`, as said or as the name of the file says."""
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
        )


def _check(key: str, value: str | None, known: Sequence[str | None]) -> None:
    if value not in known:
        names = ", ".join(filter(None, known))
        hint = " (SAS has written down no format for it)" if value == "binary" else ""
        raise ConfigError(f"{key} is one of {names}, not {value!r}{hint}", key=key, value=value)


def pairs(text: str | None) -> dict[str, str]:
    """What stands behind -C; a value with commas stands in double quotes."""
    found, at, text = {}, 0, text or ""
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None or match[1] in found:
            raise ConfigError(f"-C is key=value,key=value, each key once, not {text[at:]!r}", value=text)
        found[match[1]] = match[3] if match[2] is None else match[2]
        at = match.end()
    return found


def settings(given: Sequence[str]) -> dict[str, str]:
    """What --set gives, for the bus."""
    found = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key.isidentifier() or key in ("bus", "config", "on_notice"):
            raise ConfigError(f"--set is key=value with a key of the bus's cfg file, not {each!r}")
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
