"""What users and drivers test with: faults for any bus, a virtual clock, models, conformance. No pytest inside."""

from .faults import Faults
from .models import check_model, run_model
from .virtual import Stuck, run_virtual

__all__ = ["Faults", "Stuck", "check_model", "run_model", "run_virtual"]
