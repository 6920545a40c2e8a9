"""What tests of commands within a process need."""

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster


@pytest.fixture
def own_loop(blockbuster: BlockBuster) -> Iterator[None]:
    """A command has its loop to itself, so it may look for its cfg file in it."""
    blockbuster.deactivate()
    yield
    blockbuster.activate()
