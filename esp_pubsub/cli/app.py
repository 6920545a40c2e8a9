"""The commands and their flags. What they do stands in the modules beside, of which those that take time to load are
loaded when they are asked for.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from .. import ConfigError, EngineOptions, Schema, SchemaError, __version__, address
from ..bus import Start
from . import look
from .options import adapter_options, pairs, settings
from .pub import publish
from .running import EXIT_CODES, run
from .sub import subscribe


class Side(StrEnum):
    """One direction of a window."""

    IN = "in"
    OUT = "out"


class Format(StrEnum):
    """How events are spelt."""

    CSV = "csv"
    JSON = "json"
    BINARY = "binary"


app = typer.Typer(
    help=f"Publish and subscribe event streams from a shell. {EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EXIT_CODES,
)

Url = Annotated[str, typer.Argument(metavar="URL", help="dfESP://host:port/project/contquery/window")]
Bus = Annotated[str, typer.Option(envvar="ESP_PUBSUB_BUS", help="embedded, kafka, rabbitmq ...")]
Config = Annotated[str | None, typer.Option(help="The cfg file of the bus, or the folder it is in.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key of the cfg file; wins.")]
Keys = Annotated[str | None, typer.Option("-C", metavar="KEY=VALUE,...", help="Keys of SAS's adapters; flags win.")]
OfSide = Annotated[Side | None, typer.Option(help="The side of the window.")]
SchemaAndSource = Annotated[
    list[str],
    typer.Argument(
        metavar="[SCHEMA] SOURCE",
        help="SCHEMA is name:type,name:type,... with * behind the name of a key; types: int32, int64, double, "
        "string, rstring, date, stamp, money, blob, array(int32), array(int64), array(double). "
        "SOURCE is a file, - (stdin), :port (wait for a peer) or host:port.",
    ),
]
Spelling = Annotated[
    Format | None,
    typer.Option(
        help="Else as the file's name ends, else csv, as SAS ESP has it, not RFC 4180: blanks behind a delimiter are "
        'passed over, \\" and \\\\ are a quote and a backslash, an empty column is null, 1.50 comes out as 1.5.'
    ),
]
Opcodes = Annotated[bool, typer.Option("--opcodes", help="CSV with the columns opcode and flags in front.")]
Elected = Annotated[str | None, typer.Option(help="log, token ... or zookeeper://host:port; else the bus's own.")]
DateFormat = Annotated[str | None, typer.Option("--dateformat", help="As strptime has it; else integers.")]
Delimiter = Annotated[str | None, typer.Option(help="Of CSV, else a comma.")]
MaxEvents = Annotated[int | None, typer.Option(min=1, help="End after so many.")]


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"esp-pubsub {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which one it is.")]


@app.callback()
def _before_all(version: Version = False) -> None:
    """What stands in front of a command."""


def _run(given: dict[str, Any], keys: str | None, bus_keys: list[str] | None, *, start: str | None = None,
         block: int | None = None) -> None:  # fmt: skip
    async def job() -> None:
        options = adapter_options(pairs(keys), given)
        if options.type == "pub" and options.blocksize is None:
            options = replace(options, blocksize=block)
        options.log()
        if options.type == "sub":
            await subscribe(options, settings(bus_keys or []), _start(start))
        elif options.type == "pub":
            await publish(options, settings(bus_keys or []))
        else:
            raise ConfigError("say -k pub or -k sub")

    run(job)


def _start(text: str | None) -> Start | None:
    if text is None or text in ("earliest", "latest"):
        return text  # type: ignore[return-value]
    if text.isdecimal():
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--start is earliest, latest, a position or a time in ISO form, not {text!r}") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _is_schema(text: str) -> bool:
    try:
        Schema(text)
    except SchemaError:
        return False
    return True


@app.command(epilog=EXIT_CODES)
def pub(  # noqa: PLR0913  # a flag each
    url: Url,
    rest: SchemaAndSource,
    side: OfSide = None,
    format: Spelling = None,
    opcodes: Opcodes = False,
    header: Annotated[str | None, typer.Option(help="So many lines in front to pass over, or `names`.")] = None,
    dateformat: DateFormat = None,
    delimiter: Delimiter = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Events a block: 64 for a file, 1 (as SAS) for what comes bit by bit.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="At most so many events a second.")] = None,
    repeat: Annotated[int | None, typer.Option(min=0, help="Publish the file so many times more.")] = None,
    max_events: MaxEvents = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for what is added, or for the next peer.")] = False,
    ignore_parse_errors: Annotated[
        bool, typer.Option("--ignore-parse-errors", help="Pass over bad lines and count them.")
    ] = False,
    missing_dot: Annotated[bool, typer.Option("--missing-dot", help="A number that is `.` is null.")] = False,
    ignore_unknown: Annotated[bool, typer.Option("--ignore-unknown", help="JSON may have fields of its own.")] = False,
    upsert: Annotated[bool, typer.Option("--upsert", help="Lines without opcode are upserts.")] = False,
    transactional: Annotated[bool, typer.Option("--transactional", help="All events of a block, or none.")] = False,
    failover_group: Annotated[str | None, typer.Option(help="Be a member; the same name on each.")] = None,
    buffer: Annotated[int | None, typer.Option(min=1, help="Blocks a standby keeps (numbufferedmsgs).")] = None,
    election: Elected = None,
    run_number: Annotated[int | None, typer.Option("--run", min=0, help="Of the group; else the current one.")] = None,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
    keys: Keys = None,
) -> None:
    """Publish events from a file, a pipe or a socket.

    Without SCHEMA (id*:int64,symbol:string,price:double) the topic must have one. Without --opcodes each line is the
    fields of one event. A bad line ends it when everything before it is acknowledged. With --failover-group, or with
    hotfailover and failovergroup in the section sas of the cfg file, start it twice: when one dies the other goes on.
    """
    if len(rest) > 2:
        raise typer.BadParameter(f"too many arguments: {' '.join(rest[2:])}")
    if len(rest) == 1 and _is_schema(rest[0]):
        raise typer.BadParameter(f"the source is missing behind {rest[0]}: a file, - (stdin), :port or host:port")
    marks = {} if opcodes else {"addcsvopcode": True, "addcsvflags": "normal"}
    given = {
        "type": "pub", "url": url, "fsname": rest[-1], "schema": rest[0] if len(rest) == 2 else None, "side": side,
        "fstype": format, "header": header, "dateformat": dateformat, "csvfielddelimiter": delimiter,
        "blocksize": block_size, "rate": rate, "repeatcount": repeat, "maxevents": max_events,
        "growinginputfile": follow or None, "ignorecsvparseerrors": ignore_parse_errors or None,
        "missingdot": missing_dot or None, "ignoreunknownfields": ignore_unknown or None,
        "publishwithupsert": upsert or None, "transactional": transactional or None, "failovergroup": failover_group,
        "numbufferedmsgs": buffer, "election": election, "run": run_number, "transport": bus,
        "transportconfigfile": config, **marks,
    }  # fmt: skip
    _run(given, keys, set_)


@app.command(epilog=EXIT_CODES)
def sub(  # noqa: PLR0913
    url: Url,
    target: Annotated[str, typer.Argument(help="A file, - (stdout), :port (wait for a peer) or host:port.")] = "-",
    side: OfSide = None,
    group: Annotated[
        str | None, typer.Option(help="Go on where the group left off; a file is added to, not made anew.")
    ] = None,
    start: Annotated[str | None, typer.Option(help="earliest, latest, a position, or a time in ISO form.")] = None,
    format: Spelling = None,
    opcodes: Opcodes = False,
    header: Annotated[bool, typer.Option("--header", help="A first line that names the columns.")] = False,
    dateformat: DateFormat = None,
    delimiter: Delimiter = None,
    max_events: MaxEvents = None,
    periodicity: Annotated[str | None, typer.Option(help="Begin a new file every so often, such as 60s.")] = None,
    max_file_size: Annotated[str | None, typer.Option(help="Begin a new file before it is larger: 64MiB.")] = None,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
    keys: Keys = None,
) -> None:
    """Write a window's events to a file, a pipe or a socket, until a signal comes.

    The side is out unless you say --side in: without an engine in between, that is where publishers write to. With
    --group a block is confirmed when it is written: what cannot be written is not lost. --max-events ends with the
    block in which the number is reached. Files that are full get a number in front of the suffix.
    """
    marks = {} if opcodes else {"addcsvopcode": True, "addcsvflags": "normal"}
    given = {
        "type": "sub", "url": url, "fsname": target, "side": side, "group": group, "fstype": format,
        "header": "names" if header else None, "dateformat": dateformat, "csvfielddelimiter": delimiter,
        "maxevents": max_events, "periodicity": periodicity, "maxfilesize": max_file_size, "transport": bus,
        "transportconfigfile": config, **marks,
    }  # fmt: skip
    _run(given, keys, set_, start=start)


@app.command(epilog=EXIT_CODES)
def engine(  # noqa: PLR0913
    model: Annotated[str, typer.Argument(metavar="MODEL", help="file.py:Name, module:Name, or SAS's model.xml.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="dfESP://host:port/project/contquery")],
    without: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A window of model.xml that is left out.")
    ] = None,
    snapshots: Annotated[Path | None, typer.Option(help="A directory; a restart goes on from there.")] = None,
    window: Annotated[
        list[str] | None, typer.Option(metavar="NAME=URL", help="A window of the model that is not below URL.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run it twice over what its inputs hold, compare, and end.")
    ] = False,
    buffer: Annotated[int | None, typer.Option(min=1, help="Blocks of each output window that may wait.")] = None,
    snapshot_every: Annotated[float | None, typer.Option(help="Seconds between two snapshots.")] = None,
    written_order: Annotated[
        bool, typer.Option("--written-order", help="Write the order of one log down too.")
    ] = False,
    election: Elected = None,
    run_number: Annotated[int | None, typer.Option("--run", min=0, help="A higher one begins anew.")] = None,
    http: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Show health, figures and windows there.")
    ] = None,
    repeat: Annotated[
        bool, typer.Option("--repeat", help="Begin a new run with the last snapshot of the run before.")
    ] = False,
    to: Annotated[str | None, typer.Option(metavar="VERSION", help="With switch: the version that is to run.")] = None,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
) -> None:
    """Run a model as one member of an engine, until a signal comes.

    Start it twice: one publishes what the model emits, and when it dies the other one goes on. The first signal hands
    over. Instead of a MODEL: `esp engine status URL` shows how far it is, `esp engine stop URL` ends all members with a
    last snapshot, `esp engine switch URL --to VERSION` has another version of the model go on with the same sequence.
    """
    from . import engine as engines

    place = engines.Place(url, dict(_window(each) for each in window or []), bus, config, settings(set_ or []))
    match model:
        case "status":
            run(lambda: engines.show_status(place))
        case "stop":
            run(lambda: engines.stop(place))
        case "switch" if to is None:
            raise typer.BadParameter("switch needs --to VERSION")
        case "switch":
            run(lambda: engines.switch_version(place, str(to), run_number or 0, snapshots))
    named = _model_without(model, without or [])
    given = {
        "buffer": buffer, "snapshot_every": snapshot_every, "election": election, "run": run_number,
        "order": "written" if written_order else None, "repeat": repeat,
    }  # fmt: skip

    async def job() -> None:
        options = EngineOptions(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
        await (engines.check(named, place) if check else engines.run_engine(named, place, snapshots, options, http))

    run(job)


def _model_without(model: str, windows: list[str]) -> str:
    """The name of a model.xml that is to be loaded without some of its windows."""
    if windows and not model.endswith(".xml"):
        raise typer.BadParameter("--without leaves windows out of a model.xml, and of nothing else")
    return f"{model}:without={','.join(windows)}" if windows else model


@app.command(epilog=EXIT_CODES)
def scheduler(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="dfESP://host:port/project/contquery")
    ] = "dfESP://scheduler:5555/scheduler/main",
    snapshots: Annotated[Path | None, typer.Option(help="A directory; a restart goes on from there.")] = None,
    http: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Without it 8080, or a free one if that is taken.")
    ] = None,
    host: Annotated[list[str] | None, typer.Option(help="Call this host, or all below .example.org, only.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Call addresses too that are not public.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Calls at the same time.")] = 100,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
) -> None:
    """Run one process of a scheduler: events and crons at their times, with an HTTP API, until a signal comes.

    Start it twice, on any machine of the bus: kill either one, and nothing is lost or fired twice. What changes
    something needs the token in ESP_PUBSUB_HTTP_TOKEN, if the API is reached from elsewhere.
    """
    from .scheduler import schedule

    place = (url, bus, config, settings(set_ or []))
    run(lambda: schedule(place, snapshots, http, tuple(host or ()), private, concurrency))


@app.command(epilog=EXIT_CODES)
def pass_over(
    url: Annotated[str, typer.Argument(metavar="URL", help="The engine's: dfESP://host:port/project/contquery")],
    step: Annotated[str, typer.Argument(metavar="STEP", help="SOURCE:RUN:ID or timer:TIME:KEY, as the error says.")],
    run_number: Annotated[int, typer.Option("--run", min=0, help="Of the engine.")] = 0,
    snapshots: Annotated[Path | None, typer.Option(help="Of its members, where its order has lost entries.")] = None,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
) -> None:
    """Have an engine pass over a block, or a timer, on which its model raises; then start its members again.

    What the failed step had changed in the state stays changed.
    """
    from . import engine as engines

    run(
        lambda: engines.pass_step_over(
            engines.Place(url, {}, bus, config, settings(set_ or [])), step, run_number, snapshots
        )
    )


def _window(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not name or not equals or not url:
        raise typer.BadParameter(f"a window is NAME=URL, not {text!r}")
    return name, url


@app.command(epilog=EXIT_CODES)
def adapter(
    type: Annotated[str | None, typer.Option("-k", metavar="pub|sub")] = None,
    url: Annotated[str | None, typer.Option("-h", metavar="URL")] = None,
    fsname: Annotated[str | None, typer.Option("-f", metavar="FILE", help="Or :port, or host:port.")] = None,
    fstype: Annotated[str | None, typer.Option("-t", metavar="csv|json|binary")] = None,
    transport: Annotated[str | None, typer.Option("-l", metavar="BUS", help="Without it: the embedded bus.")] = None,
    dateformat: Annotated[str | None, typer.Option("-d", metavar="FORMAT")] = None,
    blocksize: Annotated[int | None, typer.Option("-b", metavar="EVENTS", help="Without it 1.")] = None,
    quiesce: Annotated[
        bool, typer.Option("-Q", help="When all is published, ask the engine behind the bus to work it off.")
    ] = False,
    periodicity: Annotated[str | None, typer.Option("-c", metavar="SECONDS", help="Begin a new file.")] = None,
    keys: Keys = None,
) -> None:
    """SAS's file and socket adapter: the classic flags, and the keys of -C, in which side, schema and group are ours.

    Lines have the columns opcode and flags unless addcsvopcode and addcsvflags say otherwise.
    """
    given = {
        "type": type, "url": url, "fsname": fsname, "fstype": fstype, "transport": transport, "dateformat": dateformat,
        "blocksize": blocksize, "quiesce": quiesce or None, "periodicity": periodicity,
    }  # fmt: skip
    _run(given, keys, None, block=1)


@app.command(epilog=EXIT_CODES)
def topics(bus: Bus = "embedded", config: Config = None, set_: Set = None) -> None:
    """List the topics of a bus: how many messages each holds, its name and its schema."""
    run(lambda: look.topics(bus, config, settings(set_ or [])))


@app.command(epilog=EXIT_CODES)
def tail(
    url: Url,
    side: OfSide = None,
    last: Annotated[int, typer.Option("-n", min=0, help="So many messages.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then those that come.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="And what is in each block: opcodes and values.")] = False,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
) -> None:
    """Show a topic's last messages by their headers: ids, runs, doubles, gaps."""
    wanted = cast("address.Side | None", side)
    run(lambda: look.tail(url, wanted, look.Part(last, follow, rows), bus, config, settings(set_ or [])))


@app.command(epilog=EXIT_CODES)
def top(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="[URL]...", help="These windows alone. A bus without a catalog needs one."),
    ] = None,
    failover_group: Annotated[
        list[str] | None, typer.Option(help="These groups alone. A bus without a catalog needs one.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, as into a pipe.")] = False,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
) -> None:
    """Watch topics, the members and roles of failover groups, rates, and the last failovers.

    On a bus the active member of a group alone speaks: a standby is listed once it has claimed to lead.
    """
    from . import top as watching

    run(lambda: watching.top(urls or [], failover_group or [], once, bus, config, settings(set_ or [])))


@app.command(epilog=EXIT_CODES)
def groups(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="This window alone.")] = None,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
) -> None:
    """List the groups that read: how far behind each is, in messages and in time, and who reads for it since when."""
    run(lambda: look.groups(url, bus, config, settings(set_ or [])))


@app.command(epilog=EXIT_CODES)
def replay(
    url: Annotated[str, typer.Argument(metavar="URL", help="A window of dead letters.")],
    to: Annotated[str | None, typer.Option(metavar="URL", help="Else each block goes where it came from.")] = None,
    group: Annotated[str, typer.Option(help="What it has confirmed is not published again.")] = "replay",
    wait: Annotated[float, typer.Option(help="End when none has come for so many seconds.")] = 5.0,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
) -> None:
    """Publish the blocks again that a handler put into a window of dead letters, to the windows they came from."""
    run(lambda: look.replay(url, to, group, wait, bus, config, settings(set_ or [])))


@app.command(epilog=EXIT_CODES)
def purge(
    url: Url,
    side: OfSide = None,
    schema: Annotated[bool, typer.Option("--schema", help="Forget its schema, too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
) -> None:
    """Empty a window's topics, and begin a new run of its failover groups. End their publishers first."""
    if not yes:
        typer.confirm(f"Everything in {url} goes. Are you sure?", abort=True)
    wanted = cast("address.Side | None", side)
    run(lambda: look.purge(url, wanted, schema, bus, config, settings(set_ or [])))


schemas = typer.Typer(help="The schema of a window, which its first publisher has said.", no_args_is_help=True)
app.add_typer(schemas, name="schema")


@schemas.command(epilog=EXIT_CODES)
def show(url: Url, side: OfSide = None, bus: Bus = "embedded", config: Config = None, set_: Set = None) -> None:
    """Show the schema of a window, of each side that has one."""
    run(lambda: look.show_schema(url, cast("address.Side | None", side), bus, config, settings(set_ or [])))


@schemas.command(epilog=EXIT_CODES)
def forget(
    url: Url,
    side: OfSide = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    bus: Bus = "embedded",
    config: Config = None,
    set_: Set = None,
) -> None:
    """Forget a schema that was wrong: the next publisher says another one. End its publishers and readers first.

    A publisher that is open goes on with the old schema, and under a new one nobody can read its blocks. The same holds
    for blocks that are there already: `esp purge --schema` removes them, too.
    """
    if not yes:
        typer.confirm(f"The schema of {url} is forgotten. Are its publishers ended?", abort=True)
    run(lambda: look.forget_schema(url, cast("address.Side | None", side), bus, config, settings(set_ or [])))


@app.command(epilog=EXIT_CODES)
def doctor(
    bus: Annotated[str | None, typer.Option(help="Look at this one alone.")] = None,
    config: Config = None,
    set_: Set = None,
    solace: Annotated[
        str | None,
        typer.Option("--solace", metavar="URL", help="Say what an administrator of Solace has to make for a window."),
    ] = None,
) -> None:
    """Say what is installed, which bus answers, and what to do about the rest."""
    from . import doctor as looking

    if solace is not None:
        return run(lambda: looking.solace(solace, config, settings(set_ or [])))
    run(lambda: looking.doctor(bus, config, settings(set_ or [])))


@app.command(epilog=EXIT_CODES)
def check_history(files: Annotated[list[Path], typer.Argument(help="Written by esp_pubsub.testing.history.")]) -> None:
    """Judge a history: was anything lost, doubled, reordered or invented?"""

    from . import doctor as looking

    async def job() -> None:
        looking.check_history(files)

    run(job)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def demo(context: typer.Context) -> None:
    """Run your publisher twice, kill either one, and see that nothing is missing.

    `esp demo engine` does so with an engine. `esp demo engine --full` is SAS's experiment, with 1,000,000 trades.
    """
    from .demo import main

    sys.argv = ["esp demo", *context.args]
    raise typer.Exit(main())
