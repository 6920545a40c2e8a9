"""Ask Quartz, Spring, cron4j and cron-utils when expressions are due, and keep their answers in vectors.tsv.

Run it on demand, where there are Java 17 and Maven: `python tests/vectors/cron/make_vectors.py`. The expressions are
those of expressions.tsv, and for each dialect some that are drawn here, the same in each run.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
DRAWN = 120
STARTS = (("UTC", "2026-01-10T10:20:30Z"), ("Asia/Kolkata", "2027-02-28T18:29:59Z"))
MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
DAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]


def field(dice: random.Random, least: int, most: int, names: list[str], wraps: bool) -> str:
    """One field of a cron, of any dialect."""
    kind = dice.randrange(7)
    one, other = dice.randint(least, most), dice.randint(least, most)
    if one > other and not wraps:
        one, other = other, one
    step = dice.randint(1, max(2, (most - least) // 2))
    if kind < 2:
        return "*"
    if kind == 2:
        return f"*/{step}"
    if kind == 3:
        return f"{one}-{other}"
    if kind == 4:
        return f"{min(one, other)}-{max(one, other)}/{step}"
    if kind == 5 and names:
        return dice.choice(names)
    return ",".join(str(dice.randint(least, most)) for _ in range(dice.randint(1, 3)))


def expression(dialect: str, dice: random.Random) -> str:
    """A cron of this dialect, about which its library is clear."""
    wraps = dialect == "QUARTZ"
    first = [field(dice, 0, 59, [], wraps)] if dialect in ("QUARTZ", "SPRING") else []
    first += [field(dice, 0, 59, [], wraps), field(dice, 0, 23, [], wraps)]
    day = field(dice, 1, 28, [], wraps)
    month = field(dice, 1, 12, MONTHS, wraps)
    week = field(dice, 1, 6, DAYS, wraps)
    if dialect == "QUARTZ":
        if dice.random() < 0.5:
            day, week = "?", dice.choice([week, f"{dice.randint(1, 7)}#{dice.randint(1, 5)}", f"{dice.choice(DAYS)}L"])
        else:
            day, week = dice.choice([day, f"{dice.randint(1, 31)}W", "L", f"L-{dice.randint(0, 27)}", "LW"]), "?"
    elif dialect == "SPRING":
        day = dice.choice([day, day, "?", f"{dice.randint(1, 31)}W", "L", f"L-{dice.randint(1, 26)}", "LW"])
        week = dice.choice([week, week, "?", f"{dice.choice(DAYS)}#{dice.randint(1, 5)}", f"{dice.randint(1, 7)}L"])
    elif dialect in ("UNIX", "CRON4J") and dice.random() < 0.8:
        day, week = (day, "*") if dice.random() < 0.5 else ("*", week)
    return " ".join([*first, day, month, week])


def questions() -> list[str]:
    """What is asked: dialect, expression, zone and start."""
    asked = [line.split("\t") for line in (HERE / "expressions.tsv").read_text().splitlines()]
    for dialect in ("QUARTZ", "SPRING", "CRON4J", "UNIX"):
        dice = random.Random(dialect)
        asked += [[dialect, expression(dialect, dice)] for _ in range(DRAWN)]
    return ["\t".join([*line, *start]) for line in asked for start in STARTS]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["mvn", "-q", "-f", HERE / "pom.xml", "dependency:copy-dependencies", f"-DoutputDirectory={folder}"],
            check=True,
        )
        path = f"{folder}/*"
        subprocess.run(["javac", "-cp", path, "-d", folder, HERE / "CronVectors.java"], check=True)
        answers = subprocess.run(
            ["java", "-cp", f"{folder}:{path}", "CronVectors"], input="\n".join(questions()), check=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
    (HERE / "vectors.tsv").write_text(answers.stdout)


if __name__ == "__main__":
    main()
