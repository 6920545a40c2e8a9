"""The model check: the real accept rule, outbox, member and ledger in small worlds, each explored to its last state.

The theory. In a world there are members with equal (or different) inputs of a few blocks, a bus, and subscribers. All
that is not one of the real classes is as free as PROTOCOL leaves it: whoever is eligible may lead, at any time, beside
others; whoever leads may lose it; what one member knows another may hear; a bus takes, loses and delays what it may.
The sender is here no more than its discipline: a pipe begins at m + 1 and goes on in order and within the window, past
what m has passed, acknowledgements count in order and for one pipe, after trouble a new one begins, and where holes can
be a beat says what is settled. Faults cost one of a few lives, so that every world has an end; all else is free.

Two buses. On a log there is one order for all, and what is missing of a pipe is its end. With queues every reader has
its own: pipes may come to it in another order than to the next one, and single messages may be refused in one queue,
which the pipe hears of. What a pipe wrote may come after it was dropped, or never.

Two lines. One input feeds two lines of each member, each on its own topic. There an election has one winner at a time,
and only the machine itself, asked what is due, ends its lead: so it is seen whether a member that cannot go on in one
of its lines lets another one lead.

An engine with a written order. Its members believe to lead whenever they like; then they propose what comes next, and
send what the order yields. What is asked there is whether all of them take the same steps, and each input block once;
and whether all of that holds where members are restarted from snapshots that count by the real rule.

    python -m tests.model            every world, its states and what it took
    python -m tests.model retention  some of them
"""

from __future__ import annotations

import time
from typing import Any

from .explorer import Counterexample, Explored, World, explore
from .group_scene import GroupScene
from .judges import Code
from .line_scene import FAULTS, LineScene
from .newcomer_scene import NewcomerScene
from .order_scene import HOLES, MUCH, RESTARTS, OrderScene
from .scene import Scene


def _stray(run: int, *ids: int) -> tuple[Code, ...]:
    return tuple(Code("A", run, id, 0) for id in ids)


_QUEUES: dict[str, Any] = {"queues": True, "suffix_only": False, "refusals": True}
_HOLES: dict[str, Any] = {"suffix_only": False, "refusals": True}
_ALONE: dict[str, Any] = {"lines": "A", "runs": (0,), "elections": False}
_ALL_LEAD: dict[str, Any] = {"elections": False}
_WAKES = (("wake", "c", 2), ("wake", "b", 1), ("wake", "a", 2))  # neither in the order of times nor in that of keys
_TO_P, _TO_R = ("emit", "P", 0), ("emit", "R", 0)


def scenes() -> list[Scene | LineScene | OrderScene]:
    """Every world, new: none remembers what an earlier one found."""
    return [*_of_groups(), *_of_engines()]


def _of_engines() -> list[OrderScene]:
    return [
        OrderScene("order", "two members write at once what to take of a log", log=((1, 2),), lives=2, quick=True),
        OrderScene("order, three writers", "the same with one more", log=((1, 2),), members=3),
        OrderScene("order, duplicates", "both members of a group of publishers send", log=((1, 2), (1, 2))),
        OrderScene("order, queue", "what a queue holds travels in entries of several frames", queue=((1, 2),),
                   largest=100, quick=True),
        OrderScene("order, queue, held", "a block that comes too early is confirmed before it is stepped on",
                   queue=((2, 1),), largest=100, lives=2),
        OrderScene("order, queue, duplicates", "both members of a group of publishers send", queue=((1, 2), (2,)),
                   largest=MUCH, faults=("gives up", "restarts")),
        OrderScene("order, log and queue", "entries of one frame and of three", log=((1,),), queue=((1,),), largest=40,
                   faults=("gives up",)),
        OrderScene("order, holes", "a frame of an entry is lost", queue=((1,),), largest=40,
                   faults=HOLES, quick=True),
        OrderScene("order, timers", "three timers, of which one cancels one and sets one anew", times=(1, 2),
                   plan=(("Log 1", _WAKES), ("b", (("cancel", "c", 0), ("wake", "a", 1)))), log=((1,),)),
        OrderScene("order, timers and blocks", "timers are due when blocks come", times=(1, 2), log=((1, 2),), lives=0,
                   plan=(("Log 1", _WAKES), ("b", (("wake", "a", 1),))), quick=True),
        OrderScene("order, lines", "what the order yields goes to two lines with room for one block", room=1,
                   log=((1, 2),), plan=(("Log 1", (_TO_P,)), ("Log 2", (_TO_R, _TO_P)))),
        OrderScene("order, lines, deaths", "who remains may be behind in one line, and full in the other", room=1,
                   log=((1, 2),), plan=(("Log 1", (_TO_P,)), ("Log 2", (_TO_R, _TO_P))), faults=("dies",), quick=True),
        OrderScene("order, lines, three blocks", "the same with a longer input", room=1, log=((1, 2, 3),),
                   plan=(("Log 1", (_TO_P,)), ("Log 2", (_TO_R,)), ("Log 3", (_TO_R, _TO_P, _TO_P))), faults=("dies",)),
        OrderScene("order, everything", "a log, a queue, a timer and two lines", room=1, log=((1,),), queue=((1,),),
                   plan=(("Log 1", (_TO_P, ("wake", "t", 1))), ("Queue 1", (_TO_R,)), ("t", (_TO_P,))),
                   faults=("dies",)),
        OrderScene("order, snapshots, one block", "all members go on from snapshots, of which one is torn",
                   snapshots=True, room=1, log=((1,),), plan=(("Log 1", (_TO_R, _TO_P)),), lives=2, faults=RESTARTS,
                   quick=True),
        OrderScene("order, snapshots, two lines", "of a snapshot one line is on the bus, and the other is not yet",
                   snapshots=True, room=1, log=((1, 2),), plan=(("Log 1", (_TO_P,)), ("Log 2", (_TO_R,))),
                   faults=("all restart", "a snapshot is torn")),
        OrderScene("order, snapshots, queue", "a block that came too early is held in a snapshot", snapshots=True,
                   queue=((2, 1),), faults=RESTARTS),
        OrderScene("order, snapshots, timers", "timers are due after a restart", snapshots=True, times=(1, 2),
                   log=((1,),), faults=RESTARTS,
                   plan=(("Log 1", (("wake", "b", 2), ("wake", "a", 2))), ("a", (("wake", "b", 1),)))),
        OrderScene("order, snapshots, a flaw", "a member's state goes wrong before that shows, all restart",
                   snapshots=True, room=2, log=((1, 2, 3),), flaw="Log 1", quiet=False, faults=("all restart",),
                   plan=(("Log 1", (_TO_P,)), ("Log 2", (_TO_P,)), ("Log 3", (_TO_P,))), quick=True),
        OrderScene("order, snapshots, a flaw that is found", "a member with snapshots that count is found to differ",
                   snapshots=True, room=2, log=((1, 2, 3),), flaw="Log 1", faults=("all restart",),
                   plan=(("Log 1", (_TO_P,)), ("Log 2", (_TO_P,)), ("Log 3", (_TO_P,))), quick=True),
    ]  # fmt: skip


def _of_groups() -> list[Scene | LineScene]:
    return [
        Scene("log", "members take turns on one log, their inputs come block by block", given=False),
        Scene("log, inputs at once", "inputs are read at once, and a member may die for good", deaths=True,
              quick=True),
        Scene("log, both lead", "every member is active all the time", blocks=4, lives=3, **_ALL_LEAD, quick=True),
        Scene("log, retention, standby", "retention takes what a standby has not read", retention="standbys",
              quick=True),
        Scene("log, retention", "retention takes what a subscriber has not read", lives=3, retention="subscribers",
              **_ALONE, quick=True),
        Scene("log, retention, both lead", "the same with two members that send", lives=1, retention="subscribers",
              **_ALL_LEAD),
        Scene("log, restarts", "members die and start again", restarts=True),
        Scene("log, all restart", "all members die at once and start again", all_restart=True),
        Scene("log, strays", "blocks of a dropped pipe of this run come late", slow=True, blocks=2, lives=1,
              strays=(_stray(0, 1, 2),)),
        Scene("log, strays, both lead", "the same with two members that send", slow=True, lives=1,
              strays=(_stray(0, 1, 2),), **_ALL_LEAD),
        Scene("log, strays of the last run", "blocks of a pipe of the last run come in between", slow=True, lives=1,
              runs=(1, 1), strays=(_stray(0, 1, 2),), **_ALL_LEAD),
        Scene("log, a member of the last run", "one member still sends in the run before", runs=(0, 1), quick=True),
        Scene("log, another input", "the members have different inputs", lines="AB", lives=1, progress=False,
              quick=True),
        Scene("log, another input, retention", "the same where retention takes what was not read", lines="AB", lives=1,
              retention="subscribers", troubles=False, progress=False, **_ALL_LEAD),
        NewcomerScene("log, a newcomer in the middle", "a member begins to follow anywhere, its reads are cut anywhere",
                      blocks=4, lives=1, progress=False, **_ALL_LEAD),
        Scene("log with holes", "single messages are missing from the log", lives=1, **_HOLES, quick=True),
        Scene("queues", "every reader has its own queue, single messages are refused", lives=2, **_QUEUES),
        Scene("queues, both lead", "every member is active all the time", lives=2, **_QUEUES, **_ALL_LEAD, quick=True),
        Scene("queues, small window", "at most two blocks unsettled", blocks=4, window=2, lives=1, **_QUEUES,
              **_ALL_LEAD, quick=True),
        Scene("queues, two subscribers", "what one queue lacks the other has", readers=2, lives=2, **_QUEUES,
              **_ALL_LEAD, quick=True),
        Scene("queues, late binding", "a subscriber comes when some has been sent", late=True, lives=2, **_QUEUES,
              **_ALL_LEAD),
        Scene("queues, slow", "messages come to each queue in their own time", slow=True, blocks=2, lives=1, **_QUEUES),
        Scene("queues, slow, both lead", "and in another order to each", slow=True, lives=1, **_QUEUES, **_ALL_LEAD),
        Scene("queues, strays of the last run", "blocks of a pipe of the last run come in between", slow=True, lives=1,
              blocks=2, runs=(1, 1), strays=(_stray(0, 2, 3),), **_QUEUES, **_ALL_LEAD, quick=True),
        Scene("queues, restarts", "members die and start again", blocks=2, lives=2, restarts=True, **_QUEUES,
              quick=True),
        Scene("queues, deaths", "members die for good", lives=1, deaths=True, **_QUEUES, quick=True),
        Scene("queues, another input", "the members have different inputs", blocks=2, lines="AB", lives=1,
              progress=False, **_QUEUES, quick=True),
        GroupScene("group", "a reader that restarts, and goes on from position and state", lives=2, **_ALONE,
                   quick=True),
        GroupScene("group, both lead", "the same with doubles of two members", blocks=2, lives=1, **_ALL_LEAD),
        GroupScene("group of two", "its readers take over from each other", in_group=2, lives=2, **_ALONE),
        GroupScene("group, log with holes", "a reader that restarts while blocks are held", lives=2, troubles=False,
                   **_HOLES, **_ALONE),
        GroupScene("group, queue", "a reader that restarts, on a queue that gives again", lives=2, blocks=2, **_QUEUES,
                   **_ALONE, quick=True),
        GroupScene("group, queue, three lives", "the same with one fault more", lives=3, blocks=2, troubles=False,
                   **_QUEUES, **_ALONE, quick=True),
        GroupScene("group, queue, held", "the same with blocks that are held", lives=1, **_QUEUES, **_ALONE),
        GroupScene("group, queue, late", "a group that has read of another source comes when some has been sent",
                   late=True, lives=2, troubles=False, **_QUEUES, **_ALONE),
        GroupScene("group, queue, beat", "a group comes between two blocks, a beat lets the second one through",
                   late=True, lives=2, blocks=2, troubles=False, **_QUEUES, **_ALONE, quick=True),
        GroupScene("group of two, queue", "its readers take over from each other", in_group=2, lives=2, blocks=2,
                   **_QUEUES, **_ALONE),
        LineScene("two lines", "one input feeds two lines on two logs, a fault of any kind may happen", faults=FAULTS),
        LineScene("two lines, three steps", "the same with a longer input", script=((0,), (0, 1), (1,)),
                  faults=("dies", "its input stops", "trouble")),
        LineScene("two lines, a line is cut", "a member cannot write one of its lines any more",
                  faults=("a line is cut",), quick=True),
        LineScene("two lines, a leader that hears no more", "it lets others go first, who can read the input",
                  faults=("hears no more",), quick=True),
        LineScene("two lines, queues", "a fault of any kind may happen", queues=True, faults=FAULTS),
        LineScene("two lines, queues, deaths", "who remains may be behind in one line, and full in the other",
                  queues=True, faults=("dies",), quick=True),
        LineScene("two lines, queues, a short input", "a member that has no more to give may be behind in one line",
                  short=1, queues=True, faults=("loses it",), quick=True),
        LineScene("two lines, queues, a hand-over", "leadership may be lost during it", lives=2, queues=True,
                  faults=("hand-over", "loses it")),
        LineScene("two lines, queues, both lead", "both members are active", script=((0,), (1,)), room=2, lives=0,
                  queues=True, all_lead=True),
    ]  # fmt: skip


def check(scene: World) -> Explored:
    """Exhaust one world. Raises Counterexample."""
    return explore(scene)


def main(arguments: list[str]) -> int:
    """Print every world whose name has one of the arguments in it, or every one; 1 if one has a counterexample."""
    failed, states, began = 0, 0, time.perf_counter()
    for scene in scenes():
        if arguments and not any(argument in scene.name for argument in arguments):
            continue
        since = time.perf_counter()
        try:
            found = check(scene)
        except Counterexample as counterexample:
            failed += 1
            print(f"{scene.name}: {scene.about}\n{counterexample}")
            continue
        states += found.states
        seconds = time.perf_counter() - since
        print(f"{scene.name:32} {found.states:9,} states {found.moves:11,} moves {seconds:6.1f} s  {scene.about}")
    print(f"{states:,} states in {time.perf_counter() - began:.0f} s, {failed} counterexamples")
    return 1 if failed else 0
