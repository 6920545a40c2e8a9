"""Senders at work; each ends with its test."""

from collections.abc import AsyncIterator

import pytest

from esp_pubsub import sender as sender_module
from tests.unit.sender.scripted import BENCHES, Bench, end


@pytest.fixture(params=[True, False], ids=["suffix-only", "with holes"])
async def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(suffix_only=request.param)


@pytest.fixture
async def suffix() -> Bench:
    return Bench(suffix_only=True)


@pytest.fixture
async def holes() -> Bench:
    return Bench(suffix_only=False)


@pytest.fixture(autouse=True)
async def _every_sender_ends() -> AsyncIterator[None]:
    yield
    benches = list(BENCHES)
    BENCHES.clear()
    for bench in benches:
        await end(bench)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(sender_module, "_LONGEST_PAUSE", 0.002)
