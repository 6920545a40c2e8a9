"""Failover under chaos, with real processes: `python -m tests.chaos --bus kafka --election zookeeper --runs 100`.

Every run starts a group of publishers and two readers, harms them, and hands what all of them wrote down to the history
checker. A run that fails prints its seed, keeps its place, and makes the exit code 1. `--seed N --runs 1 --only FAULT
--members M` plays the same plan again; what the machine does in between differs. Servers are started as needed.

`--system engine` has the members run a model with one input or two, in derived or in written order: what subscribers of
both its output windows got must be what the model emits over the order that was decided. `--only all-killed --runs 100`
kills all members at once, at random points, and restarts them from snapshots; with `--only all-lead` every member is
active all the time.

`--system spark` has a Spark driver read the group's topic, and harms that too: table and topic that it writes must be
what they are when nothing happens. A run takes about two minutes.

`--only duels` is long and on its own: six members under load on the processor, whose leader is killed 50 times.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from statistics import quantiles

from tests.support.rabbitmq import RabbitMQ
from tests.support.zookeeper import ZooKeeper

from .buses import Bus, Embedded
from .engine import faults_of
from .engine import play as play_engine
from .faults import ALONE, DUELS_SECONDS, FAULTS
from .kafka import KafkaBus, KafkaWithWays
from .rabbitmq import RabbitBus
from .run import SECONDS, Report, Run
from .spark import FAULTS as SPARK_FAULTS
from .spark import play as play_spark

MODES = {"bus": "direct,persistent,stream", "engine": "persistent,stream", "spark": "stream"}
"""Those of rabbitmq that are played by default."""


async def play(bus: Bus, fault: str, seed: int, members: int, seconds: float = SECONDS) -> Report:
    """One run."""
    return await Run(bus, fault, seed, members, seconds).play((ALONE | bus.faults)[fault])


def line(number: int, report: Report) -> str:
    """One run in one line, and more if it failed."""
    gaps = [gap for found in report.gaps.values() for gap in found]
    longest = f"{max(gaps) * 1000:6.0f} ms" if gaps else "        -"
    text = (
        f"{number:4} {'ok  ' if report.ok else 'FAIL'} {report.mode:<10} {report.shape:<8} {report.fault:<20} "
        f"members {report.members} seed {report.seed} takeovers {report.takeovers:2} duels {len(report.duels):2} "
        f"longest gap {longest} in {report.seconds:4.1f} s"
    )
    if report.ok:
        return text
    return "\n".join(
        [text, f"     kept in {report.kept}", *(f"     {wrong}" for wrong in report.wrong), f"     {report.verdict}"]
    )


def summary(reports: list[Report], options: str) -> str:
    """All runs together; `options` are those with which a run is to be played again."""
    faults: Counter[str] = Counter()
    gaps: dict[str, list[float]] = {}
    found: Counter[str] = Counter()
    for report in reports:
        faults.update(report.faults)
        if report.verdict is not None:
            found.update(fault.kind for fault in report.verdict.faults)
        for how, seen in report.gaps.items():
            gaps.setdefault(how, []).extend(seen)
    lines = [f"{'fault':<22} {'times':>5}   gap p50      p99      max"]
    for how in sorted(faults):
        seen = sorted(gaps.get(how, []))
        if not seen:
            lines.append(f"{how:<22} {faults[how]:>5}")
            continue
        cuts = quantiles(seen, n=100, method="inclusive") if len(seen) > 1 else seen * 99
        figures = "".join(f"{value * 1000:7.0f}ms" for value in (cuts[49], cuts[98], seen[-1]))
        lines.append(f"{how:<22} {faults[how]:>5} {figures}")
    duels = [seconds for report in reports for seconds in report.duels]
    failed = [report for report in reports if not report.ok]
    kinds = ("lost", "doubled", "reordered", "stale", "invented", "gap", "unfinished", "stuck")
    lines.append(", ".join(f"{kind} {found[kind]}" for kind in kinds))
    lines.append(f"duels {len(duels)}, the longest of {max(duels, default=0.0):.2f} s")
    blocks = sum(report.verdict.published for report in reports if report.verdict is not None)
    takeovers = sum(report.takeovers for report in reports)
    lines.append(f"{len(reports)} runs, {takeovers} takeovers, {blocks} blocks, {len(failed)} failed")
    if restored := sum(report.restored for report in reports):
        lines.append(f"{restored} members went on from snapshots")
    for r in failed:
        mode = f" --mode {r.mode}" if r.mode else ""
        lines.append(f"  again: {options}{mode} --seed {r.seed} --runs 1 --only {r.fault} --members {r.members}")
    return "\n".join(lines)


async def play_all(given: argparse.Namespace) -> list[Report]:
    """Runs one after the other; modes and faults in turn, so that each is seen."""
    async with AsyncExitStack() as stack:
        zookeeper = await stack.enter_async_context(ZooKeeper()) if given.election == "zookeeper" else None
        buses: list[Bus] = [Embedded(zookeeper)]
        if given.bus == "kafka":
            buses = [KafkaBus(zookeeper, await stack.enter_async_context(KafkaWithWays()))]
        if given.bus == "rabbitmq":
            modes = given.mode or MODES[given.system]
            if given.system == "engine" and "direct" in modes:
                raise SystemExit("no engine reads a bus that keeps nothing: leave out direct")
            broker = await stack.enter_async_context(RabbitMQ())
            buses = [RabbitBus(zookeeper, broker, mode, given.election) for mode in modes.split(",")]
        if given.bus == "solace-double":
            from tests.support.solace import Solace  # with the vendor's library, which others need not load

            from .solace import SolaceBus

            buses = [SolaceBus(zookeeper, await stack.enter_async_context(Solace()), given.election)]
        if given.only == "duels":
            return [await told(1, play(buses[0], "duels", given.seed, 6, DUELS_SECONDS))]
        plan = planned(buses, given)
        reports = []
        for number in range(given.runs):
            bus, names = plan[number % len(plan)]
            seed = given.seed + number
            many = (6, 3, 0 if given.system == "engine" else 1)  # what is computed five times takes two cores too long
            members = given.members or random.Random(seed).choices((2, 3, 5), many)[0]
            playing = {"bus": play, "engine": play_engine, "spark": play_spark}[given.system]
            fault = names[number // len(plan) % len(names)]
            reports.append(await told(number + 1, playing(bus, fault, seed, members), getattr(bus, "mode", "")))
        return reports


def planned(buses: list[Bus], given: argparse.Namespace) -> list[tuple[Bus, list[str]]]:
    """The faults to play on each bus: those that only it can suffer first, where not all are asked for."""
    own = [SPARK_FAULTS] * len(buses) if given.system == "spark" else [bus.faults for bus in buses]
    if given.system == "engine":
        own = [faults_of(bus) for bus in buses]
    known = sorted(set().union(*own))
    names = given.only.split(",") if given.only else sorted(known, key=lambda name: (name in FAULTS, name))
    if unknown := set(names) - set(known):
        raise SystemExit(f"{', '.join(unknown)}: not known here; there are: {', '.join(known)}")
    found = [(bus, [name for name in names if name in faults]) for bus, faults in zip(buses, own, strict=True)]
    return [(bus, faults) for bus, faults in found if faults]


async def told(number: int, playing: Awaitable[Report], mode: str = "") -> Report:
    """A run, with its line as soon as it is over."""
    report = await playing
    report.mode = mode
    print(line(number, report), flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--system", choices=("bus", "engine", "spark"), default="bus", help="what is harmed")
    parser.add_argument("--bus", choices=("embedded", "kafka", "rabbitmq", "solace-double"), default="embedded")
    parser.add_argument("--mode", help="of rabbitmq; with commas, in turn; by default each that can be played")
    parser.add_argument("--election", choices=("log", "token", "flow", "zookeeper"), help="by default the bus's own")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--members", type=int, choices=(2, 3, 5, 6))
    parser.add_argument("--only", help="faults, with commas")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    reports = asyncio.run(play_all(given))
    election = f" --election {given.election}" if given.election else ""
    print(summary(reports, f"--system {given.system} --bus {given.bus}{election}"))
    return 0 if all(report.ok for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
