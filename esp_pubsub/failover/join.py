"""Makes a member of a failover group from its lines and senders."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import cast

from ..bus import Bus, Deaths, Election
from ..errors import BusUnavailable
from ..sender import GRACE, Sender
from .control import Control
from .fence import Fence
from .group import Group
from .line import Line
from .log_election import LogElection
from .membership import Membership
from .options import Failover
from .words import Identity, Setup

Elect = Callable[[str, str], Election]


def identity_of(bus: Bus) -> Identity:
    """Who a member in this process is; another one each time."""
    process = cast(Deaths, bus).process if bus.capabilities.deaths else ""
    host, pid = socket.gethostname(), os.getpid()
    return Identity(f"{host}:{pid}", secrets.randbits(63), process, host, pid)


def join(
    bus: Bus,
    failover: Failover,
    control_topic: str,
    setup: Setup,
    lines: Sequence[tuple[Line, Sender]],
    *,
    elect: Elect | None,
    stall: float,
    changed: Callable[[], None],
) -> Group:
    """A member that is ready to run.

    `elect` makes an election of a group's place in line and a member's name; None: the log election. `changed` is
    called whenever what is delivered, or the role, may have changed.
    """
    identity = identity_of(bus)
    membership = Membership([line for line, _ in lines], setup, identity, failover.run, patience=GRACE * stall)
    fence = Fence(bus, identity.process) if failover.fence == "kill" and bus.capabilities.deaths else None
    control = Control(
        bus, control_topic, lines[0][0].source, failover.run, trouble=_ignore if fence is None else fence.trouble
    )
    election: Election
    if elect is None:
        election = LogElection(bus, control, identity, membership.beat)
    else:
        election = elect(_place_in_line(failover), identity.name)
    return Group(bus, membership, [sender for _, sender in lines], control, election, fence, changed)


def _ignore(_error: BusUnavailable) -> None:
    """Without a fence nothing is done about a process that is in the way."""


def _place_in_line(failover: Failover) -> str:
    """Where members stand in line to lead: each run has its own, or a new one would wait for the old one's end."""
    return f"{failover.group}.{failover.run}" if failover.run else failover.group
