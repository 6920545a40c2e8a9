"""When crons are due: as the libraries of each dialect say, as cronsim says, and when clocks change."""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from esp_pubsub.scheduler.cron import Cron, CronRefused, NeverComes
from esp_pubsub.scheduler.describe import describe
from esp_pubsub.scheduler.zones import ZONES, tzdata_version, zone

VECTORS = Path(__file__).parents[2] / "vectors/cron/vectors.tsv"
SECOND = 1_000_000

# Where we are right and the library is not, or the dialect is Debian's and not that of cron-utils.
OTHERWISE = {
    ("SPRING", "0 0 0 31W * *"): "Spring passes over months whose 31st is a Sunday",
    ("QUARTZ", "0 0 0 31W * ?"): "Quartz says something else in each time zone",
    ("QUARTZ", "0 0 0 ? 2 5#5"): "Quartz stops in 2126",
    ("CRON4J", "2-52 * 17,28 * *"): "cron4j takes the day in the zone of the machine",
    ("UNIX", "@daily"): "cron-utils does not have it",
    ("UNIX", "*/90 * * * *"): "cron takes it as 0",
    ("UNIX", "0 0 */2 * 1"): "in cron both days must match where one begins with a star",
    ("UNIX", "34,24,5 * */3 */3 2-3"): "the same",
    ("UNIX", "* * */7 * 1,4,3"): "the same",
}


def us(text: str, zone: str = "UTC") -> int:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=ZoneInfo(zone))
    return int(moment.timestamp()) * SECOND


def shown(times: list[int], zone: str = "UTC") -> list[str]:
    return [datetime.fromtimestamp(time // SECOND, ZoneInfo(zone)).isoformat() for time in times]


def test_each_dialect_is_due_when_its_own_library_says() -> None:
    wrong, compared = [], 0
    for line in VECTORS.read_text().splitlines():
        dialect, expression, zone, start, answer = line.split("\t")
        if (dialect, expression) in OTHERWISE:
            continue
        compared += 1
        try:
            cron = Cron(expression, dialect, zone)
            found = [text.replace("+00:00", "Z") for text in shown(cron.next_times(us(start), 6))]
            found += ["never"] * (len(found) < 6)
        except NeverComes:
            found = ["never"]
        except CronRefused:
            found = ["refused"]
        if found != answer.split():
            wrong.append((dialect, expression, zone, answer, found))
    assert not wrong
    assert compared > 1_200


def drawn(dice: random.Random, least: int, most: int, *, stars: bool = True) -> str:
    one, other = sorted(dice.sample(range(least, most + 1), 2))  # cronsim takes 5-5/2 as 5/2
    step = dice.randint(1, 12)
    return dice.choice(
        [f"{one}", f"{one},{other}", f"{one}-{other}", f"{one}-{other}/{step}", f"{one}/{step}"]
        + ["*", "*", f"*/{step}"] * stars
    )


def moments(dice: random.Random) -> datetime:
    return datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=dice.randrange(4 * 366 * 86_400))


def test_ten_thousand_unix_expressions_are_due_when_cronsim_says() -> None:
    cronsim = pytest.importorskip("cronsim")
    dice, compared = random.Random(32), 0
    for _ in range(10_000):
        fields = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]
        expression = " ".join(drawn(dice, *field) for field in fields)
        start = moments(dice)
        try:
            theirs = cronsim.CronSim(expression, start)
            expected = [next(theirs), next(theirs)]
        except (cronsim.CronSimError, StopIteration):
            continue  # it searches 50 years, and sees some that never come
        compared += 1
        assert shown(Cron(expression, "UNIX").next_times(us(start.isoformat()), 2)) == [
            time.isoformat() for time in expected
        ], expression
    assert compared > 9_000


@pytest.mark.parametrize("place", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
def test_unix_expressions_that_name_hours_change_clocks_as_cronsim_does(place: str) -> None:
    cronsim = pytest.importorskip("cronsim")
    dice, info = random.Random(place), ZoneInfo(place)
    changes = [
        at for at in zone(place).starts if us("2025-01-01T00:00+00:00") < at * SECOND < us("2028-01-01T00:00+00:00")
    ]
    for _ in range(100):
        expression = f"{drawn(dice, 0, 59, stars=False)} {drawn(dice, 1, 5, stars=False)} * * *"
        start = datetime.fromtimestamp(dice.choice(changes) - dice.randrange(1, 40_000), UTC).astimezone(info)
        theirs = cronsim.CronSim(expression, start)
        expected = list(dict.fromkeys(next(theirs) for _ in range(60)))
        found = Cron(expression, "UNIX", place).next_times(us(start.isoformat()), len(expected))
        assert shown(found, place) == [time.isoformat() for time in expected], (expression, start)


BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
CHANGES = [
    # zone, expression, from, the next two times with the gap's end, and which of them is next where the gap is skipped
    (BERLIN, "0 30 2 * * ?", "2026-03-28T12:00", ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"], 1),
    (BERLIN, "0 30 2 * * ?", "2026-10-24T12:00", ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"], 0),
    (NEW_YORK, "0 30 2 * * ?", "2026-03-07T12:00", ["2026-03-08T03:00:00-04:00", "2026-03-09T02:30:00-04:00"], 1),
    (NEW_YORK, "0 30 1 * * ?", "2026-10-31T12:00", ["2026-11-01T01:30:00-04:00", "2026-11-02T01:30:00-05:00"], 0),
    (LORD_HOWE, "0 15 2 * * ?", "2026-10-03T12:00", ["2026-10-04T02:30:00+11:00", "2026-10-05T02:15:00+11:00"], 1),
    (LORD_HOWE, "0 45 1 * * ?", "2026-04-04T12:00", ["2026-04-05T01:45:00+11:00", "2026-04-06T01:45:00+10:30"], 0),
]


@pytest.mark.parametrize(("place", "expression", "start", "after", "skipped"), CHANGES)
def test_clocks_change(place: str, expression: str, start: str, after: list[str], skipped: int) -> None:
    at = us(start, place)
    assert shown(Cron(expression, "QUARTZ", place, "after").next_times(at, 2), place) == after
    found = shown(Cron(expression, "QUARTZ", place, "skip").next_times(at, 2), place)
    assert found[0] == after[skipped]


@pytest.mark.parametrize("gap", ["after", "skip"])
@pytest.mark.parametrize("start", ["2026-03-28T23:00", "2026-10-24T23:00"])
def test_a_cron_of_every_quarter_of_an_hour_misses_and_repeats_none_when_clocks_change(gap: str, start: str) -> None:
    found = Cron("0 0/15 * * * ?", "QUARTZ", "Europe/Berlin", gap).next_times(us(start, "Europe/Berlin"), 40)  # type: ignore[arg-type]
    assert {later - one for one, later in pairwise(found)} == {900 * SECOND}


def test_several_times_in_a_gap_are_due_once_at_its_end() -> None:
    cron = Cron("0 0/20 2,3 * * ?", "QUARTZ", "Europe/Berlin")
    assert shown(cron.next_times(us("2026-03-29T00:00", "Europe/Berlin"), 3), "Europe/Berlin") == [
        "2026-03-29T03:00:00+02:00", "2026-03-29T03:20:00+02:00", "2026-03-29T03:40:00+02:00",
    ]  # fmt: skip


def test_from_within_the_hour_that_comes_again_times_on_the_wall_are_not_due_again() -> None:
    cron = Cron("0 30 2 * * ?", "QUARTZ", "Europe/Berlin")
    assert shown([cron.next_after(us("2026-10-25T02:10:00+01:00")) or 0], "Europe/Berlin") == [
        "2026-10-26T02:30:00+01:00"
    ]


def test_times_grow_and_are_found_again_from_the_moment_before() -> None:
    dice = random.Random(7)
    for _ in range(300):
        expression = f"{drawn(dice, 0, 59)} {drawn(dice, 0, 59)} {drawn(dice, 0, 23)} {drawn(dice, 1, 28)} * ?"
        cron = Cron(expression, "QUARTZ", dice.choice(["UTC", "Europe/Berlin", "America/New_York"]), "after")
        times = cron.next_times(us(moments(dice).isoformat()), 20)
        for one, later in pairwise(times):
            assert one < later
            assert cron.next_after(later - 1) == later == cron.next_after(one)


def test_the_last_time_up_to_a_moment_is_the_one_before_the_next() -> None:
    dice = random.Random(8)
    for _ in range(300):
        expression = f"{drawn(dice, 0, 59)} {drawn(dice, 0, 59)} {drawn(dice, 0, 23)} {drawn(dice, 1, 28)} * ?"
        cron = Cron(expression, "QUARTZ", "Europe/Berlin")
        start = us(moments(dice).isoformat())
        times = cron.next_times(start, 30)
        assert cron.last_until(times[-1], start) == times[-1]
        assert cron.last_until(times[-1] - 1, start) == times[-2]
        assert cron.last_until(times[0] - 1, start) is None


@pytest.mark.parametrize("expression", ["0 0 0 30 2 ?", "0 0 0 31 4,6 ?", "0 0 0 L-30 2 ?", "0 0 0 31W 2 ?"])
def test_a_date_that_never_comes_is_refused_by_name(expression: str) -> None:
    with pytest.raises(NeverComes) as raised:
        Cron(expression)
    assert raised.value.expression == expression


def test_years_that_are_over_are_due_no_more() -> None:
    cron = Cron("0 0 0 1 1 ? 2027")
    assert shown(cron.next_times(us("2026-05-01T00:00"), 3)) == ["2027-01-01T00:00:00+00:00"]
    assert cron.next_after(us("2027-01-01T00:00")) is None


@pytest.mark.parametrize(
    ("expression", "dialect", "says"),
    [
        ("", "QUARTZ", "6 or 7 fields"),
        ("* * *", "UNIX", "5 fields"),
        ("0 0 0 1 * ? * x", "QUARTZ", "6 or 7 fields"),
        ("60 * * * * ?", "QUARTZ", "second"),
        ("0 0 0 1, * ?", "QUARTZ", "day of month"),
        ("0 0 0 1,15W * ?", "QUARTZ", "in a list"),
        ("0 0 0 ? * FRI#6", "QUARTZ", "day of week"),
        ("0 0 0 ? * ?", "QUARTZ", "exactly one"),
        ("*/0 * * * *", "UNIX", "step"),
        ("٣ * * * *", "UNIX", "minute"),
        ("0 0 * * FRI-MON", "UNIX", "ends before it begins"),
        ("0 0 L-31 * *", "SPRING", "6 fields"),
        ("0 0 0 1 1 ? 2030-2020", "QUARTZ", "year"),
        ("0 0 0 1 1 ? " + "2030," * 100 + "2031", "QUARTZ", "400 characters"),
        ("@reboot", "UNIX", "5 fields"),
    ],
)
def test_an_expression_that_cannot_be_is_refused_with_its_field(expression: str, dialect: str, says: str) -> None:
    with pytest.raises(CronRefused, match=says):
        Cron(expression, dialect)


def test_no_text_raises_anything_but_a_refusal() -> None:
    dice = random.Random(9)
    alphabet = "0123456789 */,-?LW#@ABCJANMON\t\x00é"
    for _ in range(5_000):
        text = " ".join("".join(dice.choices(alphabet, k=dice.randint(1, 4))) for _ in range(dice.randint(4, 7)))
        for dialect in ("QUARTZ", "UNIX", "SPRING", "CRON4J"):
            with suppress(CronRefused):
                Cron(text, dialect).next_after(0)


@pytest.mark.parametrize("wrong", ["Mars/Olympus", "../../etc/passwd", "", "europe/berlin"])
def test_a_zone_that_is_not_is_refused(wrong: str) -> None:
    with pytest.raises(CronRefused, match="no time zone"):
        Cron("0 0 0 * * ?", "QUARTZ", wrong)


def test_a_dialect_or_a_policy_for_gaps_that_is_not_is_refused() -> None:
    with pytest.raises(CronRefused, match="no cron dialect"):
        Cron("0 0 0 * * ?", "NOT")
    with pytest.raises(CronRefused, match="gap"):
        Cron("0 0 0 * * ?", "QUARTZ", "UTC", "maybe")  # type: ignore[arg-type]


def test_zones_come_from_the_package_and_its_version_is_told() -> None:
    assert "Europe/Berlin" in ZONES
    assert tzdata_version()[:2] == "20"


@pytest.mark.parametrize(
    ("expression", "dialect", "says"),
    [
        ("*/5 * * * * ? *", "QUARTZ", "every 5 seconds"),
        ("0 15 10 ? * 6L 2027-2029", "QUARTZ", "at 10:15, on the last Friday of the month, in 2027 to 2029"),
        ("0 0 12 ? * 2#1", "QUARTZ", "at 12:00, on the first Monday of the month"),
        ("0 0/5 14,18 * * ?", "QUARTZ", "every 5 minutes, at hour 14 and 18"),
        ("0 0 0 L-3 * ?", "QUARTZ", "at 00:00, on 3 days before the last day of the month"),
        ("0 0 0 15W,LW * *", "SPRING", "at 00:00, on the weekday nearest to day 15 and the last weekday of the month"),
        ("0 0 0 13 * FRI", "SPRING", "at 00:00, on day 13 if that is also Friday"),
        ("0 0 13 * 5", "UNIX", "at 00:00, on day 13 or on Friday"),
        (
            "*/7 9-17 * jan,mar 1-5",
            "UNIX",
            "every 7 minutes, at hour 9 to 17, on Monday to Friday, in January and March",
        ),
        ("30 23 L * *", "CRON4J", "at 23:30, on the last day of the month"),
        ("* * * * *", "UNIX", "every minute"),
        ("0 * * * *", "UNIX", "every hour"),
        ("30 59 23 * * ?", "QUARTZ", "at 23:59:30"),
    ],
)
def test_an_expression_is_said_in_english(expression: str, dialect: str, says: str) -> None:
    assert describe(expression, dialect) == says


def test_what_can_be_read_can_be_described() -> None:
    for line in VECTORS.read_text().splitlines():
        dialect, expression, *_, answer = line.split("\t")
        if answer != "refused":
            assert describe(expression, dialect)
