from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from esp_pubsub.encode import Encoder
from esp_pubsub.errors import ConfigError
from esp_pubsub.spark_bridge import ledger
from esp_pubsub.spark_bridge.held import Held, held
from esp_pubsub.spark_bridge.ledger import BatchDiffers, Body, Ledger

from .topic import SCHEMA


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Callable[[], Ledger]]:
    """The same ledger, opened anew."""
    opened: list[Ledger] = []

    def again() -> Ledger:
        opened.append(Ledger(sqlite3.connect(tmp_path / "ledger.db")))
        return opened[-1]

    yield again
    for each in opened:
        each.close()


def ten_batches(book: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch, holds: Held | None = None) -> Ledger:
    """A ledger that keeps few notes, with more batches than that."""
    monkeypatch.setattr(ledger, "KEPT", 3)
    one = book()
    for batch in range(10):
        with one.transaction():
            one.note("s", batch, holds)
    return one


def bodies(*numbers: int) -> list[Body]:
    return [Encoder(SCHEMA).encode([(number,)]) for number in numbers]


def test_a_batch_is_done_once_the_transaction_is_over(book: Callable[[], Ledger]) -> None:
    one = book()
    with one.transaction():
        one.note("s", 3)
    assert book().done("s", 3)
    assert not book().done("s", 4)
    assert not book().done("other", 3)


def test_what_raises_leaves_neither_note_nor_effect(book: Callable[[], Ledger]) -> None:
    one = book()
    one.connection.execute("CREATE TABLE effect (x)")
    with pytest.raises(ZeroDivisionError), one.transaction():
        one.connection.execute("INSERT INTO effect VALUES (1)")
        one.note("s", 1)
        raise ZeroDivisionError
    assert not book().done("s", 1)
    assert book().connection.execute("SELECT * FROM effect").fetchall() == []


HERE, THERE = held([], ['{"topics": {"t": {"position": "7"}}}']), held([], ['{"topics": {"t": {"position": "9"}}}'])


def test_a_batch_that_comes_again_with_the_same_offsets_is_done(book: Callable[[], Ledger]) -> None:
    one = book()
    with one.transaction():
        one.note("s", 3, HERE)
    assert book().done("s", 3, HERE)
    assert not book().done("s", 4, THERE)


def test_a_batch_that_comes_with_other_offsets_is_refused_with_the_way_out(book: Callable[[], Ledger]) -> None:
    one = book()
    with one.transaction():
        one.note("s", 3, HERE)
        one.note("s", 4, THERE)
    with pytest.raises(BatchDiffers) as caught:
        one.done("s", 3, THERE)
    assert (caught.value.batch, caught.value.last) == (3, 4)  # type: ignore[attr-defined]
    assert str(caught.value).startswith(
        "batch 3 of this query is to end at t=9, and was done up to t=7: the checkpoint"
    )
    assert str(caught.value).endswith("the last batch that is done, 4, has ended: with the option start, at t=9")


def test_a_batch_from_before_the_notes_that_are_kept_is_refused(
    book: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ten_batches(book, monkeypatch, HERE)
    with pytest.raises(BatchDiffers, match=r"batch 2 of this query .* is not noted, though batch 9 is done"):
        one.done("s", 2, HERE)


def test_a_batch_whose_offsets_cannot_be_seen_goes_by_its_number(book: Callable[[], Ledger]) -> None:
    one = book()
    with one.transaction():
        one.note("s", 3)
        one.note("t", 3, HERE)
    assert one.done("s", 3, HERE) and one.done("t", 3) and one.done("t", 2)


def test_of_two_drivers_that_do_a_batch_at_once_one_has_its_effect(book: Callable[[], Ledger]) -> None:
    one, other = book(), book()
    other.connection.execute("CREATE TABLE effect (x)")
    other.connection.commit()
    with one.transaction():
        assert one.note("s", 1, HERE)
    with other.transaction():  # it looked before that was committed
        other.connection.execute("INSERT INTO effect VALUES (1)")
        assert not other.note("s", 1, HERE)
    assert other.connection.execute("SELECT * FROM effect").fetchall() == []
    with pytest.raises(BatchDiffers), other.transaction():
        other.note("s", 1, THERE)


def test_a_database_of_before_gets_the_columns_that_it_lacks(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "before.db")
    connection.execute("CREATE TABLE esp_batches (stream TEXT, batch BIGINT, PRIMARY KEY (stream, batch))")
    connection.execute("INSERT INTO esp_batches VALUES ('s', 3)")
    connection.commit()
    one = Ledger(connection)
    assert one.done("s", 3, HERE)
    with one.transaction():
        one.note("s", 4, HERE)
    with pytest.raises(BatchDiffers):
        one.done("s", 4, THERE)
    one.close()


def test_what_a_batch_holds_is_where_it_begins_and_where_it_ends() -> None:
    first, second = '{"topics": {"t": {"position": "7"}, "u": {"position": "8"}}}', "[12, 13]"
    assert held([], [first, second]).ends == "t=7, u=8, [12, 13]"
    assert len({held(*each).digest for each in (([], [first]), ([first], [first]), ([], [second]), ([], []))}) == 4


def test_notes_do_not_pile_up_and_what_they_said_still_holds(
    book: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ten_batches(book, monkeypatch)
    assert one.connection.execute("SELECT count(*) FROM esp_batches").fetchone() == (4,)
    assert all(one.done("s", batch) for batch in range(10))
    assert not one.done("s", 10)


class Cursor:
    """What drivers have that write parameters as %s, and give bytes as views of them."""

    def __init__(self, cursor: sqlite3.Cursor, made: list[str]) -> None:
        self._cursor = cursor
        self._made = made

    def execute(self, statement: str, values: tuple[object, ...]) -> None:
        assert "?" not in statement
        assert statement.count("%s") == len(values)
        self._made += [statement] if statement.startswith("CREATE") else []
        self._cursor.execute(statement.replace("%s", "?"), values)

    def fetchone(self) -> tuple[object, ...] | None:
        return next(iter(self.fetchall()), None)

    def fetchall(self) -> list[tuple[object, ...]]:
        return [
            tuple(memoryview(value) if isinstance(value, bytes) else value for value in row)
            for row in self._cursor.fetchall()
        ]


class Other:
    """A connection of such a driver."""

    def __init__(self, place: Path) -> None:
        self.made: list[str] = []
        self._connection = sqlite3.connect(place)
        self.commit, self.rollback = self._connection.commit, self._connection.rollback
        self.close = self._connection.close

    def cursor(self) -> Cursor:
        return Cursor(self._connection.cursor(), self.made)


@pytest.mark.parametrize("paramstyle", ["format", "pyformat"])
def test_a_driver_with_other_marks_and_another_name_for_bytes_keeps_the_same(paramstyle: str, tmp_path: Path) -> None:
    connection = Other(tmp_path / "other.db")
    book = Ledger(connection, paramstyle=paramstyle, blob="BYTEA")
    with book.transaction():
        book.add("s", 5, SCHEMA.fingerprint, bodies(1, 2))
        book.add("s", 5, SCHEMA.fingerprint, bodies(3))
        book.note("s", 0)
    with book.transaction():
        book.published("s", 1)
    assert [frame.id for frame in book.waiting("s")] == [2, 3]
    assert (book.done("s", 0), book.done("s", 1)) == (True, False)
    assert any("frame BYTEA" in made for made in connection.made)
    book.close()


def test_blocks_get_their_ids_in_one_line_over_the_lives_of_ledgers(book: Callable[[], Ledger]) -> None:
    for numbers in ((1, 2), (), (3,)):
        one = book()
        with one.transaction():
            one.add("s", 5, SCHEMA.fingerprint, bodies(*numbers))
    waiting = book().waiting("s")
    assert [frame.id for frame in waiting] == [1, 2, 3]
    assert [frame.link for frame in waiting] == [0, waiting[0].chain, waiting[1].chain]
    assert {frame.source for frame in waiting} == {5}
    assert book().waiting("other") == []


def test_what_was_published_is_forgotten_and_the_line_goes_on(book: Callable[[], Ledger]) -> None:
    one = book()
    with one.transaction():
        one.add("s", 5, SCHEMA.fingerprint, bodies(1, 2, 3))
    last = one.waiting("s")[-1]
    with one.transaction():
        one.published("s", 2)
    assert [frame.id for frame in book().waiting("s")] == [3]
    with one.transaction():
        one.published("s", 3)
        one.add("s", 5, SCHEMA.fingerprint, bodies(4))
    [frame] = book().waiting("s")
    assert (frame.id, frame.link) == (4, last.chain)


def test_blocks_that_were_not_committed_leave_no_trace(book: Callable[[], Ledger]) -> None:
    one = book()
    with pytest.raises(ZeroDivisionError), one.transaction():
        one.add("s", 5, SCHEMA.fingerprint, bodies(1))
        raise ZeroDivisionError
    with one.transaction():
        one.add("s", 5, SCHEMA.fingerprint, bodies(2))
    assert [frame.id for frame in one.waiting("s")] == [1]


def test_a_connection_that_commits_by_itself_is_refused(tmp_path: Path) -> None:
    for _ in "ab":  # the probe leaves nothing behind
        connection = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
        with pytest.raises(ConfigError, match="without autocommit"):
            Ledger(connection)
        connection.close()


def test_a_paramstyle_that_it_does_not_speak_is_refused() -> None:
    with pytest.raises(ConfigError, match="paramstyle is one of"):
        Ledger(None, paramstyle="named")
