"""A project from SAS's model XML.

    project = load_project("model.xml", without=("comp_win",))

What cannot be run as the file says it is a ModelFileError with file, line and element. What changes nothing here, such
as the number of threads, and what is to be run beside an engine, such as what reads a file, is logged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from esp_pubsub import (
    ConfigError,
    EspError,
    ExpressionError,
    Field,
    FieldType,
    ModelFileError,
    Schema,
    SchemaError,
)

from .aggregate import Aggregate
from .compute import Compute
from .copy import Copy
from .expression import Expression
from .filter import Filter
from .functions import CLOCKS
from .group_functions import GROUP_FUNCTIONS
from .project import Project
from .retention import Retention
from .sas_connectors import read_connector
from .sas_elements import Checked, chosen, digest, fill_in, flag, only, optional, properties_of, required
from .source import Source
from .syntax import Call, Name, Return, parse
from .xml_tree import MAX_BYTES, Element, read_xml

_log = logging.getLogger("esp_pubsub.windows")

_INDEXES = "pi_HASH pi_RBTREE pi_LN_HASH pi_CL_HASH pi_FW_HASH pi_EMPTY"
_UNITS = {"microsecond": 1, "millisecond": 1_000, "second": 1_000_000, "minute": 60_000_000, "hour": 3_600_000_000,
          "day": 86_400_000_000}  # fmt: skip
_RETENTION = re.compile(r"\s*([0-9]{1,15})\s*(?:([a-z]+?)s?)?\s*")
_GROUP_FUNCTIONS = {name.lower(): function for name, function in GROUP_FUNCTIONS.items()}
_CLOCK = re.compile(rf"\b({'|'.join(CLOCKS)})\s*\(", re.IGNORECASE)
_ARGUMENTS = {"esp_acount": 0, "esp_awave": 2}


def load_project(path: str | Path, without: Collection[str] = ()) -> Project:
    """The project in this file, without the windows of these names. ModelFileError where it cannot be run.

    Its outputs are the windows with subscriber connectors; without any, those with `pubsub='true'` where the project's
    is manual, else all. Its version follows from what the file says of windows and edges, so members whose files
    compute something else never run together.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise ModelFileError(f"{path} cannot be read: {e}", file=str(path), line=0, element="") from e
    return read_project(data, str(path), without)


def read_project(data: bytes, file: str, without: Collection[str] = ()) -> Project:
    """The project in this XML; `file` is what errors call it. See `load_project`."""
    root = read_xml(data, file)
    if root.name not in ("engine", "project"):
        root.refuse("a model begins with <engine> or <project>")
    _leave_out(root, without)
    checked = Checked()
    checked.check(root)
    if checked.idle:
        _log.info("%s: this changes nothing here: %s", file, checked)
    project = root if root.name == "project" else only(only(root, "projects"), "project")
    return _Loading(project, frozenset(without)).project()


def _leave_out(root: Element, names: Collection[str]) -> None:
    """Take these windows out of the tree, before anything is asked of them."""
    found: set[str] = set()
    there: list[str] = []
    rest = [root]
    while rest:
        element = rest.pop()
        rest += element.children
        if element.name == "windows":
            named = [child.attributes.get("name", "") for child in element.children]
            there += named
            found |= {*named} & {*names}
            element.children = [each for each, name in zip(element.children, named, strict=True) if name not in names]
    if unknown := sorted({*names} - found):
        raise ConfigError(f"{unknown[0]!r} cannot be left out: the model has the windows {', '.join(there) or 'none'}")


class _Loading:
    """A project on its way from elements to windows."""

    def __init__(self, project: Element, without: frozenset[str]) -> None:
        self._project = project
        self._without = without
        contqueries = only(project, "contqueries")
        fill_in(contqueries, properties_of(project))
        self._query = only(contqueries, "contquery")
        self._elements: dict[str, Element] = {}
        self._expressions: dict[str, list[tuple[Expression, Element]]] = {}
        self._outputs: list[str] = []

    def project(self) -> Project:
        windows: dict[str, Any] = {}
        for element in only(self._query, "windows").children:
            if element.name == "description":
                continue
            name = required(element, "name")
            if name in windows:
                element.refuse(f"there is another window of this name in line {self._elements[name].line}")
            self._elements[name] = element
            windows[name] = self._window(element, name)
        try:
            version = digest(self._project)
            project = Project(windows, self._edges(windows), outputs=self._published(windows), version=version)
            _log.info("%s: this is version %s of its model", self._project.file, version)
            return project
        except (ConfigError, SchemaError) as e:
            self._refuse(e)

    def _refuse(self, error: EspError) -> NoReturn:
        """Say where in the file it is."""
        if isinstance(error, ModelFileError):
            raise error
        element = self._elements.get(getattr(error, "window", ""), self._query)
        if isinstance(error, ExpressionError):
            for expression, each in self._expressions.get(element.attributes.get("name", ""), ()):
                if (expression.text, expression.into) == (error.text, error.into):
                    _refuse_expression(each, error)
        element.refuse(str(error))

    # windows

    def _window(self, element: Element, name: str) -> Any:
        for connectors in element.all("connectors"):
            for each in connectors.children:
                found = read_connector(each, name, self._say)
                if found is not None and not found.publishes and name not in self._outputs:
                    self._outputs.append(name)
        for attribute in ("collapse-updates", "pubsub"):
            flag(element, attribute)
        if flag(element, "output-insert-only"):
            element.refuse("output-insert-only takes updates and deletes away, which is not taken: leave it out")
        try:
            return self._made(element)
        except (ConfigError, SchemaError) as e:
            if isinstance(e, ModelFileError):
                raise
            element.refuse(str(e))

    def _made(self, element: Element) -> Any:
        match element.name:
            case "window-source":
                return self._source(element)
            case "window-copy":
                return self._copy(element)
            case "window-filter":
                return self._filter(element)
            case "window-compute":
                return self._compute(element)
            case _:
                return self._aggregate(element)

    def _source(self, element: Element) -> Source:
        if flag(element, "autogen-key"):
            element.refuse("keys are not made here (autogen-key): publish events with their keys")
        insert_only, empty = flag(element, "insert-only"), self._is_empty(element)
        if empty and not insert_only:
            self._say(
                element.line, "a source without an index takes inserts only; other events are rejected and counted"
            )
        return Source(_schema(element), insert_only=insert_only or empty, indexed=not empty)

    def _copy(self, element: Element) -> Copy:
        retention = optional(element, "retention")
        if retention is not None and self._is_empty(element):
            element.refuse("a window whose index is pi_EMPTY retains nothing: give it another index")
        self._is_empty(element)
        return Copy(retention=None if retention is None else _retention(retention))

    def _filter(self, element: Element) -> Filter:
        self._is_empty(element)
        return Filter(self._expression(element, only(element, "expression"), bool))

    def _compute(self, element: Element) -> Compute:
        self._is_empty(element)
        _refuse_variables(element)
        schema = _schema(element)
        fields = _computed(element, schema)
        return Compute(schema, {field.name: self._expression(element, each, field.type) for field, each in fields})

    def _aggregate(self, element: Element) -> Aggregate:
        if self._is_empty(element):
            element.refuse("an Aggregate window holds its groups, so its index is not pi_EMPTY: give it another one")
        _refuse_variables(element)
        schema = _schema(element)
        return Aggregate(schema, {field.name: _group_function(each) for field, each in _computed(element, schema)})

    def _expression(self, window: Element, element: Element, into: FieldType | type[bool]) -> Expression:
        try:
            expression = Expression(element.text.strip(), into)
        except ExpressionError as e:
            _refuse_expression(element, e)
        self._expressions.setdefault(window.attributes["name"], []).append((expression, element))
        return expression

    def _is_empty(self, element: Element) -> bool:
        """Whether it has no index, as it says or as query or project say for all."""
        for each in (element, self._query, self._project):
            if "index" in each.attributes:
                return chosen(each, "index", _INDEXES) == "pi_EMPTY"
        return False

    # what lies between and around them

    def _edges(self, windows: Mapping[str, Any]) -> list[tuple[str, str]]:
        found = []
        several = optional(self._query, "edges")
        for each in several.all("edge") if several else ():
            names = required(each, "source").split(), required(each, "target").split()
            found += [pair for pair in product(*names) if self._is_edge(each, pair, windows)]
        return found

    def _is_edge(self, element: Element, pair: tuple[str, str], windows: Mapping[str, Any]) -> bool:
        """Whether it leads between windows that are not left out."""
        for name in pair:
            if name not in windows and name not in self._without:
                element.refuse(f"there is no window {name}; there are {', '.join(windows)}")
        source, target = pair
        if source in self._without and target in windows:
            element.refuse(f"{target} takes the events of {source}, which is left out: leave {target} out too")
        return target in windows

    def _published(self, windows: Mapping[str, Any]) -> list[str] | None:
        """The windows that are outputs; None for all."""
        mode = chosen(self._project, "pubsub", "auto manual none", "auto")
        if self._outputs or mode == "auto":
            return self._outputs or None
        marked = [name for name in windows if flag(self._elements[name], "pubsub")]
        if not marked:
            self._project.refuse(
                f"nothing is published: pubsub is {mode}, and no window has pubsub='true' or a subscriber connector"
            )
        return marked

    def _say(self, line: int, text: str) -> None:
        _log.info("%s, line %d: %s", self._project.file, line, text)


# schemas


def _schema(element: Element) -> Schema:
    text, schema = optional(element, "schema-string"), optional(element, "schema")
    if (text is None) == (schema is None):
        element.refuse("it has a <schema> or a <schema-string>, one of them")
    if schema is None:
        assert text is not None
        return _checked(text, text.text)
    if flag(schema, "copy-keys"):
        schema.refuse("copy-keys is not taken: write the key fields out")
    return _checked(schema, [_field(each) for each in only(schema, "fields").children])


def _field(element: Element) -> Field:
    name, spelt = required(element, "name"), required(element, "type")
    if "," in spelt:
        element.refuse(f"there is no type {spelt!r}")
    return Field(name, _checked(element, f"key*:{spelt}").fields[0].type, flag(element, "key"))


def _checked(element: Element, fields: str | Iterable[Field]) -> Schema:
    try:
        return Schema(fields)
    except SchemaError as e:
        element.refuse(str(e))


def _computed(element: Element, schema: Schema) -> list[tuple[Field, Element]]:
    """Each field that is no key, with the element that computes it: they stand in the same order."""
    output = only(element, "output")
    fields = [field for field in schema.fields if not field.key]
    if len(fields) != len(output.children):
        output.refuse(
            f"there are {len(output.children)} <field-expr> for the {len(fields)} fields that are no keys: "
            + ", ".join(field.name for field in fields)
        )
    return list(zip(fields, output.children, strict=True))


# retention


def _retention(element: Element) -> Retention:
    kinds = "bytime_sliding bytime_jumping bycount_sliding bycount_jumping"
    by, kind = chosen(element, "type", kinds).removeprefix("by").split("_")
    found = _RETENTION.fullmatch(element.text)
    if found is None or (found[2] not in _UNITS if by == "time" else found[2]):
        units = ", ".join(f"{unit}s" for unit in _UNITS)
        wanted = f"a whole number of {units}" if by == "time" else "a number of events"
        element.refuse(f"a retention of this type is {wanted}, not {element.text.strip()[:40]!r}")
    amount = int(found[1]) * _UNITS.get(found[2], 1)
    try:
        return Retention("sliding" if kind == "sliding" else "jumping", "time" if by == "time" else "count", amount,
                         element.attributes.get("field"))  # fmt: skip
    except ConfigError as e:
        element.refuse(str(e))


# expressions


def _expressions(element: Element) -> list[Element]:
    """Those in this window."""
    output = optional(element, "output")
    return element.all("expression") + (output.children if output else [])


def _refuse_expression(element: Element, error: ExpressionError) -> NoReturn:
    element.refuse(str(error), line=(element.text_line or element.line) + error.text.count("\n", 0, error.at))


def _refuse_variables(element: Element) -> None:
    """A window that keeps variables would have a state that no snapshot has."""
    initialize = optional(element, "expr-initialize")
    initializer = optional(initialize, "initializer") if initialize else None
    if initializer is None or not initializer.text.strip():
        return
    for each in [initializer, *_expressions(element)]:
        if clock := _CLOCK.search(each.text):
            each.refuse(
                f"{clock[1]}() reads the wall clock, which differs between members, and so would their output: leave "
                f"the window out, by --without {element.attributes['name']}, or without= in Python",
                line=each.text_line,
            )
    initializer.refuse(
        "variables that are kept from event to event are not taken: leave the window out, or write it in Python",
        line=initializer.text_line,
    )


def _group_function(element: Element) -> Any:
    text = element.text.strip()
    try:
        program = parse(text)
    except ExpressionError as e:
        _refuse_expression(element, e)
    call = program[0].value if len(program) == 1 and isinstance(program[0], Return) else None
    if not isinstance(call, Call) or not call.name.startswith("esp_a"):
        element.refuse(
            "a field of an Aggregate window is one function of the group, such as ESP_aSum(price); what is computed "
            "of its result goes into a Compute window after this one"
        )
    function = _GROUP_FUNCTIONS.get(call.name)
    if function is None:
        element.refuse(f"{text.partition('(')[0]} is not taken; there are {', '.join(GROUP_FUNCTIONS)}")
    names = [each.name for each in call.arguments if isinstance(each, Name)]
    wanted = _ARGUMENTS.get(call.name, 1)
    if len(names) != len(call.arguments) or len(names) != wanted:
        element.refuse(f"{text.partition('(')[0]} takes {wanted} names of fields, not ({text.partition('(')[2]}")
    return function(*reversed(names))  # the weight comes first in SAS, and last here
