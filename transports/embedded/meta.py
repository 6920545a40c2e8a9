"""What the bus knows besides its topics, in one small environment: the catalog, retained values, groups, requests.

Keys are one letter and a digest, because names may be longer than LMDB's keys; values carry the names. Every function
works inside a transaction that the caller owns.

A group's reader holds it by a record with a *generation*. It keeps it by reading: each third of the lease it writes a
new deadline, by a clock that all processes of the machine share and that no one can set. When the deadline passes, or
the holder's process is gone, or it lets go, the next one who asks takes the group under a higher generation, and
whatever the former one still tries to store is refused.

When this environment was lost and the topics were not, positions are lost that somebody relied on. A topic that has
messages and is not in the catalog is what shows it; it is marked, and a group that has nothing stored is told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import lmdb
import msgpack

from esp_pubsub.errors import BusRefused, BusUnavailable

from .processes import is_gone
from .processes import name as name_of_process

_VERSION = b"\0"
_TOPIC, _FORGOTTEN, _RETAINED, _GROUP, _QUESTION, _ANSWER = b"t", b"f", b"r", b"g", b"q", b"a"
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _key(letter: bytes, *names: str) -> bytes:
    return letter + blake2b("\0".join(names).encode(), digest_size=20).digest()


def boot_time() -> float:
    """Seconds by a clock that every process of this machine shares; it also counts while the machine sleeps."""
    return time.clock_gettime(_BOOT_CLOCK)


def is_sound(transaction: lmdb.Transaction) -> bool:
    """Both ends can be read, or lmdb.Error; there is nothing to compare. A later version names itself."""
    version = transaction.get(_VERSION)
    if version is not None:
        raise BusRefused(f"this bus directory was written by another version ({bytes(version)!r})")
    transaction.cursor().last()
    return True


# catalog


def add_topic(transaction: lmdb.Transaction, topic: str, *, empty: bool) -> None:
    """Enter a topic in the catalog. One that is new to it and not empty is older than this environment."""
    if transaction.put(_key(_TOPIC, topic), topic.encode(), overwrite=False) and not empty:
        transaction.put(_key(_FORGOTTEN, topic), b"")


def has_topic(transaction: lmdb.Transaction, topic: str) -> bool:
    """It is in the catalog."""
    return transaction.get(_key(_TOPIC, topic)) is not None


def is_forgotten(transaction: lmdb.Transaction, topic: str) -> bool:
    """What was once stored of the groups of this topic is lost."""
    return transaction.get(_key(_FORGOTTEN, topic)) is not None


def topics(transaction: lmdb.Transaction) -> list[str]:
    """All topics, sorted."""
    return sorted(bytes(value).decode() for _, value in _prefixed(transaction, _TOPIC))


def _prefixed(transaction: lmdb.Transaction, prefix: bytes) -> Iterator[tuple[bytes, Any]]:
    cursor = transaction.cursor()
    if cursor.set_range(prefix):
        for key, value in cursor:
            if bytes(key[: len(prefix)]) != prefix:
                return
            yield bytes(key), value


# retained values


def retain(transaction: lmdb.Transaction, topic: str, key: str, value: bytes | None) -> None:
    """Keep or forget a last value."""
    if value is None:
        transaction.delete(_key(_RETAINED, topic, key))
    else:
        transaction.put(_key(_RETAINED, topic, key), value)


def retained(transaction: lmdb.Transaction, topic: str, key: str) -> bytes | None:
    """The last value kept."""
    value = transaction.get(_key(_RETAINED, topic, key))
    return None if value is None else bytes(value)


# groups


class Group(NamedTuple):
    """The record of a group. `position` is where its next reader begins, None before the first confirm in order; `mark`
    is the log's of the message before it, where that was known.
    """

    generation: int
    holder: str
    process: str
    deadline: float
    incarnation: int
    position: int | None
    state: bytes | None
    lease: float = 0.0
    mark: int | None = None
    since: float = 0.0
    """When its reader took it, by the wall clock."""
    topic: str = ""
    name: str = ""


_NOBODY = Group(0, "", "", 0.0, 0, None, None)


def group(transaction: lmdb.Transaction, topic: str, name: str) -> Group:
    """What is stored of a group."""
    value = transaction.get(_key(_GROUP, topic, name))
    return _NOBODY if value is None else Group(*msgpack.unpackb(value, use_list=False))


def groups(transaction: lmdb.Transaction, topic: str) -> list[Group]:
    """All groups of a topic."""
    found = [Group(*msgpack.unpackb(value, use_list=False)) for _, value in _prefixed(transaction, _GROUP)]
    return [record for record in found if record.topic == topic]


def _put_group(transaction: lmdb.Transaction, topic: str, name: str, record: Group) -> Group:
    record = record._replace(topic=topic, name=name)
    transaction.put(_key(_GROUP, topic, name), msgpack.packb(tuple(record)))
    return record


def is_free(record: Group) -> bool:
    """Nobody reads for the group: it was let go, or its deadline passed, or its process is gone.

    A deadline further off than a lease was set before the machine was started again, and the clock with it.
    """
    left = record.deadline - boot_time()
    return not record.holder or not 0 <= left <= record.lease or is_gone(record.process)


def acquire(transaction: lmdb.Transaction, topic: str, name: str, holder: str, lease: float) -> Group:
    """Take the group if it is free; the record that comes back tells by its holder who has it now."""
    record = group(transaction, topic, name)
    if record.holder != holder and not is_free(record):
        return record
    taken = record._replace(
        generation=record.generation + 1,
        holder=holder,
        process=name_of_process(),
        deadline=boot_time() + lease,
        lease=lease,
        since=time.time(),
    )
    return _put_group(transaction, topic, name, taken)


def held(transaction: lmdb.Transaction, topic: str, name: str, generation: int) -> Group:
    """The record, if it is still of this generation; else BusUnavailable."""
    record = group(transaction, topic, name)
    if record.generation != generation or not record.holder:
        raise BusUnavailable(f"another reader has taken over the group {name!r} on {topic}", group=name, topic=topic)
    return record


def extend(transaction: lmdb.Transaction, topic: str, name: str, generation: int, lease: float) -> Group:
    """Move the deadline on."""
    record = held(transaction, topic, name, generation)
    return _put_group(transaction, topic, name, record._replace(deadline=boot_time() + lease))


def store(
    transaction: lmdb.Transaction,
    topic: str,
    name: str,
    generation: int,
    incarnation: int,
    position: int | None,
    mark: int | None,
    state: bytes,
    *,
    anew: bool,
) -> None:
    """Position and state in one step; a position never goes back within an incarnation, but with `anew`."""
    record = held(transaction, topic, name, generation)
    known = record.position if record.incarnation == incarnation and not anew else None
    if known is not None and known >= (position or 0):
        position, mark = record.position, record.mark
    stored = record._replace(incarnation=incarnation, position=position, mark=mark, state=state)
    _put_group(transaction, topic, name, stored)


def let_go(transaction: lmdb.Transaction, topic: str, name: str, holder: str) -> None:
    """Leave the group to the next reader, if it is still ours."""
    record = group(transaction, topic, name)
    if record.holder == holder:
        _put_group(transaction, topic, name, record._replace(holder="", process="", deadline=0.0))


# requests


class Question(NamedTuple):
    """A request that nobody has taken yet."""

    key: bytes
    number: bytes
    deadline: float
    data: bytes
    process: str


def ask(transaction: lmdb.Transaction, topic: str, number: bytes, deadline: float, data: bytes) -> None:
    """Put a question, in the order of asking."""
    order = time.time_ns().to_bytes(8, "big")
    value = msgpack.packb((number, deadline, data, name_of_process()))
    transaction.put(_key(_QUESTION, topic) + order + number, value)


def has_question(transaction: lmdb.Transaction, topic: str) -> bool:
    """Somebody asked."""
    return next(_prefixed(transaction, _key(_QUESTION, topic)), None) is not None


def take_question(transaction: lmdb.Transaction, topic: str) -> Question | None:
    """The oldest question that somebody still waits for; it is taken, so no other server sees it."""
    found: Question | None = None
    gone = []
    for key, value in _prefixed(transaction, _key(_QUESTION, topic)):
        question = Question(key, *msgpack.unpackb(value, use_list=False))
        gone.append(key)
        if question.deadline > boot_time() and not is_gone(question.process):
            found = question
            break
    for key in gone:
        transaction.delete(key)
    return found


def answer(transaction: lmdb.Transaction, question: Question, data: bytes) -> None:
    """Leave an answer for the asker, if it may still wait; what was left for askers that are gone is cleared."""
    old = [key for key, value in _prefixed(transaction, _ANSWER) if msgpack.unpackb(value)[0] < boot_time()]
    for key in old:
        transaction.delete(key)
    if question.deadline > boot_time():
        transaction.put(_ANSWER + question.number, msgpack.packb((question.deadline, data)))


def answered(transaction: lmdb.Transaction, number: bytes) -> bytes | None:
    """The answer to a question, if it has come."""
    value = transaction.get(_ANSWER + number)
    return None if value is None else msgpack.unpackb(value)[1]


def forget_question(transaction: lmdb.Transaction, topic: str, number: bytes) -> None:
    """The asker waits no more: take back the question and throw away the answer."""
    transaction.delete(_ANSWER + number)
    for key, _ in list(_prefixed(transaction, _key(_QUESTION, topic))):
        if key.endswith(number):
            transaction.delete(key)
