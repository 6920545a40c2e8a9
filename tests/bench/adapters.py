"""`esp pub` and `esp sub` as they are run, on the embedded bus: `make bench NAME=adapters` (about four minutes).

A file of 1 M trades of 13 columns (LINES=100000: fewer) goes through `esp pub` in blocks of 256 and comes out of
`esp sub`, byte for byte. Beside them, in the same repetition, processes that do with Python's own `csv` alone what
cannot be left out: read and convert the file, and write ready rows. All are measured from their start to their end,
but the peers without what they import and, the writer, without making the rows.
"""

from __future__ import annotations

import asyncio
import csv
import filecmp
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .report import LIMIT, REPETITIONS, URL, Crew, Report, heard, main, say
from .text import BLOCK, CONVERT, EVENTS, SCHEMA, trades

LINES = int(os.environ.get("LINES", "1000000"))
SINGLES = LINES // 10
VENDOR = 2_900  # events a second of SAS's adapter with blocks of one, in the vendor's own run


def converted(path: str) -> Iterator[list[Any]]:
    """What one writes without us."""
    with open(path, newline="") as file:
        for row in csv.reader(file):
            yield [convert(value) for convert, value in zip(CONVERT, row, strict=True)]


def written(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """The same the other way round."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


async def convert(directory: str, path: str) -> None:
    """Read and convert the file."""
    await heard()
    began, count = time.perf_counter(), 0
    for _ in converted(path):
        count += 1
    say(took=time.perf_counter() - began, lines=count)


async def write(directory: str, path: str) -> None:
    """Write the rows of the file to another one."""
    rows = list(converted(path))
    await heard()
    began = time.perf_counter()
    written(Path(directory, "out.csv"), rows)
    say(took=time.perf_counter() - began, lines=len(rows))


ROLES = {role.__name__: role for role in (convert, write)}


async def peer(role: str, path: Path) -> float:
    """Lines a second."""
    async with Crew("adapters") as crew:
        member = await crew.start(role, path=str(path))
        member.tell()
        said = await member.told()
    return float(said["lines"] / said["took"])


async def esp(lines: int, *arguments: object) -> float:
    """Lines a second of a command, from its start to its end."""
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "esp_pubsub.cli", *map(str, arguments), stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT):
            _, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode or f"{lines:,} events" not in told.decode():
        raise RuntimeError(f"esp {arguments[0]} ended with {process.returncode}: {told.decode()}")
    return lines / (time.perf_counter() - began)


async def repetition(folder: Path, source: Path, samples: dict[str, list[float]]) -> None:
    """Everything once, on a bus of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        bus, out = ("--set", f"dir={place}/bus"), Path(place, "out.csv")
        single = URL.replace("window", "singles")
        block = ("--block-size", BLOCK)
        samples["csv.reader and conversion"].append(await peer("convert", source))
        samples["esp pub"].append(await esp(LINES, "pub", URL, SCHEMA, source, *block, *bus))
        samples["csv.writer"].append(await peer("write", source))
        everything = ("--side", "in", "--start", "earliest", "--max-events", LINES)
        samples["esp sub"].append(await esp(LINES, "sub", URL, out, *everything, *bus))
        if not filecmp.cmp(source, out, shallow=False):
            raise RuntimeError(f"{out} is not what went in")
        ones = ("--block-size", 1, "--max-events", SINGLES)
        samples["esp pub, blocks of one"].append(await esp(SINGLES, "pub", single, SCHEMA, source, *ones, *bus))


async def measure(report: Report) -> None:
    names = "csv.reader and conversion", "esp pub", "csv.writer", "esp sub", "esp pub, blocks of one"
    samples: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="esp-bench-") as folder:
        source = Path(folder, "trades.csv")
        some = trades()
        written(source, ((number, *some[number % EVENTS][1:]) for number in range(LINES)))
        for _ in range(REPETITIONS):
            await repetition(Path(folder), source, samples)
    report.figures(samples, "events/s")
    report.ratio(samples, "esp pub", "csv.reader and conversion", 0.6)
    report.ratio(samples, "esp sub", "csv.writer", 0.6)
    samples["the vendor's"] = [VENDOR] * REPETITIONS
    report.ratio(samples, "esp pub, blocks of one", "the vendor's", 1.0)


if __name__ == "__main__":
    main("adapters", measure, ROLES)
