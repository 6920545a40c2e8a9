"""SAS's connectors, which say where a window's events come from and go to.

An engine reads the bus and writes the bus, whatever the file says; who publishes and who subscribes runs beside it. So
nothing of a connector is carried out. It is checked that it asks for nothing else than what happens, and what is to be
run or set instead is said. A window with a subscriber connector is an output.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .sas_elements import flag, properties_of, required
from .xml_tree import Element

Say = Callable[[int, str], None]
"""Takes a line of the file and what is to be said of it."""

_ANY = "type urlhostport hotfailover numbufferedmsgs snapshot dateformat transactional blocksize"
_KNOWN: Mapping[str, str] = {
    "fs": f"{_ANY} fsname fstype header rate maxevents repeatcount addcsvopcode addcsvflags noautogenfield prebuffer "
    "growinginputfile ignorecsvparseerrors publishwithupsert csvfielddelimiter csvincludeschema collapse "
    "cefsyslogprefix periodicity maxfilesize unbufferedoutputstreams",
    "kafka": f"{_ANY} kafkahostport kafkapartition kafkatopic kafkatype kafkaglobalconfig kafkatopicconfig "
    "kafkainitialoffset useoffsetmsgid useclientmsgid zookeeperhostport failovergroup",
    "rmq": f"{_ANY} rmqhost rmqport rmquserid rmqpassword rmqpasswordencrypted rmqvhost rmqexchange rmqtopic rmqtype "
    "rmqssl buspersistence buspersistencequeue useclientmsgid failovergroup",
}
_BUSES = {"kafka": ("Kafka", "kafka"), "rmq": ("RabbitMQ", "rabbitmq")}
_ADAPTERS = (
    "header rate maxevents repeatcount addcsvopcode addcsvflags noautogenfield prebuffer growinginputfile "
    "ignorecsvparseerrors publishwithupsert csvfielddelimiter csvincludeschema periodicity maxfilesize transactional"
)  # what `esp adapter -C` takes under the same names


class Connector(NamedTuple):
    """An active connector."""

    kind: str
    publishes: bool
    """Its events come into the window; else the window's go out."""


def read_connector(element: Element, window: str, say: Say) -> Connector | None:
    """What this connector is, if it is active; what it would do in SAS and is not done here is said."""
    kind = required(element, "class")
    if not flag(element, "active", True):
        return None
    if kind not in _KNOWN:
        element.refuse(
            f"connectors of class {kind} are not taken (fs, kafka and rmq are): take it out, and publish to the bus or "
            "read from it with a program of your own"
        )
    given = properties_of(element)
    for name in given:
        if name not in _KNOWN[kind].split():
            element.refuse(f"the property {name} is not taken in a connector of class {kind}")
    found = Connector(kind, _publishes(element, given))
    if kind == "fs":
        _read_file(element, given, found, window, say)
    else:
        _read_bus(element, given, kind, say)
    return found


def _publishes(element: Element, given: Mapping[str, str]) -> bool:
    side = given.get("type") or {"publish": "pub", "subscribe": "sub"}.get(element.attributes.get("type", ""), "")
    if side not in ("pub", "sub"):
        element.refuse("the property type is pub or sub" + (f", not {side!r}" if side else ", and it is missing"))
    return side == "pub"


def _read_file(element: Element, given: Mapping[str, str], found: Connector, window: str, say: Say) -> None:
    kind = given.get("fstype", "csv")
    if kind != "csv":
        element.refuse(f"files of type {kind} are not taken here: take the connector out, and see esp adapter --help")
    if not given.get("fsname"):
        element.refuse("the property fsname is missing")
    side = "pub" if found.publishes else "sub"
    words = ["esp", "adapter", "-k", side, "-h", f"URL/{window}", "-f", given["fsname"], "-t", "csv"]
    for name, sign in (("dateformat", "-d"), ("blocksize", "-b")):
        words += [sign, given[name]] if name in given else []
    keys = [f"{name}={given[name]}" for name in _ADAPTERS.split() if name in given]
    words += ["-C", ",".join(keys)] if keys else []
    say(element.line, f"an engine {'reads' if found.publishes else 'writes'} no files: {shlex.join(words)}")


def _read_bus(element: Element, given: Mapping[str, str], kind: str, say: Say) -> None:
    vendor, bus = _BUSES[kind]
    form = given.get(f"{kind}type", "binary")
    if form != "binary":
        element.refuse(f"blocks travel in binary form, which failover needs: make {kind}type binary, not {form}")
    partition = given.get("kafkapartition", "0")
    if not (partition.isascii() and partition.isdecimal()):
        element.refuse(f"a window has one fixed partition, or there is no one order: kafkapartition is not {partition}")
    for name in ("hotfailover", "buspersistence"):
        if given.get(name, "true") not in ("true", "false"):
            element.refuse(f"the property {name} is true or false, not {given[name]!r}")
    said = f"the bus and its keys come from the command: --bus {bus}, and its cfg file"
    if "urlhostport" in given:
        said += "; the engine's URL says what urlhostport says"
    if buffered := given.get("numbufferedmsgs"):
        if not (buffered.isascii() and buffered.isdecimal() and int(buffered[:9]) > 0):
            element.refuse(f"the property numbufferedmsgs is a number of at least 1, not {buffered!r}")
        said += f"; for numbufferedmsgs: --buffer {buffered}"
    if given.get("hotfailover") == "false":
        said += "; every member stands by for the others, also with hotfailover=false"
    say(element.line, f"{vendor}: {said}")
