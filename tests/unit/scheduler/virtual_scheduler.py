"""A scheduler at work in virtual time, without an engine: requests in, rows out, calls answered, restarts between."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from esp_pubsub.scheduler.model import Scheduler
from esp_pubsub.scheduler.windows import OUTPUTS
from esp_pubsub.testing.models import Trial

SECOND = 1_000_000
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
START = int(NOON.timestamp()) * SECOND

Worker = Callable[[dict[str, Any]], tuple[int, str, float] | None]
"""What comes of a call: a code, a text and seconds for Retry-After; None for nothing yet."""


class Row(NamedTuple):
    """A row of an output window, and when it was emitted, in seconds after noon."""

    seconds: float
    values: dict[str, Any]


def moment(seconds: float) -> str:
    """That many seconds after noon, as a request has it."""
    return (NOON + timedelta(seconds=seconds)).isoformat()


class Virtual:
    """Time is in seconds after noon; everything that is due in between fires at its time."""

    def __init__(self, worker: Worker | None = None, restarts: random.Random | None = None, share: float = 0.2) -> None:
        self.model = Scheduler()
        self._trial = Trial(self.model)
        self.worker = worker
        self.rows: dict[str, list[Row]] = {window: [] for window in OUTPUTS}
        self.largest = 0
        """The most rows that fell due in one block."""
        self.time = 0.0
        self._dice, self._share = restarts, share
        self._take(START)

    def _take(self, sent: Any) -> list[Row]:
        calls, answers = [], []
        for window, block in self._trial.take(sent):
            if window != "Answers":
                self.largest = max(self.largest, len(block))
            for row in block.rows():
                found = Row(self.time, dict(zip(block.schema.names, row, strict=True)))
                self.rows[window].append(found)
                if window == "Calls":
                    calls.append(found.values)
                elif window == "Answers":
                    answers.append(found)
        if self._dice is not None and self._dice.random() < self._share:
            self.restart()
        for call in calls:
            if self.worker is not None and (came := self.worker(call)) is not None:
                self.outcome(call, *came)
        return answers

    def restart(self) -> None:
        """Go on as a member that was restored from a snapshot."""
        self._trial.restart()
        self.model = self._trial._at_work

    def until(self, seconds: float) -> None:
        """Let time pass up to here."""
        while (due := self._trial.steps.timers.next) is not None and due <= START + round(seconds * SECOND):
            self.jump(max((due - START) / SECOND, self.time))
        self.jump(seconds)

    def jump(self, seconds: float) -> None:
        """It is so late now: nothing ran in between."""
        self.time = seconds
        self._take(START + round(seconds * SECOND))

    def command(self, do: str, **fields: Any) -> dict[str, Any]:
        """The answer to a command, with its body read."""
        return self.raw(json.dumps({"do": do} | fields))

    def raw(self, body: str) -> dict[str, Any]:
        """The answer to any text as a command."""
        (answer,) = self._take(self._trial.sent(("Commands", [("c", body)])))
        return answer.values | {"body": json.loads(answer.values["body"] or "null")}

    def schedule(self, *rows: tuple[Any, ...]) -> list[dict[str, Any]]:
        """The answers to a list of events: tenant, id, time (a text, or seconds), payload, mode, option, version."""
        filled = [row + (None,) * (7 - len(row)) for row in rows]
        sent = [
            (tenant, id, time if time is None or isinstance(time, str) else moment(time), *rest)
            for tenant, id, time, *rest in filled
        ]
        return [answer.values for answer in self._take(self._trial.sent(("Events", sent)))]

    def event(self, *row: Any) -> dict[str, Any]:
        """The answer to one event."""
        (answer,) = self.schedule(row)
        return answer

    def outcome(self, call: dict[str, Any], code: int, text: str = "", retry_after: float = 0) -> None:
        """What came of a call is told."""
        self.outcomes([(call["delivery"], call["attempt"], code, text, retry_after)])

    def outcomes(self, rows: list[tuple[Any, ...]]) -> None:
        """What came of several calls is told in one block."""
        self._take(self._trial.sent(("Outcomes", rows)))

    def ask(self, ask: str, **fields: Any) -> dict[str, Any]:
        """The answer to a question."""
        return self.model.ask({"ask": ask} | fields)

    def status(self, tenant: str, id: str) -> str | None:
        """Of an event; None if there is none."""
        return self.ask("find", tenant=tenant, id=id).get("eventStatus")

    def fired(self, window: str = "Fires") -> list[tuple[float, str]]:
        """When which ids fell due, in the order in which they were emitted."""
        return [(row.seconds, row.values["id"]) for row in self.rows[window]]

    def window_tenant(self, name: str = "t", **limits: Any) -> None:
        """Register a tenant of the window Fires."""
        answer = self.command("tenant", tenant=name, type="MESSAGING", props={"window": "Fires"}, limits=limits)
        assert answer["code"] == 200, answer

    def http_tenant(self, name: str = "h", **limits: Any) -> None:
        """Register a tenant that is called."""
        props = {"url": "http://example.org/", "headers": {"a": "b"}}
        answer = self.command("tenant", tenant=name, type="HTTP", props=props, limits=limits)
        assert answer["code"] == 200, answer
