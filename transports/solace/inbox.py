"""A topic of our own, by which echoes and answers come back to us. A letter bears the number of who it is for."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable

from .link import Inbound, Link, Publisher
from .names import OURS


class Inbox:
    """One for each session, with what sends letters to others."""

    publisher: Publisher

    def __init__(self) -> None:
        self.topic = f"{OURS}/inbox/{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Callable[[bytes], None]] = {}

    async def open(self, link: Link) -> None:
        """From now on it hears."""
        await link.subscribe(self.topic, self._hear)
        self.publisher = await link.publisher(lambda number, error: None, guaranteed=False)

    def enter(self, hear: Callable[[bytes], None]) -> int:
        """Wait for letters; returns the number that they have to bear."""
        number = next(self._numbers)
        self._waiting[number] = hear
        return number

    def leave(self, number: int) -> None:
        """Wait no more."""
        self._waiting.pop(number, None)

    def _hear(self, letter: Inbound) -> None:
        hear = self._waiting.get(int.from_bytes(letter.data[:8], "big"))
        if hear is not None:
            hear(letter.data[8:])


def letter(number: int, data: bytes) -> bytes:
    """What to send to an inbox."""
    return number.to_bytes(8, "big") + data
