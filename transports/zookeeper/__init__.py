"""The election by ZooKeeper, as SAS has it. It serves the failover groups of any bus."""

from esp_pubsub.bus import Election

from .election import ZooKeeperElection
from .place import read_place

__all__ = ["open_election"]


def open_election(place: str, group: str, member: str) -> Election:
    """One member's part in the election of a group; connects to nothing before `run` and `campaign`.

    `place` is what follows `zookeeper://`: `host:port,host:port/root?session=1200ms`. `member` is what people see in
    the data of its node. Raises ConfigError for a place or a group that cannot be used.
    """
    return ZooKeeperElection(read_place(place), group, member)
