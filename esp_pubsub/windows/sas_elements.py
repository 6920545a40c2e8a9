"""What SAS's model XML may hold here: every element with its attributes, what it may contain, and what is refused.

An attribute or an element that is listed nowhere is refused; one that changes nothing here is reported. So nothing of a
file is passed over in silence. The lists follow what public models use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from .xml_tree import Element


@dataclass(frozen=True, slots=True)
class Kind:
    """An element: the attributes that are read, those that change nothing here, and what may stand in it."""

    read: str = ""
    idle: str = ""
    children: str = ""
    text: bool = False
    anything: bool = False
    """What it holds is for people or for SAS's own tools."""


_WINDOW = "name index pubsub collapse-updates output-insert-only"
_WINDOW_IDLE = "exp-max-string pubsub-index"
_PARTS = "description connectors"

KINDS: Mapping[str, Kind] = {
    "engine": Kind(idle="port", children="description projects"),
    "projects": Kind(children="project description"),
    "project": Kind(
        "name pubsub index",
        "threads heartbeat-interval use-tagged-token luaroot",
        "description metadata properties contqueries project-connectors",
    ),
    "description": Kind(anything=True),
    "metadata": Kind(anything=True),
    "project-connectors": Kind(anything=True),
    "contqueries": Kind(children="contquery"),
    "contquery": Kind("name index", "trace include-singletons", "description metadata windows edges"),
    "windows": Kind(children="description window-source window-copy window-filter window-compute window-aggregate"),
    "window-source": Kind(f"{_WINDOW} insert-only autogen-key", _WINDOW_IDLE, f"{_PARTS} schema schema-string"),
    "window-copy": Kind(_WINDOW, _WINDOW_IDLE, f"{_PARTS} retention"),
    "window-filter": Kind(_WINDOW, _WINDOW_IDLE, f"{_PARTS} expression"),
    "window-compute": Kind(_WINDOW, _WINDOW_IDLE, f"{_PARTS} schema schema-string output expr-initialize"),
    "window-aggregate": Kind(_WINDOW, _WINDOW_IDLE, f"{_PARTS} schema schema-string output expr-initialize"),
    "schema": Kind("copy-keys", children="fields"),
    "fields": Kind(children="field"),
    "field": Kind("name type key"),
    "schema-string": Kind(text=True),
    "retention": Kind("type field", text=True),
    "expression": Kind(text=True),
    "expr-initialize": Kind(children="initializer"),
    "initializer": Kind("type", text=True),
    "output": Kind(children="field-expr"),
    "field-expr": Kind(text=True),
    "connectors": Kind(children="connector"),
    "connector": Kind("class name type active", children="properties"),
    "properties": Kind(children="property"),
    "property": Kind("name", text=True),
    "edges": Kind(children="description edge"),
    "edge": Kind("source target"),
}

ORDERS_ONLY = ("project-connectors",)
"""Says in which order connectors start, which are not started here."""
NOT_COMPUTED = ("description", "metadata", "connectors", *ORDERS_ONLY)
"""What changes nothing of what a model computes."""

REFUSED: Mapping[str, str] = {
    "splitter-expr": "an event goes to all windows after this one: put a Filter window in front of each",
    "splitter-plug": "an event goes to all windows after this one: put a Filter window in front of each",
    "udfs": "functions of one's own are not taken: write them out where they are used",
    "field-plug": "functions of plug-ins are not taken: write the window in Python",
    "plugin": "plug-ins are not taken: write the window in Python",
    "context-plugin": "plug-ins are not taken: write the window in Python",
    "code": "code in Lua or Python is not run from a model file: write the window in Python, as a model of its own",
    "use": "code in Lua or Python is not run from a model file: write the window in Python, as a model of its own",
    "mas-modules": "modules of SAS Micro Analytic Service are not taken: write a model in Python",
    "slot": "an event goes to all windows after this one: put a Filter window in front of each",
    "retention": "put a Copy window with this retention after it",
    "role": "only windows with one input are taken, and those need no role",
    "unit": "retention of type bytime_jumping_lookback is not taken",
    "pulse-interval": "changes go out as they come: leave pulse-interval out",
}
_WINDOWS = "windows of this kind are not taken: leave it out (--without, without=), or write a model in Python"


@dataclass
class Checked:
    """What was found in a file whose elements are all known: what changes nothing, and where that stood first."""

    idle: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """The names, each with its line."""
        return ", ".join(f"{name} (line {line})" for name, line in self.idle.items())

    def check(self, element: Element) -> None:
        """Refuse what is not taken in this element, and in those inside it."""
        kind = KINDS[element.name]
        if kind.anything:
            return
        for name in element.attributes:
            if name in kind.idle.split():
                self.idle.setdefault(f"{name}=", element.line)
            elif name not in kind.read.split():
                element.refuse(f"the attribute {name} is not taken" + _why(name, kind.read))
        if not kind.text and element.text.strip():
            element.refuse("no text may stand here", line=element.text_line)
        for child in element.children:
            if child.name not in kind.children.split():
                child.refuse(f"is not taken inside <{element.name}>" + _why(child.name, kind.children))
            if child.name in ORDERS_ONLY:
                self.idle.setdefault(f"<{child.name}>", child.line)
            self.check(child)


def _why(name: str, known: str) -> str:
    if name in REFUSED:
        return f": {REFUSED[name]}"
    if name.startswith("window-"):
        return f": {_WINDOWS}"
    return f"; known here: {', '.join(known.split())}" if known else ""


# values


def flag(element: Element, name: str, default: bool = False) -> bool:
    """An attribute that is true or false."""
    text = element.attributes.get(name, str(default).lower())
    if text not in ("true", "false"):
        element.refuse(f"{name} is true or false, not {text!r}")
    return text == "true"


def chosen(element: Element, name: str, choices: str, default: str | None = None) -> str:
    """An attribute that is one of several words."""
    text = element.attributes.get(name, default)
    if text is None:
        element.refuse(f"the attribute {name} is missing")
    if text not in choices.split():
        element.refuse(f"{name} is {', '.join(choices.split())}, not {text!r}")
    return text


def required(element: Element, name: str) -> str:
    """An attribute that has to be there."""
    if not element.attributes.get(name):
        element.refuse(f"the attribute {name} is missing")
    return element.attributes[name]


def only(element: Element, name: str) -> Element:
    """The one child of this name."""
    found = optional(element, name)
    if found is None:
        element.refuse(f"<{name}> is missing")
    return found


def optional(element: Element, name: str) -> Element | None:
    """The child of this name, if there is one."""
    found = element.all(name)
    if len(found) > 1:
        found[1].refuse(f"stands twice in <{element.name}>; one is taken" + _SEVERAL.get(name, ""))
    return found[0] if found else None


_SEVERAL = {
    "project": ": an engine runs one project, so make a file of each",
    "contquery": ": an engine runs one continuous query, so make a file of each",
}


_TOKEN = re.compile(r"@(\w+)@")
_MOST_VALUE = 1_000
_MOST_FILLED = 10_000


def fill_in(element: Element, values: Mapping[str, str]) -> None:
    """Put the project's own properties in for `@NAME@`, in this element and in those inside it."""

    def filled(text: str) -> str:
        if not values or "@" not in text:
            return text
        if len(text) <= _MOST_FILLED:
            text = _TOKEN.sub(lambda found: values.get(found[1], found[0]), text)
        if len(text) > _MOST_FILLED:
            element.refuse(f"a text with @properties@ has at most {_MOST_FILLED:,} characters")
        return text

    element.attributes = {name: filled(text) for name, text in element.attributes.items()}
    element.text = filled(element.text)
    for child in element.children:
        fill_in(child, values)


def digest(project: Element) -> str:
    """The same for two projects that say the same of what is computed, and hardly ever for others."""
    said = blake2b(digest_size=8)
    rest = [project]
    while rest:
        element = rest.pop()
        idle = KINDS[element.name].idle.split()
        named = sorted((name, value) for name, value in element.attributes.items() if name not in idle)
        children = [each for each in element.children if each.name not in NOT_COMPUTED]
        said.update(repr((element.name, named, element.text.strip(), len(children))).encode())
        rest += children
    return said.hexdigest()


def properties_of(element: Element) -> dict[str, str]:
    """The properties that stand in <properties> in this element, by name."""
    found: dict[str, str] = {}
    properties = optional(element, "properties")
    for each in properties.children if properties else ():
        name, value = required(each, "name"), each.text.strip()
        if name in found:
            each.refuse("the property stands twice")
        if len(value) > _MOST_VALUE:
            each.refuse(f"a property has at most {_MOST_VALUE:,} characters")
        found[name] = value
    return found
