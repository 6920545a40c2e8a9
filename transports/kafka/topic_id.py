"""Metadata request of version 12, in which a topic has an id: the client itself goes up to version 5."""

from __future__ import annotations

from io import BytesIO

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields


class _Uuid(AbstractType[bytes]):
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)

    @classmethod
    def repr(cls, value: bytes) -> str:
        return value.hex()


_TEXT = CompactString("utf-8")


class _Answer(Response):
    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle", Int32),
        (
            "brokers",
            CompactArray(("node", Int32), ("host", _TEXT), ("port", Int32), ("rack", _TEXT), ("t", TaggedFields)),
        ),
        ("cluster", _TEXT),
        ("controller", Int32),
        (
            "topics",
            CompactArray(
                ("error", Int16),
                ("name", _TEXT),
                ("id", _Uuid),
                ("internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline", CompactArray(Int32)),
                        ("t", TaggedFields),
                    ),
                ),
                ("operations", Int32),
                ("t", TaggedFields),
            ),
        ),
        ("t", TaggedFields),
    )


class _Question(RequestStruct):
    API_KEY = 3
    API_VERSION = 12
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        ("topics", CompactArray(("id", _Uuid), ("name", _TEXT), ("t", TaggedFields))),
        ("make", Boolean),
        ("operations", Boolean),
        ("t", TaggedFields),
    )


class TopicId(Request[_Question]):
    """Asks for one topic."""

    API_KEY = 3

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def build(self, request_struct_class: type[_Question]) -> _Question:
        """See `Request.build`."""
        return request_struct_class([(bytes(16), self._topic, {})], False, False, {})

    def __repr__(self) -> str:
        return f"TopicId({self._topic!r})"
