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

from .names import OURS, flow_queue, group_queue, last_value_queue, probe, value_queue, value_topic
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


def permissions(options: SolaceOptions, address: Address) -> Iterator[str]:
    """Lines for a shell: what a client profile, PROFILE, and an ACL profile, ACL, have to allow."""
    yield _send(
        "PATCH", f"{_vpn(options)}/clientProfiles/$PROFILE",
        {"allowGuaranteedMsgSendEnabled": True, "allowGuaranteedMsgReceiveEnabled": True,
         "allowSharedSubscriptionsEnabled": True},
    )  # fmt: skip
    profile = f"{_vpn(options)}/aclProfiles/$ACL"
    yield _send("PATCH", profile, {"clientConnectDefaultAction": "allow"})
    for topic in (f"{address.hostport}/>", f"{OURS}/>"):
        for kind in ("publishTopicException", "subscribeTopicException"):
            yield _send("POST", f"{profile}/{kind}s", {kind: topic, f"{kind}Syntax": "smf"})


def requests(options: SolaceOptions, wanted: Iterator[Endpoint]) -> Iterator[str]:
    """Lines for a shell, in which SEMP is the broker's management address and ADMIN is user:password."""
    place = f"{_vpn(options)}/queues"
    for each in wanted:
        body = {
            "queueName": each.name, "accessType": "exclusive", "owner": options.username, "permission": "no-access",
            "ingressEnabled": True, "egressEnabled": True, **({"maxMsgSpoolUsage": 0} if each.last_value else {}),
        }  # fmt: skip
        yield _send("POST", place, body)
        if each.topic is not None:
            yield _send("POST", f"{place}/{quote(each.name, safe='')}/subscriptions", {"subscriptionTopic": each.topic})


def _vpn(options: SolaceOptions) -> str:
    return f"/SEMP/v2/config/msgVpns/{quote(options.vpn_name, safe='')}"


def _send(how: str, path: str, body: dict[str, object]) -> str:
    """In the path, what begins with $ is a variable of the shell's; a name on the broker has none, it is quoted."""
    return (
        f'curl -fsS -u "$ADMIN" -X {how} "$SEMP{path}" -H "content-type: application/json" '
        f"-d {shlex.quote(json.dumps(body))}"
    )


def told(options: SolaceOptions, url: str, failover: str | None) -> list[str]:
    """What `esp doctor --solace URL` prints."""
    address = Address.parse(url)
    wanted = endpoints(address, options.groupid, failover, persistent=options.buspersistence)
    return [
        "# SEMP=https://broker:1943 ADMIN=user:password PROFILE=the client profile ACL=the ACL profile",
        "# What the client profile has to allow, shared subscriptions for requests; and the ACL profile, which by",
        "# default denies to connect, to publish and to subscribe. The share is called esp-pubsub.",
        *permissions(options, address),
        "# Clients make their queues by themselves where the client profile has allowGuaranteedEndpointCreateEnabled.",
        f"# Such queues, and those made here, are for {options.username} alone: for members with other usernames, make",
        "# them here, with permission consume in place of no-access.",
        "# Needed only where the client profile lets clients make no queues; else clients make all but the",
        "# last-value queues, last@..., by themselves, and those only spare a group that restarts as a whole work.",
        *requests(options, wanted),
    ]
