"""What several files of integration tests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.shell import Cli


@pytest.fixture
def cli(bus_directory: Path) -> Iterator[Cli]:
    cli = Cli(bus_directory / "bus")
    yield cli
    cli.close()
