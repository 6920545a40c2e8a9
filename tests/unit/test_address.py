"""dfESP URLs, what they print as, and the names that come from them."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_pubsub.address import (
    Address,
    AddressOptions,
    is_control,
    kafka_topic,
    order_topic,
    other_side,
    tervela_topic,
)
from esp_pubsub.errors import AddressError, NotOffered

TRADES = Address("trades", 5555, "market", "cq", "TradesSource")

READ_AND_PRINTED = [
    ("dfESP://trades:5555", Address("trades", 5555)),
    ("dfESP://trades:5555/market", Address("trades", 5555, "market")),
    ("dfESP://trades:5555/market/cq", Address("trades", 5555, "market", "cq")),
    ("dfESP://trades:5555/market/cq/TradesSource", TRADES),
    ("dfESP://Host-1.na_x.example.com:1/A-b/c_d/0", Address("Host-1.na_x.example.com", 1, "A-b", "c_d", "0")),
    ("dfESP://[::1]:65535/p/q/w", Address("[::1]", 65535, "p", "q", "w")),
    ("dfESP://h:1?get=projects", Address("h", 1, options=AddressOptions(get="projects"))),
    ("dfESP://h:1/p?get=windows_sourceonly", Address("h", 1, "p", options=AddressOptions(get="windows_sourceonly"))),
    (
        "dfESP://h:1/p/q/w?collapse=true?rmretdel=true?side=in?get=schema",
        Address("h", 1, "p", "q", "w", AddressOptions(collapse=True, rmretdel=True, side="in", get="schema")),
    ),
]

ALSO_READ = [
    ("dfESP://h:1/p/q/w?snapshot=false", "dfESP://h:1/p/q/w"),
    ("dfESP://h:1/p/q/w?snapshot=false?collapse=true", "dfESP://h:1/p/q/w?collapse=true"),
    ("dfESP://h:1/p/q/w?rmretdel=true&collapse=true", "dfESP://h:1/p/q/w?collapse=true?rmretdel=true"),
    ("dfESP://h:1/p/q/w?side=out&collapse=false?rmretdel=false", "dfESP://h:1/p/q/w?side=out"),
]

SLIPS = [
    ("", "scheme", "dfESP://host:port"),
    ("h:1/p/q/w", "scheme", "dfESP://host:port"),
    ("http://h:1/p/q/w", "scheme", "dfESP://host:port"),
    ("dfesp://h:1/p/q/w", "scheme", "exactly this case"),
    ("dfESP:/h:1/p/q/w", "scheme", "dfESP://host:port"),
    ("dfESP://", "port", "is missing"),
    ("dfESP://h", "port", "is missing"),
    ("dfESP://h/p/q/w", "port", "is missing"),
    ("dfESP://h:/p/q/w", "port", "is missing"),
    ("dfESP://[::1]/p/q/w", "port", "is missing"),
    ("dfESP://h:0", "port", "1 to 65535"),
    ("dfESP://h:65536", "port", "1 to 65535"),
    ("dfESP://h:" + "9" * 5000, "port", "1 to 65535"),
    ("dfESP://h:-1", "port", "1 to 65535"),
    ("dfESP://h:05555", "port", "leading zeros"),
    ("dfESP://h:http", "port", "1 to 65535"),
    ("dfESP://h:٣", "port", "1 to 65535"),
    ("dfESP://:1/p/q/w", "host", "dfESP://host:port"),
    ("dfESP://::1:5555/p/q/w", "host", "into brackets"),
    ("dfESP://[::1:5555/p/q/w", "host", "into brackets"),
    ("dfESP://[::g]:5555/p/q/w", "host", "[::1]"),
    ("dfESP://[fe80::1%eth0]:5555/p/q/w", "host", "[::1]"),
    ("dfESP://user@h:1/p/q/w", "host", "'@'"),
    ("dfESP://höst:1/p/q/w", "host", "'ö'"),
    ("dfESP://h%20:1/p/q/w", "host", "not decoded"),
    ("dfESP://" + "h" * 129 + ":1", "host", "128"),
    ("dfESP://h:1/", "project", "trailing '/'"),
    ("dfESP://h:1//q/w", "project", "doubled"),
    ("dfESP://h:1/p//w", "contquery", "doubled"),
    ("dfESP://h:1/p/q/", "window", "trailing '/'"),
    ("dfESP://h:1/p/q/w/I", "path", "more than three"),
    ("dfESP://h:1/p/q/w/", "path", "more than three"),
    ("dfESP://h:1/a.b/q/w", "project", "'.'"),
    ("dfESP://h:1/p/q%20r/w", "contquery", "not decoded"),
    ("dfESP://h:1/p/q/w#x", "window", "'#'"),
    ("dfESP://h:1/p/q/w*", "window", "'*'"),
    ("dfESP://h:1/p/q/é", "window", "'é'"),
    ("dfESP://h:1/" + "p" * 129, "project", "128"),
    (" dfESP://h:1", "URL", "' '"),
    ("dfESP://h:1/p/q/w\n", "URL", "'\\n'"),
    ("dfESP://h:1/p q", "URL", "take it out"),
    ("dfESP://h:1/p\u00a0q", "URL", "take it out"),
    ("dfESP://h:1/p\x00q", "URL", "'\\x00'"),
    ("dfESP://h:1/p/q/w?", "option", "?name=value"),
    ("dfESP://h:1/p/q/w?collapse", "option", "?name=value"),
    ("dfESP://h:1/p/q/w?collapse=", "option", "?name=value"),
    ("dfESP://h:1/p/q/w?=true", "option", "?name=value"),
    ("dfESP://h:1/p/q/w?collapse=true&&side=in", "option", "?name=value"),
    ("dfESP://h:1/p/q/w?colapse=true", "option", "nearest is 'collapse'"),
    ("dfESP://h:1/p/q/w?Side=in", "option", "nearest is 'side'"),
    ("dfESP://h:1/p/q/w?schema=x", "option", "known: snapshot"),
    ("dfESP://h:1/p/q/w?collapse=True", "option collapse", "lower case"),
    ("dfESP://h:1/p/q/w?collapse=1", "option collapse", "neither true nor false"),
    ("dfESP://h:1/p/q/w?snapshot=yes", "option snapshot", "neither true nor false"),
    ("dfESP://h:1/p/q/w?side=input", "option side", "nearest is 'in'"),
    ("dfESP://h:1/p/q/w?side=IN", "option side", "nearest is 'in'"),
    ("dfESP://h:1/p/q/w?get=shcema", "option get", "nearest is 'schema'"),
    ("dfESP://h:1/p/q/w?side=in?side=out", "option side", "given twice"),
    ("dfESP://h:1/p/q/w?collapse=true&collapse=true", "option collapse", "given twice"),
]

BUILT_WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: Address.parse(None), "URL"),
    (lambda: Address.parse(b"dfESP://h:1"), "URL"),
    (lambda: Address("", 1), "host"),
    (lambda: Address(None, 1), "host"),
    (lambda: Address("h/p", 1), "host"),
    (lambda: Address("[]", 1), "host"),
    (lambda: Address("h", 0), "port"),
    (lambda: Address("h", "1"), "port"),
    (lambda: Address("h", True), "port"),
    (lambda: Address("h", 1, None, "q"), "project"),
    (lambda: Address("h", 1, "p", None, "w"), "contquery"),
    (lambda: Address("h", 1, "p\n"), "project"),
    (lambda: Address("h", 1, 7), "project"),
    (lambda: AddressOptions(collapse="true"), "option collapse"),
    (lambda: AddressOptions(side="I"), "option side"),
    (lambda: TRADES.topic("I"), "side"),
    (lambda: Address("h", 1).require_window(), "project"),
    (lambda: Address("h", 1, "p").require_window(), "contquery"),
    (lambda: Address("h", 1, "p", "q").topic("in"), "window"),
    (lambda: TRADES.control(""), "group"),
    (lambda: TRADES.control("a.b"), "group"),
    (lambda: TRADES.control("a/b"), "group"),
    (lambda: TRADES.control("O"), "group"),
    (lambda: TRADES.control("g" * 129), "group"),
    (lambda: other_side("h:1/M"), "topic"),
    (lambda: other_side("h:1/p/q/w"), "topic"),
    (lambda: other_side("h:1/p/q/w/X"), "topic"),
    (lambda: other_side("h:1/p/q/w/x/I"), "topic"),
    (lambda: kafka_topic("h_1.p.q.w.I"), "topic"),
    (lambda: kafka_topic("h:1"), "topic"),
    (lambda: kafka_topic("h:1//M"), "topic"),
    (lambda: kafka_topic("h:1/a.b/q/w/I"), "topic"),
    (lambda: tervela_topic("a.b", TRADES, "in"), "engine"),
    (lambda: tervela_topic("e", TRADES, "IN"), "side"),
    (lambda: tervela_topic("e", Address("h", 1), "in"), "project"),
]


@pytest.mark.parametrize(("url", "address"), READ_AND_PRINTED)
def test_a_url_reads_as_its_address_and_the_address_prints_as_the_url(url: str, address: Address) -> None:
    assert Address.parse(url) == address
    assert str(address) == url


@pytest.mark.parametrize(("url", "canonical"), ALSO_READ)
def test_other_spellings_print_in_the_canonical_one(url: str, canonical: str) -> None:
    assert str(Address.parse(url)) == canonical
    assert Address.parse(canonical) == Address.parse(url)


@pytest.mark.parametrize(("url", "part", "way_out"), SLIPS)
def test_a_slip_in_a_url_names_the_part_and_the_way_out(url: str, part: str, way_out: str) -> None:
    with pytest.raises(AddressError) as caught:
        Address.parse(url)
    assert caught.value.part == part
    assert way_out in str(caught.value)
    assert part in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("call", "part"), BUILT_WRONG)
def test_what_is_built_without_a_url_is_checked_too(call: Callable[[], object], part: str) -> None:
    with pytest.raises(AddressError) as caught:
        call()
    assert caught.value.part == part


@pytest.mark.parametrize("url", ["dfESP://h:1/p/q/w?snapshot=true", "dfESP://h:1/p/q/w?collapse=true&snapshot=true"])
def test_a_snapshot_is_refused_because_it_needs_an_engine(url: str) -> None:
    with pytest.raises(NotOffered, match="needs an engine") as caught:
        Address.parse(url)
    assert caught.value.capability == "snapshot"


@given(st.text() | st.text("dfESP:/?&=.[]%h1pqwsideinout").map("dfESP://".__add__))
def test_any_text_is_an_address_that_prints_back_or_a_named_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except (AddressError, NotOffered):
        return
    assert Address.parse(str(address)) == address


def test_an_address_has_its_portable_names() -> None:
    assert TRADES.topic("in") == "trades:5555/market/cq/TradesSource/I"
    assert TRADES.topic("out") == "trades:5555/market/cq/TradesSource/O"
    assert TRADES.metadata == "trades:5555/M"
    assert TRADES.control("feed") == "trades:5555/M/F/feed"
    assert TRADES.require_window() == ("market", "cq", "TradesSource")


def test_options_do_not_change_a_name() -> None:
    url = f"{TRADES}?side=out?collapse=true"
    assert Address.parse(url).topic("in") == TRADES.topic("in")


def test_each_direction_is_the_other_side_of_the_other() -> None:
    assert other_side(TRADES.topic("in")) == TRADES.topic("out")
    assert other_side(TRADES.topic("out")) == TRADES.topic("in")


@pytest.mark.parametrize(
    ("name", "on_kafka"),
    [
        (TRADES.topic("in"), "trades_5555.market.cq.TradesSource.I"),
        (TRADES.topic("out"), "trades_5555.market.cq.TradesSource.O"),
        (TRADES.metadata, "trades_5555.M"),
        (TRADES.control("feed"), "trades_5555.M.F.feed"),
        (Address("a.b_c", 1).metadata, "a.b_c_1.M"),
    ],
)
def test_kafka_names_follow_from_the_portable_ones(name: str, on_kafka: str) -> None:
    assert kafka_topic(name) == on_kafka


def test_a_kafka_name_with_a_character_that_kafka_refuses_says_which() -> None:
    with pytest.raises(AddressError, match=r"character '\[', which no Kafka topic can have; .* another label"):
        kafka_topic(Address("[::1]", 5555).metadata)


def test_a_kafka_name_may_have_249_characters_and_no_more() -> None:
    fits = Address("h" * 112, 1, "p" * 128, "q", "w").topic("in")
    assert len(kafka_topic(fits)) == 249
    with pytest.raises(AddressError, match="has 250 characters, Kafka allows 249"):
        kafka_topic(fits.replace("/q/", "/qq/"))


def test_no_two_names_share_a_kafka_topic() -> None:
    hosts, names = ("a", "a.a", "a_1.a", "a.a_1", "a_1.M.F", "M"), ("a", "M", "F", "I", "a_1")
    portable = [Address(host, 1).metadata for host in hosts]
    portable += [Address(host, 1).control(group) for host in hosts for group in names if group != "I"]
    paths = itertools.product(hosts, names, names, names)
    portable += [Address(host, 1, p, q, w).topic(side) for host, p, q, w in paths for side in ("in", "out")]
    assert len({kafka_topic(name) for name in portable}) == len(portable) == len(set(portable))


def test_tervela_names_have_the_engine_in_place_of_the_host() -> None:
    assert tervela_topic("engine1", TRADES, "in") == "SAS.ENGINES.engine1.market.cq.TradesSource.IN"
    assert tervela_topic("engine1", TRADES, "out") == "SAS.ENGINES.engine1.market.cq.TradesSource.OUT"


@pytest.mark.parametrize(
    "url",
    ["dfESP://u:hunter2@h:1/p/q/w", "dfesp://u:hunter2@h:1", "dfESP://u:hunter2@h", "dfESP://u:hunt er2@h:1/p",
     "dfESP://u:hu/nt/hunter2@h:1/p/q/w", "dfESP://u:hunter2@h:x/p"],
)  # fmt: skip
def test_a_user_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(AddressError) as caught:
        Address.parse(url)
    assert "hunt" not in f"{caught.value} {vars(caught.value)}"


@pytest.mark.parametrize(
    ("topic", "control"),
    [
        (TRADES.control("feed"), True),
        (TRADES.control("orders"), True),
        (TRADES.control("order"), True),
        (TRADES.engine_control, True),
        (order_topic(TRADES.engine_control, 0), False),
        (order_topic(TRADES.engine_control, 20261120), False),
        (TRADES.topic("in"), False),
        (TRADES.metadata, False),
        (Address("host", 5555, "M", "F", "w").topic("in"), False),
        (Address("host", 5555, "M", "F", "w").topic("out"), False),
    ],
)
def test_only_the_words_of_a_group_are_of_use_for_seconds(topic: str, control: bool) -> None:
    assert is_control(topic) is control
