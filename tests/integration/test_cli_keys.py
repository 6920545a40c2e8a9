"""Every flag and every key of `-C` that no other test uses, through the command line."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import esp_pubsub as esp
from tests.integration.shell import BOUND, SCHEMA, URL, Cli, text

pytestmark = pytest.mark.timeout(3 * BOUND)
DATED = "id*:int64,symbol:string,day:date"
DAY = 1_794_960_000  # 2026-11-18


async def blocks(bus: Path, events: int) -> list[esp.Block]:
    """The first ones, of so many events."""
    async with esp.init(dir=bus) as client, client.subscriber(URL, side="in", start="earliest") as sub:
        found: list[esp.Block] = []
        while sum(map(len, found)) < events:
            found.append(await anext(sub))
        return found


@pytest.mark.parametrize(
    ("command", "flags", "lines", "expected"),
    [
        ("pub", ["--delimiter", ";"], "1;a;0\n", ["I N 1 a 0"]),
        ("pub", ["--dateformat", "%d.%m.%Y"], "1,a,18.11.2026\n", [f"I N 1 a {DAY}"]),
        ("pub", ["--upsert"], "1,a,0\n", ["P N 1 a 0"]),
        ("pub", ["--transactional", "--block-size", "2"], "1,a,0\n2,b,0\n", ["I N 1 a 0", "I N 2 b 0", "all or none"]),
        ("pub", ["--header", "2"], "x\ny,z\n1,a,0\n", ["I N 1 a 0"]),
        ("pub", ["--failover-group", "g", "--buffer", "5", "--election", "log"], "1,a,0\n", ["I N 1 a 0"]),
        ("adapter", ["csvfielddelimiter=|"], "i|n|1|a|0\n", ["I N 1 a 0"]),
        ("adapter", ["noautogenfield=true"], "i,n,a,0\n", ["I N None a 0"]),
        ("adapter", ["repeatcount=1"], "i,n,1,a,0\n", ["I N 1 a 0", "I N 1 a 0"]),
        ("adapter", ["growinginputfile=true,maxevents=1"], "i,n,1,a,0\n", ["I N 1 a 0"]),
        ("adapter", ["addcsvopcode=true,publishwithupsert=true"], "n,1,a,0\n", ["P N 1 a 0"]),
        ("adapter", ["addcsvflags=partialupdate"], "u,1,a,\n", ["U P 1 a None"]),
        ("adapter", ["header=true"], "opcode,flags,id,symbol,day\ni,n,1,a,0\n", ["I N 1 a 0"]),
        ("adapter", ["prebuffer=true,loglevel=off,ignorecsvparseerrors=true"], "x\ni,n,1,a,0\n", ["I N 1 a 0"]),
        ("adapter", ["transactional=true,rate=100,side=in"], "i,n,1,a,0\n", ["I N 1 a 0", "all or none"]),
        ("adapter", [f"hotfailover=true,failovergroup=g,numbufferedmsgs=5,election=log,schema=\"{DATED}\""],
            "i,n,1,a,0\n", ["I N 1 a 0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "I N" not in value[0] else "",
)  # fmt: skip
def test_a_publisher_does_what_its_flags_and_keys_say(
    command: str, flags: list[str], lines: str, expected: list[str], cli: Cli, tmp_path: Path
) -> None:
    feed, config = tmp_path / "feed.csv", tmp_path / "embedded.cfg"
    feed.write_text(lines)
    config.write_text(f'embedded {{\n dir = "{cli.bus}"\n}}\n')
    if command == "pub":
        cli.run("pub", URL, DATED, feed, *flags)
    else:
        schema = "" if "schema=" in flags[0] else f',schema="{DATED}"'
        keys = f"url={URL},fsname={feed},type=pub,transportconfigfile={config},{flags[0]}{schema}"
        cli.run("adapter", "-C", keys)
    found = asyncio.run(blocks(cli.bus, len([line for line in expected if line != "all or none"])))
    got = []
    for block in found:
        for event in block.events():
            values: Any = dict(event.values)
            day = values["day"] and int(values["day"].timestamp())
            letters = {1: "I", 2: "U", 4: "P"}[event.opcode], "NP"[event.flags]
            got.append(" ".join(map(str, (*letters, values["id"], values["symbol"], day if day is not None else None))))
    assert got + ["all or none"] * found[0].transactional == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--delimiter", ";"], "1;a;0\n2;b;1794960000\n"),
        (["--dateformat", "%d.%m.%Y"], "1,a,01.01.1970\n2,b,18.11.2026\n"),
        (["-C", "noautogenfield=true"], "a,0\nb,1794960000\n"),
        (["-C", "csvfielddelimiter=|,unbufferedoutputstreams=false"], "1|a|0\n2|b|1794960000\n"),
        (["-C", "csvincludeschema=once"], f"{DATED}\n1,a,0\n2,b,1794960000\n"),
        (["-C", "csvincludeschema=pereventblock"], f"{DATED}\n1,a,0\n{DATED}\n2,b,1794960000\n"),
        (["-C", "header=true"], "id,symbol,day\n1,a,0\n2,b,1794960000\n"),
        (["-C", "header=full", "--opcodes"], "opcode,flags,id,symbol,day\nI,N,1,a,0\nI,N,2,b,1794960000\n"),
        (["-C", "header=false,loglevel=error"], "1,a,0\n2,b,1794960000\n"),
        (["-C", "maxfilesize=12,group=g"], "2,b,1794960000\n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_subscriber_does_what_its_flags_and_keys_say(
    flags: list[str], expected: str, cli: Cli, tmp_path: Path
) -> None:
    feed, out = tmp_path / "feed.csv", tmp_path / "out.csv"
    feed.write_text(f"1,a,0\n2,b,{DAY}\n")
    cli.run("pub", URL, DATED, feed, "--block-size", 1)
    start = [] if "group=" in flags[-1] else ["--start", "earliest"]
    cli.run("sub", URL, out, "--side", "in", "--max-events", 2, *start, *flags)
    assert out.read_text() == expected


def test_blocks_travel_in_binary_as_they_are(cli: Cli, tmp_path: Path) -> None:
    config, feed, blocks, out = (tmp_path / name for name in ("embedded.cfg", "feed.csv", "blocks", "out.csv"))
    config.write_text(f'embedded {{\n dir = "{cli.bus}"\n}}\n')
    feed.write_text('I,N,1,"two\nlines",0.1\nP,N,2,,\nD,N,1,,\n')
    copy = URL.replace("Trades", "Copy")
    cli.run("pub", URL, SCHEMA, feed, "--opcodes", "--block-size", 2)
    reading = ("--side", "in", "--group", "archive", "--format", "binary", "--max-events")
    cli.run("sub", URL, blocks, *reading, 2)
    with blocks.open("ab") as torn:
        torn.write(b"\x70\0\0\0half of a block")
    cli.run("sub", URL, blocks, *reading, 1)
    keys = f'transportconfigfile={config},side=in,schema="{SCHEMA}"'
    _, said = cli.run("adapter", "-k", "pub", "-h", copy, "-f", blocks, "-t", "binary", "-b", 64, "-C", keys)
    assert "3 events published, blocks 1 to 2, all acknowledged" in said
    cli.run("sub", copy, out, "--side", "in", "--start", "earliest", "--opcodes", "--max-events", 3)
    assert out.read_text() == feed.read_text()
    _, said = cli.run("pub", copy, feed, "--format", "binary", code=1)
    assert "block 1: it has no length; the input is not of this format" in said


def test_a_subscriber_begins_at_a_time(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    for first in (1, 3):
        between = datetime.now(UTC)
        feed.write_text(text(first, first + 1))
        cli.run("pub", URL, SCHEMA, feed)
    for moment in (between.isoformat(), between.replace(tzinfo=None).isoformat()):
        assert cli.run("sub", URL, "--side", "in", "--max-events", 2, "--start", moment)[0] == text(3, 4)
