"""The definition of a driver: whoever passes these checks keeps the contract of `esp_pubsub.bus`.

    import asyncio
    from esp_pubsub.testing import conformance
    import my_driver

    async def open_bus():                             # an independent connection to the same system, each time
        return await my_driver.open_bus(my_driver.Options())

    report = asyncio.run(conformance.run(open_bus))
    print(report)
    raise SystemExit(not report.ok)

Under pytest, parametrise over `CHECKS`: each is an async callable that takes a `Context` and raises `Failed` (an
AssertionError) or `NotClaimed` (skip it). What a driver does not claim in its capabilities is not checked; what the
hooks of `Context` provoke (a refused message, a lost link, retention) is checked where they are given.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from esp_pubsub.bus import Bus

from . import _conformance_feeds, _conformance_groups, _conformance_pipes, _conformance_purges, _conformance_roles
from ._trial import CHECKS as _ENTERED
from ._trial import Check, Context, Failed, NotClaimed

__all__ = ["CHECKS", "Check", "Context", "Failed", "NotClaimed", "Report", "Result", "run"]

_PARTS = (_conformance_pipes, _conformance_feeds, _conformance_groups, _conformance_purges, _conformance_roles)
_ORDER = [part.__name__ for part in _PARTS]

CHECKS: Mapping[str, Check] = dict(sorted(_ENTERED.items(), key=lambda item: _ORDER.index(item[1].body.__module__)))
"""All checks by name: pipes, feeds, groups, purges, then what else a bus may offer."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one check."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What became of all of them. Its text is a table."""

    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Nothing failed, and something passed."""
        outcomes = {result.outcome for result in self.results}
        return "failed" not in outcomes and "passed" in outcomes

    @property
    def failed(self) -> dict[str, str]:
        """The reasons by name of check."""
        return {result.name: result.reason for result in self.results if result.outcome == "failed"}

    def __str__(self) -> str:
        lines = []
        for result in self.results:
            lines.append(f"{result.outcome:8}{result.seconds:7.2f} s  {result.name}")
            if result.outcome != "passed":
                lines.append(f"{'':19}{result.reason}")
        counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        for result in self.results:
            counts[result.outcome] += 1
        return "\n".join([*lines, ", ".join(f"{count} {outcome}" for outcome, count in counts.items())])


async def run(open_bus: Callable[[], Awaitable[Bus]], *, only: Iterable[str] | None = None, **settings: Any) -> Report:
    """Carry out all checks, or `only` those named, one by one. `settings` are the other fields of `Context`."""
    context = Context(open_bus=open_bus, **settings)
    chosen = CHECKS.values() if only is None else [CHECKS[name] for name in only]
    return Report(tuple([await _result(check, context) for check in chosen]))


async def _result(check: Check, context: Context) -> Result:
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    reason = ""
    began = time.monotonic()
    try:
        await check(context)
    except NotClaimed as why:
        outcome, reason = "skipped", str(why)
    except Failed as why:
        outcome, reason = "failed", str(why)
    except Exception as error:  # noqa: BLE001  # whatever a driver raises is for the report
        outcome, reason = "failed", f"{type(error).__name__}: {error}"
    return Result(check.name, outcome, reason, time.monotonic() - began)
