"""The command `esp`, also as `python -m esp_pubsub.cli`."""

from __future__ import annotations

import csv
import sys

from ..text import MAX_LINE


def main() -> None:
    """Run the command line, or say which extra it needs."""
    try:
        from .app import app
    except ModuleNotFoundError as e:
        if e.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"esp: the command line needs {e.name}, which is not installed: pip install 'esp-pubsub[cli]'")
    csv.field_size_limit(MAX_LINE)  # the library's own is for a whole process, and less than a line may have
    app(prog_name="esp")


if __name__ == "__main__":
    main()
