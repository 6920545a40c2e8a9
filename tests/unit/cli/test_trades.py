"""The trades of the experiment give the counts of SAS's own one."""

import csv
from datetime import UTC, datetime, timedelta

import pytest

from esp_pubsub.cli.trades import DATEFORMAT, counts, lines, parts, second_of

FIGURE_8 = {
    "Aggregate1HR": 3_068, "Aggregate24HR": 3_608, "Aggregate5min": 1_941, "Copy1HRRet": 359_951,
    "Copy24HRRet": 1_000_000, "Copy5MinRet": 29_951, "TradesSource": 1_000_000,
}  # fmt: skip


def test_a_million_trades_give_the_counts_of_figure_8() -> None:
    assert counts(1_000_000) == FIGURE_8


def test_of_a_million_trades_49_are_in_the_first_second_and_51_in_the_last() -> None:
    seconds = [second_of(trade, 1_000_000) for trade in (0, 48, 49, 148, 149, 999_948, 999_949, 999_999)]
    assert seconds == [0, 0, 1, 1, 2, 9_999, 10_000, 10_000]


def test_an_hour_and_five_minutes_begin_with_a_second() -> None:
    for part, seconds in zip(parts(1_000_000)[1:], (3_600, 300), strict=True):
        assert [second_of(part.first - at, 1_000_000) for at in (1, 0)] == [10_000 - seconds, 10_001 - seconds]


@pytest.mark.parametrize("of", [5_000, 20_000])
def test_the_counts_of_fewer_trades_are_those_of_a_naive_computation(of: int) -> None:
    rows = [(row[3], datetime.strptime(row[-1], DATEFORMAT).replace(tzinfo=UTC)) for row in csv.reader(lines(of))]
    assert rows == sorted(rows, key=lambda row: row[1])
    naive = {"TradesSource": len(rows)}
    for copy, aggregate, held in (
        ("Copy5MinRet", "Aggregate5min", timedelta(minutes=5)),
        ("Copy1HRRet", "Aggregate1HR", timedelta(hours=1)),
        ("Copy24HRRet", "Aggregate24HR", timedelta(hours=24)),
    ):
        left = [symbol for symbol, time in rows if rows[-1][1] - time < held]
        naive |= {copy: len(left), aggregate: len(set(left))}
    assert naive == counts(of)


def test_the_trades_are_the_same_every_time() -> None:
    assert list(lines(500)) == list(lines(500))
    assert len({line.split(",")[2] for line in lines(500)}) == 500, "each has an id of its own"
