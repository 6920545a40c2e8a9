"""Failover under chaos, with real processes: `python -m tests.chaos --bus embedded --runs 100`.

Every run starts a group of publishers and two readers, harms them, and hands what all of them wrote down to the history
checker. A run that fails prints its seed, keeps its place, and makes the exit code 1. `--seed N --runs 1 --only FAULT
--members M` plays the same plan again; what the machine does in between differs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from statistics import quantiles

from .buses import BUSES
from .faults import FAULTS
from .run import Report, Run


async def play(bus: str, fault: str, seed: int, members: int, seconds: float = 2.5) -> Report:
    """One run."""
    run = Run(bus, fault, seed, members, seconds)
    return await run.play((FAULTS | BUSES[bus].faults)[fault])


def line(number: int, report: Report) -> str:
    """One run in one line, and more if it failed."""
    gaps = [gap for found in report.gaps.values() for gap in found]
    longest = f"{max(gaps) * 1000:6.0f} ms" if gaps else "        -"
    text = (
        f"{number:4} {'ok  ' if report.ok else 'FAIL'} {report.fault:<20} members {report.members} seed {report.seed} "
        f"takeovers {report.takeovers:2} longest gap {longest} in {report.seconds:4.1f} s"
    )
    if report.ok:
        return text
    return "\n".join(
        [text, f"     kept in {report.kept}", *(f"     {wrong}" for wrong in report.wrong), f"     {report.verdict}"]
    )


def summary(reports: list[Report]) -> str:
    """All runs together."""
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
    failed = [report for report in reports if not report.ok]
    kinds = ("lost", "doubled", "reordered", "stale", "invented", "gap", "unfinished", "stuck")
    lines.append(", ".join(f"{kind} {found[kind]}" for kind in kinds))
    lines.append(f"{len(reports)} runs, {sum(r.takeovers for r in reports)} takeovers, {len(failed)} failed")
    lines += [f"  again: --seed {r.seed} --runs 1 --only {r.fault} --members {r.members}" for r in failed]
    return "\n".join(lines)


async def play_all(given: argparse.Namespace) -> list[Report]:
    """Runs one after the other; the faults in turn, so that each is seen."""
    names = [given.only] if given.only else sorted(FAULTS | BUSES[given.bus].faults)
    reports = []
    for number in range(given.runs):
        seed = given.seed + number
        dice = random.Random(seed)
        members = given.members or dice.choices((2, 3, 5), (6, 3, 1))[0]
        report = await play(given.bus, names[number % len(names)], seed, members)
        reports.append(report)
        print(line(number + 1, report), flush=True)
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--bus", choices=sorted(BUSES), default="embedded")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--members", type=int, choices=(2, 3, 5))
    parser.add_argument("--only", choices=sorted(FAULTS))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    reports = asyncio.run(play_all(given))
    print(summary(reports))
    return 0 if all(report.ok for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
