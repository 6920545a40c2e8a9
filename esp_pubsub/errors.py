"""Every error the SDK raises on purpose.

An error names the thing and the way out in its message and carries the same facts as attributes, so that
code acts on the class and the data, never on the text.

    EspError
    +-- ConfigError            a setting, a cfg file, a keyword
    |   +-- AddressError       a dfESP URL or a topic name
    |   +-- NotInstalled       an extra is missing (.extra)
    |   +-- NotOffered         this bus cannot do that (.capability)
    |   +-- ExpressionError    an expression that cannot be computed (.text, .at)
    |   +-- ModelFileError     a model file that cannot be run (.file, .line, .element)
    +-- SchemaError            a schema string, or none to be had
    |   +-- SchemaDiffers      the topic has another one (.given, .retained)
    +-- ValueRefused           a value a block cannot carry (.row, .field, .value); no id was given
    +-- TooLarge               a block over a limit (.size, .limit); no id was given
    +-- BadFrame               bytes that are no frame (.reason)
    +-- BadBody                a block whose body cannot be read (.id, .position)
    +-- BusError               what a driver raises: the pipe, feed or bus at hand is dead
    |   +-- BusUnavailable     cannot be reached, or does not answer in time
    |   +-- BusRefused         answered, and said no; trying again will not help
    +-- DeliveryUnknown        not acknowledged in time (.id); still being tried, may be awaited again
    +-- InputDiffers           another input under the same source and run (.id, .ours, .theirs)
    +-- Stale                  a higher run of the source exists (.run, .current)
    +-- Overrun                a standby whose input could not wait
    +-- ModelError             an engine's model did what no model may do
    |   +-- StepFailed         it raised in a step (.window, .source, .run, .id, .position)
    |   +-- StepsDiffer        this member did something else than the others (.step, .ours, .theirs)
    |   +-- StateRefused       its state would come back from a snapshot different (.path)
    +-- BeginningDiffers       a member of an engine that is set up differently (.differences)
    +-- Switched               the engine goes on with another version of the model (.version, .place)
    +-- InputLost              an engine cannot read its input, or its order, without a gap (.topic, .position)
    +-- NoGroup                confirm without a group
    +-- NothingStored          a group that has confirmed nothing, where start is none (.group)
    +-- Unconfirmed            too many blocks read and not confirmed (.limit)
    +-- NoAnswer               a request nobody answered in time (.topic, .timeout)
    +-- RequestRefused         a request that was answered with an error (.topic)
    +-- EffectFailed           the handler of an effect raised (.key)
    +-- HandlerFailed          the function of `esp.handle` raised, and was to stop then (.block)
    +-- Closed                 used after close
    +-- WrongOrder             calls in the wrong order, another loop, a forked process
"""

from __future__ import annotations

from typing import Any


class EspError(Exception):
    """The root. Keyword arguments become attributes."""

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.__dict__.update(data)


class ConfigError(EspError):
    """A setting that cannot be used."""


class AddressError(ConfigError):
    """A dfESP URL or a topic name that cannot be used."""


class NotInstalled(ConfigError):
    """A part of the SDK whose extra is not installed."""

    extra: str


class NotOffered(ConfigError):
    """The bus in use does not offer what was asked for."""

    capability: str


class ExpressionError(ConfigError):
    """An expression that cannot be computed, and the character at which that shows, counted from 0."""

    text: str
    at: int
    into: Any = None


class ModelFileError(ConfigError):
    """A model file that cannot be run as it is, and where in it that shows."""

    file: str
    line: int
    element: str


class SchemaError(EspError):
    """A schema that cannot be read, or that is missing."""


class SchemaDiffers(SchemaError):
    """The topic carries another schema than the one given."""

    given: str
    retained: str


class ValueRefused(EspError):
    """A value that does not fit its field; nothing was sent and no id was given."""

    row: int
    field: str
    value: Any


class TooLarge(EspError):
    """A block over a limit; nothing was sent and no id was given."""

    size: int
    limit: int


class BadFrame(EspError):
    """Bytes that are not a frame of this protocol version, or a forged one."""

    reason: str


class BadBody(EspError):
    """A block that arrived whole but whose body cannot be read."""

    id: int
    position: Any


class BusError(EspError):
    """What a driver raises when a pipe, a feed or the bus is dead."""


class BusUnavailable(BusError):
    """The bus cannot be reached or does not answer in time; a new attempt may work."""


class BusRefused(BusError):
    """The bus answered and refused; the same attempt will be refused again."""


class DeliveryUnknown(EspError):
    """No acknowledgement in time. The block keeps its id and is still being tried."""

    id: int


class InputDiffers(EspError):
    """Two inputs under one source and run."""

    id: int
    ours: int
    theirs: int


class Stale(EspError):
    """A higher run of this source exists."""

    run: int
    current: int


class Overrun(EspError):
    """A standby's outbox is full and its input cannot wait."""


class ModelError(EspError):
    """An engine's model did what no model may do."""


class StepFailed(ModelError):
    """The model raised in a step; `__cause__` is what it raised. All members step on the same block."""

    window: str
    source: int
    run: int
    id: int
    position: Any


class StepsDiffer(ModelError):
    """Up to this step, this member of an engine did something else than the others."""

    step: int
    ours: int
    theirs: int


class StateRefused(ModelError):
    """The model's state would come back from a snapshot different from what it is."""

    path: str


class BeginningDiffers(EspError):
    """This member of an engine is set up differently from how the engine began."""

    differences: list[tuple[str, Any, Any]]


class Switched(EspError):
    """The engine goes on with another version of the model, from this place in its order; this member has ended."""

    version: str
    place: int
    needed: bool
    """Whether the other version needs a snapshot of this place."""


class InputLost(EspError):
    """What an engine still has to read is no longer there."""

    topic: str
    position: int


class NoGroup(EspError):
    """Confirm was called on a subscriber without a group."""


class NothingStored(EspError):
    """A group that has confirmed nothing yet, where its subscriber starts at what is stored and nowhere else."""

    group: str


class Unconfirmed(EspError):
    """More blocks were read without being confirmed than the subscriber may remember."""

    limit: int


class NoAnswer(EspError):
    """Nobody answered a request in time."""

    topic: str
    timeout: float


class RequestRefused(EspError):
    """Whoever served a request answered with an error."""

    topic: str


class EffectFailed(EspError):
    """The handler of an effect raised; `__cause__` is what it raised. The call is not confirmed, and comes again."""

    key: str


class HandlerFailed(EspError):
    """The function of `esp.handle` raised; `__cause__` is what it raised. The block is not confirmed, and comes again.

    `block` is the text by which the block is named: source, run and id.
    """

    block: str


class Closed(EspError):
    """The object was closed."""


class WrongOrder(EspError):
    """Calls in an order, a loop or a process that cannot work."""
