"""The sample driver is imported here from its folder, as if it were installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support" / "sample_driver"))
