"""Explore the worlds of the model check: `python -m tests.model [name]`, or `make model`."""

import sys

from .worlds import main

sys.exit(main(sys.argv[1:]))
