"""With --torch_compile: when the model was compiled, what that took, and what it brings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn
from transformers import TrainerCallback

# Passes are timed after so many updates without compiling: each way so often, as long as there is
# time; the first of each is left out.
SETTLED, PASSES, LIMIT_S = 3, 3, 10.0
WORTH_SAYING = 1.02  # times as fast


class Compiled(TrainerCallback):
    """The last of all callbacks, as it makes passes when a step has been recorded.

    Compiling takes seconds to minutes. It belongs into the first updates, which are left out of the
    rates; where texts of a new length or a last short batch set it off later, the record says so.
    Counts as torch does; made only with the flag, as it loads the compiler.
    """

    MOST_UPDATES = 50  # that are recorded

    @classmethod
    def added_to(cls, trainer: Any, model: nn.Module) -> Self:
        """model: as training uses it."""
        callback = cls(trainer, model, trainer.model)
        trainer.add_callback(callback)
        return callback

    def __init__(self, trainer: Any, model: nn.Module, inner: nn.Module) -> None:
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
        self.trainer, self.model, self.counters = trainer, model, counters
        self.before = self.seen = self._graphs()
        self.updates: list[int] = []
        self.compiling_s: list[float] = []  # of those updates
        self.others_s: list[float] = []
        self.began_s: float | None = None
        self.batch: Any = None
        self.settled = 0
        # Of several processes the passes would have to agree, and exchange or compile once more.
        self.tried = trainer.context.world.size > 1
        self.pass_s: dict[str, float] = {}

    def _graphs(self) -> int:
        return int(self.counters["stats"]["unique_graphs"])

    @property
    def _is_due(self) -> bool:
        return not self.tried and self.settled + 1 == SETTLED and bool(self.updates)

    def fed(self, batch: Any) -> None:
        """A batch has been trained on."""
        if self._is_due:
            self.batch = batch

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.began_s is None:
            return
        took_s, now = time.perf_counter() - self.began_s, self._graphs()
        if now != self.seen:
            self.seen, self.settled = now, 0
            self.updates.append(state.global_step)
            self.compiling_s.append(took_s)
        else:
            due = self._is_due
            self.settled += 1
            self.others_s.append(took_s)
            if due and state.global_step < state.max_steps:
                self._try_both()
        self.batch = None

    def _try_both(self) -> None:
        """Seconds of a pass forward and backward over one batch, compiled and not."""
        self.tried = True
        ways = {"compiled_pass_s": self.model, "eager_pass_s": self.model._orig_mod}
        times: dict[str, list[float]] = {name: [] for name in ways}
        began_s = time.perf_counter()
        with self.trainer.rehearsal():
            while len(times["eager_pass_s"]) <= PASSES and time.perf_counter() - began_s < LIMIT_S:
                for name, model in ways.items():
                    times[name].append(self._pass_s(model))
        if len(times["eager_pass_s"]) > 1:
            self.pass_s = {name: statistics.median(each[1:]) for name, each in times.items()}
        self.trainer.observations.checked |= self.observed()

    def _pass_s(self, model: Any) -> float:
        began_s = time.perf_counter()
        self.trainer.training_step(model, self.batch)
        if self.trainer.args.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    def observed(self) -> dict[str, Any]:
        usual_s = statistics.median(self.others_s) if self.others_s else 0.0
        return {
            "compiled_graphs": self.seen - self.before,
            "compiled_in_updates": self.updates[: self.MOST_UPDATES],
            "compile_s": max(0.0, sum(self.compiling_s) - len(self.compiling_s) * usual_s),
            **self.pass_s,
        }


def what_it_brings(observed: Mapping[str, Any], passes: float) -> str | None:
    """In a line; passes: forward passes of an epoch."""
    compile_s, eager_s = observed.get("compile_s"), observed.get("eager_pass_s")
    if compile_s is None or eager_s is None:
        return None
    took, saved_s = f"compiling took {compile_s:.0f} s", eager_s - observed["compiled_pass_s"]
    gain = eager_s / observed["compiled_pass_s"]
    padded = "; without it, texts of a batch may not be padded" * ("padding" in observed)
    if gain < WORTH_SAYING:
        return f"{took}, and a pass is {gain:.2f} times as fast: it does not pay{padded}"
    epochs = compile_s / (saved_s * passes)
    return (
        f"{took}, and a pass is {gain:.2f} times as fast: it pays after {epochs:.1f} epochs{padded}"
    )
