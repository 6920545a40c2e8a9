"""The pages are true: programs run, names exist, commands parse, and the site is built without a warning.

A block that begins with the comment `# name.py` is that file; a page's files stand in one folder and share one private
bus, on which they run together. What is a whole program, because it defines or imports every name that it uses, is run;
tests are run by pytest. A fragment that needs no more than a client, a publisher and what they are given is run with
those; what the pages about drivers and Spark have is run by tests/conformance and tests/spark. A program that needs a
broker stands behind an HTML comment that says which, `<!-- kafka -->`: it is compiled and its names are looked up. In
the same way `<!-- not run -->` in front of a console block lets its commands be; else everything after `$ esp` must
parse, and tests/unit/cli/test_pages.py plays the sessions.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import dataclasses
import importlib
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import typer
from fastapi import FastAPI
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import esp_pubsub as esp
from esp_pubsub import telemetry
from esp_pubsub.cli.app import app
from esp_pubsub.config import load_options
from esp_pubsub.registry import driver
from esp_pubsub.registry import names as buses

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LIMIT = 60.0
ELSEWHERE = {"sample_bus", "pyspark"}  # who imports these is run by tests/conformance and tests/spark
SKETCH = "class Bus(Protocol):"  # the design draws the seam without bodies
SUBJECTS = {"esp": esp, "client": esp.Client, "pub": esp.Publisher, "publisher": esp.Publisher, "sub": esp.Subscriber}
_BLOCK = re.compile(r"(?P<mark><!--[^>]*-->\n+)?^ *```(?P<kind>\w*).*?\n(?P<text>.*?)^ *```", re.S | re.M)
PYTEST = (
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "esp_pubsub.testing.plugin",
)  # fmt: skip
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    kind: str
    text: str
    marked: bool

    @property
    def name(self) -> str | None:
        """The file that it says it is."""
        found = re.match(r"# ([\w.-]+\.\w+)\n", self.text)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start("text")), found["kind"], textwrap.dedent(found["text"]),
              found["mark"] is not None)
        for found in _BLOCK.finditer(text)
    ]  # fmt: skip


ALL = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in ALL if block.kind == "python" and not block.text.startswith(SKETCH)]
CONSOLE = [block for block in ALL if block.kind == "console" and not block.marked]


def parsed(block: Block) -> ast.Module:
    """Fragments may await."""
    compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return ast.parse(block.text, str(block))


def free_names(tree: ast.Module) -> set[str]:
    """Names that are used and nowhere bound."""
    used, bound = set(), {"__name__", "__file__", *dir(builtins)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound.update((alias.asname or alias.name).partition(".")[0] for alias in names)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
    return used - bound


def imports(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return {name.partition(".")[0] for name in found}


def is_program(block: Block) -> bool:
    try:
        tree = parsed(block)
    except SyntaxError:
        return False  # which a test tells
    return not block.marked and bool(imports(tree)) and not free_names(tree) and not imports(tree) & ELSEWHERE


PROGRAMS = {page: found for page in PAGES if (found := [b for b in PYTHON if b.page == page and is_program(b)])}


# names


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_every_name_of_ours_in_an_example_is_there(block: Block) -> None:
    tree = parsed(block)
    assert not (block.name or "asyncio.run(" in block.text) or not free_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("esp_pubsub"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in SUBJECTS:
            assert hasattr(SUBJECTS[node.value.id], node.attr) or node.attr == "schema", ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            check_call(node, node.func)


def check_call(call: ast.Call, called: ast.Attribute) -> None:
    """What is passed to us is what we take."""
    subject = SUBJECTS.get(called.value.id) if isinstance(called.value, ast.Name) else None
    function = getattr(subject, called.attr, None)
    if subject is None or function is None or isinstance(function, property):
        return
    names = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    given: list[Any] = [None] * (len(call.args) + (subject is not esp))
    if any(isinstance(argument, ast.Starred) or ast.unparse(argument) == "..." for argument in call.args):
        return
    bound = inspect.signature(function).bind(*given, **names)
    if function in (esp.init, esp.set_pubsub_lib):
        bus = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else "embedded"
        known = {field.name for field in dataclasses.fields(driver(str(bus)).Options)}
        assert set(bound.arguments.get("settings", {})) <= known, ast.unparse(call)


# programs


class Program:
    """A program of a page in a process of its own. What it prints comes together with its errors."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.command = command
        self._bus = folder / "bus"
        self._output = folder / f"{command[-1]}.out"
        environment = os.environ | {
            "ESP_PUBSUB_DIR": str(self._bus), "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }  # fmt: skip
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "dev", *command], cwd=folder, env=environment,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output.read_text()

    def is_done(self, prints: bool) -> bool:
        """It has ended, or runs on and has shown itself: by what it prints, else by a topic on the bus."""
        shown = self._output.stat().st_size > 0 if prints else any(self._bus.glob("topics/*"))
        return self.process.poll() is not None or (shown and self.command != PYTEST)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path) -> None:
    found = {block.name or f"line{block.line}.py": block for block in PROGRAMS[page]}
    for name, block in {
        block.name: block for block in ALL if block.page == page and block.name
    }.items() | found.items():
        (tmp_path / name).write_text(block.text)
    modules = {f"{module}.py" for block in found.values() for module in imports(parsed(block))}
    prints = {name: "print(" in block.text for name, block in found.items() if name not in modules | {"conftest.py"}}
    if any(name.startswith("test_") for name in prints):
        prints = {name: does for name, does in prints.items() if not name.startswith("test_")}
        prints["pytest"] = True
    programs: dict[str, Program] = {}
    try:
        for name in prints:
            programs[name] = Program(tmp_path, *(PYTEST if name == "pytest" else [name]))
        until, waited_for = time.monotonic() + LIMIT, [name for name in prints if prints[name]] or [*prints]
        while late := [name for name in waited_for if not programs[name].is_done(prints[name])]:
            assert time.monotonic() < until, f"nothing came of {late}"
            time.sleep(0.02)
    finally:
        for program in programs.values():
            program.end()
    for name, program in programs.items():
        assert program.process.returncode in (0, 130, -signal.SIGINT), f"{name}: {program.output}"
        # An interrupt may meet asyncio.run itself, while it ends.
        told = re.sub(r"coroutine 'BaseEventLoop\.\w+' was never awaited", "", program.output)
        assert "never retrieved" not in told and "never awaited" not in told, program.output


# fragments

GIVEN = {"esp", "client", "url", "schema", "pub"}
FRAGMENTS = [b for b in PYTHON if not b.marked and (names := free_names(parsed(b))) and names <= GIVEN]
CFGS = [b for b in ALL if not b.kind and re.match(rf"({'|'.join(buses())})\n?{{?\n", b.text)]


@pytest.mark.parametrize("block", FRAGMENTS, ids=str)
async def test_a_fragment_does_what_it_says(
    block: Block, bus_directory: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    url, schema = "dfESP://test:5555/project/query/window", "id*:int64,symbol:string,price:double"
    monkeypatch.setenv("ESP_PUBSUB_DIR", str(bus_directory / "own"))
    async with (
        esp.init("embedded") as client,
        client.publisher(url + "2", schema, failover=esp.Failover("feed")) as pub,
    ):
        given = {"esp": esp, "client": client, "url": url, "schema": schema, "pub": pub}
        for statement in ast.parse(block.text).body:
            await done(ast.unparse(statement).replace("/var/lib/feeds/bus", str(bus_directory / "other")), given)
    await esp.shutdown()  # forgets what set_pubsub_lib has chosen


async def test_what_the_page_on_telemetry_adds_to_an_application_shows_what_was_counted(bus_directory: Path) -> None:
    page = [block for block in PYTHON if block.page.name == "telemetry.md" and block.name is None]
    web, providers = (block.text for block in page)
    app, reader, spans = FastAPI(), InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader], shutdown_on_exit=False), TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    async with esp.init(dir=bus_directory) as first, esp.init(dir=bus_directory) as second:
        url = "dfESP://test:5555/project/query/window"
        exec(web, {"app": app, "telemetry": telemetry.instrument(first), "client": first, "URL": f"{url}?side=in"})
        given = {"client": second, "meter_provider": meters, "tracer_provider": tracers}
        exec(providers, {"instrument": telemetry.instrument, **given})
        for client in first, second:
            async with client.publisher(url, "id*:int64") as publisher:
                await (await publisher.inject([(1,)]))
        async with first.subscriber(url, side="in", group="billing") as subscriber:
            await anext(subscriber)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as browser:
            answer = await browser.get("/metrics")
    assert answer.headers["content-type"] == telemetry.PROMETHEUS
    assert re.search(r"^esp_publish_blocks_total\{.*\} 1$", answer.text, re.M)
    assert re.search(r'^esp_group_behind\{.*group="billing"\} 2$', answer.text, re.M)
    assert "esp.publish.blocks" in str(reader.get_metrics_data())
    assert "publish test:5555/project/query/window/I" in {span.name for span in spans.get_finished_spans()}
    meters.shutdown()
    tracers.shutdown()


async def done(statement: str, given: dict[str, Any]) -> None:
    """Run a statement; what it opens is entered and closed, and what would go on forever goes on for a moment."""
    is_opening = statement.startswith(("esp.init", "client."))
    result = eval(compile(statement, "", "eval" if is_opening else "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), given)
    if statement.startswith("async for"):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(result, 0.2)
    elif is_opening:
        async with result:
            pass
    elif result is not None:
        await result


@pytest.mark.parametrize("block", CFGS, ids=str)
def test_every_cfg_file_of_the_pages_is_taken(block: Block, tmp_path: Path) -> None:
    bus = block.text.split()[0]
    path = tmp_path / f"{bus}.cfg"
    path.write_text(block.text)
    load_options(driver(bus).Options, section=bus, config=path, keywords={})


# commands and links


def esp_commands(block: Block) -> Iterator[list[str]]:
    """What is given to `esp` in the lines of a shell."""
    for line in re.findall(r"^\$ (.*)", block.text.replace("\\\n", " "), re.M):
        lexer = shlex.shlex(re.sub(r"\s[0-9]>", " >", line), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("|&;<>()"):
                words.append(word)
                continue
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words[:1] == ["esp"]:
                yield words[1:]
            words = []


@pytest.mark.parametrize("block", [block for block in CONSOLE if any(esp_commands(block))], ids=str)
def test_every_command_of_ours_in_an_example_parses(block: Block) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for name, *words in esp_commands(block):
        assert name in group.commands, f"there is no esp {name}"
        if "--help" not in words:
            group.commands[name].make_context(name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    for target, _ in _LINK.findall(prose):
        assert not target or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_in_the_reference() -> None:
    shown = set(re.findall(r"^::: esp_pubsub\.(\w+)$", (ROOT / "docs/reference/api.md").read_text(), re.M))
    errors = {name for name in esp.__all__ if getattr(esp, name).__module__ == "esp_pubsub.errors"}
    assert shown >= set(esp.__all__) - errors


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=80,
    )  # fmt: skip
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    keys = (tmp_path / "site/reference/configuration/index.html").read_text()
    assert all(f"<code>{field.name}</code>" in keys for field in dataclasses.fields(driver("embedded").Options))
    assert "--failover-group" in (tmp_path / "site/reference/cli/index.html").read_text()
