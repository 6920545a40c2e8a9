"""The command line as a user has it: real processes, files, pipes and sockets, on the embedded bus."""

import filecmp
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.integration.shell import BOUND, ESP, LINES, SCHEMA, URL, Cli, ended, listening, size, text, until

pytestmark = pytest.mark.timeout(3 * BOUND)


@pytest.fixture
def trades(tmp_path: Path) -> Path:
    path = tmp_path / "trades.csv"
    path.write_text(text(1, LINES))
    return path


def test_lines_come_out_as_they_went_in(cli: Cli, trades: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    reading = cli.start("sub", URL, out, "--side", "in", "--start", "earliest", "--max-events", LINES)
    _, said = cli.run("pub", URL, SCHEMA, trades)
    blocks = -(-LINES // 64)
    assert said == f"esp: {LINES:,} events published, blocks 1 to {blocks}, all acknowledged\n"
    _, said = ended(reading)
    assert said.endswith(f"esp: {LINES:,} events written, {blocks:,} blocks, the last one {blocks} of run 0\n")
    assert filecmp.cmp(trades, out, shallow=False)


def test_a_field_may_be_nearly_as_long_as_a_line(cli: Cli, tmp_path: Path) -> None:
    lines, out = tmp_path / "lines.csv", tmp_path / "out.csv"
    lines.write_text(f"1,{'x' * 1_000_000},0.5\n")
    cli.run("pub", URL, SCHEMA, lines)
    cli.run("sub", URL, out, "--side", "in", "--start", "earliest", "--max-events", 1)
    assert filecmp.cmp(lines, out, shallow=False)


def test_lines_come_out_as_they_went_in_although_the_active_publisher_is_killed(
    cli: Cli, trades: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    group = (URL, SCHEMA, trades, "--failover-group", "feed", "--rate", LINES)
    reading = cli.start("sub", URL, out, "--side", "in", "--group", "reader", "--max-events", LINES)
    active = cli.start("pub", *group)
    until(lambda: size(out))
    other = cli.start("pub", *group)
    until(lambda: size(out) > size(trades) / 3)
    active.kill()
    assert active.wait() == -signal.SIGKILL
    _, said = ended(other)
    assert f"{LINES:,} events published" in said and "all acknowledged" in said
    ended(reading)
    assert filecmp.cmp(trades, out, shallow=False)


def test_two_keys_in_a_file_make_a_publisher_redundant_and_sigterm_hands_over(cli: Cli, tmp_path: Path) -> None:
    config, feed, out = tmp_path / "embedded.cfg", tmp_path / "feed.csv", tmp_path / "out.csv"
    config.write_text(
        f'embedded {{\n dir = "{cli.bus}"\n}}\nsas {{\n hotfailover = true\n failovergroup = "feed"\n}}\n'
    )
    feed.write_text(text(1, 3))
    group = (URL, SCHEMA, feed, "--follow", "--config", config)
    reading = cli.start("sub", URL, out, "--side", "in", "--group", "reader", "--max-events", 5)
    active = cli.start("pub", *group)
    until(lambda: size(out) == size(feed))
    other = cli.start("pub", *group)
    active.send_signal(signal.SIGTERM)
    _, said = ended(active, 143)
    assert said.endswith("3 events published, blocks 1 to 3, all acknowledged\n")
    with feed.open("a") as more:
        more.write(text(4, 5))
    ended(reading)
    assert out.read_text() == text(1, 5)
    other.send_signal(signal.SIGINT)
    assert "5 events published, blocks 1 to 5, all acknowledged" in ended(other, 130)[1]


def test_what_a_file_grows_by_is_published_by_whole_lines(cli: Cli, tmp_path: Path) -> None:
    feed, out = tmp_path / "feed.csv", tmp_path / "out.csv"
    feed.write_text("1,IBM,1.5\n2,SA")
    reading = cli.start("sub", URL, out, "--side", "in", "--start", "earliest", "--max-events", 2)
    growing = cli.start("pub", URL, SCHEMA, feed, "--follow")
    until(lambda: size(out))
    assert out.read_text() == "1,IBM,1.5\n"
    with feed.open("a") as more:
        more.write("S,2.5\n3,half")
    ended(reading)
    assert out.read_text() == "1,IBM,1.5\n2,SAS,2.5\n"
    growing.send_signal(signal.SIGTERM)
    assert "2 events published" in ended(growing, 143)[1]


def test_a_file_that_becomes_shorter_is_an_error(cli: Cli, tmp_path: Path) -> None:
    feed, out = tmp_path / "feed.csv", tmp_path / "out.csv"
    feed.write_text(text(1, 2))
    reading = cli.start("sub", URL, out, "--side", "in", "--start", "earliest", "--max-events", 2)
    growing = cli.start("pub", URL, SCHEMA, feed, "--follow")
    ended(reading)
    feed.write_text("")
    assert "became shorter" in ended(growing, 1)[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{},IBM,much\n", "line {}: column 3, field 'price' (double): 'much' is not a number"),
        ("{},IB\udcff,1.5\n", "line {}: column 2, field 'symbol' (string): 'IB\\udcff' is not UTF-8"),
        ("{},IBM\n", "line {}: it has 2 columns, not 3 (id,symbol,price)"),
        ('{},"IBM,1.5\n', "line {}: a quote that opens in it is not closed"),
    ],
    ids=["type", "not UTF-8", "columns", "quote"],
)
def test_a_bad_line_ends_it_when_all_before_is_acknowledged(cli: Cli, tmp_path: Path, line: str, words: str) -> None:
    feed, out = tmp_path / "feed.csv", tmp_path / "out.csv"
    good = LINES * 7 // 10
    bad = line.format(good + 1).encode(errors="surrogateescape")
    feed.write_bytes(text(1, good).encode() + bad + text(good + 2, LINES).encode())
    _, said = cli.run("pub", URL, SCHEMA, feed, code=1)
    assert f"{good:,} events published, blocks 1 to {-(-good // 64)}, all acknowledged" in said
    assert words.format(good + 1) in said
    cli.run("sub", URL, out, "--side", "in", "--start", "earliest", "--max-events", good)
    assert out.read_text() == text(1, good)
    _, said = cli.run("pub", URL, feed, "--ignore-parse-errors")
    assert f"{LINES - 1:,} events published" in said and "1 bad line skipped" in said


def test_bad_lines_are_skipped_and_counted_when_that_is_wanted(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text(text(1, 1) + "x,IBM,1\n\xff" * 12 + "\n" + text(2, 2), encoding="latin-1")
    _, said = cli.run("pub", URL, SCHEMA, feed, "--ignore-parse-errors")
    assert "line 2: column 1, field 'id' (int64): 'x' is not an integer" in said
    assert said.count("skipped: ") == 10
    assert "2 events published, blocks 1 to 1, all acknowledged; 13 bad lines skipped" in said
    assert cli.read("--max-events", 2) == text(1, 2)


def test_a_byte_order_mark_and_mixed_ends_of_lines_are_read(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_bytes(b'\xef\xbb\xbfid,symbol,price\r\n1,"a,\r\nb",1.5\r\n2,c,2.5\n3,d,3.5')
    cli.run("pub", URL, SCHEMA, feed, "--header", "names")
    out = tmp_path / "out.csv"
    cli.run("sub", URL, out, "--side", "in", "--start", "earliest", "--max-events", 3, "--header")
    assert out.read_bytes() == b'id,symbol,price\n1,"a,\r\nb",1.5\n2,c,2.5\n3,d,3.5\n'


def test_standard_input_and_output_in_json(cli: Cli) -> None:
    writing = cli.start("pub", URL, SCHEMA, "-", "--format", "json", stdin=subprocess.PIPE)
    writing.stdin.write('[[{"id": 1, "symbol": "IBM", "price": 1.5}], [{"id": 2}]]')
    writing.stdin.close()
    writing.stdin = None
    assert "2 events published, blocks 1 to 2" in ended(writing)[1]
    first, second = cli.read("--max-events", 2, "--format", "json").splitlines()
    assert first == '{"events":{"entries":[{"id":1,"symbol":"IBM","price":1.5}]}}'
    assert '"id":2' in second


def test_repeat_rate_and_max_events(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text(text(1, 10))
    begun = time.monotonic()
    _, said = cli.run("pub", URL, SCHEMA, feed, "--repeat", 9, "--max-events", 45, "--rate", 20, "--block-size", 10)
    assert time.monotonic() - begun >= 2.0, "four pauses; nobody knows how late the first block was sent"
    assert "45 events published, blocks 1 to 5, all" in said
    assert cli.read("--max-events", 45) == text(1, 10) * 4 + text(1, 5)


def test_half_a_line_of_a_peer_that_left_is_not_published(cli: Cli) -> None:
    publishing = cli.start("pub", URL, SCHEMA, ":0")
    with listening(publishing) as peer:
        peer.sendall(b"1,IBM,1.5\n2,SAS,2.5\n3,MSFT,12")
    _, said = ended(publishing, 1)
    assert "2 events published, blocks 1 to 2, all acknowledged" in said
    assert "left in the middle of a line: '3,MSFT,12'" in said


def test_a_peer_that_stalls_holds_up_neither_what_it_sent_nor_sigterm(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    reading = cli.start("sub", URL, out, "--side", "in", "--start", "earliest", "--max-events", 1)
    publishing = cli.start("pub", URL, SCHEMA, ":0")
    with listening(publishing) as peer:
        peer.sendall(b"1,IBM,1.5\n2,")
        ended(reading)
        publishing.send_signal(signal.SIGTERM)
        assert "1 event published, blocks 1 to 1, all acknowledged" in ended(publishing, 143)[1]
    assert out.read_text() == "1,IBM,1.5\n"


def test_peers_are_called_and_answered(cli: Cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(BOUND)
        publishing = cli.start("pub", URL, SCHEMA, f"127.0.0.1:{server.getsockname()[1]}")
        peer, _ = server.accept()
        with peer:
            peer.sendall(text(1, 4).encode())
        ended(publishing)
        publishing = cli.start("pub", URL, SCHEMA, f"127.0.0.1:{server.getsockname()[1]}", "--format", "json")
        peer, _ = server.accept()
        with peer:
            peer.sendall(b'[[{"id":5,"symbol":"SYM5","price":1.25}]]')
        ended(publishing)
    reading = cli.start("sub", URL, ":0", "--side", "in", "--start", "earliest", "--max-events", 5)
    with listening(reading) as peer, peer.makefile() as lines:
        assert lines.read() == text(1, 5)
    ended(reading)


def test_a_peer_that_reads_nothing_costs_nothing(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text("".join(f"{i},{'x' * 1000},1.0\n" for i in range(20_000)))
    cli.run("pub", URL, SCHEMA, feed)
    reading = cli.start("sub", URL, ":0", "--side", "in", "--group", "reader")
    with listening(reading) as peer:
        assert select.select([peer], [], [], BOUND)[0]
        reading.send_signal(signal.SIGTERM)
        ended(reading, 143)
        with peer.makefile("rb") as lines:
            got = lines.read()  # what the system had taken over
    whole, out = feed.read_bytes(), tmp_path / "out.csv"
    assert whole.startswith(got) and len(got) < len(whole)
    reading = cli.start("sub", URL, out, "--side", "in", "--group", "reader")
    until(lambda: size(out) and b"\n19999," in out.read_bytes()[-1100:])
    reading.send_signal(signal.SIGTERM)
    ended(reading, 143)
    rest = out.read_bytes()
    assert whole.endswith(rest) and len(got) + len(rest) >= len(whole), "what the peer did not get comes again"


def test_what_a_peer_that_left_did_not_get_comes_again(cli: Cli, tmp_path: Path) -> None:
    feed, out = tmp_path / "feed.csv", tmp_path / "out.csv"
    reader = ("--side", "in", "--group", "reader")
    reading = cli.start("sub", URL, ":0", *reader)
    assert reading.stderr is not None and "nobody has published" in reading.stderr.readline()
    with listening(reading) as peer:
        for number in (1, 2):  # once the second one comes, the first one is confirmed
            feed.write_text(text(number, number))
            cli.run("pub", URL, SCHEMA, feed)
            assert peer.recv(1000).decode() == text(number, number)
    _, said = ended(reading, 1)
    assert "who read the output has left" in said, "it does not wait for more to notice"
    feed.write_text(text(3, 3))
    cli.run("pub", URL, SCHEMA, feed)
    reading = cli.start("sub", URL, out, *reader)
    until(lambda: size(out) and out.read_text().endswith(text(3, 3)))
    assert out.read_text() in (text(2, 3), text(3, 3))


def test_what_a_full_disk_did_not_take_is_not_confirmed(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text(text(1, 200))
    cli.run("pub", URL, SCHEMA, feed)
    _, said = cli.run("sub", URL, "/dev/full", "--side", "in", "--group", "reader", code=1)
    assert "/dev/full cannot be written: No space left on device" in said
    out = tmp_path / "out.csv"
    cli.run("sub", URL, out, "--side", "in", "--group", "reader", "--max-events", 200)
    assert out.read_text() == text(1, 200)


def on_a_disk_of_its_own(folder: Path, how: str, *command: object) -> list[str]:
    """A command with a file system at `folder` that nobody else sees. Root may mount one, others in a namespace."""
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    mount = [*own, "sh", "-c", f'mount -t tmpfs -o {how} none "$0" && exec "$@"', str(folder)]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    return [*mount, *map(str, command)]


def _holds(path: Path, lines: str) -> bool:
    return size(path) == len(lines)


def test_a_disk_that_fills_up_holds_whole_lines_and_what_it_did_not_take_comes_again(cli: Cli, tmp_path: Path) -> None:
    feed, disk, kept, out = (tmp_path / name for name in ("feed.csv", "disk", "kept.csv", "out.csv"))
    disk.mkdir()
    group = ("--side", "in", "--group", "reader", "--set", f"dir={cli.bus}")
    reading = [*ESP, "sub", URL, disk / "out.csv", *group]
    keeping = ("sh", "-c", '"$@"; code=$?; cp "$0"/out.csv "$0"/../kept.csv; exit $code', disk, *reading)
    filling = subprocess.Popen(on_a_disk_of_its_own(disk, "size=64k", *keeping), stderr=subprocess.PIPE, text=True)
    cli.running.append(filling)
    there = Path(f"/proc/{filling.pid}/root{disk}/out.csv")  # which nobody else sees
    for first, events in ((1, 300), (301, 1_000)):
        feed.write_text(text(first, events))
        cli.run("pub", URL, SCHEMA, feed)
        until(partial(_holds, there, text(1, events)))
    feed.write_text(text(events + 1, LINES))
    cli.run("pub", URL, SCHEMA, feed)
    _, said = ended(filling, 1)
    assert "No space left on device" in said
    taken = kept.read_text()
    written = taken.count("\n")  # of what was published last it may have taken some, if that came in several reads
    assert events <= written < LINES
    assert taken == text(1, written) and f"{written:,} events written" in said
    cli.run("sub", URL, out, "--side", "in", "--group", "reader", "--max-events", LINES - written)
    assert out.read_text() == text(written + 1, LINES), "nothing was confirmed that was not written, and all that was"


def test_a_folder_that_cannot_be_written_to_is_named(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for command in (
        [*ESP, "sub", URL, folder / "out.csv", "--set", f"dir={cli.bus}"],
        [*ESP, "pub", URL, SCHEMA, os.devnull, "--set", f"dir={folder}/bus"],
    ):
        refused = subprocess.run(
            on_a_disk_of_its_own(folder, "ro", *command), capture_output=True, text=True, check=False
        )
        assert refused.returncode in (1, 2) and "Traceback" not in refused.stderr, refused.stderr
        assert "Read-only file system" in refused.stderr and str(folder) in refused.stderr


def test_a_group_adds_to_its_file(cli: Cli, tmp_path: Path) -> None:
    feed, out = tmp_path / "feed.csv", tmp_path / "out.csv"
    feed.write_text(text(1, 200))
    cli.run("pub", URL, SCHEMA, feed)
    reader = ("sub", URL, out, "--side", "in", "--group", "reader", "--header")
    _, said = cli.run(*reader, "--max-events", 100)
    assert "128 events written, 2 blocks" in said, "it ends with a whole block"
    with out.open("a") as torn:
        torn.write("129,half of a li")
    cli.run(*reader, "--max-events", 72)
    assert out.read_text() == "id,symbol,price\n" + text(1, 200)


def test_output_is_turned_over_by_size_and_by_time(cli: Cli, tmp_path: Path) -> None:
    feed, sized, timed = tmp_path / "feed.csv", tmp_path / "sized.csv", tmp_path / "timed.csv"
    feed.write_text(text(1, 500))
    cli.run("pub", URL, SCHEMA, feed)
    reader = ("--side", "in", "--start", "earliest", "--max-events")
    cli.run("sub", URL, sized, *reader, 500, "--max-file-size", "4KiB", "--header")
    parts = [
        *(tmp_path / f"sized.{number}.csv" for number in range(1, len(list(tmp_path.glob("sized.*.csv"))) + 1)),
        sized,
    ]
    assert len(parts) > 1 and all(size(part) <= 4096 for part in parts)
    head = "id,symbol,price\n"
    assert all(part.read_text().startswith(head) for part in parts)
    assert "".join(part.read_text().removeprefix(head) for part in parts) == text(1, 500)
    reading = cli.start("sub", URL, timed, *reader, 501, "--periodicity", "100ms")
    until((tmp_path / "timed.1.csv").exists)
    assert (tmp_path / "timed.1.csv").read_text() == text(1, 500)
    feed.write_text(text(501, 501))
    cli.run("pub", URL, SCHEMA, feed)
    ended(reading)
    assert timed.read_text() == text(501, 501)


def test_a_slip_in_the_cfg_file_names_the_right_key(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "embedded.cfg"
    config.write_text("sas {\n hotfailver = true\n}\nembedded {\n}\n")
    _, said = cli.run("pub", URL, SCHEMA, "-", "--config", config, code=2)
    assert "embedded.cfg:2: sas has no key 'hotfailver'; the nearest known one is 'hotfailover'" in said


def test_the_adapter_takes_the_classic_flags(cli: Cli, tmp_path: Path) -> None:
    config, feed, out = tmp_path / "embedded.cfg", tmp_path / "feed.csv", tmp_path / "out.csv"
    config.write_text(f'embedded {{\n dir = "{cli.bus}"\n}}\nsas {{\n dateformat = "%Y-%m-%d %H:%M:%S"\n}}\n')
    feed.write_text("i,n,1,IBM,2026-11-18 21:30:00\nd,n,1,,\np,n,2,SAS,2026-11-18 21:30:01\n")
    common = f'transportconfigfile={config},side=in,schema="id*:int64,symbol:string,at:stamp"'
    moments = ("-t", "csv", "-l", "embedded", "-d", "%Y-%m-%d %H:%M:%S")
    _, said = cli.run("adapter", "-k", "pub", "-h", URL, "-f", feed, *moments, "-b", 2, "-C", common)
    assert "3 events published, blocks 1 to 2" in said
    keys = f"type=sub,url={URL},fsname={out},group=reader,maxevents=3,{common}"
    cli.run("adapter", "-c", 3600, "-C", keys)
    assert out.read_text() == "I,N,1,IBM,2026-11-18 21:30:00\nD,N,1,,\nP,N,2,SAS,2026-11-18 21:30:01\n"
    _, said = cli.run("adapter", "-k", "pub", "-h", URL, "-f", feed, "-C", "blocksise=3", code=2)
    assert "the nearest known one is 'blocksize'" in said
    _, said = cli.run("adapter", "-k", "sub", "-h", URL, "-f", out, "-Q", code=2)
    assert "quiesce is not for sub" in said
    assert "fstype is one of" in cli.run("adapter", "-k", "pub", "-h", URL, "-f", feed, "-t", "hdat", code=2)[1]


def test_plain_lines_do_not_hide_a_delete(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text("I,N,1,IBM,1.5\nD,N,1,,\n")
    cli.run("pub", URL, SCHEMA, feed, "--opcodes")
    reader = ("sub", URL, "-", "--side", "in", "--start", "earliest", "--max-events", 2)
    assert "pass --opcodes" in cli.run(*reader, code=1)[1]
    assert cli.run(*reader, "--opcodes")[0] == feed.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("pub", "http://cli:5555/a/b/c", SCHEMA, "-"), 2, "is not dfESP"),
        (("pub", URL, SCHEMA, "no-such-file.csv"), 1, "no-such-file.csv: No such file or directory"),
        (("pub", URL, SCHEMA, "."), 1, "directory"),
        (("pub", URL, "-"), 2, "so it has no schema: give one"),
        (("pub", URL, "id:int64", "-"), 2, "no field is a key"),
        (("pub", URL, SCHEMA, ":99999"), 2, "a port is 0 to 65535"),
        (("pub", URL, SCHEMA, "..:80"), 1, "..:80 cannot be reached"),
        (("sub", URL, "-", "-C", "rate=5"), 2, "rate is not for sub"),
        (("pub", URL, SCHEMA, "127.0.0.1:1"), 1, "127.0.0.1:1 cannot be reached: "),
        (("pub", URL, SCHEMA, "-", "--bus", "kafak"), 2, "did you mean 'kafka'?"),
        (("pub", URL, SCHEMA, "-", "-C", "rate"), 2, "-C is key=value"),
        (("pub", URL, SCHEMA, "-", "more"), 2, "too many arguments"),
        (("sub", URL, "/no/such/folder/out.csv"), 1, "No such file or directory"),
        (("sub", URL, "-", "--start", "yesterday"), 2, "--start is earliest"),
        (("purge", URL, "--yes"), 1, "there is no topic of"),
        (("tail", URL, "--follow"), 1, "there is no topic of"),
        (("pub", URL, SCHEMA), 2, "the source is missing"),
        (("check-history-less",), 2, "No such command"),
    ],
    ids=lambda value: None,
)  # fmt: skip
def test_whatever_is_wrong_is_said_in_a_line(cli: Cli, arguments: tuple[str, ...], code: int, expected: str) -> None:
    _, said = cli.run(*arguments, code=code)
    assert expected in " ".join(said.split()), said


def test_topics_tail_and_purge(cli: Cli, tmp_path: Path) -> None:
    feed, out = tmp_path / "feed.csv", tmp_path / "out.csv"
    feed.write_text(text(1, 30))
    group = ("pub", URL, SCHEMA, feed, "--failover-group", "feed", "--block-size", 10)
    cli.run(*group)
    head, *_, row = cli.run("topics")[0].splitlines()
    assert head.split() == ["held", "topic", "schema"] and row.split() == ["3", "cli:5555/market/cq/Trades/I", SCHEMA]
    rows = [line.split() for line in cli.run("tail", URL, "-n", 2)[0].splitlines()[1:]]
    assert [(row[1], row[2], row[3], row[4]) for row in rows] == [("block", "0", "2", "10"), ("block", "0", "3", "10")]
    assert "Aborted" in cli.run("purge", URL, code=1)[1]
    assert "a new run begins for 1 failover group;" in cli.run("purge", URL, "--yes")[1]
    assert len(cli.run("tail", URL)[0].splitlines()) == 1
    following = cli.start("tail", URL, "--follow", stderr=subprocess.STDOUT)
    assert following.stdout is not None and "position" in following.stdout.readline()
    assert "blocks 1 to 3, all acknowledged" in cli.run(*group)[1]
    seen = [following.stdout.readline().split() for _ in range(3)]
    assert [(row[1], row[2], row[3]) for row in seen] == [("block", "1", str(id)) for id in (1, 2, 3)]
    following.send_signal(signal.SIGTERM)
    ended(following, 143)
    assert "is over, the current one is 1" in cli.run(*group, "--run", 0, code=1)[1]
    cli.run("sub", URL, out, "--side", "in", "--start", "earliest", "--max-events", 30)
    assert out.read_text() == text(1, 30)


def test_tail_labels_its_columns_and_shows_rows_when_asked(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text("I,N,1,IBM,0.5\nD,N,2,,\n")
    cli.run("pub", URL, SCHEMA, feed, "--opcodes")
    head, block, *rows = cli.run("tail", URL, "--rows")[0].splitlines()
    labels = re.split(r"\s{2,}", head.strip())
    cells = re.split(r"\s{2,}", block.strip())
    assert (labels[0], labels[-2], labels[-1]) == ("position", "sent at (UTC)", "source")
    assert re.fullmatch("[0-9a-f]{16}", cells[-1]) and head.index("source") == block.index(cells[-1])
    assert [row.split() for row in rows] == [
        ["insert", "id=1", "symbol='IBM'", "price=0.5"], ["delete", "id=2", "symbol=None", "price=None"]
    ]  # fmt: skip


def test_tail_of_a_misspelt_window_names_the_nearest_one(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text(text(1, 2))
    cli.run("pub", URL, SCHEMA, feed)
    wrong = URL.replace("Trades", "Tradse")
    assert cli.run("tail", wrong)[1] == f"esp: nobody has published to {wrong} yet; did you mean {URL}?\n"
    assert f"pass --side in or out; did you mean {URL}?" in cli.run("tail", wrong, "--follow", code=1)[1]


def test_groups_are_listed_with_how_far_behind_they_are(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text(text(1, 30))
    cli.run("pub", URL, SCHEMA, feed, "--block-size", 10)
    assert "no group reads there" in cli.run("groups")[1]
    cli.run("sub", URL, tmp_path / "out.csv", "--side", "in", "--group", "billing", "--max-events", 10)
    for arguments in ((), (URL,)):
        head, row = cli.run("groups", *arguments)[0].splitlines()
        assert head.split()[0] == "behind" and row.split()[0] == "2"
        assert row.endswith("billing on cli:5555/market/cq/Trades/I") and "nobody" in row
    assert cli.run("top", "--once")[0].splitlines()[1].split()[-1] == "2"


def test_a_wrong_schema_is_shown_and_forgotten(cli: Cli, tmp_path: Path) -> None:
    feed, wrong = tmp_path / "feed.csv", "id*:int32,symbol:string,price:double"
    feed.write_text(text(1, 2))
    assert "has no schema: nobody has published" in cli.run("schema", "show", URL, code=1)[1]
    cli.run("pub", URL, wrong, feed)
    assert cli.run("schema", "show", URL)[0] == f"in   {wrong}\n"
    assert "the topic cli:5555/market/cq/Trades/I has id*:int32" in cli.run("pub", URL, SCHEMA, feed, code=1)[1]
    assert "; it keeps its schema, which --schema forgets\n" in cli.run("purge", URL, "--yes")[1]
    cli.run("pub", URL, wrong, feed)
    assert "Aborted" in cli.run("schema", "forget", URL, code=1)[1]
    said = cli.run("schema", "forget", URL, "--yes")[1]
    assert "the next publisher says it; under another schema nobody can read the 1 message there\n" in said
    assert "; its schema is forgotten\n" in cli.run("purge", URL, "--schema", "--yes")[1]
    cli.run("pub", URL, SCHEMA, feed)
    assert cli.run("sub", URL, "--side", "in", "--start", "earliest", "--max-events", 2)[0] == text(1, 2)


@pytest.mark.parametrize("side", [[], ["--side", "in"]])
def test_tail_of_what_nobody_has_published_to_says_so_and_makes_nothing(cli: Cli, side: list[str]) -> None:
    out, said = cli.run("tail", URL, *side)
    assert not out and said.startswith("esp: nobody has published to ") and said.count("\n") == 1
    assert cli.run("topics")[0] == ""


def test_the_doctor_names_the_bus_and_what_is_missing(cli: Cli) -> None:
    out, _ = cli.run("doctor", "--bus", "embedded")
    assert f"bus embedded: answers at {cli.bus}, 0 topics" in out
    assert "extra cli: " in out
    cli.bus.chmod(0o755)
    out, said = cli.run("doctor", "--bus", "embedded", code=1)
    assert "chmod 700" in out and "bus embedded cannot be used" in said


def test_topics_print_no_control_characters_of_others(cli: Cli, tmp_path: Path) -> None:
    feed = tmp_path / "feed.csv"
    feed.write_text(text(1, 3))
    cli.run("pub", URL, SCHEMA, feed)
    forged = "id*:int64,a\u202eb:string".encode()
    program = (
        "import asyncio, sys, esp_pubsub as esp\n"
        "async def main():\n"
        "    async with esp.init('embedded', dir=sys.argv[1]) as client:\n"
        f"        await client.bus.retain('cli:5555/market/cq/Trades/I', 'schema', {forged!r})\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program, str(cli.bus)], check=True)
    out, said = cli.run("topics")
    assert "Trades" in out and "\u202e" not in out + said
