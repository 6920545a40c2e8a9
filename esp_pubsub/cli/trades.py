"""The trades of the experiment that proves an engine's failover: `python -m esp_pubsub.cli.trades 20000 > trades.csv`.

They are made so that the counts of SAS's own experiment follow. It has 1,000,000 trades in 10,000 seconds, 100 in each
second, but 49 in the first and 51 in the last, because stamps are whole seconds. So the last five minutes have 29,951
trades, and the last hour has 359,951. All 3,608 symbols trade, 3,068 of them in the last hour, and 1,941 of them in the
last five minutes.

Fewer trades take the same time, with fewer in each second and fewer symbols. Pure.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

SCHEMA = (
    "ID*:int32,symbol:string,currency:int32,udate:int64,msecs:int32,price:double,quantity:int32,venue:int32,"
    "broker:int32,buyer:int32,seller:int32,buysellflg:int32,time:stamp"
)
DATEFORMAT = "%Y-%m-%d %H:%M:%S"
MOST = 1_000_000

_SECONDS = 10_000  # from the first trade to the last one
_BEGIN = 1_287_394_200  # a Monday, 09:30 in UTC
_SYMBOLS = ((None, 3_608), (3_600, 3_068), (300, 1_941))
"""How many symbols trade in so many seconds at the end; in all of them first."""


class Part(NamedTuple):
    """A stretch of trades, and how many symbols trade in it."""

    first: int
    symbols: int


def second_of(trade: int, of: int) -> int:
    """The second of a trade, if `of` trades are made; the first trade is 0, and so is its second."""
    return (trade * _SECONDS + of * 51 // 100) // of


def parts(of: int) -> list[Part]:
    """Before the last hour, before the last five minutes, and those."""
    last = second_of(of - 1, of)
    return [
        Part(0 if seconds is None else _first_after(last - seconds, of), max(1, symbols * of // MOST))
        for seconds, symbols in _SYMBOLS
    ]


def counts(of: int) -> dict[str, int]:
    """The rows that each window of the experiment's model has after so many trades."""
    day, hour, minutes = parts(of)
    return {
        "Aggregate1HR": hour.symbols, "Aggregate24HR": day.symbols, "Aggregate5min": minutes.symbols,
        "Copy1HRRet": of - hour.first, "Copy24HRRet": of, "Copy5MinRet": of - minutes.first, "TradesSource": of,
    }  # fmt: skip


def _first_after(second: int, of: int) -> int:
    """The first trade of the seconds after this one."""
    return -(-((second + 1) * of - of * 51 // 100) // _SECONDS)


def trades(of: int = MOST) -> Iterator[tuple[Any, ...]]:
    """So many trades: the same ones every time."""
    dice = random.Random(of)
    prices = [dice.randrange(500, 20_000) for _ in range(parts(of)[0].symbols)]
    for trade, symbol in enumerate(_symbols(of, dice)):
        prices[symbol] = price = max(100, prices[symbol] + dice.randrange(-5, 6))
        second = second_of(trade, of)
        yield (
            trade + 1, _name(symbol), 1, 20_101_018, dice.randrange(1_000), price / 100, 100 * dice.randrange(1, 50),
            *dice.choices(range(1, 100), k=4), dice.randrange(2), (_BEGIN + second) * 1_000_000,
        )  # fmt: skip


def _symbols(of: int, dice: random.Random) -> Iterator[int]:
    """Who trades. Some symbols trade far more than others, but each of a part does so in it."""
    stretches = parts(of)
    ends = [part.first for part in stretches[1:]] + [of]
    for (first, symbols), end in zip(stretches, ends, strict=True):
        every = (end - first) // symbols
        for at in range(end - first):
            turn, rest = divmod(at, every)
            yield turn if rest == 0 and turn < symbols else int(symbols * dice.random() ** 2)


def _name(symbol: int) -> str:
    """`AAA`, `AAB` and so on."""
    return "".join(chr(65 + symbol // place % 26) for place in (676, 26, 1))


def lines(of: int = MOST) -> Iterator[str]:
    """The trades as lines of CSV as SAS has it, each an insert."""
    for *values, stamp in trades(of):
        when = datetime.fromtimestamp(stamp // 1_000_000, UTC).strftime(DATEFORMAT)
        yield ",".join(("i", "n", *map(str, values), when)) + "\n"


if __name__ == "__main__":
    sys.stdout.writelines(lines(int(sys.argv[1]) if sys.argv[1:] else MOST))
