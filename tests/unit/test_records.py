"""A user's class: its instances go into blocks, and come out of them."""

import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

import esp_pubsub as esp
from tests.unit.workbench import URL, Bench

NOON = datetime(2026, 11, 20, 12, 0, 0, 5, tzinfo=UTC)


@dataclass
class Order:
    id: Annotated[int, esp.Key]
    at: datetime
    day: date
    price: Decimal | None = None
    lots: list[int] = field(default_factory=list)
    ticks: Annotated[int, esp.FieldType.STAMP] = 0


class StructOrder(msgspec.Struct):
    id: Annotated[int, esp.Key]
    at: datetime
    note: str | None = None


class ModelOrder(pydantic.BaseModel):
    id: Annotated[int, esp.Key]
    at: datetime = pydantic.Field(alias="placedAt")
    note: str | None = None


@dataclass
class Checked:
    id: Annotated[int, esp.Key]

    def __post_init__(self) -> None:
        if self.id < 0:
            raise ValueError("an id is not negative")


@pytest.mark.parametrize(
    "given",
    [
        Order(1, NOON, date(2026, 11, 20), Decimal("1.50"), [1, 2], 7),
        Order(2, NOON, date(1969, 1, 1)),
        StructOrder(1, NOON, "new"),
        ModelOrder(id=1, placedAt=NOON),
        ModelOrder(id=1, placedAt=NOON, note="new"),
    ],
    ids=repr,
)
async def test_what_was_injected_as_an_instance_comes_back_as_one(bench: Bench, given: Any) -> None:
    async with bench.client.publisher(URL, type(given)) as pub:
        await (await pub.inject([given, given]))
    async with bench.client.subscriber(URL, type(given), side="in", start="earliest") as sub:
        assert (await anext(sub)).as_(type(given)) == [given, given]


async def blocks_of(bench: Bench, schema: str, *rows: tuple[Any, ...]) -> esp.Block:
    async with await bench.publisher(schema) as pub:
        await pub.inject(list(rows))
    return (await bench.blocks(1))[0]


@pytest.mark.parametrize(
    ("schema", "row", "words"),
    [
        ("id*:int64", (1,), r"the block has no 'at' \(stamp\)"),
        ("id*:int64,at:int64,note:string", (1, 1, ""), "'at' is int64, and not stamp"),
        ("id*:int64,at:stamp,note:string,more:double", (1, 1, "", 1.0), r"the class has no 'more' \(double\)"),
        ("at*:stamp,id:int64,note:string", (1, 1, ""), "they stand in another order"),
    ],
)
async def test_a_class_with_other_fields_than_the_block_is_refused_by_field_and_type(
    bench: Bench, schema: str, row: tuple[Any, ...], words: str
) -> None:
    block = await blocks_of(bench, schema, row)
    with pytest.raises(esp.SchemaDiffers, match=words):
        block.as_(StructOrder)


async def test_a_null_for_a_field_that_is_never_none_is_refused_by_row_field_and_type(bench: Bench) -> None:
    block = await blocks_of(bench, "id*:int64,at:stamp,note:string", (1, 1, None), (2, None, None))
    with pytest.raises(esp.ValueRefused) as caught:
        block.as_(StructOrder)
    assert (caught.value.row, caught.value.field) == (1, "at")
    assert str(caught.value) == (
        "row 1, field 'at' (stamp): null is no datetime; in StructOrder make it datetime | None"
    )


async def test_a_moment_that_python_cannot_show_is_refused_by_field(bench: Bench) -> None:
    block = await blocks_of(bench, "id*:int64,at:stamp,note:string", (1, (1 << 63) - 1, None))
    with pytest.raises(esp.ValueRefused, match=r"field 'at' \(stamp\): 9223372036854775807 is no moment"):
        block.as_(StructOrder)


async def test_what_the_class_itself_refuses_is_told_with_the_row(bench: Bench) -> None:
    block = await blocks_of(bench, "id*:int64", (1,), (-1,))
    with pytest.raises(esp.ValueRefused, match="row 1 is no Checked: an id is not negative"):
        block.as_(Checked)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            [ModelOrder.model_construct(id="1", at=NOON, note=None)],
            r"row 0, field 'id' \(int64\): str '1' is not an in",
        ),
        ([StructOrder(1, 0.5)], r"row 0, field 'at' \(stamp\): float 0.5 is not integer micros"),  # type: ignore[arg-type]
        ([StructOrder(1, NOON), Checked(1)], r"row 1, a Checked, has no field 'at' \(stamp\)"),
    ],
    ids=repr,
)
async def test_an_instance_that_does_not_fit_is_refused_by_field_and_type(bench: Bench, given: Any, words: str) -> None:
    async with bench.client.publisher(URL, StructOrder) as pub:
        with pytest.raises(esp.ValueRefused, match=words):
            await pub.inject(given)


async def test_floats_come_back_as_they_are(bench: Bench) -> None:
    @dataclass
    class Measured:
        id: Annotated[int, esp.Key]
        value: float

    async with bench.client.publisher(URL, "id*:int64,value:double") as pub:
        await pub.inject([Measured(1, math.inf)])
    assert (await bench.blocks(1))[0].as_(Measured) == [Measured(1, math.inf)]
