"""What real brokers are made of, put on this machine when it is missing: Debian packages, and jars in a cache.

The cache is outside of the checkout, `~/.cache/esp-pubsub` or below `$XDG_CACHE_HOME`. Whatever is in it is whole: it
is made beside its place by one process at a time and renamed when it is ready.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "esp-pubsub"
PATIENCE = 600.0  # seconds that a download may take, or another process that is at it
_POLICY = Path("/usr/sbin/policy-rc.d")


class Missing(Exception):
    """Something is not on this machine and could not be put there; the message says what to install."""


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """One process at a time, of those that share the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + PATIENCE
    with (CACHE / f"{name}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Missing(f"another process has been installing {name} for {PATIENCE:.0f} s") from None
                time.sleep(0.1)
        yield


def cached(name: str, fill: Callable[[Path], None]) -> Path:
    """The folder of this name in the cache; `fill` puts into it what belongs there, the first time."""
    place = CACHE / name
    if place.exists():
        return place
    with _alone(name):
        if not place.exists():
            unready = CACHE / f"{name}.unready"
            shutil.rmtree(unready, ignore_errors=True)  # of a process that was killed here
            unready.mkdir()
            fill(unready)
            unready.rename(place)
    return place


def run(command: Sequence[str | Path], *, hint: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What a command prints. One that fails raises Missing with the hint and the end of what it said."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=PATIENCE, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{hint}: {error}") from error
    if done.returncode:
        raise Missing(f"{hint}: {command[0]} ended with code {done.returncode}\n{done.stdout[-2000:]}")
    return done.stdout


def debian(program: str, package: str) -> str:
    """The path of a program (by name, or the path itself), from this Debian package if it is missing."""
    hint = f"{program} is missing; as root: apt-get install {package}"
    with _alone("apt"):  # what another process is just installing has its name before it works
        if not shutil.which(program) and os.geteuid() == 0 and shutil.which("apt-get"):
            _apt(package, hint)
    if found := shutil.which(program):
        return found
    raise Missing(hint)


def _apt(package: str, hint: str) -> None:
    """Install a package, and let none of its services start."""
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    ours = not _POLICY.exists()
    if ours:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        run([*apt, "update"], hint=hint, env=quiet)
        run([*apt, "install", "-y", "--no-install-recommends", package], hint=hint, env=quiet)
    finally:
        if ours:
            _POLICY.unlink()


def java() -> str:
    """The path of the Java virtual machine."""
    return debian("java", "default-jre-headless")


def classpath(name: str, artifacts: Sequence[str]) -> str:
    """The jars of these Maven artifacts ("group:artifact:version") and of what they need, always in the same order."""

    def fill(place: Path) -> None:
        maven = debian("mvn", "maven")
        (place / "pom.xml").write_text(_pom(artifacts))
        copy = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={place}"]
        run([maven, "-q", "-B", *copy], cwd=place, hint=f"Maven cannot fetch {', '.join(artifacts)}")

    jars = sorted(cached(name, fill).glob("*.jar"))
    return ":".join(map(str, jars))


def _pom(artifacts: Sequence[str]) -> str:
    needed = [
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version></dependency>"
        for group, artifact, version in (map(escape, name.split(":")) for name in artifacts)
    ]
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>local</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{''.join(needed)}</dependencies></project>"
    )
