"""The map body of beats, claims, requests and replies: one msgpack map with text keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from ..errors import BadFrame
from .frame import MAP, Frame, Sealed, seal

_MOST = 10_000  # entries of one map or array in it


def seal_map(kind: int, values: Mapping[str, Any], *, source: int = 0, run: int = 0) -> Sealed:
    """A sealed frame with a map for a body."""
    return seal(kind, MAP, source=source, run=run, body=msgpack.packb(dict(values)))


def read_map(frame: Frame) -> dict[str, Any]:
    """The map in a frame. Raises BadFrame, whatever the bytes."""
    try:
        values = msgpack.unpackb(frame.body, max_array_len=_MOST, max_map_len=_MOST, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as e:
        raise BadFrame(f"its body is no map: {e}", reason="the body is no map") from None
    if not isinstance(values, dict):
        raise BadFrame("its body is no map", reason="the body is no map")
    return values
