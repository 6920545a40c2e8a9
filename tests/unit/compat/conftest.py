"""The library of the vendor's API, begun on a bus of its own."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from esp_pubsub.compat import modelingApi, pubsubApi


@pytest.fixture
def compat_bus(bus_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A bus, and nothing begun; what a test leaves begun is ended."""
    monkeypatch.setenv("ESP_PUBSUB_DIR", str(bus_directory))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pubsubApi, "_ANSWER", 0.5)  # no engine answers any sooner for being waited for longer
    before = logging.getLogger("esp_pubsub").level
    yield bus_directory
    if pubsubApi._library is not None:
        pubsubApi.Shutdown()
    logging.getLogger("esp_pubsub").setLevel(before)


@pytest.fixture
def library(compat_bus: Path) -> Path:
    """A bus, after Init."""
    assert pubsubApi.Init(modelingApi.ll_Info, None) == 1
    return compat_bus
