"""How long a Copy window holds its rows. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from esp_pubsub import ConfigError, FieldType, Schema, SchemaError

from .window import index_of

SECOND = 1_000_000  # microseconds


@dataclass(frozen=True, slots=True)
class Retention:
    """Rows go after so many microseconds, or when there are so many newer ones.

    `sliding`: each row by itself. `jumping`: all at once, when a row comes that is so much later than the first of
    them, or one too many. `field` is a stamp or a date of the rows, and the newest that came is the time; without it,
    time is the engine's, and rows go at full seconds. A row that is updated counts as new.
    """

    kind: Literal["sliding", "jumping"]
    by: Literal["time", "count"]
    amount: int
    """Microseconds, or rows."""
    field: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("sliding", "jumping") or self.by not in ("time", "count"):
            raise ConfigError(f"a retention is sliding or jumping, by time or count, not {self.kind!r} by {self.by!r}")
        if not isinstance(self.amount, int) or isinstance(self.amount, bool) or not 1 <= self.amount < 1 << 62:
            raise ConfigError(f"the amount of a retention is a number of microseconds or rows, not {self.amount!r}")
        if self.field is not None and self.by == "count":
            raise ConfigError("a retention by count looks at no field: leave out the field, or make it by time")

    @property
    def timed(self) -> bool:
        """It goes by the engine's time."""
        return self.by == "time" and self.field is None

    def at(self, schema: Schema) -> tuple[int, int] | None:
        """Where the field stands in a row, and the amount in its unit. SchemaError if it cannot be the time."""
        if self.field is None:
            return None
        at = index_of(schema, self.field)
        kind = schema.fields[at].type
        if kind not in (FieldType.STAMP, FieldType.DATE):
            raise SchemaError(
                f"the field {self.field!r} of a retention is {kind}, and has to be a stamp or a date", field=self.field
            )
        return at, self.amount if kind is FieldType.STAMP else -(-self.amount // SECOND)
