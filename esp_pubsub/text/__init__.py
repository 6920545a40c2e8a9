"""Events as text, both ways, bit by bit, with no I/O: the caller reads and writes the bytes."""

from .csv import CsvFormat, CsvReader, CsvWriter
from .json import JsonReader, JsonWriter
from .values import BadText, Batch

__all__ = ["BadText", "Batch", "CsvFormat", "CsvReader", "CsvWriter", "JsonReader", "JsonWriter"]
