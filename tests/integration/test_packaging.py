"""What a user installs: one import name, two base dependencies, nothing else loaded."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OPTIONAL = ["aio_pika", "aiokafka", "aiormq", "kazoo", "numpy", "opentelemetry", "pandas", "pyarrow", "pyspark", "rich",
            "rstream", "solace", "typer"]  # fmt: skip
LOADED = f"import sys, json, esp_pubsub; print(json.dumps([m for m in {OPTIONAL} if m in sys.modules]))"


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(out: Path, *options: str) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *options, ROOT, cwd=out)
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))  # the sdist, then the wheel from the sdist


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Run a piece of Python where the wheel is installed and nothing else."""
    home = tmp_path_factory.mktemp("empty")
    python = home / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv", cwd=home)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", wheel, cwd=home)
    return lambda code: run(python, "-W", "error", "-c", code, cwd=home)


@pytest.fixture(scope="module")
def python(installed: Callable[[str], str]) -> Path:
    """The interpreter of that environment."""
    return Path(installed("import sys; print(sys.executable)").strip())


def test_the_wheel_holds_every_source_file_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    # rglob stops at the symlinks
    sources = [
        path.relative_to(ROOT)
        for top in ("esp_pubsub", "transports", "spark_bridge")
        for path in (ROOT / top).rglob("*.py")
    ]
    inside = [str(path if path.parts[0] == "esp_pubsub" else "esp_pubsub" / path) for path in sources]
    assert sorted(name for name in names if name.endswith(".py")) == sorted(inside)
    assert "esp_pubsub/py.typed" in names


def test_the_wheel_holds_what_users_test_with_and_not_how_the_protocol_is_checked(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folder = "esp_pubsub/testing/"
    offered = {name.removeprefix(folder) for name in names if name.startswith(folder)}
    assert {name for name in offered if not name.startswith("_")} == {
        "conformance.py", "election_conformance.py", "faults.py", "history.py", "models.py", "plugin.py", "virtual.py"
    }  # fmt: skip
    assert {re.sub("-.*", "", name.partition("/")[0]) for name in names} == {"esp_pubsub"}  # and no tests


def test_the_wheel_is_the_same_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    assert zipfile.ZipFile(build(tmp_path, "--wheel")).namelist() == zipfile.ZipFile(wheel).namelist()


def test_one_import_name_is_added(installed: Callable[[str], str]) -> None:
    names = json.loads(
        installed("import json, importlib.metadata as m; print(json.dumps(dict(m.packages_distributions())))")
    )
    assert [name for name, owners in names.items() if "esp-pubsub" in owners] == ["esp_pubsub"]
    assert {owner for owners in names.values() for owner in owners} == {"esp-pubsub", "lmdb", "msgpack", "msgspec"}


def test_the_embedded_driver_needs_no_extra(installed: Callable[[str], str]) -> None:
    installed("import esp_pubsub.transports.embedded, esp_pubsub.spark_bridge")


def test_a_base_install_loads_nothing_optional(installed: Callable[[str], str], tmp_path: Path) -> None:
    assert json.loads(installed(LOADED)) == []
    # Here some of it is installed, so an import that a base install would skip over shows.
    assert json.loads(run(sys.executable, "-c", LOADED, cwd=tmp_path)) == []


@pytest.mark.parametrize("name", ["transports", "spark_bridge"])
def test_the_folder_is_no_package_of_its_own(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: {name} is not a package of its own: import esp_pubsub.{name}" in done.stderr


def test_the_two_files_of_the_readme_run_twice_from_the_wheel(python: Path, tmp_path: Path) -> None:
    for code in re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M):
        if name := re.match(r"# (publish|subscribe)\.py\n", code):
            (tmp_path / f"{name[1]}.py").write_text(code)
    environment = os.environ | {"ESP_PUBSUB_DIR": str(tmp_path / "bus"), "PYTHONUNBUFFERED": "1"}
    for _ in range(2):
        with subprocess.Popen(
            [python, "subscribe.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdout is not None
            for _ in range(2):  # a line for each: what came before this reader is confirmed, but perhaps its last block
                subprocess.run([python, "publish.py"], cwd=tmp_path, env=environment, check=True, timeout=60)
                assert reader.stdout.readline() == "1 [(1, 'IBM', 101.5), (2, 'SAS', 99.0)]\n"
            reader.kill()
            reader.wait()
