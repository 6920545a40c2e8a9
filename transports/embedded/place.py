"""The bus directory: where it is, and that nobody but its owner can get at it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from hashlib import blake2b
from pathlib import Path

from esp_pubsub.errors import BusRefused, ConfigError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0)
_DESCRIPTORS = Path("/proc/self/fd")
_HAS_DESCRIPTORS = _DESCRIPTORS.is_dir()
_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "gpfs", "beegfs", "lustre", "glusterfs",
    "fuse.glusterfs", "fuse.sshfs",
}  # fmt: skip


def default_directory() -> Path:
    """One bus a user: under the state directory of the desktop standard."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "esp-pubsub"


class Held:
    """A folder, and a descriptor of it until all have let go: who owns a folder above may put another one in its place.
    Whoever makes it holds it.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.at = by_descriptor(fd, path)
        """Where it is, whatever becomes of its name."""
        self._fd = fd
        self._users = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """One more uses it."""
        with self._lock:
            self._users += 1

    def let_go(self) -> None:
        """One less uses it. Any thread."""
        with self._lock:
            self._users -= 1
            if not self._users:
                os.close(self._fd)


def prepare(directory: Path) -> Held:
    """The bus directory, which is ours alone, made if missing. Raises BusRefused, or ConfigError where no bus can be,
    saying what is wrong.
    """
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700, parents=True)
        if not stat.S_ISDIR(directory.lstat().st_mode):
            raise BusRefused(f"the bus directory {directory} is no directory (a link is not followed)")
        fd = os.open(directory, _FOLDER)
    except OSError as e:
        raise BusRefused(f"the bus directory {directory} cannot be made or opened: {e.strerror}; name another") from e
    try:
        return Held(_checked(directory, fd), fd)
    except BaseException:
        os.close(fd)
        raise


def by_descriptor(fd: int, path: Path) -> Path:
    """A folder as a path that leads there whatever becomes of its name; the name where the system has no such path."""
    return _DESCRIPTORS / str(fd) if _HAS_DESCRIPTORS else path


def _checked(directory: Path, fd: int) -> Path:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise BusRefused(
            f"the bus directory {directory} belongs to user {found.st_uid}, not to you ({os.geteuid()}); name your own"
        )
    if found.st_mode & 0o077:
        raise BusRefused(
            f"the bus directory {directory} is open to others (mode {stat.S_IMODE(found.st_mode):o}); "
            f"only its owner may reach it: chmod 700 {directory}"
        )
    if not os.access(by_descriptor(fd, directory), os.W_OK | os.X_OK):
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
