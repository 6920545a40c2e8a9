"""What `make docs` adds to the pages: navigation by folder, and the tables that follow from the code.

A mark such as `{{ buses }}` in a page is replaced when the site is built, so a key or a flag is described in one place,
beside the code that reads it. `MADE` has them all.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.cli import get_docs_for_click

from esp_pubsub.cli.app import app
from esp_pubsub.cli.options import AdapterOptions
from esp_pubsub.config import SasOptions
from esp_pubsub.registry import driver, names

SECTIONS = ("Tutorial", "How-to", "Reference", "Explanation", "Decisions")
TYPES = {str: "text", int: "number", float: "number", bool: "true or false", Path: "path"}


def on_config(config: Any) -> None:
    """Every page there is, in the section of its folder."""
    docs = Path(config.docs_dir)
    sections = {name: [str(page.relative_to(docs)) for page in sorted((docs / name.lower()).glob("*.md"))]
                for name in SECTIONS}  # fmt: skip
    sections["Explanation"].append("walk.md")
    config.nav = ["index.md", *({name: pages} for name, pages in sections.items())]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in what follows from the code."""
    for name, make in MADE.items():
        mark = f"{{{{ {name} }}}}"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def buses() -> str:
    """The keys of every bus."""
    return "\n\n".join(f"## {name}\n\n{table(driver(name).Options)}" for name in names())


def commands() -> str:
    """Every command, in its own words."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="esp")
    return text.partition("\n")[2]  # the page has a heading


def table(cls: Any) -> str:
    """The keys of one class of options; without a column of meanings where it has none."""
    meanings, hints = _meanings(cls), get_type_hints(cls)
    rows = [
        [f"`{field.name}`", _type(field, hints[field.name]), _default(field), meanings.get(field.name, "")]
        for field in fields(cls)
    ]
    rows = [["key", "type", "default", "meaning"], ["---"] * 4, *rows]
    return "\n".join(f"| {' | '.join(row[: 4 if meanings else 3])} |" for row in rows)


def _meanings(cls: type) -> dict[str, str]:
    """The texts that stand below the fields of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        field.target.id: " ".join(text.value.value.split()).replace("|", "\\|")
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _type(field: Field[Any], hint: Any) -> str:
    """What may be written there."""
    return field.metadata.get("form") or TYPES[next((t for t in get_args(hint) if t is not type(None)), hint)]


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return inspect.getdoc(field.default_factory).partition(":")[0]
    value, form = field.default, field.metadata.get("form")
    if value is MISSING:
        return "**needed**"
    if value is None or value == "":
        return ""
    if form == "duration":
        return f"`{value:g}s`"
    if form == "size":
        return next(f"`{value >> at}{unit}`" for at, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, ""))
                    if value >> at << at == value and (value or not at))  # fmt: skip
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


MADE = {
    "buses": buses,
    "sas": partial(table, SasOptions),
    "adapter": partial(table, AdapterOptions),
    "commands": commands,
}
