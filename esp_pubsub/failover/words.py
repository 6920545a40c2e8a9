"""What members of a group write to their control topic: beats, claims, challenges, and that they stand by. Pure: bytes
to words and back.

A beat is the sign of life of a leader. It says what all members must have in common, who speaks, and how far each line
is. A claim is the wish of a member to lead the next term of a log election (ballot.py). A challenge says to an engine's
leader that it does not go on (course.py). What members say of their setup in beats is compared by the others: members
that are set up differently must not pass for one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, TypeVar

from ..errors import BadFrame, ConfigError
from ..wire.frame import BEAT, CHALLENGE, CLAIM, STANDBY, Sealed, parse
from ..wire.maps import read_map, seal_map
from .belief import CHAIN_MAX, NUMBER_MAX, TIME_MAX
from .course import Places
from .line import Position

_KINDS: dict[str, type] = {"str": str, "bool": bool}


@dataclass(frozen=True, slots=True)
class Setup:
    """What the members of a group must have in common. Topic and schema of each line, in the same order."""

    topics: tuple[str, ...]
    schemas: tuple[str, ...]
    body: str
    election: str
    beginning: int = 0
    """Of an engine: the chain of its beginning (engine/beginning.py)."""
    since: int = 0
    """Of an engine: the entry of its order from which on the version runs that its members have."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a member is. `process` is for the bus's death notices, `host` and `pid` are for people."""

    name: str
    nonce: int
    process: str
    host: str
    pid: int


class Pulse(NamedTuple):
    """What a member of an engine also says: its time, and its step chain at the last step that is compared."""

    now: int
    step: int
    chain: int
    taken: int = 0
    """How many steps it has taken."""
    snapshot: int = 0
    """When a snapshot of its counted last, in microseconds since the epoch; 0 for none."""
    stops: bool = False
    """The leader says: all members are to stop here."""
    places: tuple[int, ...] = ()
    """Of each input the position after what was taken; 0 of a queue."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A leader's sign of life: its number in the term, and how far each line is."""

    setup: Setup
    identity: Identity
    run: int
    term: int
    number: int
    positions: tuple[Position, ...]
    resigns: bool
    pulse: Pulse | None = None

    def sealed(self, source: int) -> Sealed:
        """As a frame of the control topic."""
        values = {
            "setup": asdict(self.setup), "identity": asdict(self.identity), "number": self.number,
            "positions": self.positions, "resigns": self.resigns, "pulse": self.pulse,
        }  # fmt: skip
        return seal_map(BEAT, values, source=source, run=self.run)


@dataclass(frozen=True, slots=True)
class Claim:
    """A member wants to lead the next term; the last beat it read was `saw_number` of the member `saw_nonce`."""

    identity: Identity
    run: int
    term: int
    saw_nonce: int
    saw_number: int

    def sealed(self, source: int) -> Sealed:
        """As a frame of the control topic."""
        values = {"identity": asdict(self.identity), "saw_nonce": self.saw_nonce, "saw_number": self.saw_number}
        return seal_map(CLAIM, values, source=source, run=self.run)


@dataclass(frozen=True, slots=True)
class StandBy:
    """A member that does not lead is there. It is for people: no member acts on it."""

    identity: Identity
    run: int
    term: int
    eligible: bool
    """It could lead: it lacks nothing of what the bus holds."""
    positions: tuple[Position, ...]
    pulse: Pulse | None = None

    def sealed(self, source: int) -> Sealed:
        """As a frame of the control topic."""
        values = {
            "identity": asdict(self.identity), "eligible": self.eligible, "positions": self.positions,
            "pulse": self.pulse,
        }  # fmt: skip
        return seal_map(STANDBY, values, source=source, run=self.run)


@dataclass(frozen=True, slots=True)
class Challenge:
    """A standby of an engine has read its inputs up to here, and the leader of this term does not go on."""

    identity: Identity
    run: int
    term: int
    read: Places

    def sealed(self, source: int) -> Sealed:
        """As a frame of the control topic."""
        values = {"identity": asdict(self.identity), "read": self.read}
        return seal_map(CHALLENGE, values, source=source, run=self.run)


Word = Beat | Claim | StandBy | Challenge
T = TypeVar("T", Identity, Beat, Claim, StandBy, Challenge)


def read_word(data: bytes) -> Word | None:
    """What a message of the control topic says; None for anything else, which has no voice there."""
    try:
        frame = parse(data)
        if frame.kind not in (BEAT, CLAIM, STANDBY, CHALLENGE):
            return None
        values = read_map(frame)
        identity = _sound(Identity(**values.pop("identity")))
        if frame.kind == CLAIM:
            return _sound(Claim(identity=identity, run=frame.run, term=frame.term, **values))
        if frame.kind == CHALLENGE:
            return Challenge(identity, frame.run, frame.term, _places(**values))
        positions = tuple(_position(*each) for each in values.pop("positions"))
        if frame.kind == STANDBY:
            pulse = _pulse(values.pop("pulse", None))
            return _sound(StandBy(identity, frame.run, frame.term, positions=positions, pulse=pulse, **values))
        setup = _setup(**values.pop("setup"))
        if len(positions) != len(setup.topics):
            raise TypeError("not one position for each line")
        pulse = _pulse(values.pop("pulse", None))
        return _sound(Beat(setup, identity, frame.run, frame.term, positions=positions, pulse=pulse, **values))
    except (BadFrame, TypeError, ValueError, KeyError, AttributeError):
        return None


def _setup(topics: Any, schemas: Any, body: Any, election: Any, beginning: Any = 0, since: Any = 0) -> Setup:
    setup = Setup(tuple(topics), tuple(schemas), body, election, _number(beginning, CHAIN_MAX), _number(since))
    if not setup.topics or not all(isinstance(text, str) for text in (*setup.topics, *setup.schemas, body, election)):
        raise TypeError("a setup is made of texts and two numbers")
    return setup


def _position(given: Any, settled: Any, chain: Any) -> Position:
    return Position(_number(given), _number(settled), None if chain is None else _number(chain, CHAIN_MAX))


def _pulse(said: Any) -> Pulse | None:
    if said is None:
        return None
    now, step, chain, taken, snapshot, stops, places = Pulse(*said)
    if not isinstance(stops, bool):
        raise TypeError("all are to stop, or not")
    return Pulse(
        _number(now, TIME_MAX), _number(step), _number(chain, CHAIN_MAX), _number(taken), _number(snapshot, TIME_MAX),
        stops, _places(places),
    )  # fmt: skip


def _places(read: Any) -> Places:
    return tuple(_number(each) for each in read)


def _number(said: Any, most: int = NUMBER_MAX) -> int:
    """See belief.py. `True` is no number, though Python takes it for one."""
    if type(said) is not int or not 0 <= said <= most:
        raise TypeError(f"no number from 0 to {most}")
    return said


def _sound(said: T) -> T:
    """What came from elsewhere, if its plain fields are of the types that stand above; else TypeError."""
    for field in fields(said):
        value, kind = getattr(said, field.name), str(field.type)
        if kind == "int":
            _number(value)
        elif not isinstance(value, _KINDS.get(kind, object)):
            raise TypeError(f"{field.name} is not {field.type}")
    return said


def differences(ours: Setup, theirs: Setup) -> ConfigError | None:
    """What two members should have in common and have not, both shown."""
    pairs = [(name, one, other) for name, one, other in _pairs(ours, theirs) if one != other]
    if not pairs:
        return None
    text = "; ".join(f"{name}: ours {one!r}, theirs {other!r}" for name, one, other in pairs)
    return ConfigError(f"another member of this failover group is set up differently: {text}", differences=pairs)


def _pairs(ours: Setup, theirs: Setup) -> Sequence[tuple[str, Any, Any]]:
    one_line = len(ours.topics) == len(theirs.topics) == 1
    lines: list[tuple[str, Any, Any]] = [
        ("topic", ours.topics[0], theirs.topics[0]), ("schema", ours.schemas[0], theirs.schemas[0])
    ] if one_line else [("topics", ours.topics, theirs.topics), ("schemas", ours.schemas, theirs.schemas)]  # fmt: skip
    names = ("body", "election", "beginning")
    return [*lines, *((name, getattr(ours, name), getattr(theirs, name)) for name in names)]
