"""Windows as SAS has them: sources, copies with retention, filters, computations and aggregates, as the model of an
engine. See `Project`.
"""

from .aggregate import Aggregate
from .compute import Compute
from .copy import Copy
from .expression import Expression
from .filter import Filter
from .group_functions import (
    GROUP_FUNCTIONS,
    Average,
    Count,
    First,
    Last,
    Max,
    Min,
    StandardDeviation,
    Sum,
    WeightedAverage,
)
from .project import Project
from .retention import Retention
from .sas_xml import load_project
from .source import Source

__all__ = [
    "GROUP_FUNCTIONS",
    "Aggregate",
    "Average",
    "Compute",
    "Copy",
    "Count",
    "Expression",
    "Filter",
    "First",
    "Last",
    "Max",
    "Min",
    "Project",
    "Retention",
    "Source",
    "StandardDeviation",
    "Sum",
    "WeightedAverage",
    "load_project",
]
