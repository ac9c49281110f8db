"""--torch_compile: that the model was compiled, and in which updates.

Compiling takes seconds to minutes. It belongs into the first updates, which are left out of the
rates; where texts of a new length or a last short batch set it off later, the record says so.
"""

from __future__ import annotations

from typing import Any

from torch import nn

KEPT = 50  # updates that are written down


class Compiled:
    """Counts as torch does; only where compiling was asked for, as it loads the compiler."""

    def __init__(self, model: nn.Module, inner: nn.Module) -> None:
        from torch._dynamo import OptimizedModule
        from torch._dynamo.utils import counters

        if not isinstance(model, OptimizedModule):
            raise RuntimeError(
                "asked for --torch_compile, but the model that training uses is not compiled: "
                "refusing to record one as the other"
            )
        config: Any = getattr(inner, "config", None)
        if getattr(config, "problem_type", "") is None:
            # The first pass would find out, and the second be compiled again because of it.
            config.problem_type = "single_label_classification"
        self.counters = counters
        self.before = self.seen = self._graphs()
        self.updates: list[int] = []

    def _graphs(self) -> int:
        return int(self.counters["stats"]["unique_graphs"])

    def after_update(self, update: int) -> None:
        if (now := self._graphs()) != self.seen:
            self.seen = now
            self.updates.append(update)

    def found(self) -> dict[str, Any]:
        return {
            "compiled_graphs": self.seen - self.before,
            "compiled_in_updates": self.updates[:KEPT],
        }
