"""The rows by name: what each measures, and its time. Knows no torch, so that a parser is quick."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """Where a row's function is, and its time."""

    module: str
    function: str
    # Measuring ends so long after the row's start, but for what must be measured in any case.
    enough_s: float
    # The process that measures is ended so long after it. Neither time runs while it loads.
    most_s: float

    def load(self) -> "Row":
        row: Row = getattr(importlib.import_module(f"benchmarks.gpu.{self.module}"), self.function)
        return row


# In this order: the most important first, and rows of one model together. `load` is quick, and
# says at once what keeps others from being measured.
ROWS: Mapping[str, RowPlan] = {
    "load": RowPlan(module="steps", function="measure_load", enough_s=2, most_s=20),
    "decode": RowPlan(module="steps", function="measure_decode", enough_s=60, most_s=120),
    "verify": RowPlan(module="steps", function="measure_verify", enough_s=20, most_s=60),
    "long": RowPlan(module="steps", function="measure_long", enough_s=10, most_s=40),
    "kernel": RowPlan(module="steps", function="measure_kernel", enough_s=10, most_s=40),
    "products": RowPlan(module="products", function="measure", enough_s=10, most_s=40),
    "speculation": RowPlan(
        module="engines", function="measure_speculation", enough_s=40, most_s=80
    ),
    "host": RowPlan(module="engines", function="measure_host", enough_s=10, most_s=40),
    "random": RowPlan(module="engines", function="measure_random", enough_s=40, most_s=70),
    "stack": RowPlan(module="services", function="measure", enough_s=50, most_s=90),
    "strict": RowPlan(module="strict", function="measure", enough_s=30, most_s=70),
    "sweep": RowPlan(module="steps", function="measure_sweep", enough_s=20, most_s=60),
    # Compilation takes what is left.
    "transformers": RowPlan(module="peers", function="measure", enough_s=60, most_s=180),
}
