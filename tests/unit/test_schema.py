"""Schema strings: both directions, every slip named, a fingerprint that never moves."""

import copy
import pickle
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_pubsub.errors import EspError, SchemaError
from esp_pubsub.schema import MAX_FIELDS, Field, FieldType, Schema

EVERY_TYPE = (
    "i*:int32,l*:int64,d:double,s:string,r:rstring,t:date,u:stamp,m:money,b:blob,"
    "ai:array(i32),al:array(i64),ad:array(dbl)"
)

SPELLINGS = [
    ("id*:int64", "id*:int64"),
    ("id*:int64,symbol:string,price:double", "id*:int64,symbol:string,price:double"),
    ("  id * : int64 ,\tsymbol:string\n", "id*:int64,symbol:string"),
    ("v:double,id*:int32", "v:double,id*:int32"),  # a key may stand anywhere
    ("a*:string,b*:stamp,c*:money", "a*:string,b*:stamp,c*:money"),
    ("k*:int32,a:array(int32),b:array(int64),c:array(double)", "k*:int32,a:array(i32),b:array(i64),c:array(dbl)"),
    ("größe*:int32,価格:money", "größe*:int32,価格:money"),
    ("a-b.c/d[0]*:int32", "a-b.c/d[0]*:int32"),
    (f"{'n' * 128}*:blob", f"{'n' * 128}*:blob"),
    (EVERY_TYPE, EVERY_TYPE),
]

GOLDEN = {
    "id*:int64": 0x1CC408FD076DB821,
    "id*:int64,symbol:string,price:double": 0x1C5F5254ACFDEEEC,
    EVERY_TYPE: 0x9DE1300C23C38453,
    "größe*:int32,価格:money": 0x94459A1FC609AF5D,
}

SLIPS = [
    ("", "name:type"),
    ("   ", "name:type"),
    (",", "name:type"),
    ("id", "field 1"),
    ("id*:", "field 1"),
    (":int64", "field 1"),
    ("*:int64", "''"),
    ("id*:int64,", "field 2"),
    (",id*:int64", "field 1"),
    ("id*:int64,,v:double", "field 2"),
    ("id*:int64;v:double", "unknown type"),
    ("id*:int64:string", "unknown type"),
    ("id*:int46", "did you mean int64"),
    ("id*:INT64", "did you mean int64"),
    ("id*:Array(i32)", "did you mean array(i32)"),
    ("id*:float", "unknown type"),
    ("id*:quaternion", "known types"),
    ("id:int64*", "unknown type"),
    ("id**:int64", "'id*'"),
    ("*id:int64", "'*id'"),
    ("i d*:int64", "'i d'"),
    ("i\u2003d*:int64", "cannot be used"),
    ("i\x00d*:int64", "cannot be used"),
    ("i\x7fd*:int64", "cannot be used"),
    ("i\ud800d*:int64", "cannot be used"),
    ('"id"*:int64', "cannot be used"),
    ("'id'*:int64", "cannot be used"),
    ("i\\d*:int64", "cannot be used"),
    (f"{'n' * 129}*:int64", "128"),
    ("id*:int64,id:double", "twice"),
    ("id:int64", "no field is a key; mark one with a star: id*:int64"),
    ("id:int64,v:double", "id*:int64"),
]

NOT_FIELDS: list[Any] = [
    [],
    (),
    b"id*:int64",
    ["id*:int64"],
    [("id", FieldType.INT64, True)],
    [Field("id", "int64", True)],  # type: ignore[arg-type]
    [Field("", FieldType.INT64, True)],
    [Field("a,b", FieldType.INT64, True)],
    [Field("a:b", FieldType.INT64, True)],
    [Field("a\n", FieldType.INT64, True)],
    [Field("id", FieldType.INT64)],
    [Field("id", FieldType.INT64, True), Field("id", FieldType.INT64)],
]


@pytest.mark.parametrize(("written", "canonical"), SPELLINGS)
def test_a_schema_string_prints_as_its_one_canonical_spelling(written: str, canonical: str) -> None:
    schema = Schema(written)
    assert str(schema) == schema.text == canonical
    assert schema == Schema(canonical) == Schema(schema.fields)
    assert Schema(str(schema)).fields == schema.fields
    assert eval(repr(schema), {"Schema": Schema}) == schema


def test_fields_names_and_keys_say_what_was_parsed() -> None:
    schema = Schema("v:double,id*:int64,name*:rstring")
    assert schema.fields == (
        Field("v", FieldType.DOUBLE),
        Field("id", FieldType.INT64, True),
        Field("name", FieldType.RSTRING, True),
    )
    assert schema.names == ("v", "id", "name")
    assert schema.keys == ("id", "name")
    assert [str(f) for f in schema.fields] == ["v:double", "id*:int64", "name*:rstring"]


def test_every_type_has_one_spelling_and_stands_in_the_table_of_the_tests() -> None:
    assert {f.type for f in Schema(EVERY_TYPE).fields} == set(FieldType)
    assert len({str(t) for t in FieldType}) == len(FieldType) == 12


@pytest.mark.parametrize("text", GOLDEN)
def test_the_fingerprint_is_the_blake2b_of_the_canonical_string_and_never_moves(text: str) -> None:
    assert Schema(text).fingerprint == GOLDEN[text]
    assert Schema(text).fingerprint == int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    assert Schema(text.replace(",", " , ").replace(":", " : ")).fingerprint == GOLDEN[text]


@pytest.mark.parametrize(
    "other", ["id*:int32,v:double", "id:int64,v*:double", "v:double,id*:int64", "Id*:int64,v:double", "id*:int64"]
)
def test_schemas_that_differ_in_anything_differ_in_fingerprint(other: str) -> None:
    one, two = Schema("id*:int64,v:double"), Schema(other)
    assert one != two
    assert one.fingerprint != two.fingerprint


@pytest.mark.parametrize(("text", "hint"), SLIPS)
def test_a_slip_in_a_schema_string_is_named(text: str, hint: str) -> None:
    with pytest.raises(SchemaError) as e:
        Schema(text)
    assert hint in str(e.value)
    assert isinstance(e.value, EspError)


@pytest.mark.parametrize("fields", NOT_FIELDS, ids=repr)
def test_what_is_no_sequence_of_good_fields_is_refused(fields: Any) -> None:
    with pytest.raises(SchemaError):
        Schema(fields)


def test_the_error_carries_the_part_and_the_type_as_data() -> None:
    with pytest.raises(SchemaError) as e:
        Schema("id*:int64, v:duoble")
    assert (e.value.part.strip(), e.value.type) == ("v:duoble", "duoble")  # type: ignore[attr-defined]


def test_a_schema_has_at_most_a_thousand_fields() -> None:
    most = ",".join(f"f{i}*:int32" for i in range(MAX_FIELDS))
    assert len(Schema(most).fields) == MAX_FIELDS
    with pytest.raises(SchemaError, match="1001"):
        Schema(f"{most},one:int32")


@pytest.mark.parametrize("name", [*Schema.__slots__, "other"])
def test_a_schema_cannot_be_changed(name: str) -> None:
    schema = Schema("id*:int64")
    with pytest.raises(AttributeError):
        setattr(schema, name, "x")
    with pytest.raises(AttributeError):
        delattr(schema, name)
    assert schema == Schema("id*:int64")


def test_a_field_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Schema("id*:int64").fields[0].name = "x"  # type: ignore[misc]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_schema_is_pickled_and_copied_as_the_same_schema(protocol: int) -> None:
    schema = Schema(EVERY_TYPE)
    for again in (pickle.loads(pickle.dumps(schema, protocol)), copy.copy(schema), copy.deepcopy(schema)):
        assert again == schema
        assert hash(again) == hash(schema)
        assert again.fields == schema.fields


def test_equal_schemas_are_one_key_and_a_schema_is_no_string() -> None:
    assert {Schema("id*:int64"): 1}[Schema(" id * :int64")] == 1
    assert Schema("id*:int64") != "id*:int64"


_names = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Z"], exclude_characters=",:*\"'\\"), min_size=1, max_size=128
)
_fields = st.lists(
    st.builds(Field, _names, st.sampled_from(FieldType), st.booleans()),
    min_size=1,
    max_size=8,
    unique_by=lambda f: f.name,
).filter(lambda fields: any(f.key for f in fields))


@given(_fields)
def test_any_good_fields_come_back_from_the_string(fields: list[Field]) -> None:
    schema = Schema(fields)
    assert Schema(str(schema)).fields == tuple(fields)


@given(st.text(max_size=40) | st.text("id*:nt64,() \n", max_size=30))
def test_any_text_is_a_schema_or_a_schema_error(text: str) -> None:
    try:
        schema = Schema(text)
    except SchemaError as e:
        assert str(e)
    else:
        assert Schema(str(schema)) == schema
