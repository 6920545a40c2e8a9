"""What can happen to a group, by name. Each is a function of a run, under way and under load."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

from .process import now
from .run import Process, Run

HOUR = 3_600.0
KILLS = 50
DUELS_SECONDS = 2.5 * KILLS  # of input; what is left of the kills when it has ended shows less
LONGEST_DUEL = 2.0  # seconds
Fault = Callable[[Run], Awaitable[None]]


async def _kill(run: Run, process: Process, how: str) -> None:
    run.harmed(how)
    process.kill()


async def _restart(run: Run) -> None:
    """Another member, and wait until it could lead: what comes next is to show a takeover, not the start of Python."""
    member = await run.start_member()
    await run.until(lambda: member.role in ("candidate", "active"), 5.0)


async def quiet(run: Run) -> None:
    """Nothing happens: what gaps there are all the same."""
    await run.moment(0.2, 0.3)
    run.harmed("quiet")


async def kill(run: Run) -> None:
    """The active is killed; twice, if there is somebody left, and it is started again."""
    for low, high in ((0.15, 0.4), (0.55, 0.8)):
        await run.moment(low, high)
        await _kill(run, await run.active(), "kill")
        await _restart(run)


async def freeze_short(run: Run) -> None:
    """The active stands still for less than the silence: it may stay the leader, or not."""
    for low, high in ((0.1, 0.3), (0.4, 0.6), (0.7, 0.8)):
        await run.moment(low, high)
        active = await run.active()
        run.harmed("freeze-short")
        await active.freeze(run.dice.uniform(0.02, 0.35))


async def freeze_long(run: Run) -> None:
    """The active stands still until another one leads, and wakes up as a second leader."""
    await run.moment(0.15, 0.6)
    active = await run.active()
    run.harmed("freeze-long")
    await active.freeze(run.dice.uniform(0.8, 2.0))


async def kill_second_after(run: Run) -> None:
    """The active is killed, and the next one as soon as it leads."""
    await run.moment(0.15, 0.6)
    await _kill(run, await run.active(), "kill-second-after")
    await run.start_member()
    (await run.active()).kill()
    await run.start_member()


async def kill_second_during(run: Run) -> None:
    """The active is killed, and so is another one in the middle of taking over."""
    await run.moment(0.15, 0.6)
    active = await run.active()
    await _kill(run, active, "kill-second-during")
    await run.pause(0.0, 0.02)
    others = run.others(active)
    (run.leaders() or others)[0].kill()
    await run.start_member()
    if len(others) < 2:
        await run.start_member()


async def terminate(run: Run) -> None:
    """The active is asked to end, and closes."""
    for low, high in ((0.15, 0.4), (0.55, 0.8)):
        await run.moment(low, high)
        run.harmed("terminate")
        (await run.active()).terminate()
        await _restart(run)


async def hand_over(run: Run) -> None:
    """The active hands over, and stays."""
    for low, high in ((0.15, 0.4), (0.55, 0.8)):
        await run.moment(low, high)
        active = await run.active()
        run.harmed("hand-over" if low < 0.5 else "hand-over-again")
        active.order("hand_over")
        await run.until(lambda active=active: active.role != "active", 5.0)


async def hand_over_then_kill(run: Run) -> None:
    """The active hands over; then the new one is killed, and the first has to lead again."""
    await run.moment(0.1, 0.3)
    first = await run.active()
    run.harmed("hand-over")
    first.order("hand_over")
    await run.until(lambda: any(m is not first for m in run.leaders()), 5.0)
    await run.moment(0.5, 0.7)
    await _kill(run, await run.active(), "kill-after-hand-over")
    await _restart(run)


async def restart_members(run: Run) -> None:
    """All members are killed at once, and started again."""
    await run.moment(0.2, 0.7)
    run.harmed("restart-members")
    for member in run.members:
        member.kill()
    await run.pause(0.0, 0.3)
    for _ in range(run.report.members):
        await run.start_member()


async def restart_all(run: Run) -> None:
    """All members and both readers are killed at once, and started again."""
    await run.moment(0.2, 0.7)
    run.harmed("restart-all")
    for process in (*run.members, *run.readers):
        process.kill()
    await run.start_reader("group", "g")
    for _ in range(run.report.members):
        await run.start_member()
    await run.start_reader("all-2")


async def new_run(run: Run) -> None:
    """A higher run begins while the active of the old one stands still, and wakes up later and goes on sending."""
    await run.moment(0.2, 0.5)
    old = [member for member in run.members if member.alive]
    active = await run.active()
    run.may_leave |= {member.name: "Stale" for member in old}
    run.harmed("new-run")
    run.end_run = 1
    frozen = asyncio.create_task(active.freeze(run.dice.uniform(0.8, 1.6)))
    run.begun = now() + 0.8
    for _ in range(2):
        await run.start_member(run=1)
    await frozen
    if not await run.until(lambda: all(not member.alive for member in old)):
        run.report.wrong.append("a member of the old run is still there")


async def slow_member(run: Run) -> None:
    """One member is far behind; the active is killed, and it must not be the slow one that leads."""
    slow = await run.start_member(rate=run.rate * 0.3)
    await run.moment(0.3, 0.8)
    await _kill(run, await run.active(), "slow-member")
    await run.start_member()
    await run.pause(0.5, 1.0)
    if any(said.get("event") == "won" for said in slow.said):
        run.report.wrong.append("the member that was far behind led")


async def other_input(run: Run) -> None:
    """A member with another input comes, and has to leave; then the active is killed."""
    await run.moment(0.1, 0.4)
    run.harmed("other-input")
    intruder = await run.start_member(seed=run.report.seed + 1)
    run.may_leave[intruder.name] = "InputDiffers"
    if not await run.until(lambda: not intruder.alive):
        run.report.wrong.append("the member with another input did not leave")
    await _kill(run, await run.active(), "kill")
    await run.start_member()


async def clock_step(run: Run) -> None:
    """The wall clocks of two new members are hours behind and ahead, and each comes to lead."""
    await run.moment(0.05, 0.15)
    hours = [-run.dice.uniform(1, 9), run.dice.uniform(1, 30)]
    run.dice.shuffle(hours)
    for number, off_by in enumerate(hours):
        before = [member for member in run.members if member.alive]
        stepped = await run.start_member(clock_off_by=off_by * HOUR)
        await run.until(lambda stepped=stepped: stepped.role == "candidate")
        await run.moment(*((0.3, 0.5), (0.6, 0.8))[number])
        run.harmed("clock-step")
        for member in before:
            member.kill()
        await run.until(lambda: bool(run.leaders()))
    await run.start_member()


async def kill_reader(run: Run) -> None:
    """The reader of the group is killed and started again, around a kill of the active."""
    await run.moment(0.1, 0.4)
    for _ in range(2):
        next(reader for reader in run.readers if reader.alive and reader.job.group).kill()
        await _kill(run, await run.active(), "kill-reader")
        await run.start_reader("group", "g")
        await _restart(run)
        await run.pause(0.3, 0.7)


async def freeze_reader(run: Run) -> None:
    """Both readers stand still for a while, and the active is killed meanwhile."""
    await run.moment(0.1, 0.4)
    frozen = [asyncio.create_task(reader.freeze(run.dice.uniform(0.3, 1.2))) for reader in run.readers]
    await run.pause(0.0, 0.2)
    await _kill(run, await run.active(), "freeze-reader")
    await run.start_member()
    await asyncio.gather(*frozen)


async def mixed(run: Run) -> None:
    """Five random faults one after the other."""
    for _ in range(5):
        await run.pause(0.1, 0.5)
        active = await run.active()
        how = run.dice.choice(("kill", "freeze", "terminate", "hand_over", "standby", "reader"))
        run.harmed("mixed")
        if how == "freeze":
            await active.freeze(run.dice.uniform(0.05, 1.0))
        elif how == "hand_over":
            active.order("hand_over")
        elif how == "reader":
            next(reader for reader in run.readers if reader.alive and reader.job.group).kill()
            await run.start_reader("group", "g")
        else:
            victim = active if how != "standby" else run.dice.choice(run.others(active) or [active])
            victim.terminate() if how == "terminate" else victim.kill()
            await run.start_member()


async def zookeeper_hole(run: Run) -> None:
    """The link of the active to ZooKeeper loses all bytes until another one leads, and is healed."""
    await run.moment(0.1, 0.5)
    active = await run.active()
    run.harmed("zookeeper-hole")
    run.links[active.name].swallow()
    if not await run.until(lambda: any(leader is not active for leader in run.leaders())):
        run.report.wrong.append("nobody took over from a leader without ZooKeeper")
    await run.pause(0.0, 1.0)
    run.links[active.name].heal()


async def duels(run: Run) -> None:
    """The leader is killed again and again while two other processes want the whole machine; five stand by each time.

    A member that is late may take a slow leader for a dead one. That costs doubles, and must stay rare and short.
    """
    busy = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    load = [await asyncio.create_subprocess_exec(sys.executable, "-c", busy) for _ in range(2)]
    try:
        for _ in range(KILLS):
            await run.until(lambda: len(run.others()) == run.report.members)
            await run.pause(0.0, 0.5)
            active = await run.active()
            await _kill(run, active, "duels")
            await run.start_member()
            await run.until(lambda active=active: any(leader is not active for leader in run.leaders()))
    finally:
        for process in load:
            process.kill()
            await process.wait()
    found = run.duels()
    if len(found) > KILLS // 5 or max(found, default=0.0) > LONGEST_DUEL:
        run.report.wrong.append(f"{len(found)} duels, the longest of {max(found):.2f} s")


FAULTS: dict[str, Fault] = {
    "quiet": quiet,
    "kill": kill,
    "freeze-short": freeze_short,
    "freeze-long": freeze_long,
    "kill-second-after": kill_second_after,
    "kill-second-during": kill_second_during,
    "terminate": terminate,
    "hand-over": hand_over,
    "hand-over-then-kill": hand_over_then_kill,
    "restart-members": restart_members,
    "restart-all": restart_all,
    "new-run": new_run,
    "slow-member": slow_member,
    "other-input": other_input,
    "clock-step": clock_step,
    "kill-reader": kill_reader,
    "freeze-reader": freeze_reader,
    "mixed": mixed,
}
ZOOKEEPER_FAULTS: dict[str, Fault] = {"zookeeper-hole": zookeeper_hole}
ALONE: dict[str, Fault] = {"duels": duels}
"""Those that are played only when they are asked for."""
