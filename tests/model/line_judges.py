"""A member with two lines, for the model check: each block of its input goes to one or to both. See worlds.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from esp_pubsub.errors import InputDiffers
from esp_pubsub.failover.line import Line
from esp_pubsub.failover.membership import Event, Membership, Role
from esp_pubsub.failover.outbox import Outbox
from esp_pubsub.failover.words import Beat, Identity, Setup

from .explorer import Broken
from .judges import SOURCE, Code, frame, sealed

LINES = "PQ"
_LATER = 1_000.0  # seconds: longer than any patience

Script = tuple[tuple[int, ...], ...]
"""For each block of the input, the lines to which it gives a block."""


class Member:
    """A member and how much it has taken of its input."""

    def __init__(self, name: str, script: Script, *, suffix_only: bool, room: int) -> None:
        lines = [Line(SOURCE, 0, Outbox(room, 1 << 20), suffix_only=suffix_only, buffer=10) for _ in LINES]
        setup = Setup(tuple(LINES), ("schema",) * len(LINES), "rows", "log")
        self.member = Membership(lines, setup, Identity(name, ord(name), "", "", 1), 0, patience=1.0)
        self.member.hears(all_of_it=True)
        for at in range(len(LINES)):
            self.member.follows(at, follows=True)
            lines[at].reached_end()
        self.script = script
        self.taken = 0


class LineView(NamedTuple):
    """What can be seen of a line."""

    m: int
    first: int
    last: int
    delivered: int
    eligible: bool


class MemberView(NamedTuple):
    """What can be seen of a member. `due`: the event that is due now, `due_later` the one if nothing happens for long;
    `takes`: it would take the
    next block of its input; `handed_over`: the ids whose hand-over ended without its lead.
    """

    role: Role
    lines: tuple[LineView, ...]
    due: Event | None
    due_later: Event | None
    taken: int
    takes: bool
    asked: tuple[int, ...] | None
    handed_over: bool

    @property
    def eligible(self) -> bool:
        """It could go on in every line, whatever it says itself."""
        return all(line.eligible for line in self.lines)


def view(core: Member) -> MemberView:
    """What can be seen of a member. It is asked what is due, so this is for a copy."""
    member = core.member
    lines = tuple(
        LineView(line.m, line.outbox.first, line.outbox.last, line.delivered, line.eligible) for line in member.lines
    )
    following = core.script[core.taken : core.taken + 1]
    takes = all(member.room(member.lines[at], 1) for to in following for at in to) and bool(following)
    asked = None if member.hands_over_to is None else tuple(member.hands_over_to)
    now, later = member.due(0.0), member.due(_LATER)
    return MemberView(member.role, lines, now, later, core.taken, takes, asked, member.was_handed_over)


def said(core: Member) -> Beat:
    """What a beat of it says."""
    return core.member.beat(1, 1, False)


def _agrees(call: Callable[..., object], *arguments: object) -> None:
    try:
        call(*arguments)
    except InputDiffers as differs:
        raise Broken(f"it leaves for block {differs.id}, and there is but one input") from None


def take(core: Member) -> None:
    """It takes the next block of its input."""
    for at in core.script[core.taken]:
        line = core.member.lines[at]
        _agrees(line.give, sealed(LINES[at], 0, line.outbox.last + 1))
    core.taken += 1


def follow(core: Member, at: int, code: Code) -> None:
    """It reads a frame of the topic of a line."""
    _agrees(core.member.lines[at].follow_all, [(None, frame(code).data)])


def hear(core: Member, beat: Beat) -> None:
    """It reads a beat on the control topic."""
    _agrees(core.member.hear, beat, -math.inf)


def acknowledge(core: Member, at: int, id: int) -> None:
    """The bus confirmed what it sent in a line."""
    core.member.lines[at].acked(id)
    if core.member.due(0.0) == "synced":
        core.member.step("synced", 0.0, 0.0)


def lead(core: Member) -> None:
    """It campaigns, is elected and has caught up."""
    member = core.member
    for event in ("eligible", "elected", "won"):
        if event == "elected":
            member.elected(1)
        elif event == "won":
            member.caught_up()
        if member.due(0.0) != event:
            raise Broken(f"a member that leads must find {event!r} due, not {member.due(0.0)!r}")
        member.step(event, 0.0, 0.0)
    if member.due(0.0) == "synced":
        member.step("synced", 0.0, 0.0)


def step(core: Member, event: Event) -> None:
    """It takes a transition, and follows its lines anew if it does not lead any more."""
    led = core.member.role == "active"
    core.member.step(event, 0.0, 0.0)
    if led and core.member.role == "standby":
        for line in core.member.lines:
            line.rejoin()


def ask_hand_over(core: Member) -> None:
    """Its user wants another member to lead."""
    core.member.ask_hand_over()


def end_hand_over(core: Member) -> None:
    """Its user hears that this is done."""
    core.member.keep_leading()


def deafen(core: Member) -> None:
    """It knows that it cannot read what others may be able to read."""
    core.member.hindered_since = _always


def _always() -> float:
    return 0.0
