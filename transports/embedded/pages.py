"""Whether every page in use is in the file: LMDB's own layout (data format 1, 64 bits), as far as that takes.

A file may be shorter than it says and yet be whole: pages that one commit takes at the end and frees again are never
written. LMDB would find out by touching a page that is not there, or is another one, which ends the process. So its
trees are walked here, by reading the file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import lmdb

DAMAGE = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)
"""What LMDB says of pages that are not what they should be."""

_HEAD = 16  # bytes of a page before what is in it
_META = struct.Struct("=IIQQ" + 2 * "IHHQQQQQ" + "QQ")
_ROOTS, _NUMBER = (11, 19), 21  # in a meta page: the trees of free pages and of entries, and of which transaction it is
_PAGE = struct.Struct("=Q2xHH")  # its number, what page it is, and where its list of nodes ends
_NODE = struct.Struct("=HHHH")  # its low and its high half of a size or a page, flags, length of the key
_BRANCH, _LEAF, _BIG = 1, 2, 1
_NO_TREE = 2**64 - 1


def is_whole(opened: lmdb.Environment, data: Path) -> bool:
    """Every page of the newest commit is in the file."""
    size = opened.stat()["psize"]
    fd = os.open(data, os.O_RDONLY | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0))
    try:
        while True:
            with opened.begin() as transaction:  # while it is open, none of its pages is used again
                for number in 0, 1:
                    meta = _META.unpack_from(os.pread(fd, size, number * size), _HEAD)
                    if meta[_NUMBER] == transaction.id():
                        return all(_is_there(fd, size, meta[root]) for root in _ROOTS if meta[root] != _NO_TREE)
            # two commits came in between, and another meta page is the newest
    finally:
        os.close(fd)


def _is_there(fd: int, size: int, root: int) -> bool:
    end = os.fstat(fd).st_size // size
    todo = [root]
    while todo:
        number = todo.pop()
        if number >= end:
            return False
        page = os.pread(fd, size, number * size)
        told, kind, nodes = _PAGE.unpack_from(page)
        if told != number or not kind & (_BRANCH | _LEAF):
            return False
        if kind & _BRANCH:
            todo += (low | high << 16 | flags << 32 for _, (low, high, flags, _) in _nodes(page, nodes))
        elif any(last >= end for last in _last_pages(page, nodes, size)):
            return False
    return True


def _nodes(page: bytes, end: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    for at in struct.unpack_from(f"={(end - _HEAD) // 2}H", page, _HEAD):
        yield at, _NODE.unpack_from(page, at)


def _last_pages(page: bytes, end: int, size: int) -> Iterator[int]:
    """The last page of each value of a leaf that has pages of its own."""
    for at, (low, high, flags, key) in _nodes(page, end):
        if flags & _BIG:
            (first,) = struct.unpack_from("=Q", page, at + _NODE.size + key)
            yield first + (_HEAD - 1 + (low | high << 16)) // size
