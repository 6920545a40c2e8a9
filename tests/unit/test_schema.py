"""Schema strings: both directions, every slip named, a fingerprint that never moves."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field, make_dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, Optional, TypeVar

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_pubsub.encode import Encoder
from esp_pubsub.errors import EspError, SchemaError
from esp_pubsub.schema import MAX_FIELDS, Field, FieldType, Key, Schema

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


# schemas of classes


@dataclass
class DataTrade:
    id: Annotated[int, Key]
    symbol: str
    price: float | None = None


class StructTrade(msgspec.Struct):
    id: Annotated[int, Key]
    symbol: str
    price: float | None = None


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class PydanticDataTrade:
    id: Annotated[int, Key]
    symbol: str
    price: float | None = None


class ModelTrade(pydantic.BaseModel):
    id: Annotated[int, Key]
    symbol: str
    price: float | None = None


def data(annotations: dict[str, Any]) -> type:
    return make_dataclass("Some", list(annotations.items()), namespace={"__module__": __name__})


def struct(annotations: dict[str, Any]) -> type:
    return msgspec.defstruct("Some", list(annotations.items()), module=__name__)


def model(annotations: dict[str, Any]) -> type:
    return type(
        "Some",
        (pydantic.BaseModel,),
        {
            "__annotations__": annotations,
            "__module__": __name__,
            "model_config": {"arbitrary_types_allowed": True, "protected_namespaces": ()},
        },
    )


KINDS = pytest.mark.parametrize("made", [data, struct, model])
KEYED = {"k": Annotated[int, Key]}

HINTS: list[tuple[Any, str]] = [
    (int, "int64"),
    (float, "double"),
    (str, "string"),
    (bytes, "blob"),
    (Decimal, "money"),
    (datetime, "stamp"),
    (date, "date"),
    (list[int], "array(i64)"),
    (list[float], "array(dbl)"),
    (tuple[int, ...], "array(i64)"),
    (tuple[float, ...], "array(dbl)"),
    (int | None, "int64"),
    (None | str, "string"),
    (Optional[float], "double"),  # noqa: UP045
    (Annotated[int, FieldType.INT32], "int32"),
    (Annotated[int, FieldType.STAMP], "stamp"),
    (Annotated[int, FieldType.DATE], "date"),
    (Annotated[str, FieldType.RSTRING], "rstring"),
    (Annotated[datetime, FieldType.DATE], "date"),
    (Annotated[list[int], FieldType.ARRAY_INT32], "array(i32)"),
    (Annotated[tuple[int, ...], FieldType.ARRAY_INT32], "array(i32)"),
    (Annotated[int, FieldType.INT32] | None, "int32"),
    (Annotated[int | None, FieldType.INT32], "int32"),
    (Annotated[int | None, FieldType.INT64], "int64"),
    (Annotated[float, "a remark", msgspec.Meta(gt=0)], "double"),
    ("int", "int64"),
    ("Annotated[int, FieldType.INT32] | None", "int32"),
    ("Decimal", "money"),
]

NO_FIELD: list[tuple[Any, str]] = [
    (bool, "bool, which no field type holds; make it an int: Annotated[int, esp.FieldType.INT32]"),
    (bool | None, "bool, which"),
    (dict[str, int], "dict[str, int], which no field type holds; it may be int, float, str,"),
    (object, "object, which"),
    (Any, "Any, which"),
    (None, "NoneType, which"),
    (list, "list, which"),
    (list[str], "list[str], which"),
    (list[int | None], "list[int | None], which"),
    (tuple[int, float], "tuple[int, float], which"),
    (tuple[int], "tuple[int], which"),
    (int | float, "int | float, which"),
    (int | float | None, "int | float | None, which"),
    (Annotated[str, FieldType.INT64], "str, which esp.FieldType.INT64 does not hold; str may be STRING or RSTRING"),
    (Annotated[int, FieldType.DOUBLE], "int, which esp.FieldType.DOUBLE does not hold; int may be INT64 or INT32 or"),
    (Annotated[float, FieldType.MONEY], "float, which esp.FieldType.MONEY does not hold; float may be DOUBLE"),
    (Annotated[bool, FieldType.INT32], "bool, which"),
    (Annotated[Annotated[int, FieldType.INT32], FieldType.INT64], "has two field types, INT32 and INT64"),
    (Annotated[int | None, Key], "is a key, and a key is never None; make it Annotated[int, esp.Key]"),
    (Annotated[int, Key] | None, "is a key, and a key is never None"),
]


@pytest.mark.parametrize("trade", [DataTrade, StructTrade, ModelTrade, PydanticDataTrade])
def test_a_dataclass_a_struct_and_a_model_with_the_same_fields_make_one_schema(trade: type) -> None:
    assert Schema.of(trade) == Schema("id*:int64,symbol:string,price:double")


@KINDS
@pytest.mark.parametrize(("hint", "kind"), HINTS, ids=lambda value: str(value))
def test_the_type_of_a_field_follows_from_its_annotation(
    made: Callable[[dict[str, Any]], type], hint: Any, kind: str
) -> None:
    assert str(Schema.of(made(KEYED | {"v": hint}))) == f"k*:int64,v:{kind}"


@KINDS
def test_keys_stand_anywhere_are_of_any_type_and_may_be_several(made: Callable[[dict[str, Any]], type]) -> None:
    hints = {
        "v": float,
        "a": Annotated[Annotated[str, FieldType.RSTRING], Key],
        "b": "Annotated[datetime, Key, 'when']",
        "c": Annotated[int, Key()],
    }
    assert str(Schema.of(made(hints))) == "v:double,a*:rstring,b*:stamp,c*:int64"


VALUES: list[tuple[Any, list[Any], list[FieldType]]] = [
    (int, [7, -7], [FieldType.INT64, FieldType.INT32, FieldType.STAMP, FieldType.DATE]),
    (float, [0.5], [FieldType.DOUBLE]),
    (str, ["x"], [FieldType.STRING, FieldType.RSTRING]),
    (bytes, [b"x"], [FieldType.BLOB]),
    (Decimal, [Decimal("1.5")], [FieldType.MONEY]),
    (datetime, [datetime(2026, 1, 1, tzinfo=UTC)], [FieldType.STAMP, FieldType.DATE]),
    (date, [date(2026, 1, 1)], [FieldType.DATE]),
    (list[int], [[], [1, 2]], [FieldType.ARRAY_INT64, FieldType.ARRAY_INT32]),
    (list[float], [[], [0.5]], [FieldType.ARRAY_DOUBLE]),
    (tuple[int, ...], [(), (1, 2)], [FieldType.ARRAY_INT64, FieldType.ARRAY_INT32]),
    (tuple[float, ...], [(), (0.5,)], [FieldType.ARRAY_DOUBLE]),
]


@pytest.mark.parametrize(("hint", "values", "kinds"), VALUES, ids=lambda value: str(value))
def test_a_field_type_that_an_annotation_may_name_takes_values_of_the_annotated_type(
    hint: Any, values: list[Any], kinds: list[FieldType]
) -> None:
    for kind in FieldType:
        some = data({"v": Annotated[hint, kind, Key]})
        if kind in kinds:
            Encoder(Schema.of(some)).encode([some(value) for value in values])
        else:
            with pytest.raises(SchemaError, match=f"FieldType.{kind.name} does not hold"):
                Schema.of(some)


@KINDS
@pytest.mark.parametrize(("hint", "why"), NO_FIELD, ids=lambda value: str(value))
def test_a_field_that_cannot_be_sent_is_refused_with_class_field_and_way_out(
    made: Callable[[dict[str, Any]], type], hint: Any, why: str
) -> None:
    some = made(KEYED | {"v": hint})
    with pytest.raises(SchemaError) as e:
        Schema.of(some)
    assert str(e.value).startswith("no schema can be made of Some: field 'v' ")
    assert why in str(e.value)
    assert (e.value.cls, e.value.field) == (some, "v")  # type: ignore[attr-defined]


def test_no_key_among_the_fields_of_a_class_is_refused_with_a_way_to_mark_one() -> None:
    @dataclass
    class Trade:
        id: int
        at: Annotated[datetime | None, FieldType.DATE]

    with pytest.raises(SchemaError, match=r"Trade: no field is a key; mark one, such as id: Annotated\[..., esp.Key\]"):
        Schema.of(Trade)


T = TypeVar("T")


@dataclass
class DataBase:
    id: Annotated[int, Key]
    note: str
    counted: ClassVar[int] = 0


@dataclass
class DataDerived(DataBase):
    _: KW_ONLY
    price: float = 0.0
    note: Annotated[str, FieldType.RSTRING] = ""
    _hidden = 1


class StructBase(msgspec.Struct, kw_only=True, tag=True, rename="camel"):
    the_id: Annotated[int, Key]
    note: str
    counted: ClassVar[int] = 0


class StructDerived(StructBase):
    price: float = 0.0


class ModelBase(pydantic.BaseModel):
    the_id: Annotated[int, Key] = pydantic.Field(alias="theId", gt=0)
    note: str
    counted: ClassVar[int] = 0
    _hidden: int = 1

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return 2 * self.the_id


class ModelDerived(ModelBase):
    price: pydantic.NonNegativeFloat = 0.0
    note: Annotated[str, FieldType.RSTRING] = ""


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (DataDerived, "id*:int64,note:rstring,price:double"),
        (StructDerived, "price:double,the_id*:int64,note:string"),  # what has to be named comes last
        (ModelDerived, "the_id*:int64,note:rstring,price:double"),
    ],
)
def test_fields_are_those_of_the_class_in_its_own_order(cls: type, text: str) -> None:
    assert str(Schema.of(cls)) == text


@dataclass
class Computed:
    id: Annotated[int, Key]
    twice: int = field(init=False)


@dataclass
class Init:
    id: Annotated[int, Key]
    seed: InitVar[int]


@dataclass
class Box(Generic[T]):
    id: Annotated[int, Key]
    item: T


class ModelBox(pydantic.BaseModel, Generic[T]):
    id: Annotated[int, Key]
    item: T


@dataclass
class Unknown:
    id: "Annotated[int, Key]"
    item: "Missing"  # type: ignore[name-defined]  # noqa: F821


@dataclass
class Empty:
    pass


class Tuple(NamedTuple):
    id: Annotated[int, Key]


class Plain:
    id: Annotated[int, Key]


NO_CLASS: list[tuple[Any, str]] = [
    (Computed, "Computed: field 'twice' has init=False, so no event could give it back"),
    (Init, "Init: field 'seed' is an InitVar, which no event"),
    (Box, "Box: field 'item' is ~T, which"),
    (Box[int], "Box[int]: it is not a class; pass a class, and for a generic one"),
    (ModelBox, "ModelBox: field 'item' is ~T, which"),
    (ModelBox[int], "ModelBox[int]: field 'item' is ~T, which"),
    (Unknown, "Unknown: name 'Missing' is not defined; "),
    (Empty, "Empty: a schema has 1 to 1000 fields, not 0"),
    (msgspec.Struct, "Struct: a schema has 1 to 1000 fields, not 0"),
    (pydantic.BaseModel, "BaseModel: a schema has 1 to 1000 fields, not 0"),
    (make_dataclass("Long", [("n" * 129, Annotated[int, Key])]), "Long: the field name 'nnn"),
    (Tuple, "Tuple: it is no dataclass, no msgspec.Struct and no pydantic.BaseModel"),
    (Plain, "Plain: it is no dataclass,"),
    (int, "int: it is no dataclass,"),
    (DataTrade(1, "a"), "DataTrade(id=1, symbol='a', price=None): it is not a class; "),
    ("id*:int64", "'id*:int64': it is not a class; "),
    (None, "None: it is not a class; "),
]


@pytest.mark.parametrize(("cls", "why"), NO_CLASS, ids=lambda value: str(value)[:40])
def test_what_no_schema_can_be_made_of_is_refused_by_name(cls: Any, why: str) -> None:
    with pytest.raises(SchemaError) as e:
        Schema.of(cls)
    assert str(e.value).startswith("no schema can be made of ")
    assert why in str(e.value)
    assert e.value.cls is cls  # type: ignore[attr-defined]


def test_a_schema_of_a_dataclass_imports_no_pydantic() -> None:
    program = """
import sys
from dataclasses import dataclass
from typing import Annotated

import esp_pubsub as esp

@dataclass
class Trade:
    id: Annotated[int, esp.Key]

assert str(esp.Schema.of(Trade)) == "id*:int64"
assert "pydantic" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
