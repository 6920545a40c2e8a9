"""The tutorial's programs, in the session that is there, and with no pause between the trades that they publish."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from esp_pubsub.spark_bridge import register

from .conftest import PATIENCE, ROOT, Window

PAGE = (ROOT / "docs" / "tutorial" / "spark.md").read_text()
SCHEMA, TOTALS = re.findall(r"^```\n((?:root|\[\().*?)^```", PAGE, re.M | re.S)


def program(name: str, **instead: str) -> str:
    """A program of the page, with something else in some places."""
    [text] = re.findall(rf"^```python\n# {re.escape(name)}\n(.*?)^```", PAGE, re.M | re.S)
    for old, new in instead.items():
        assert old in text
        text = text.replace(old, new)
    return str(text)


def test_the_tutorial_comes_to_what_it_says(
    window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bus = window.options["bus.dir"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESP_PUBSUB_DIR", bus)
    feed = program("feed.py", **{"sleep(0.05)": "sleep(0)"})
    subprocess.run([sys.executable, "-c", feed], check=True, timeout=PATIENCE)
    with monkeypatch.context() as there:
        there.setitem(window.spark.sparkContext.environment, "ESP_PUBSUB_DIR", bus)
        exec(program("look.py", **{"spark.stop()": ""}), {})
        shown = capsys.readouterr().out
        assert shown.startswith(SCHEMA)
        assert shown.count("44000") == 3
        checkpoint = {'"totals-checkpoint"': repr(str(tmp_path / "checkpoint")), "query.awaitTermination()": ""}
        names: dict[str, Any] = {}
        exec(program("totals.py", **checkpoint), names)
        said: list[str] = []

        def told() -> bool:
            said.append(capsys.readouterr().out)
            return TOTALS.strip() in "".join(said)

        try:
            window.until(told, names["query"])
        finally:
            names["query"].stop()
    register(window.spark)
