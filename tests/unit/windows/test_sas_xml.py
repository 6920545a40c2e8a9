"""SAS's model XML: what becomes of it, and that what is not taken is refused by name, with its line."""

import logging
import re
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from esp_pubsub import ConfigError, EspError, ModelFileError
from esp_pubsub.engine.loading import load_model
from esp_pubsub.engine.model import declared
from esp_pubsub.testing import check_model, run_model
from esp_pubsub.windows.sas_elements import KINDS
from esp_pubsub.windows.sas_xml import load_project, read_project

TRADES = Path(__file__).with_name("trades.xml")
MODEL = """\
<project name="p" threads="2">
 <properties><property name="LIMIT">100</property></properties>
 <contqueries><contquery name="q">
  <windows>
   <window-source name="Trades" insert-only="true">
    <schema><fields>
     <field name="id" type="int64" key="true"/>
     <field name="symbol" type="string"/>
     <field name="price" type="double"/>
     <field name="qty" type="int32"/>
     <field name="at" type="stamp"/>
    </fields></schema>
   </window-source>
   <window-filter name="Large">
    <expression><![CDATA[qty >= @LIMIT@ and
       symbol != 'IBM']]></expression>
   </window-filter>
   <window-compute name="Cost">
    <schema-string>id*:int64,symbol:string,cost:double,large:int32,at:stamp</schema-string>
    <output>
     <field-expr>symbol</field-expr>
     <field-expr>price * qty</field-expr>
     <field-expr>qty >= 1000</field-expr>
     <field-expr>at</field-expr>
    </output>
   </window-compute>
   <window-copy name="Hour">
    <retention type="bytime_sliding" field="at">1 hours</retention>
   </window-copy>
   <window-aggregate name="Totals">
    <schema-string>symbol*:string,cost:double,n:int64</schema-string>
    <output>
     <field-expr>ESP_aSum(cost)</field-expr>
     <field-expr>ESP_aCount()</field-expr>
    </output>
   </window-aggregate>
  </windows>
  <edges>
   <edge source="Trades" target="Large"/>
   <edge source="Large" target="Cost"/>
   <edge source="Cost" target="Hour"/>
   <edge source="Hour" target="Totals"/>
  </edges>
 </contquery></contqueries>
</project>
"""
VARIABLE = "<expr-initialize><initializer type='int32'>integer n; n=0</initializer></expr-initialize>"
CONNECTORS = """<connectors><connector class="{}" name="c"><properties>{}</properties></connector></connectors>"""


def changed(old: str, new: str, text: str = MODEL) -> str:
    assert old in text
    return text.replace(old, new, 1)


def read(text: str | bytes, without: Any = ()) -> Any:
    return read_project(text.encode() if isinstance(text, str) else text, "model.xml", without)


def connector(kind: str, **properties: str) -> str:
    """The model with a connector in its Aggregate window."""
    given = "".join(f'<property name="{name}">{value}</property>' for name, value in properties.items())
    return changed("  </windows>", "", changed(
        "</output>\n   </window-aggregate>", f"</output>{CONNECTORS.format(kind, given)}</window-aggregate></windows>"
    ))  # fmt: skip


# what is taken


def test_a_model_computes_what_its_file_says() -> None:
    project = read(MODEL)
    model, _ = declared(project)
    assert {name: str(schema) for name, schema in model.outputs.items()}[
        "Totals"
    ] == "symbol*:string,cost:double,n:int64"
    assert list(model.inputs) == ["Trades"]
    rows = [(1, "IBM", 1.0, 500, 0), (2, "SAS", 2.0, 1_000, 0), (3, "SAS", 4.0, 99, 0), (4, "SAS", None, 100, 1)]
    blocks = run_model(project, [("Trades", rows)])
    assert [block.rows() for block in blocks["Cost"]] == [
        [(2, "SAS", 2_000.0, 1, 0), (4, "SAS", None, 0, 1)],
    ]
    assert [block.rows() for block in blocks["Totals"]] == [[("SAS", 2_000.0, 2)]]


def test_the_published_model_runs_without_the_window_that_reads_the_clock() -> None:
    with pytest.raises(ModelFileError, match="reads the wall clock") as caught:
        load_project(TRADES)
    assert (caught.value.line, caught.value.element) == (44, "initializer")
    assert "--without comp_win" in str(caught.value)
    project = load_project(TRADES, without=("comp_win",))
    assert set(declared(project)[0].outputs) == {"aggW5minRet", "aggW1hourRet", "aggW24hourRet"}
    source = project._nodes[0].window
    assert (source.insert_only, source.indexed) == (True, False)
    trades = [(1, 10.0, 1, 0), (2, 20.0, 3, 299), (3, 30.0, 2, 300)]
    rows = [(id, "IBM", 1, 1, 1, price, quantity, 1, 1, 1, 1, 1, at * 1_000_000) for id, price, quantity, at in trades]
    blocks = run_model(project, [("source_win", [row]) for row in rows])
    assert blocks["aggW5minRet"][-1].rows()[0] == ("IBM", 24.0, 20.0, 30.0, 5.0)  # the first one has just gone
    assert blocks["aggW1hourRet"][-1].rows()[0][1] == (10 + 60 + 60) / 6


def test_a_model_of_a_file_has_a_name_for_command_lines() -> None:
    assert declared(load_model(f"{TRADES}:without=comp_win"))[0].inputs.keys() == {"source_win"}
    with pytest.raises(ModelFileError, match="wall clock"):
        load_model(str(TRADES))
    rows = [(number, f"S{number % 3}", 1, 1, 1, number / 3, number, 1, 1, 1, 1, 1, number * 60_000_000)
            for number in range(40)]  # fmt: skip
    assert check_model(f"{TRADES}:without=comp_win", [("source_win", [row]) for row in rows]) == 120


@pytest.mark.parametrize(
    ("mode", "marks", "outputs"),
    [
        ("", "", {"Trades", "Large", "Cost", "Hour", "Totals"}),
        ("auto", ' pubsub="false"', {"Trades", "Large", "Cost", "Hour", "Totals"}),
        ("manual", ' pubsub="true"', {"Cost"}),
    ],
)
def test_the_outputs_are_what_the_file_publishes(mode: str, marks: str, outputs: set[str]) -> None:
    text = changed('<window-compute name="Cost"', f'<window-compute name="Cost"{marks}')
    if mode:
        text = changed('threads="2"', f'threads="2" pubsub="{mode}"', text)
    assert set(declared(read(text))[0].outputs) == outputs
    assert set(declared(read(connector("fs", type="sub", fsname="out.csv")))[0].outputs) == {"Totals"}


def test_the_version_changes_with_what_is_computed_and_with_nothing_else() -> None:
    def version(old: str, new: str) -> str:
        return declared(read(changed(old, new)))[0].version

    same = declared(read(MODEL))[0].version
    for old, new in [('threads="2"', 'threads="9"'), ("<windows>", "<!-- all --><windows><description>!</description>"),
                     ("<field-expr>symbol<", "<field-expr>\n symbol\n<")]:  # fmt: skip
        assert version(old, new) == same
    for old, new in [("1 hours", "2 hours"), ("price * qty", "qty * price"), ('key="true"', 'key="true" '),
                     ("aSum", "aMax"), (' insert-only="true"', "")]:  # fmt: skip
        assert (version(old, new) == same) == (new.strip() == old)


@pytest.mark.parametrize(
    ("type", "text", "expected"),
    [
        ("bytime_sliding", "300 seconds", ("sliding", "time", 300_000_000)),
        ("bytime_sliding", " 1 second ", ("sliding", "time", 1_000_000)),
        ("bytime_jumping", "30 minutes", ("jumping", "time", 1_800_000_000)),
        ("bytime_jumping", "4 days", ("jumping", "time", 345_600_000_000)),
        ("bytime_sliding", "200 milliseconds", ("sliding", "time", 200_000)),
        ("bycount_sliding", "1000", ("sliding", "count", 1_000)),
        ("bycount_jumping", " 10\n", ("jumping", "count", 10)),
    ],
)
def test_retentions_are_read(type: str, text: str, expected: tuple[str, str, int]) -> None:
    project = read(changed('type="bytime_sliding" field="at">1 hours', f'type="{type}">{text}'))
    found = next(node.window.retention for node in project._nodes if node.name == "Hour")
    assert (found.kind, found.by, found.amount, found.field) == (*expected, None)


def test_every_function_of_a_group_is_read() -> None:
    functions = ["ESP_aSum(qty)", "ESP_aCount( )", "ESP_aMin(price)", "esp_amax(price)", "ESP_aAve(price)",
                 "ESP_aWAve(qty, price)", "ESP_aStd(price)", "ESP_aFirst(symbol)", "ESP_aLast(`at`)"]  # fmt: skip
    types = ["double", "int64", "double", "double", "double", "double", "double", "string", "stamp"]
    fields = "".join(f",f{at}:{kind}" for at, kind in enumerate(types))
    made = "".join(f"<field-expr>{each}</field-expr>" for each in functions)
    text = re.sub(r"<schema-string>symbol.*?</output>", f"<schema-string>symbol*:string{fields}</schema-string>"
                  f"<output>{made}</output>", MODEL, flags=re.DOTALL)  # fmt: skip
    project = read(changed('source="Hour" target="Totals"', 'source="Trades" target="Totals"', text))
    blocks = run_model(project, [("Trades", [(1, "A", 10.0, 1, 5), (2, "A", 20.0, 3, 7)])])
    assert blocks["Totals"][0].rows() == [("A", 4.0, 2, 10.0, 20.0, 15.0, 17.5, 5.0, "A", 7)]


def test_an_edge_may_name_several_windows() -> None:
    text = changed('source="Cost" target="Hour"', 'source="Cost" target=" Hour  Totals"')
    text = changed('   <edge source="Hour" target="Totals"/>\n', "", text)
    assert [node.before and node.before.name for node in read(text)._nodes] == [None, "Trades", "Large", "Cost", "Cost"]


def test_nothing_is_passed_over_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "esp_pubsub.windows")
    text = connector("rmq", type="sub", urlhostport="h:1", hotfailover="true", numbufferedmsgs="500", rmqtype="binary")
    text = changed(
        'insert-only="true"', 'index="pi_EMPTY"', changed("</contqueries>", "</contqueries><project-connectors/>", text)
    )
    text = changed("</schema>\n   </window-source>", "</schema>" + CONNECTORS.format(
        "fs", '<property name="type">pub</property><property name="fsname">a b.csv</property>'
        '<property name="blocksize">1</property><property name="header">1</property>'
    ) + "</window-source>", text)  # fmt: skip
    project = read(text)
    said = "\n".join(caplog.messages)
    assert f"version {declared(project)[0].version} of its model" in said
    for each in ("threads= (line 1)", "<project-connectors>", "takes inserts only", "--buffer 500", "--bus rabbitmq",
                 "esp adapter -k pub -h URL/Trades -f 'a b.csv' -t csv -b 1 -C header=1"):  # fmt: skip
        assert each in said


def test_a_connector_that_is_not_active_does_nothing() -> None:
    text = changed('name="c"', 'name="c" active="false"', connector("lua", type="sub"))
    assert "Trades" in declared(read(text))[0].outputs


# what is refused


BAD: list[tuple[str, int, str, str]] = [
    # no XML
    ("", 1, "", "this is no XML: no element found"),
    ("{}", 1, "", "this is no XML"),
    ("<project>", 1, "project", "this is no XML: no element found"),
    ("<project></q>", 1, "project", "mismatched tag"),
    ('<project a="1" a="2"/>', 1, "", "duplicate attribute"),
    ("<project>&nbsp;</project>", 1, "project", "undefined entity"),
    ("<project/><project/>", 1, "", "junk after document element"),
    ('<?xml version="1.0" encoding="klingon"?><project/>', 1, "", "this is no XML"),
    ("<!DOCTYPE project><project/>", 1, "", "no <!DOCTYPE>"),
    ('\n<!DOCTYPE p [<!ENTITY a "b">]><project>&a;</project>', 2, "", "no <!DOCTYPE>"),
    ('<!DOCTYPE p SYSTEM "file:///etc/passwd"><project/>', 1, "", "no <!DOCTYPE>"),
    ("<?xml-stylesheet href='a'?><project/>", 1, "", "processing instructions"),
    ("<model/>", 1, "model", "begins with <engine> or <project>"),
    ("<a>" * 100, 1, "a", "more than 64 deep"),
    ("<project>" + "<a/>" * 100_001 + "</project>", 1, "project", "more than 100,000 elements"),
    ("<project>" + " " * (4 << 20), 1, "", "at most 4,194,304"),
    # elements and attributes
    ("<project/>", 1, "project", "<contqueries> is missing"),
    ("<engine><projects/></engine>", 1, "projects", "<project> is missing"),
    ("<engine><projects><project/><project/></projects></engine>", 1, "project", "make a file of each"),
    (changed("</contquery>", '</contquery><contquery name="r"/>'), 44, "contquery", "make a file of each"),
    (changed("<windows>", "<windows>text"), 4, "windows", "no text may stand here"),
    (changed("<windows>", '<windows><window-join name="J"/>'), 4, "window-join", "windows of this kind"),
    (changed("<windows>", "<windows><window/>"), 4, "window", "known here: description, window-source"),
    (changed('insert-only="true"', 'isert-only="true"'), 5, "window-source", "isert-only is not taken; known here"),
    (changed('insert-only="true"', 'insert-only="yes"'), 5, "window-source", "true or false, not 'yes'"),
    (changed('insert-only="true"', 'index="pi_FAST"'), 5, "window-source", "not 'pi_FAST'"),
    (changed('insert-only="true"', 'autogen-key="true"'), 5, "window-source", "with their keys"),
    (changed('insert-only="true"', 'pulse-interval="1 second"'), 5, "window-source", "leave pulse-interval out"),
    (changed('name="Cost"', 'name="Cost" output-insert-only="true"'), 18, "window-compute", "leave it out"),
    (changed("   <window-filter", "<window-filter/><window-filter"), 14, "window-filter", "name is missing"),
    (changed('name="Large"', 'name="Trades"'), 14, "window-filter", "another window of this name in line 5"),
    (changed('"Large">', '"a.b">').replace('"Large"', '"a.b"'), 14, "window-filter", "no name of a window"),
    (changed("</schema>", "</schema><retention type='bycount_sliding'>1</retention>"), 12, "retention", "put a Copy"),
    (changed("<output>", "<splitter-expr/><output>"), 20, "splitter-expr", "Filter window"),
    (changed("<output>", "<code>return 1</code><output>"), 20, "code", "Lua or Python"),
    # schemas
    (changed("int64", "integer"), 7, "field", "unknown type 'integer'"),
    (changed('type="int64" key', 'type="int64,b:int32" key'), 7, "field", "no type"),
    (changed(' key="true"', ""), 6, "schema", "no field is a key"),
    (changed('name="qty"', 'name="price"'), 6, "schema", "stands twice"),
    (changed("<schema>", '<schema copy-keys="true">'), 6, "schema", "write the key fields out"),
    (changed("<schema>", "<schema-string>a*:int32</schema-string><schema>"), 5, "window-source", "one of them"),
    (changed("cost:double,large", "cost:dubble,large"), 19, "schema-string", "did you mean double"),
    (changed("symbol*:string", "symbol*:int32"), 30, "window-aggregate", "the key 'symbol' is int32, and string"),
    (changed("symbol*:string", "sy*:string"), 30, "window-aggregate", "there is no field 'sy'"),
    (changed("cost:double,n", "cost:string,n"), 30, "window-aggregate", "its function computes double"),
    # retention
    (changed("1 hours", "1"), 28, "retention", "a whole number of microseconds"),
    (changed("1 hours", "-1 hours"), 28, "retention", "not '-1 hours'"),
    (changed("1 hours", "1 weeks"), 28, "retention", "days, not '1 weeks'"),
    (changed("1 hours", "0 hours"), 28, "retention", "not 0"),
    (changed("1 hours", "9" * 15 + " days"), 28, "retention", "amount of a retention"),
    (changed("1 hours", "9" * 10_000 + " days"), 28, "retention", "a whole number"),
    (changed("bytime_sliding", "bytime_gliding"), 28, "retention", "bytime_sliding, bytime_jumping"),
    (changed("bytime_sliding", "bycount_sliding"), 28, "retention", "a number of events"),
    (changed('bytime_sliding" field="at">1 hours', 'bycount_sliding">10s'), 28, "retention", "not '10s'"),
    (changed('bytime_sliding" field="at">1 hours', 'bycount_sliding" field="at">10'), 28, "retention", "no field"),
    (changed('field="at">1 hours', 'unit="hour">1'), 28, "retention", "lookback"),
    (changed('field="at"', 'field="when"'), 27, "window-copy", "no field 'when'"),
    (changed('field="at"', 'field="cost"'), 27, "window-copy", "has to be a stamp or a date"),
    (changed('"Hour">', '"Hour" index="pi_EMPTY">'), 27, "window-copy", "retains nothing"),
    # expressions
    (changed("symbol != 'IBM'", "symbol != "), 16, "expression", "the expression ends"),
    (changed("symbol != 'IBM'", "symbul != 'IBM'"), 16, "expression", "did you mean symbol"),
    (changed("symbol != 'IBM'", "symbol"), 16, "expression", "neither true nor false"),
    (changed("qty >= @LIMIT@ and\n       symbol != 'IBM'", "symbol"), 15, "expression", "a condition is a boolean"),
    (changed("price * qty", "price * symbol"), 22, "field-expr", "takes numbers, not values of type string"),
    (changed("price * qty", "symbol"), 22, "field-expr", "of type double does not take"),
    (changed("price * qty", "price * volume"), 22, "field-expr", "no field volume"),
    (changed("price * qty", ""), 22, "field-expr", "no expression"),
    (changed("price * qty", "today()"), 22, "field-expr", "reads the clock"),
    (changed("price * qty", "n = n + 1 return n"), 22, "field-expr", "keeps no variable"),
    (changed("price * qty", "ESP_aSum(price)"), 22, "field-expr", "aggregate function"),
    (changed("@LIMIT@", "@LIMITS@"), 15, "expression", "means nothing"),
    (changed("@LIMIT@", "@LIMIT@" * 2_000), 15, "expression", "a text with @properties@"),
    (changed(">100<", ">" + "1" * 2_000 + "<"), 2, "property", "at most 1,000 characters"),
    (changed("<field-expr>at</field-expr>", ""), 20, "output", "3 <field-expr> for the 4 fields that are no keys"),
    (changed("<output>", f"{VARIABLE}<output>"), 20, "initializer", "kept from event to event"),
    (changed("<output>", "<expr-initialize><udfs/></expr-initialize><output>"), 20, "udfs", "write them out"),
    # functions of a group
    (changed("ESP_aSum(cost)", "ESP_aSum(cost) / 2"), 33, "field-expr", "into a Compute window"),
    (changed("ESP_aSum(cost)", "cost"), 33, "field-expr", "one function of the group"),
    (changed("ESP_aSum(cost)", "ESP_aLag(cost, 1)"), 33, "field-expr", "ESP_aLag is not taken; there are ESP_aCount"),
    (changed("ESP_aSum(cost)", "ESP_aSum(cost * 2)"), 33, "field-expr", "takes 1 names of fields"),
    (changed("ESP_aSum(cost)", "ESP_aSum()"), 33, "field-expr", "takes 1 names of fields"),
    (changed("ESP_aSum(cost)", "ESP_aSum(cost"), 33, "field-expr", "is expected here"),
    (changed("ESP_aSum(cost)", "ESP_aSum(costs)"), 30, "window-aggregate", "no field 'costs'"),
    (changed("ESP_aSum(cost)", "ESP_aSum(symbol)"), 30, "window-aggregate", "symbol"),
    (changed('"Totals">', '"Totals" index="pi_EMPTY">'), 30, "window-aggregate", "holds its groups"),
    # edges
    (changed('target="Large"', 'target="Large Lagre"'), 39, "edge", "there is no window Lagre; there are Trades"),
    (changed('source="Trades" target="Large"', 'source="Trades"'), 39, "edge", "target is missing"),
    (changed('target="Large"', 'target="Large" slot="0"'), 39, "edge", "slot is not taken: an event goes to all"),
    (changed('target="Large"', 'target="Large" role="data"'), 39, "edge", "role is not taken"),
    (changed('source="Trades"', 'source="Totals"'), 14, "window-filter", "circle"),
    (changed('target="Large"', 'target="Trades"'), 5, "window-source", "is a source, and an edge leads to it"),
    (changed('   <edge source="Cost" target="Hour"/>\n', ""), 27, "window-copy", "no edge leads to window Hour"),
    (changed('source="Hour" target="Totals"', 'source="Hour" target="Cost"'), 18, "window-compute", "two edges lead"),
    (re.sub("<edges>.*</edges>", "", MODEL, flags=re.DOTALL), 14, "window-filter", "no edge leads"),
    # connectors
    (connector("mqtt", type="pub"), 35, "connector", "class mqtt are not taken"),
    (connector("fs", fsname="a.csv"), 35, "connector", "type is pub or sub, and it is missing"),
    (connector("fs", type="both", fsname="a.csv"), 35, "connector", "not 'both'"),
    (connector("fs", type="pub"), 35, "connector", "fsname is missing"),
    (connector("fs", type="pub", fsname="a", fstype="xml"), 35, "connector", "files of type xml"),
    (connector("fs", type="pub", fsname="a", speed="9"), 35, "connector", "the property speed is not taken"),
    (connector("kafka", type="sub", kafkapartition="-1"), 35, "connector", "one fixed partition"),
    (connector("kafka", type="sub", kafkatype="csv"), 35, "connector", "make kafkatype binary"),
    (connector("rmq", type="sub", rmqtype="json"), 35, "connector", "make rmqtype binary"),
    (connector("rmq", type="sub", hotfailover="maybe"), 35, "connector", "hotfailover is true or false"),
    (connector("rmq", type="sub", numbufferedmsgs="many"), 35, "connector", "at least 1, not 'many'"),
    (changed(' class="fs"', "", connector("fs", type="sub", fsname="a")), 35, "connector", "class is missing"),
    (changed('<property name="type">', '<property name="type">pub</property><property name="type">',
             connector("fs", type="sub", fsname="a")), 35, "property", "stands twice"),
    (changed('threads="2"', 'pubsub="manual"'), 1, "project", "nothing is published"),
    (changed('threads="2"', 'pubsub="never"'), 1, "project", "auto, manual, none"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "element", "says"), BAD, ids=[f"{each[2]}-{each[3]}" for each in BAD])
def test_what_is_not_taken_is_refused_with_its_line(text: str, line: int, element: str, says: str) -> None:
    with pytest.raises(ModelFileError, match=says) as caught:
        read(text)
    assert (caught.value.file, caught.value.line, caught.value.element) == ("model.xml", line, element)
    assert "model.xml" in str(caught.value)


def test_an_error_is_no_longer_than_one_can_read() -> None:
    for text in (changed('name="Large"', f'name="Large" pubsub="{"x" * 100_000}"'), f"<{'x' * 100_000}/>",
                 changed('name="Large"', f'name="{"x" * 100_000}"')):  # fmt: skip
        with pytest.raises(ModelFileError) as caught:
            read(text)
        assert len(str(caught.value)) < 1_500


def test_what_is_left_out_has_to_be_there_and_nothing_may_need_it() -> None:
    assert "Totals" not in declared(read(MODEL, ["Totals"]))[0].outputs
    assert set(declared(read(MODEL, ["Cost", "Hour", "Totals"]))[0].outputs) == {"Trades", "Large"}
    with pytest.raises(ConfigError, match="'Total' cannot be left out: the model has the windows Trades, Large"):
        read(MODEL, ["Total"])
    with pytest.raises(ModelFileError, match="Totals takes the events of Hour, which is left out") as caught:
        read(MODEL, ["Hour"])
    assert caught.value.line == 42


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none\.xml cannot be read"):
        load_project(tmp_path / "none.xml")
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_project(tmp_path)


# anything at all


NAMES = st.sampled_from([*KINDS, "window-join", "splitter-expr", "x"])
WORDS = st.sampled_from(["true", "false", "", "Trades", "sub", "pub", "fs", "kafka", "int64", "id", "1 hours",
                         "bytime_sliding",
                         "id*:int64,a:double", "ESP_aSum(a)", "a > 1", "@LIMIT@", "&amp;", "&#0;", "é"])  # fmt: skip
ATTRIBUTES = st.dictionaries(
    st.sampled_from(sorted({name for kind in KINDS.values() for name in kind.read.split()})), WORDS, max_size=4
)


def element(name: str, attributes: dict[str, str], inner: str) -> str:
    given = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<{name}{given}>{inner}</{name}>"


TREES = st.recursive(
    st.builds(element, NAMES, ATTRIBUTES, WORDS),
    lambda inner: st.builds(element, NAMES, ATTRIBUTES, st.lists(inner, max_size=3).map("".join)),
    max_leaves=12,
)


INSIDE = TREES.map(lambda tree: f"<project><contqueries>{tree}</contqueries></project>".encode())


@st.composite
def edited(draw: st.DrawFn) -> bytes:
    """A model with a few pieces moved, doubled, lost or replaced."""
    data = draw(st.sampled_from([MODEL, TRADES.read_text()])).encode()
    for _ in range(draw(st.integers(1, 3))):
        at, length, to = (draw(st.integers(0, len(data))) for _ in range(3))
        piece = draw(
            st.sampled_from([data[at : at + length % 60], b"", b"<", b"\x00", b"\xff", b"<!--", b"]]>", b"&a;"])
        )
        data = data[:to] + piece + data[to + draw(st.integers(0, 40)) :]
    return data


@settings(max_examples=150, deadline=None)
@given(edited() | INSIDE | TREES.map(str.encode) | st.binary(max_size=200))
@example(b"<!DOCTYPE a [" + b'<!ENTITY a "' + b"a" * 100_000 + b'">]><project/>')
@example(b"<project>" * 50_000)
@example(b"<project " + b" ".join(b'a%d="1"' % at for at in range(50_000)) + b"/>")
@example(b"<project>" + b"\n" * 1_000_000 + b"</project>")
@example(changed("price * qty", "(" * 9_000).encode())
@example(changed("price * qty", " or ".join(["qty"] * 2_000)).encode())
@example(changed("1 hours", "1" + " " * 100_000 + "hours").encode())
@example(
    changed(
        "<windows>",
        "<windows>"
        + "".join(f'<window-filter name="f{at}"><expression>qty</expression></window-filter>' for at in range(300)),
    )
    .replace(
        "</edges>",
        "".join(f'<edge source="{f"f{at - 1}" if at else "Trades"}" target="f{at}"/>' for at in range(300))
        + "</edges>",
    )
    .encode()
)
def test_any_bytes_are_a_project_or_refused_by_name_and_soon(data: bytes) -> None:
    begun = process_time()
    try:
        read(data)
    except EspError as e:
        assert isinstance(e, ModelFileError), repr(e)
    assert process_time() - begun < 10  # a bound on what grows without one, not a speed
