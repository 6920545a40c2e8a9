"""The scheduler as a model: requests and outcomes come in, what falls due goes out. Pure; an engine runs it.

Input windows, which anybody may write to:

- `Events`: a row schedules, updates or removes one event; a block is a list of them. `tenant`, `id`; `eventTime` in ISO
  8601 with an offset; `payload`; `mode` UPSERT (or null), REMOVE or DRYRUN, which delivers once and changes nothing;
  `deliveryOption` FULL_EVENT (or null) or PAYLOAD_ONLY; `version`, if given, has to be the one at hand, 0 for none.
- `Commands`: `name` is of no meaning, but a schema has a key; `body` is a JSON object whose `do` says what: `tenant`,
  `pause`, `resume`, `retry`, `cron`, `remove cron`, `pause cron`, `resume cron`, `trigger cron`. tenants.py and
  crons.py have a class for each, with its fields.
- `Outcomes`: what came of a call: its `delivery` and `attempt`; `code`, an HTTP status, or 0 where there was no answer;
  `text` of an error; `retryAfter` in seconds, or 0.

Output windows:

- `Answers`: one row for each row of Events and Commands. `request` is the key of that row: source, run and id of its
  block, and its place there. `code` is as in HTTP; `status` is one of BigBen's words; `version` and `eventId` are the
  event's; `message` says why it was rejected; `body` is the JSON that a command answers.
- `Fires`: what fell due, for tenants of type MESSAGING with props `{"window": "Fires"}`. `delivery` names it, once and
  for all: tenant/id/occurrence; `slot` is from 0 to 1023; `body` is what is to be delivered.
- `Calls`: the same for all other tenants, for a worker to deliver. `attempt` counts the tries; the outcome has to come
  before `deadline`; `type` and `props` are the tenant's. `delivery` is the same in all tries: the Idempotency-Key.
- `Dead`: what is not tried any more, with the last `code` and `error`.

What is due is emitted some at a time, at most MOST_ROWS rows or MOST_SIZE characters in a step, so steps stay short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

import esp_pubsub as esp

from . import attempts, crons, events, questions, tenants
from .attempts import Ended
from .events import Refused
from .state import Kind, State, size_of
from .windows import INPUTS, OUTPUTS
from .zones import tzdata_version

MOST_IN_BLOCK = 10_000
MOST_IN_MESSAGE = 200_000  # characters of a block, so that any bus can carry it
_WAKE = "due"
_FORGET = 2_000
_Command = (
    tenants.Register | tenants.Pause | tenants.Resume | tenants.RetryBacklog | crons.SetCron | crons.RemoveCron
    | crons.PauseCron | crons.ResumeCron | crons.TriggerCron
)  # fmt: skip
_read = msgspec.json.Decoder(_Command).decode
_COMMANDS: dict[type, Callable[[State, Any], Any]] = {
    tenants.Register: tenants.register,
    tenants.Pause: tenants.pause,
    tenants.Resume: tenants.resume,
    tenants.RetryBacklog: tenants.retry,
    crons.SetCron: crons.put,
    crons.RemoveCron: crons.remove,
    crons.PauseCron: crons.pause,
    crons.ResumeCron: crons.resume,
    crons.TriggerCron: crons.trigger,
}
_DUE: dict[Kind, Callable[[State, str], list[Ended]]] = {
    Kind.EVENT: events.fire,
    Kind.CRON: crons.fire,
    Kind.DELIVERY: attempts.turn,
}


def _blocks(rows: list[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Rows in blocks that are not too large; a row that is larger comes alone."""
    block: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        size += (more := size_of(row))
        if size > MOST_IN_MESSAGE and block:
            yield block
            block, size = [], more
        block.append(row)
    if block:
        yield block


@esp.model(inputs=INPUTS, outputs=OUTPUTS, version=f"scheduler/1 tzdata/{tzdata_version()}", timers=True)
@dataclass
class Scheduler(State):
    """Fires events and crons at their times. Its fields are those of State."""

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        """Take a block of requests or outcomes, and what is due by now."""
        self._begin(out)
        request = f"{block.source:016x}:{block.run}:{block.id}"
        try:
            rows = block.rows()
        except esp.BadBody as e:
            rows = []
            self._reject(f"{request}:0", 400, str(e))
        if len(rows) > MOST_IN_BLOCK:
            self._reject(f"{request}:0", 400, f"a block has at most {MOST_IN_BLOCK} rows, not {len(rows)}")
            rows = []
        for place, row in enumerate(rows):
            self._settle(self._take(window, f"{request}:{place}", row))
        self._finish(out)

    def timer(self, key: str, out: esp.Out) -> None:
        """Something is due."""
        self._begin(out)
        self._finish(out)

    def ask(self, question: Any) -> dict[str, Any]:
        """What questions.py says. It changes nothing."""
        return questions.answer(self, question)

    def _begin(self, out: esp.Out) -> None:
        self.now, self.size = out.now, 0

    def _take(self, window: str, request: str, row: tuple[Any, ...]) -> list[Ended]:
        if window == "Events":
            return events.take(self, request, row)
        if window == "Commands":
            return self._command(request, row[1])
        delivery, attempt, code, text, retry_after = row
        return attempts.outcome(self, delivery, attempt, code or 0, text or "", retry_after or 0)

    def _command(self, request: str, body: str | None) -> list[Ended]:
        ended: list[Ended] = []
        try:
            asked = _read(body or "")
            answer = _COMMANDS[type(asked)](self, asked)
            if isinstance(answer, tuple):
                answer, ended = answer
        except Refused as e:
            self._reject(request, e.code, str(e))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
            self._reject(request, 400, f"this is no command: {e}"[:500])
        else:
            said = msgspec.json.encode(answer).decode()
            names = (str(getattr(asked, name, None) or "")[: events.LONGEST_NAME] for name in ("tenant", "id"))
            self.emit("Answers", request, 200, "OK", *names, None, None, None, said)
        return ended

    def _reject(self, request: str, code: int, why: str) -> None:
        self.emit("Answers", request, code, "REJECTED", None, None, None, None, why, None)

    def _settle(self, ended: list[Ended]) -> None:
        """Deliveries that ended may let others begin, which may end at once."""
        while ended:
            ended += crons.over(self, ended.pop(0))

    def _finish(self, out: esp.Out) -> None:
        """What is due by now, as much as a step may emit; then have the next step come when something is due."""
        while not self.full and (due := self.take_due()) is not None:
            kind, key = due
            self._settle(self._turn(kind, key))
        self.forget(_FORGET)
        for window, rows in self.rows.items():
            for block in _blocks(rows):
                out.emit(window, block)
            rows.clear()
        if (at := self.next_due()) is not None:
            out.wake(_WAKE, at)

    def _turn(self, kind: int, key: str) -> list[Ended]:
        if kind == Kind.TENANT:
            self.tenants[key].wake = 0
            return attempts.dispatch(self, key)
        return _DUE[Kind(kind)](self, key)
