"""An XML text as elements that know their lines. Pure.

Nothing is fetched and nothing is expanded: a document type is refused before anything in it is read, and with it all
entities but the five of XML itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from esp_pubsub import ModelFileError

MAX_BYTES = 4 << 20
MAX_DEPTH = 64
MAX_ELEMENTS = 100_000
_SHOWN = 100  # characters of a name in an error


@dataclass(slots=True)
class Element:
    """An element of the file."""

    file: str
    name: str
    line: int
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    text: str = ""
    text_line: int = 0
    """Where the text begins; 0 without one."""

    def all(self, name: str) -> list[Element]:
        """The children of this name."""
        return [child for child in self.children if child.name == name]

    def refuse(self, why: str, *, line: int | None = None) -> NoReturn:
        """ModelFileError at this element, or at a line of its text."""
        at = self.line if line is None else line
        named = f" name={self.attributes['name'][:_SHOWN]!r}" if "name" in self.attributes else ""
        raise ModelFileError(
            f"{self.file}, line {at}, <{self.name[:_SHOWN]}{named}>: {why[: 10 * _SHOWN]}",
            file=self.file,
            line=at,
            element=self.name,
        )


def read_xml(data: bytes, file: str) -> Element:
    """The root of the XML in these bytes; `file` is what errors call it. ModelFileError for what is not plain XML."""
    if len(data) > MAX_BYTES:
        raise ModelFileError(
            f"{file} has {len(data):,} bytes, and a model at most {MAX_BYTES:,}", file=file, line=1, element=""
        )
    return _Reader(file).read(data)


class _Reader:
    def __init__(self, file: str) -> None:
        self._file = file
        self._path: list[Element] = []
        self._texts: list[list[str]] = []
        self._root: Element | None = None
        self._count = 0
        parser = self._parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.StartDoctypeDeclHandler = self._doctype
        parser.ProcessingInstructionHandler = self._instruction

    def read(self, data: bytes) -> Element:
        try:
            self._parser.Parse(data, True)
        except expat.ExpatError as e:
            self._refuse(f"this is no XML: {expat.ErrorString(e.code)}", e.lineno)
        except (ValueError, LookupError) as e:  # an encoding that Python does not have
            self._refuse(f"this is no XML: {e}", 1)
        assert self._root is not None  # or expat finds no element
        return self._root

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        line = self._parser.CurrentLineNumber
        self._count += 1
        if len(self._path) >= MAX_DEPTH:
            self._refuse(f"elements stand more than {MAX_DEPTH} deep in each other", line)
        if self._count > MAX_ELEMENTS:
            self._refuse(f"there are more than {MAX_ELEMENTS:,} elements", line)
        element = Element(self._file, name, line, attributes)
        if self._path:
            self._path[-1].children.append(element)
        else:
            self._root = element
        self._path.append(element)
        self._texts.append([])

    def _end(self, _: str) -> None:
        self._path.pop().text = "".join(self._texts.pop())

    def _characters(self, text: str) -> None:
        element = self._path[-1]
        if not element.text_line and text.strip():
            element.text_line = self._parser.CurrentLineNumber
        self._texts[-1].append(text)

    def _doctype(self, *_: object) -> None:
        self._refuse(
            "a model has no <!DOCTYPE> and no entities of its own: take the declaration out",
            self._parser.CurrentLineNumber,
        )

    def _instruction(self, target: str, _: str) -> None:
        self._refuse(
            f"a model has no processing instructions: take out <?{target} ...?>", self._parser.CurrentLineNumber
        )

    def _refuse(self, why: str, line: int) -> NoReturn:
        name = self._path[-1].name if self._path else ""
        raise ModelFileError(f"{self._file}, line {line}: {why}", file=self._file, line=line, element=name)
