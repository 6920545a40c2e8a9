"""Events as text, and in binary, both ways, bit by bit, with no I/O: the caller reads and writes the bytes."""

from .binary import BinaryReader, BinaryWriter
from .csv import MAX_LINE, CsvFormat, CsvReader, CsvWriter
from .json import JsonReader, JsonWriter
from .values import BadText, Batch

__all__ = [
    "MAX_LINE",
    "BadText",
    "Batch",
    "BinaryReader",
    "BinaryWriter",
    "CsvFormat",
    "CsvReader",
    "CsvWriter",
    "JsonReader",
    "JsonWriter",
]
