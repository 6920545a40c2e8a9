"""Which public models run: of each, a small model of ours with the same elements, and what becomes of it.

The texts of those models are not ours, so none is here. `docs/how-to/bring-a-sas-model.md` says where each is.
"""

import pytest

from esp_pubsub import ModelFileError
from esp_pubsub.windows.sas_xml import read_project

FIELDS = """
<field name='ID' type='int32' key='true'/><field name='symbol' type='string'/><field name='time' type='stamp'/>
<field name='quant' type='int32' key='false'/><field name='price' type='{}'/>
"""
CONNECTORS = """
<connectors><connector class='{}' name='c' type='{}'><properties>
<property name='fstype'><![CDATA[csv]]></property><property name='fsname'>@ESPTESTDATA@/file.csv</property>{}
</properties></connector></connectors>
"""
ORDER = """
<project-connectors><connector-groups><connector-group name='g'>
<connector-entry connector='q/w/c' state='running'/></connector-group></connector-groups></project-connectors>
"""
STEP = "<edge source='s' target='w'/>"


def connector(kind: str, type: str, **properties: str) -> str:
    given = (f"<property name='{name}'>{value}</property>" for name, value in properties.items())
    return CONNECTORS.format(kind, type, "".join(given))


def source(attributes: str = "", inside: str = "", price: str = "double") -> str:
    schema = f"<schema copy-keys='false'><fields>{FIELDS.format(price)}</fields></schema>"
    return f"<window-source name='s' {attributes}>{schema}{inside}</window-source>"


def window(kind: str, inside: str = "", attributes: str = "") -> str:
    return f"<window-{kind} name='w' {attributes}>{inside}</window-{kind}>"


def computed(schema: str, *expressions: str) -> str:
    fields = "".join(f"<field-expr><![CDATA[{each}]]></field-expr>" for each in expressions)
    return f"<schema-string>{schema}</schema-string><output>{fields}</output>"


def engine(*windows: str, edges: str = STEP, after: str = "") -> str:
    """As SAS's examples are written by hand."""
    words = "<description>Some <![CDATA[words]]></description>"
    query = f"{words}<windows>{''.join(windows)}</windows><edges>{words}{edges}</edges>"
    project = f"{words}<contqueries><contquery name='q' trace='w'>{query}</contquery></contqueries>{after}"
    return f"<engine port='5'>{words}<projects><project name='p' threads='8'>{project}</project></projects></engine>"


def studio(*windows: str, edges: str = STEP) -> str:
    """As SAS's Studio writes it."""
    query = f"<windows>{''.join(windows)}</windows><edges><description/>{edges}</edges>"
    return (
        "<project name='p' pubsub='auto' threads='1' heartbeat-interval='1' use-tagged-token='true' luaroot='@HOME@'>"
        "<metadata><meta id='layout'>{}</meta></metadata><contqueries>"
        f"<contquery name='q' include-singletons='true'>{query}</contquery></contqueries></project>"
    )


def retention(at: int, attributes: str, text: str) -> str:
    return f"<window-copy name='w{at}'><retention {attributes}><![CDATA[{text}]]></retention></window-copy>"


READS = connector("fs", "publish", transactional="true", blocksize="1", dateformat="%Y-%m-%d %H:%M:%S")
WRITES = connector("fs", "subscribe", snapshot="true", collapse="true")
LAST = ("ESP_aLast(price)", "ESP_aLast(quant)", "ESP_aAve(price)", "ESP_aMax(quant)")
VARIABLE = "<expr-initialize><initializer type='int32'>integer counter counter=0</initializer></expr-initialize>"
UDFS = "<udfs><udf name='f' type='int32'>return parameter(1)</udf></udfs>"
SLOTS = "<splitter-expr><expression>ID%2</expression></splitter-expr>"

RUN = {
    "copy_with_retention": engine(
        source(inside=READS),
        window("copy", "<retention field='time' type='bytime_sliding'>300 seconds</retention>" + WRITES),
        after=ORDER,
    ),
    "aggregate": studio(
        source("pubsub='true'", READS),
        window("aggregate", computed("symbol*:string,n:int32,m:double", "ESP_aSum(quant)", "ESP_aMax(price)")),
    ),
    "aggregate_last": engine(
        source("insert-only='true'", READS),
        window("aggregate", computed("symbol*:string,a:double,b:int32,c:double,d:int32", *LAST) + WRITES),
    ),
    "orders": engine(source(), window("aggregate", computed("symbol*:string,n:double", "ESP_aSum(quant)"))),
    "compute_exp": engine(
        source(inside=READS),
        window("compute", computed("ID*:int32,name:string,n:int32", "symbol", 'match_string(symbol, "Apex")')),
    ),
    "filter_exp": engine(source(price="money"), window("filter", "<expression>quant > 1000</expression>")),
    "filter_with_expression": engine(
        source(price="money"), window("filter", '<expression>symbol=="update\'s result"</expression>' + WRITES)
    ),
    "log_config": engine(source("index='pi_HASH' collapse-updates='true'"), edges=""),
    "copy": studio(
        source("index='pi_EMPTY'", connector("fs", "publish", rate="1", maxevents="11")),
        retention(1, "type='bytime_sliding'", "5 seconds"),
        retention(2, "type='bytime_sliding' field='time'", "5 seconds"),
        retention(3, "type='bytime_jumping'", "5 seconds"),
        retention(4, "type='bycount_sliding'", "10"),
        retention(5, "type='bycount_jumping'", "10"),
        edges="<edge source='s' target='w1 w2 w3 w4 w5'/>",
    ),
    "routers": studio(
        source("pubsub='true'"), window("compute", computed("ID*:int32,a:string,b:double", "symbol", "price") + WRITES)
    ),
}  # and the published model of trades, without one window: see test_sas_xml


@pytest.mark.parametrize("text", RUN.values(), ids=RUN)
def test_these_public_models_run(text: str) -> None:
    assert read_project(text.encode(), "model.xml")


WINDOWS = (
    "join", "union", "pattern", "functional", "counter", "geofence", "notification", "procedural", "calculate", "score",
    "train", "model-reader", "remove-state", "lua", "python", "custom", "transpose", "textcategory", "statedb-reader",
)  # fmt: skip


@pytest.mark.parametrize("kind", WINDOWS)
def test_models_with_other_windows_are_refused(kind: str) -> None:
    with pytest.raises(ModelFileError, match=f"<window-{kind} name='w'>: .* windows of this kind are not taken"):
        read_project(studio(source(), window(kind)).encode(), "model.xml")


def needs(*windows: str) -> str:
    return studio(source(), *windows)


REFUSED = {
    "compute_exp_udf": (
        needs(window("compute", f"<expr-initialize>{UDFS}</expr-initialize>" + computed("ID*:int32,n:int32", "f(ID)"))),
        "udfs", "write them out",
    ),
    "compute_field_expression": (
        needs(window("compute", VARIABLE)),
        "initializer", "kept from event to event",
    ),
    "slots": (needs(window("compute", SLOTS)), "splitter-expr", "goes to all windows"),
    "filter_on_opcode": (
        needs(window("filter", '<expression>ESP_OPCODE=="I"</expression>')), "expression", "not its opcode"
    ),
    "filter_on_flag": (
        studio(source(inside="<retention type='bycount_sliding'>2</retention>")), "retention", "put a Copy window"
    ),
    "aggregate_func": (
        needs(window("aggregate", "<output><field-plug function='f' plugin='p' additive='true'/></output>")),
        "field-plug", "plug-ins",
    ),
    "aggregate_window": (
        needs(window("aggregate", computed("symbol*:string,n:string", 'ESP_aCat(symbol,",")'))), "field-expr", "aCat"
    ),
    "aggregate_timed": (
        needs(window("aggregate", computed("symbol*:string,n:double", "ESP_aAveTimed(price, 5)"))),
        "field-expr", "ESP_aAveTimed is not taken",
    ),
    "array": (
        studio(source(price="array(dbl)"), window("aggregate", computed("symbol*:string,n:double", "ESP_aAve(price)"))),
        "window-aggregate", "price",
    ),
    "autogen": (studio(source("autogen-key='true'"), edges=""), "window-source", "with their keys"),
    "filter_in_lua": (needs(window("filter", "<use>price</use><code>return true</code>")), "use", "Lua or Python"),
    "websocket": (studio(source(inside=connector("websocket", "publish")), edges=""), "connector", "class websocket"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "element", "says"), REFUSED.values(), ids=REFUSED)
def test_these_public_models_are_refused_by_what_they_need(text: str, element: str, says: str) -> None:
    with pytest.raises(ModelFileError, match=says) as caught:
        read_project(text.encode(), "model.xml")
    assert caught.value.element == element
