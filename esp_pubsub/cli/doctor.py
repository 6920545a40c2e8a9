"""`esp doctor`: what is installed, which bus answers, and what to do about the rest. `esp check-history`."""

from __future__ import annotations

import asyncio
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from .. import BusRefused, BusUnavailable, ConfigError, EspError, NotInstalled, __version__, init
from ..config import SasOptions, load_options
from ..registry import driver, names
from ..testing.history import check, read

_ANSWER = 15.0
_EXTRA = re.compile(r"([\w-]+).*extra == [\"'](\w+)[\"']")
_COLLECTIONS = ("all", "dev")


async def doctor(bus: str | None, config: str | None, keys: Mapping[str, Any]) -> None:
    """Look at everything, or at one bus. It fails if that bus, or the embedded one, does not answer."""
    print(f"Python {platform.python_version()} on {platform.system()} {platform.release()}")
    print(f"esp-pubsub {__version__}")
    for line in _extras():
        print(line)
    wrong = []
    for name in [bus] if bus else names():
        good, found = await _bus(name, config if name == bus else None, keys if name == bus else {})
        print(f"bus {name}: {found}")
        if not good and name == (bus or "embedded"):
            wrong.append(name)
    if wrong:
        raise EspError(f"bus {wrong[0]} cannot be used")


async def solace(url: str, config: str | None, keys: Mapping[str, Any]) -> None:
    """What an administrator has to make for a window, as solace.cfg is: with its `queuename` and `failovergroup`."""
    for line in await asyncio.to_thread(_for_solace, url, config, keys):
        print(line)


def _for_solace(url: str, config: str | None, keys: Mapping[str, Any]) -> list[str]:
    found: Any = driver("solace")
    shared = {field.name for field in fields(SasOptions)} - {field.name for field in fields(found.Options)}
    ours = {key: value for key, value in keys.items() if key not in shared}
    options = load_options(found.Options, section="solace", config=config, keywords=ours)
    others = {key: value for key, value in keys.items() if key in shared}
    sas = load_options(SasOptions, section="sas", bus="solace", config=config, keywords=others)
    lines: list[str] = found.told(options, url, sas.failovergroup)
    return lines


def _extras() -> list[str]:
    wanted: dict[str, list[str]] = {}
    for each in requires("esp-pubsub") or []:
        if (match := _EXTRA.match(each)) and match[2] not in _COLLECTIONS:
            wanted.setdefault(match[2], []).append(match[1])
    lines = []
    for extra, packages in sorted(wanted.items()):
        found = {package: _version(package) for package in packages}
        if all(found.values()):
            lines.append(f"extra {extra}: {', '.join(f'{package} {number}' for package, number in found.items())}")
        else:
            lines.append(f"extra {extra}: not installed; if you need it: pip install 'esp-pubsub[{extra}]'")
    return lines


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


async def _bus(name: str, config: str | None, keys: Mapping[str, Any]) -> tuple[bool, str]:
    try:
        options = load_options((await asyncio.to_thread(driver, name)).Options, section=name, config=config,
                               keywords=keys)  # fmt: skip
        place = getattr(options, "dir", None) or getattr(options, "hostport", None) or getattr(options, "host", "")
        async with asyncio.timeout(_ANSWER), init(name, config=config, **keys) as client:
            topics = len(await client.catalog().topics()) if client.bus.capabilities.catalog else None
    except NotInstalled as e:
        return False, str(e)
    except ConfigError as e:
        return False, f"not set up: {e}"
    except (BusUnavailable, TimeoutError) as e:
        return (
            False,
            f"does not answer: {str(e) or f'nothing within {_ANSWER:g} s'}; is it running, is its place right?",
        )
    except BusRefused as e:
        return False, f"refuses: {e}"
    return True, f"answers at {place}" + ("" if topics is None else f", {topics} topics")


def check_history(files: Sequence[Path]) -> None:
    """EspError if anything was lost, doubled, reordered, invented or stuck."""
    lines: list[str] = []
    try:
        for path in files:
            with path.open(encoding="utf-8", newline="\n") as file:
                lines += file
        verdict = check(read(lines))
    except ValueError as e:  # text that is not UTF-8 among them
        raise EspError(str(e)) from None
    print(verdict)
    if not verdict.ok:
        raise EspError(f"{len(verdict.faults)} faults")
