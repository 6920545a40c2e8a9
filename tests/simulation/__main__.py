"""Run seeds of the simulation: `python -m tests.simulation --seeds 10000`, or `make simulate SEEDS=10000`."""

import sys

from .run import main

sys.exit(main(sys.argv[1:]))
