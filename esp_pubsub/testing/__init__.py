"""What users and drivers test with: faults for any bus, a virtual clock, models, conformance. No pytest inside."""

from .faults import Faults
from .models import run_model
from .virtual import Stuck, run_virtual

__all__ = ["Faults", "Stuck", "run_model", "run_virtual"]
