"""The machine of a failover member: what happened, and what follows from it, over all lines. Pure: group.py performs.

A member is in one state at a time. `due(now)` says which event of this table is due, if any; `step(event)` takes it.
In each state the runner does what ACTIVITIES names, and nothing else; where a transition is in RESIGNS, it also gives
up its leadership in the election, so that others go first.

    standby      follows its lines on the bus, gives ids to its own blocks, keeps those past m, sends nothing
    candidate    a standby that could go on where the bus stands, in every line; it campaigns. In an engine it also
                 challenges a leader that does not go on in its inputs (course.py)
    elected      it won; before it sends, it reads each line to its present end, so that few duplicates are sent
    active       sends from m + 1 in each line, and says its position
    left         closed, or found out to differ; it never comes back

A takeover, from the outside in: death or silence -> ballot -> claim -> claim read back -> won(term) -> catch up in each
line -> open each line. All elections look alike here: they say won(term), and later why that ended.

Who may lead. A member is eligible if it has given ids up to m at least, in every line: then its outboxes begin at m + 1
and no block is missing. One that was restarted in the middle reads its input from the start and catches up first.

No decision here is needed for safety: whoever sends, readers drop duplicates (see line.py). These decisions see to it
that somebody sends, and that it is somebody who can go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import Closed, ConfigError, EspError
from .course import Course, Reach
from .line import Line, Position
from .words import Beat, Challenge, Identity, Pulse, Setup, StandBy, differences

Role = Literal["standby", "candidate", "active", "left"]
State = Literal["standby", "candidate", "elected", "active", "left"]
Event = Literal[
    "eligible", "ineligible", "elected", "won", "lost", "suspended", "stalled", "hindered", "challenged", "synced",
    "handed over", "leave"
]  # fmt: skip
Activity = Literal["follow", "campaign", "catch up", "watch", "send", "say position", "say standing by", "challenge"]

TABLE: dict[tuple[State, Event], State] = {
    ("standby", "eligible"): "candidate",
    ("candidate", "ineligible"): "standby",
    ("candidate", "elected"): "elected",
    ("elected", "won"): "active",
    ("elected", "ineligible"): "standby",
    ("elected", "lost"): "standby",
    ("elected", "suspended"): "standby",
    ("active", "synced"): "active",
    ("active", "lost"): "standby",
    ("active", "suspended"): "standby",
    ("active", "stalled"): "standby",
    ("active", "hindered"): "standby",
    ("active", "challenged"): "standby",
    ("active", "ineligible"): "standby",
    ("active", "handed over"): "standby",
    ("standby", "leave"): "left",
    ("candidate", "leave"): "left",
    ("elected", "leave"): "left",
    ("active", "leave"): "left",
}
RESIGNS: set[tuple[State, Event]] = {
    ("elected", "ineligible"),
    ("active", "stalled"),
    ("active", "hindered"),
    ("active", "challenged"),
    ("active", "ineligible"),
    ("active", "handed over"),
}
ACTIVITIES: dict[State, tuple[Activity, ...]] = {
    "standby": ("follow", "say standing by"),
    "candidate": ("follow", "campaign", "say standing by", "challenge"),
    "elected": ("follow", "catch up", "watch"),
    "active": ("send", "watch", "say position"),
    "left": (),
}

CATCH_UP = 0.3  # seconds an elected member reads on before it sends: less is sent twice, but readers wait for it
BEHIND = 0.5  # seconds a member may lack what the bus holds before it leaves the others alone
LEADS_ON = 60.0  # seconds for which a leader that was hindered, or challenged, does not let others go first again
_LOOK_EVERY = 0.05
HEARD = 2.0  # seconds for which a leader that was heard counts as alive; the slowest one beats every second


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A member took another role. `m` and `last` are of its line, of the first one if it has several."""

    role: Role
    event: Event
    term: int
    at: float
    """Seconds since the epoch, by this member's clock."""
    positions: tuple[Position, ...]

    @property
    def m(self) -> int:
        """How far the bus was known to hold the sequence."""
        return self.positions[0].settled

    @property
    def last(self) -> int:
        """The last id that was given."""
        return self.positions[0].given


class Membership:
    """One member over all its lines. Times are of one clock that does not go back; the caller says what time it is."""

    def __init__(self, lines: Sequence[Line], setup: Setup, identity: Identity, run: int, *, patience: float) -> None:
        """`patience`: seconds that a leader with unsent blocks waits for an acknowledgement in any line."""
        self.lines = lines
        self.setup = setup
        self.identity = identity
        self.run = run
        self.state: State = "standby"
        self.term = 0
        """The last one in which it led, or was elected to."""
        self.fell_silent = ""
        """Once it has won: the name of the member that led before and did not resign; empty if there was none."""
        self.patience = patience
        self.pulse: Callable[[], Pulse] | None = None
        """What beats say of an engine; None for a publisher."""
        self.hindered_since: Callable[[], float | None] = _never
        """Since when this member cannot read what an engine reads, if it cannot."""
        self.reach: Callable[[], Reach] | None = None
        """How far a member of an engine is; None for a publisher."""
        self._course = Course(patience)
        self._challenged = False
        self._leads_on_until = -math.inf
        self._following = [False] * len(lines)
        self._hears = False  # the control topic was read to its end, and is being read
        self._speaks = False  # others may have heard that it leads
        self._silent = False  # it leaves
        self._heard_other_at = -math.inf
        self._speaker: int | None = None  # the other member whose beat was heard last
        self._led = ""  # the name of the one that was heard to lead, and not to resign
        self._conflict_until = -math.inf
        self._elected: int | None = None
        self._ended: Literal["lost", "suspended"] | None = None
        self._state_since = 0.0
        self._caught_up = False
        self._behind_since: float | None = None
        self._behind_with: list[int] = []
        self._progress: list[tuple[int, float]] = []  # of each line: how far it is on the bus, and since when
        self._sync_at: list[int] | None = None
        self._hand_over_at: list[int] | None = None

    # what happened

    def hear(self, said: Beat, now: float) -> bool:
        """A beat on the control topic, in its order; False if it is not believed (belief.py). Raises what ends the
        membership for good: InputDiffers, Stale for a higher run, ConfigError for a member that is set up differently.

        What a group said that is long gone binds nobody: only a member that speaks now is compared.
        """
        if said.identity.nonce == self.identity.nonce:
            return True
        try:
            return self._compare(said, now)
        except EspError:
            self._silent = True
            raise

    def _compare(self, said: Beat, now: float) -> bool:
        speaker, self._speaker = self._speaker, said.identity.nonce
        beats_on = speaker == self._speaker
        if said.setup.beginning == self.setup.beginning and said.setup.since != self.setup.since:
            # it is of another version of the model, whose lines are ours; the order tells each of them whose is over
            return self._hear_positions(said, beats_on=beats_on)
        if said.setup.topics == self.setup.topics and said.run != self.run:
            return self._hear_positions(said, beats_on=beats_on)  # a higher run ends ours, a lower one is over
        differ = differences(self.setup, said.setup)
        if differ is not None:
            return self._hear_others(said, now, differ, beats_on=beats_on)
        if self._hears:
            self._led = "" if said.resigns else said.identity.name
        if self._hears and not said.resigns:
            self._heard_other_at = now
            if said.pulse is not None and beats_on:
                self._course.heard(said.term, (*said.pulse.places, said.pulse.taken), now)
        return self._hear_positions(said, beats_on=beats_on)

    def _hear_others(self, said: Beat, now: float, differ: ConfigError, *, beats_on: bool) -> bool:
        """A beat of another group under our name: one of the two leaves, the one that does not lead. Of two that lead,
        the one with the lower nonce stays.
        """
        stays = said.resigns or said.identity.nonce > self.identity.nonce if self._speaks else self.others_lead(now)
        if stays:
            return False
        if self._hears and beats_on:
            raise differ
        self._conflict_until = -math.inf if said.resigns else now + HEARD  # by then it should have spoken again
        return True

    def hear_challenge(self, said: Challenge, now: float) -> None:
        """Somebody has read more than this member, if it leads."""
        if self.state == "active" and (said.run, said.term) == (self.run, self.term) and now >= self._leads_on_until:
            self._challenged = self._course.yields(said.read, now)

    def challenge(self, now: float) -> Challenge | None:
        """What a candidate says to a leader that does not go on. To be asked again and again."""
        if self.reach is None or self.state != "candidate" or not self.eligible or not self.others_lead(now):
            return None
        reach = self.reach()
        if not self._course.challenges(reach, now):
            return None
        return Challenge(self.identity, self.run, self._course.term, reach.read)

    def _hear_positions(self, said: Beat, *, beats_on: bool) -> bool:
        positions, believed = dict(zip(said.setup.topics, said.positions, strict=True)), True
        for line, topic in zip(self.lines, self.setup.topics, strict=True):
            if (at := positions.get(topic)) is not None:
                believed = line.heard(said.run, at.settled, at.chain, beats_on=beats_on) and believed
        return believed

    def hears(self, *, all_of_it: bool) -> None:
        """The control topic is read to its end, or it is not read at the moment."""
        self._hears = all_of_it

    def follows(self, line: int, *, follows: bool) -> None:
        """A line is read on the bus, or it is not at the moment."""
        self._following[line] = follows

    def caught_up(self) -> None:
        """Each line was read to the end that it had when this member was elected."""
        self._caught_up = True

    def elected(self, term: int) -> None:
        """The election says that we lead."""
        self._elected = term

    def declines(self) -> bool:
        """Whether a campaign was won in the very moment in which it was given up: then it has to be resigned."""
        won, self._elected = self._elected, None
        return won is not None

    def ended(self, how: Literal["lost", "suspended"]) -> None:
        """The election says that we lead no more, or that it cannot know."""
        self._ended = how

    def ask_hand_over(self) -> None:
        """Every block that has an id now is to be sent, then another member is to lead."""
        self._hand_over_at = [line.outbox.last for line in self.lines]

    def keep_leading(self) -> None:
        """Nobody asks for a hand-over any more."""
        self._hand_over_at = None

    @property
    def hands_over_to(self) -> list[int] | None:
        """The last block of each line that had an id when a hand-over was asked for, and it is not done yet."""
        return self._hand_over_at

    @property
    def not_handed_over(self) -> tuple[str, int]:
        """The topic of the first line of which a hand-over lacks something, and the last block that it is to send."""
        topics, asked = self.setup.topics, self.hands_over_to or self._given()
        for topic, line, last in zip(topics, self.lines, asked, strict=True):
            if line.delivered < last:
                return topic, last
        return topics[0], asked[0]

    @property
    def was_handed_over(self) -> bool:
        """Leadership ended before all was sent that a hand-over was to send, and by now the bus holds it: another
        member sent it.
        """
        ids = self._hand_over_at
        if ids is None or self.state == "active":
            return False
        return all(line.delivered >= id for line, id in zip(self.lines, ids, strict=True))

    # what follows

    def due(self, now: float) -> Event | None:
        """The event of the table that is due, if any. To be asked after anything happened, and at `look_at`."""
        eligible = self.eligible
        if eligible:
            self._behind_since = None
        elif self._behind_since is None or (self.state == "active" and self._behind_with != self._given()):
            self._behind_since, self._behind_with = now, self._given()
        match self.state:
            case "standby":
                ready = eligible and self._hears and all(self._following) and now > self._conflict_until
                return "eligible" if ready else None
            case "candidate":
                if self._elected is not None:
                    return "elected"
                return "ineligible" if self._left_behind(now) else None
            case "elected":
                return self._due_elected(now)
            case "active":
                return self._due_active(now)
            case _:
                return None

    def _due_elected(self, now: float) -> Event | None:
        if self._ended is not None:
            return self._ended
        if self._left_behind(now):
            return "ineligible"
        ready = self._caught_up or now >= self._state_since + CATCH_UP
        return "won" if ready and self.eligible else None

    def _due_active(self, now: float) -> Event | None:
        if self.reach is not None:
            self._course.moves(self.reach().taken, now)
        if self._ended is not None:
            return self._ended
        if self._is_on_bus(self._hand_over_at):
            return "handed over"
        if self._is_on_bus(self._sync_at):
            return "synced"
        if self._left_behind(now):  # by late blocks of the one that led before, and its own input does not go on
            return "ineligible"
        if self._stalls(now):
            return "stalled"
        if self._challenged:
            return "challenged"
        return "hindered" if self._is_hindered(now) else None

    def _is_hindered(self, now: float) -> bool:
        """Others may be better off. If nobody is, this member leads again, and then it leads on."""
        since = self.hindered_since()
        return since is not None and now >= max(since + self.patience, self._leads_on_until)

    def _stalls(self, now: float) -> bool:
        """Blocks of any line wait, and nothing was acknowledged for too long since they came."""
        for at, line in enumerate(self.lines):
            settled, since = self._progress[at]
            if not len(line.outbox) or settled != line.m:
                self._progress[at] = line.m, now
            elif now >= since + self.patience:
                return True
        return False

    def _left_behind(self, now: float) -> bool:
        return self._behind_since is not None and now >= self._behind_since + BEHIND

    def _is_on_bus(self, ids: list[int] | None) -> bool:
        return ids is not None and all(line.m >= id for line, id in zip(self.lines, ids, strict=True))

    def _given(self) -> list[int]:
        return [line.outbox.last for line in self.lines]

    def look_at(self, now: float) -> float:
        """When `due` is to be asked again if nothing happens before."""
        times = [math.inf]
        if self._behind_since is not None and self.state != "standby":
            times.append(self._behind_since + BEHIND)
        if self.state == "elected" and not self._caught_up and now < self._state_since + CATCH_UP:
            times.append(self._state_since + CATCH_UP)
        if self.state == "standby":
            times.append(now + _LOOK_EVERY)  # that the control topic is read to its end is no news
        if self.state == "active":
            times.append(now + self.patience / 20)  # an acknowledgement is no news here: it would be asked too often
        return min(times)

    def step(self, event: Event, now: float, at: float) -> RoleChange | None:
        """Take a transition of the table; returns the change of role, if there is one. KeyError for no transition.

        `now` is of the clock of all other methods, `at` are seconds since the epoch, for people.
        """
        before = self.role
        self._silent = self._silent or event == "leave"
        self.state = TABLE[self.state, event]
        self._state_since = now
        if event == "elected":
            self.term, self._elected = self._elected or 0, None
            self._ended, self._caught_up = None, False
        elif event == "won":
            self.fell_silent, self._led = self._led, ""
            self._course.begins()
            self._progress = [(line.m, now) for line in self.lines]
            self._sync_at = self._given()
            self._behind_since = None
        if event == "synced" or self.state != "active":
            self._sync_at = None
        if self.state != "elected":  # the election may have beaten already, and goes on to
            self._speaks = self._speaks and self.state == "active"
        if event == "handed over":
            self._hand_over_at = None
        self._challenged = False
        if event in ("hindered", "challenged"):
            self._leads_on_until = now + LEADS_ON
        if before == self.role:
            return None
        if "active" in (before, self.role):
            for line in self.lines:
                line.lead(leads=self.role == "active")
        return RoleChange(self.role, event, self.term, at, tuple(line.position for line in self.lines))

    @property
    def role(self) -> Role:
        """The state, as others see it."""
        return "candidate" if self.state == "elected" else self.state

    @property
    def eligible(self) -> bool:
        """It could go on where the bus stands, in every line."""
        return all(line.eligible for line in self.lines)

    def others_lead(self, now: float) -> bool:
        """Another member was heard to lead, a moment ago."""
        return now - self._heard_other_at < HEARD

    def room(self, line: Line, size: int) -> bool:
        """Whether a line takes one more block. While any line lacks what the bus holds, the input has to go on,
        whatever waits in the other lines: a full one would keep the one that is behind from ever being eligible.
        """
        return line.outbox.room(size) or not self.eligible

    @property
    def is_behind(self) -> bool:
        """When it was last asked what is due, some line lacked what the bus holds."""
        return self._behind_since is not None

    @property
    def waits_for_its_lines(self) -> bool:
        """What is read in a line may make something due: all the while at first, and then where it is eligible no more,
        or is again, or where somebody waits for a hand-over.
        """
        return self.state == "standby" or self._hand_over_at is not None or self.eligible == self.is_behind

    @property
    def waits_for_the_bus(self) -> bool:
        """An acknowledgement may make something due: that it is synced, or handed over."""
        return self._sync_at is not None or self._hand_over_at is not None

    def beat(self, term: int, number: int, resigns: bool) -> Beat:
        """What a beat of ours says now. Closed for a member that leaves: it says nothing more."""
        if self._silent:
            raise Closed(f"{self.identity.name} left its group")
        self._speaks = not resigns
        positions = tuple(line.position for line in self.lines)
        pulse = None if self.pulse is None else self.pulse()
        return Beat(self.setup, self.identity, self.run, term, number, positions, resigns, pulse)

    def standing_by(self) -> StandBy:
        """What this member says while it does not lead."""
        positions = tuple(line.position for line in self.lines)
        pulse = None if self.pulse is None else self.pulse()
        return StandBy(self.identity, self.run, self.term, self.eligible, positions, pulse)


def _never() -> float | None:
    return None


def diagram() -> str:
    """The transition table as a Mermaid state diagram; the docs show what this returns."""
    lines = [f"    {before} --> {after}: {event}" for (before, event), after in TABLE.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> standby", *lines, "    left --> [*]"])
