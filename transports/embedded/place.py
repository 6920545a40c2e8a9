"""The bus directory: where it is, and that nobody but its owner can get at it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from hashlib import blake2b
from pathlib import Path

from esp_pubsub.errors import BusRefused, ConfigError

_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "gpfs", "beegfs", "lustre", "glusterfs",
    "fuse.glusterfs", "fuse.sshfs",
}  # fmt: skip


def default_directory() -> Path:
    """One bus a user: under the state directory of the desktop standard."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "esp-pubsub"


def prepare(directory: Path) -> Path:
    """The real path of a bus directory that is ours alone, made if missing. Raises BusRefused, or ConfigError
    where no bus can be, saying what is wrong.
    """
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
        found = directory.lstat()
    except OSError as e:
        raise BusRefused(f"the bus directory {directory} cannot be made: {e.strerror}; name another one") from e
    if not stat.S_ISDIR(found.st_mode):
        raise BusRefused(f"the bus directory {directory} is no directory (a link is not followed)")
    if found.st_uid != os.geteuid():
        raise BusRefused(
            f"the bus directory {directory} belongs to user {found.st_uid}, not to you ({os.geteuid()}); name your own"
        )
    if found.st_mode & 0o077:
        raise BusRefused(
            f"the bus directory {directory} is open to others (mode {stat.S_IMODE(found.st_mode):o}); "
            f"only its owner may reach it: chmod 700 {directory}"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise BusRefused(f"the bus directory {directory} is read-only")
    real = directory.resolve()
    _refuse_network(real)
    return real


def topic_directory(root: Path, topic: str) -> Path:
    """Where a topic lives: readable, short, and never the same for two topics."""
    digest = blake2b(topic.encode(), digest_size=10).hexdigest()
    return root / "topics" / f"{re.sub(r'[^A-Za-z0-9.-]', '_', topic)[:60]}-{digest}"


def _refuse_network(path: Path) -> None:
    """Shared memory and locks between processes hold on a local file system only."""
    kind = file_system(path, _mounts())
    if kind in _NETWORK:
        raise ConfigError(
            f"the bus directory {path} is on a network file system ({kind}); put it on a local one", path=str(path)
        )


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system that holds `path`, from the text of a mount table; empty if it is not told."""
    best, kind = "", ""
    for line in mounts.splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        point = parts[1].replace("\\040", " ")
        if (str(path) == point or str(path).startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, parts[2]
    return kind


def _mounts() -> str:
    try:
        return Path("/proc/self/mounts").read_text()
    except OSError:
        return ""
