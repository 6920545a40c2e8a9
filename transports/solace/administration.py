"""What has to be on a broker whose clients may make no queues: the names that the driver uses, and the requests of the
vendor's SEMP v2 that make them. Pure.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote

from esp_pubsub.address import Address, Side

from .names import flow_queue, group_queue, last_value_queue, probe, value_queue, value_topic
from .options import SolaceOptions

_SIDES: tuple[Side, Side] = ("in", "out")


class Endpoint(NamedTuple):
    """A durable exclusive queue."""

    name: str
    topic: str | None = None
    """What it gets; None: nothing."""
    last_value: bool = False
    """It keeps the last message only."""


def endpoints(address: Address, group: str | None, failover: str | None, *, persistent: bool) -> Iterator[Endpoint]:
    """What a window needs, in both directions: for a group of subscribers, and for a failover group of publishers. A
    run of that group beyond 0 has another line, so another queue and term.
    """
    yield Endpoint(*probe())
    for side in _SIDES:
        topic = address.topic(side)
        values = ["schema", "runs", *([f"state of {group}"] if group and persistent else [])]
        for key in values:
            yield Endpoint(value_queue(topic, key), value_topic(topic, key))
        if group and persistent:
            yield Endpoint(group_queue(topic, group), topic)
        if failover:
            yield Endpoint(last_value_queue(topic), topic, last_value=True)
    if failover:
        line = f"{address.control(failover)}#{failover}"
        yield Endpoint(flow_queue(line))
        yield Endpoint(value_queue(line, "term"), value_topic(line, "term"))


def requests(options: SolaceOptions, wanted: Iterator[Endpoint]) -> Iterator[str]:
    """Lines for a shell, in which SEMP is the broker's management address and ADMIN is user:password."""
    place = f"/SEMP/v2/config/msgVpns/{quote(options.vpn_name, safe='')}/queues"
    for each in wanted:
        body = {
            "queueName": each.name, "accessType": "exclusive", "owner": options.username, "permission": "no-access",
            "ingressEnabled": True, "egressEnabled": True, **({"maxMsgSpoolUsage": 0} if each.last_value else {}),
        }  # fmt: skip
        yield _post(place, body)
        if each.topic is not None:
            yield _post(f"{place}/{quote(each.name, safe='')}/subscriptions", {"subscriptionTopic": each.topic})


def _post(path: str, body: dict[str, object]) -> str:
    return (
        f'curl -fsS -u "$ADMIN" -X POST "$SEMP"{shlex.quote(path)} -H "content-type: application/json" '
        f"-d {shlex.quote(json.dumps(body))}"
    )


def told(options: SolaceOptions, url: str, failover: str | None) -> list[str]:
    """What `esp doctor --solace URL` prints."""
    wanted = endpoints(Address.parse(url), options.groupid, failover, persistent=options.buspersistence)
    return [
        "# Needed only where the client profile lets clients make no queues; else clients make all but the",
        "# last-value queues, last@..., by themselves, and those only spare a group that restarts as a whole work.",
        "# SEMP=https://broker:1943 ADMIN=user:password",
        *requests(options, wanted),
    ]
