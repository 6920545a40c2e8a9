"""JSON: both shapes, every type both ways, whatever the pieces it comes in."""

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_pubsub.encode import Encoder
from esp_pubsub.errors import EspError
from esp_pubsub.events import Opcode
from esp_pubsub.schema import Schema
from esp_pubsub.text import BadText, Batch, JsonReader, JsonWriter

TRADE = Schema("id*:int64,symbol:string,price:double")
I32, I64 = 1 << 31, 1 << 63
ISO = "%Y-%m-%d %H:%M:%S"


def read(schema: Schema, text: bytes | str, **settings: Any) -> list[Batch]:
    reader = JsonReader(schema, **settings)
    return [*reader.feed(text.encode() if isinstance(text, str) else text), *reader.close()]


def read_until_bad(reader: JsonReader, text: bytes | str) -> tuple[list[Batch], BadText]:
    """What was given out in front of the error, and the error."""
    batches: list[Batch] = []
    with pytest.raises(BadText) as caught:
        for part in (lambda: reader.feed(text.encode() if isinstance(text, str) else text), reader.close):
            for batch in part():
                batches.append(batch)  # noqa: PERF402 - what comes before the error counts
    return batches, caught.value


BOTH_WAYS: list[tuple[str, str, Any, dict[str, Any]]] = [  # a type, its JSON, its value
    ("int32", str(I32 - 1), I32 - 1, {}),
    ("int64", str(-I64), -I64, {}),
    ("int64", "null", None, {}),
    ("double", "0.1", 0.1, {}),
    ("double", '"nan"', float("nan"), {}),
    ("double", '"-inf"', float("-inf"), {}),
    ("string", '"say \\"hi\\",\\n üñ価"', 'say "hi",\n üñ価', {}),
    ("rstring", '""', "", {}),
    ("string", "null", None, {}),
    ("date", "1760000000", 1_760_000_000, {}),
    ("stamp", "1760000000000001", 1_760_000_000_000_001, {}),
    ("stamp", '"2026-11-18 20:15:00.000001"', 1_795_032_900_000_001, {"dateformat": ISO}),
    ("date", '"2026-11-18 20:15:00"', 1_795_032_900, {"dateformat": ISO}),
    ("money", '"0.000000001"', Decimal("1E-9"), {}),
    ("money", '"123456789012345678901234567890.12"', Decimal("123456789012345678901234567890.12"), {}),
    ("blob", '"AP8="', b"\0\xff", {}),
    ("blob", '""', b"", {}),
    ("blob", "null", None, {}),
    ("array(i32)", "[1,-2]", (1, -2), {}),
    ("array(i64)", "[]", (), {}),
    ("array(dbl)", '[0.1,"inf",1e+300]', (0.1, float("inf"), 1e300), {}),
    ("array(dbl)", "null", None, {}),
]


@pytest.mark.parametrize(("kind", "text", "value", "settings"), BOTH_WAYS)
def test_every_type_is_read_and_written_the_same(kind: str, text: str, value: Any, settings: dict[str, Any]) -> None:
    schema = Schema(f"k*:int32,v:{kind}")
    for shape, document in (
        ("inject", f'[[{{"k":1,"v":{text}}}]]\n'),
        ("events", f'{{"events":{{"entries":[{{"k":1,"v":{text}}}]}}}}\n'),
    ):
        writer = JsonWriter(schema, shape=shape, **settings)  # type: ignore[arg-type]
        assert (writer.write([(1, value)]) + writer.close()).decode() == document
        assert repr(read(schema, document, **settings)) == repr([Batch([(1, value)])])  # repr: a nan is not itself


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int64", '"7"', 7),
        ("int64", '""', None),
        ("double", "7", 7.0),
        ("double", '"1.5"', 1.5),
        ("money", "12.3456789012345678901234567890", Decimal("12.3456789012345678901234567890")),
        ("money", "5", Decimal(5)),
        ("array(i32)", '"[1;2]"', (1, 2)),
        ("string", '"\\u00fc\\ud83d\\ude00"', "ü😀"),
    ],
)
def test_other_spellings_are_understood(kind: str, text: str, value: Any) -> None:
    assert read(Schema(f"k*:int32,v:{kind}"), f'[[{{"v":{text},"k":1}}]]') == [Batch([(1, value)])]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("int32", str(I32), "an integer from"),
        ("int64", "1.0", "an integer from"),
        ("int64", "true", "an integer from"),
        ("int64", '"seven"', "an integer from"),
        ("int64", "[]", "an integer from"),
        ("double", "true", "a number"),
        ("double", "1" + "0" * 400, "a number that a double can hold"),
        ("string", "7", "a string"),
        ("string", "{}", "a string"),
        ("string", '"\\ud800"', "UTF-8"),
        ("string", '"\\udc00"', "UTF-8"),
        ("money", "NaN", "a finite decimal"),
        ("money", "1e1000", "a finite decimal"),
        ("money", "false", "a finite decimal"),
        ("blob", "[1]", "a string"),
        ("blob", '"AP8"', "base64"),
        ("array(i32)", "[1,null]", "an integer from"),
        ("array(i32)", "1", "an array"),
        ("array(dbl)", '["1"]', "a number"),
        ("array(i64)", json.dumps([1] * 65_537), "at most 65536 items"),
        ("stamp", '"2026-11-18"', "an integer from"),
    ],
    ids=range(21),
)
def test_a_wrong_value_is_named_by_line_event_field_and_type(kind: str, text: str, words: str) -> None:
    schema = Schema(f"k*:int32,v:{kind}")
    document = f'[[{{"k":1}},\n{{"k":2}}],[\n{{"k":3,\n"v":{text}}},{{"k":4}}]]'
    batches, error = read_until_bad(JsonReader(schema), document)
    assert batches == [Batch([(1, None), (2, None)])]
    assert (error.line, error.field, error.type) == (3, "v", schema.fields[1].type)
    assert "line 3, event 3: field 'v'" in str(error) and words in str(error) and len(str(error)) < 300
    bad: list[BadText] = []
    assert read(schema, document, on_bad=bad.append) == [Batch([(1, None), (2, None)]), Batch([(4, None)])]
    assert [str(e) for e in bad] == [str(error)]


def test_opcodes_and_flags_stand_beside_the_fields() -> None:
    rows = [(1, "a", None), (2, "b", 2.5), (3, None, None)]
    for shape in ("inject", "events"):
        writer = JsonWriter(TRADE, shape=shape)  # type: ignore[arg-type]
        batch = Batch(rows, bytes([Opcode.INSERT, Opcode.UPSERT, Opcode.DELETE]), bytes([0, 1, 3]))
        text = writer.write(*batch) + writer.close()
        assert b'"@opcode":"upsert"' in text and b'"@flags":"PR"' in text
        assert read(TRADE, text) == [batch]
    for word in ("Update", "u", "U"):
        assert read(TRADE, f'[[{{"@opcode":"{word}","id":1}}]]') == [Batch([(1, None, None)], Opcode.UPDATE)]
    pair = JsonWriter(TRADE, shape="events").write([(1, "new", 1.0), (1, "old", 1.0)], Opcode.UPDATEBLOCK)
    assert read(TRADE, pair) == [Batch([(1, "new", 1.0)], Opcode.UPDATE)]


@pytest.mark.parametrize(
    ("event", "field", "words"),
    [
        ('{"@opcode":"erase","id":1}', "@opcode", "no opcode"),
        ('{"@opcode":7,"id":1}', "@opcode", "no opcode"),
        ('{"@flags":"X","id":1}', "@flags", "no flag"),
        ('{"id":1,"prize":2}', "prize", "no field"),
    ],
)
def test_an_event_of_another_shape_is_named(event: str, field: str, words: str) -> None:
    batches, error = read_until_bad(JsonReader(TRADE), f'[[{{"id":1}},{event}]]')
    assert batches == [Batch([(1, None, None)])]
    assert error.field == field and words in str(error)


def test_blocks_are_those_of_the_input_or_smaller() -> None:
    text = '[[{"id":1},{"id":2}],[],[{"id":3},{"id":4},{"id":5}]] \n {"events":{"entries":[{"id":6},{"id":7}]}}'
    assert [len(batch.rows) for batch in read(TRADE, text)] == [2, 3, 2]
    assert [len(batch.rows) for batch in read(TRADE, text, block=2)] == [2, 2, 1, 2]
    writer = JsonWriter(TRADE)
    written = writer.write([(1, None, None), (2, None, None)]) + writer.write([(3, None, None)]) + writer.close()
    assert [len(batch.rows) for batch in read(TRADE, written)] == [2, 1]
    assert read(TRADE, JsonWriter(TRADE).close()) == read(TRADE, b"") == read(TRADE, b"[[]]") == []


def test_messages_of_a_server_are_read() -> None:
    text = """
        {"schema": {"@id": "p/cq/w", "fields": [{"name": "id", "type": "int64", "key": true}]}}
        {"events": {"@id": "p/cq/w", "entries": [{"@timestamp": "1", "id": "1"}, {"@opcode": "delete", "id": "2"}],
                    "info": {"page": 0, "pages": 1}}}
        {"events": [{"event": {"id": 3, "symbol": "c"}}]}
    """
    assert read(TRADE, text) == [
        Batch([(1, None, None), (2, None, None)], bytes([Opcode.INSERT, Opcode.DELETE])),
        Batch([(3, "c", None)]),
    ]
    for message in ('{"error": {"message": "no"}}', '{"events": 7}', "{}"):
        _, error = read_until_bad(JsonReader(TRADE), message)
        assert "without events" in str(error)
    for message in ('{"events": [7]}', '{"events": {"entries": [[]]}}', '{"events": [{"id": 1}]}'):
        _, error = read_until_bad(JsonReader(TRADE), message)
        assert "is no event" in str(error)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("7", 1, "an array, a message or an event"),
        ("\n[7]", 2, "an array of events"),
        ('[[{"id":1}],7]', 1, "an array of events"),
        ("[[7]]", 1, "an event should stand"),
        ("[[[", 1, "an event should stand"),
        ('[[{"id":1} {"id":2}]]', 1, "a comma or a bracket"),
        ('[[{"id":1},]]', 1, "an event should stand"),
        ("[,]", 1, "an array of events"),
        ('[[{"id":1}],\n', 2, "not closed"),
        ('[[{"id":1}', 1, "not closed"),
        ('[[\n{"id":1,"symbol":"a', 2, "no JSON"),
        ('[[{"id":01}, {"id":2}, {"id":3}, {"id":4}]]', 1, "no JSON"),
        ("[[{'id':1}, {'id':2}, {'id':3}]]", 1, "no JSON"),
        ('{"events":', 1, "no JSON"),
        ("[[" + '{"a":' * 100_000, 1, "nested too deeply"),
        ('[[{"id":' + "9" * 5_000 + "}]]", 1, "no JSON"),
        (b'[[{"id":1}],\n[{"id":2,"symbol":"\xff"}]]', 2, "UTF-8"),
        (b'[[{"id":1}],\n[{"id":2}]]\xc3', 2, "UTF-8"),
    ],
    ids=range(18),
)
def test_what_is_no_json_ends_the_reading_and_says_where(text: str | bytes, line: int, words: str) -> None:
    reader = JsonReader(TRADE, on_bad=lambda error: None)
    _, error = read_until_bad(reader, text)
    assert error.line == line and words in str(error)
    with pytest.raises(BadText) as caught:
        list(reader.feed(b"[]"))
    assert caught.value is error


def test_broken_json_in_a_stream_is_found_before_its_end() -> None:
    reader = JsonReader(TRADE)
    with pytest.raises(BadText, match="no JSON"):
        list(reader.feed(b'[[{"id":1},{"id":tru},{"id":3},{"id":4},{"id":5}'))


def test_an_event_without_end_is_bounded() -> None:
    reader = JsonReader(TRADE, max_value=1_000)
    with pytest.raises(BadText, match="longer than 1000 characters"):
        for _ in range(30):
            list(reader.feed(b'[[{"id":1,"symbol":"' if not _ else b"x" * 100))


def test_an_event_is_given_out_as_soon_as_its_block_is_whole() -> None:
    reader = JsonReader(TRADE)
    assert list(reader.feed(b'{"events":{"entries":[{"id":1,"symbol":"' + b"x" * 1_000)) == []
    assert list(reader.feed(b'"}]}')) == []
    (batch,) = reader.feed(b"}")
    assert batch.rows[0][0] == 1


ROUGH = (
    '\ufeff[[{"id":1,"symbol":"ü\\n}]"},\r\n {"id":2,"price":1e3}],\n[{"id":"x"},{"@opcode":"delete","id":3}]]'
    '{"schema":{}}\n{"events":{"entries":[{"id":4},{"id":5,"bad":[{}]}]}}{"events":[{"event":{"id":6}}]}[]\n'
).encode()


def rough(sizes: list[int], block: int) -> tuple[list[Batch], list[str]]:
    bad: list[BadText] = []
    reader = JsonReader(TRADE, block=block, on_bad=bad.append)
    batches, at = [], 0
    while at < len(ROUGH):
        size = sizes[at % len(sizes)]
        batches += reader.feed(ROUGH[at : at + size])
        at += size
    return [*batches, *reader.close()], [str(error) for error in bad]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.sampled_from([1, 2, 256]))
def test_the_pieces_it_comes_in_change_nothing(sizes: list[int], block: int) -> None:
    whole = rough([1 << 20], block)
    assert rough(sizes, block) == whole
    assert [row[0] for batch in whole[0] for row in batch.rows] == [1, 2, 3, 4, 6]
    assert [text.partition(":")[0] for text in whole[1]] == ["line 3, event 3", "line 4, event 6"]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=100) | st.text('[]{}:,"id1\\ ', max_size=60).map(str.encode), st.integers(1, 50))
def test_whatever_comes_ends_or_is_read_in_good_order(data: bytes, size: int) -> None:
    reader = JsonReader(TRADE, max_value=40)
    try:
        for at in range(0, len(data), size):
            for batch in reader.feed(data[at : at + size]):
                Encoder(TRADE).encode(*batch)
        for batch in reader.close():
            Encoder(TRADE).encode(*batch)
    except EspError as e:
        assert isinstance(e, BadText)


def test_a_moment_beyond_the_calendar_cannot_be_written_with_a_date_format() -> None:
    schema = Schema("k*:int32,v:stamp")
    with pytest.raises(ValueError, match="cannot show"):
        JsonWriter(schema, dateformat=ISO).write([(1, I64 - 1)])


PLAIN_OBJECTS = [
    '[{"id":1,"symbol":"a"},{"id":2},{"id":3,"@opcode":"delete"}]',
    '{"id":1,"symbol":"a"}\n{"id":2}\r\n{"id":3,"@opcode":"delete"}\n',
    '{"id":1,"symbol":"a"}{"id":2}\n\n[{"id":3,"@opcode":"delete"}]',
]


@pytest.mark.parametrize("text", PLAIN_OBJECTS)
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_plain_objects_are_events(text: str, piece: int) -> None:
    reader, data = JsonReader(TRADE), text.encode()
    batches = [batch for at in range(0, len(data), piece) for batch in reader.feed(data[at : at + piece])]
    batches += reader.close()
    assert [row for batch in batches for row in batch.rows] == [(1, "a", None), (2, None, None), (3, None, None)]


def test_plain_objects_are_cut_by_the_size_of_a_block_alone() -> None:
    objects = [f'{{"id":{n}}}' for n in range(7)]
    for text in ("\n".join(objects), f"[{','.join(objects)}]"):
        for piece in (1, 5, 1000):
            reader = JsonReader(TRADE, block=3)
            batches = [
                batch for at in range(0, len(text), piece) for batch in reader.feed(text[at : at + piece].encode())
            ]
            assert [len(batch.rows) for batch in [*batches, *reader.close()]] == [3, 3, 1]


def test_a_message_among_plain_objects_is_a_block_of_its_own() -> None:
    text = '{"id":1}{"events":{"entries":[{"id":2}]}}{"id":3}[[{"id":4}],{"id":5}]'
    assert [batch.rows[0][0] for batch in read(TRADE, text)] == [1, 2, 3, 4, 5]
    odd = Schema("events*:int64,schema:int64")
    assert read(odd, '{"events":1,"schema":2}') == [Batch([(1, 2)])]


def test_fields_that_the_schema_has_not_are_passed_over_where_that_is_said() -> None:
    text = '[{"id":1,"prize":{"deep":[1]},"symbol":"a"}]\n{"id":2,"other":null}'
    assert [row for batch in read(TRADE, text, ignore_unknown=True) for row in batch.rows] == [
        (1, "a", None), (2, None, None),
    ]  # fmt: skip
    _, error = read_until_bad(JsonReader(TRADE), text)
    assert error.field == "prize"
