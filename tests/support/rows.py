"""What the tests of the rows body share."""

from typing import Any

from hypothesis import strategies as st

from esp_pubsub.schema import FieldType, Schema
from esp_pubsub.wire.rows import RowCodec, codec

EVERY = Schema(
    "i*:int32,l:int64,d:double,s:string,r:rstring,t:date,u:stamp,m:money,b:blob,"
    "ai:array(i32),al:array(i64),ad:array(dbl)"
)
I32, I64 = 1 << 31, 1 << 63


def of(kind: str) -> RowCodec:
    """The codec of a key and one field `v` of this type."""
    return codec(Schema(f"k*:int32,v:{kind}"))


def named(value: Any) -> str:
    """An id for a case, the same in every process; some values are too long to be shown."""
    if isinstance(value, int) and value > 1 << 200:
        return "a huge integer"
    shown = repr(value).split(" at 0x")[0]
    return f"{type(value).__name__}:{shown:.30}"


VALUES: dict[FieldType, st.SearchStrategy[Any]] = {
    FieldType.INT32: st.integers(-I32, I32 - 1),
    FieldType.INT64: st.integers(-I64, I64 - 1),
    FieldType.DOUBLE: st.floats(),
    FieldType.STRING: st.text(max_size=40),
    FieldType.RSTRING: st.text(max_size=10),
    FieldType.DATE: st.integers(-I64, I64 - 1),
    FieldType.STAMP: st.integers(-I64, I64 - 1),
    FieldType.MONEY: st.decimals(
        allow_nan=False, allow_infinity=False, places=4, min_value=-(10**20), max_value=10**20
    ),
    FieldType.BLOB: st.binary(max_size=40),
    FieldType.ARRAY_INT32: st.lists(st.integers(-I32, I32 - 1), max_size=4).map(tuple),
    FieldType.ARRAY_INT64: st.lists(st.integers(-I64, I64 - 1), max_size=4).map(tuple),
    FieldType.ARRAY_DOUBLE: st.lists(st.floats(), max_size=4).map(tuple),
}
TYPES = st.lists(st.sampled_from(FieldType), min_size=1, max_size=6)
BLOCKS = TYPES.flatmap(
    lambda types: st.tuples(
        st.just(types),
        st.lists(st.tuples(*(st.none() | VALUES[t] for t in types)), min_size=1, max_size=20),
    )
)
