"""What users and drivers test with: faults for any bus, a virtual clock, conformance suites. No pytest inside."""

from .faults import Faults
from .virtual import Stuck, run_virtual

__all__ = ["Faults", "Stuck", "run_virtual"]
