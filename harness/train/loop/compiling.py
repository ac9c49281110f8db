"""--torch_compile: when the model was compiled, the time that took, and the speedup."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from harness.core.process import lacks_memory
from harness.core.schema.environment import ObservedRecord
from harness.train.data.texts import TextBatches
from harness.train.measure.clock import MEASURING

# After SETTLED updates without compiling, PASSES passes are timed both compiled and eager, after a
# first one of each that is left out, within LIMIT_S.
SETTLED, PASSES, LIMIT_S = 3, 3, 10.0
NOISE = 1.02  # times as fast: a smaller gain may be noise
FOR_COMPILING = "to compile"  # ends the reason why texts are padded (data/text_layout.py)


class Compiled(TrainerCallback):
    """Must be the last callback, because it runs passes after a step has been recorded.

    Compiling takes seconds to minutes. It should happen in the first updates, which are left out of
    the rates; if texts of a new length or a short last batch trigger it later, the record says so.
    Graphs are counted as torch counts them. Created only with the flag, as it loads the compiler.
    """

    MOST_UPDATES = 50  # recorded at most

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        """model: the model that training uses, which must be compiled."""
        from torch._dynamo import OptimizedModule
        from torch._dynamo.utils import counters

        if not isinstance(model, OptimizedModule):
            raise RuntimeError(
                "asked for --torch_compile, but the model that training uses is not compiled: "
                "refusing to record one as the other"
            )
        config: Any = getattr(trainer.model, "config", None)
        if getattr(config, "problem_type", "") is None:
            # The first pass would set it, and because of that the second would be compiled again.
            config.problem_type = "single_label_classification"
        self.trainer, self.model, self.counters = trainer, model, counters
        batches = trainer.data_collator
        texts = trainer.args.train_batch_size
        self.varies = isinstance(batches, TextBatches) and len(batches.sizes_of(texts)) > 1
        self.before = self.seen = self._graphs()
        self.updates: list[int] = []
        self.compiling_s: list[float] = []  # seconds of these updates
        self.others_s: list[float] = []
        self.began_s: float | None = None
        self.batch: Any = None
        self.settled = 0
        # Several processes would have to make these passes together, and exchange or recompile.
        context = trainer.context
        self.tried = not context.session.is_single or context.settings.comm_probe == "off"
        self.pass_s: ObservedRecord = {}
        self.observed: ObservedRecord = {}  # once both passes are timed, or training has ended
        trainer.add_callback(self)

    def _graphs(self) -> int:
        return int(self.counters["stats"]["unique_graphs"])

    @property
    def _is_due(self) -> bool:
        return not self.tried and self.settled + 1 == SETTLED and bool(self.updates)

    def mark(self, inputs: Mapping[str, Any]) -> None:
        """Say that columns vary in number, before the model is compiled for one of the numbers: it
        would be compiled again as soon as there are others.
        """
        if self.varies:
            for value in inputs.values():
                if isinstance(value, torch.Tensor) and value.ndim == 2:
                    torch._dynamo.maybe_mark_dynamic(value, 1)

    def fed(self, batch: Any) -> None:
        """Keep the batch of a step for the measurement, if that is due."""
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
            due, in_time = self._is_due, 2 * took_s < LIMIT_S
            self.settled += 1
            self.others_s.append(took_s)
            if due and in_time and state.global_step < state.max_steps:
                self._try_both()
        self.batch = None

    @MEASURING.counted()
    def _try_both(self) -> None:
        """Time a forward and backward pass over one batch, compiled and eager."""
        self.tried = True
        models = {"compiled_pass_s": self.model, "eager_pass_s": self.model._orig_mod}
        times: dict[str, list[float]] = {name: [] for name in models}
        until_s = time.perf_counter() + LIMIT_S
        with self.trainer.rehearsal():
            try:
                while len(times["eager_pass_s"]) <= PASSES and time.perf_counter() < until_s:
                    for name, model in models.items():
                        times[name].append(self._pass_s(model))
            except (RuntimeError, MemoryError) as error:
                if not lacks_memory(error):
                    raise
                # The batch may fit into memory only when compiled.
                times["eager_pass_s"] = []
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # memory of eager passes is no part of the record
        if len(times["eager_pass_s"]) > 1:
            compiled_s, eager_s = (statistics.median(each[1:]) for each in times.values())
            self.pass_s = {"compiled_pass_s": compiled_s, "eager_pass_s": eager_s}
        self.observe()

    def _pass_s(self, model: Any) -> float:
        began_s = time.perf_counter()
        self.trainer.training_step(model, self.batch)
        if self.trainer.args.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    def observe(self) -> None:
        """Tell the record what has been compiled so far."""
        self.observed = {
            "compiled_graphs": self.seen - self.before,
            "compiled_in_updates": self.updates[: self.MOST_UPDATES],
        }
        if self.others_s:
            usual_s = len(self.compiling_s) * statistics.median(self.others_s)
            self.observed["compile_s"] = max(0.0, sum(self.compiling_s) - usual_s)
        self.observed |= self.pass_s


def what_it_brings(observed: ObservedRecord, passes: float) -> str:
    """One line on what compiling took and gained; passes: forward passes per epoch."""
    compile_s, compiled_s = observed["compile_s"], observed["compiled_pass_s"]
    saved_s = observed["eager_pass_s"] - compiled_s
    gain = observed["eager_pass_s"] / compiled_s
    pays = "no more than noise"
    if gain >= NOISE:
        pays = f"it pays after {compile_s / (saved_s * passes):,.1f} epochs"
    elif gain <= 1 / NOISE:
        pays = "it costs time"
    padded = (observed.get("padding_reason") or "").endswith(FOR_COMPILING)
    more = "; without it, texts would not be padded, which is not counted" if padded else ""
    return f"compiling took {compile_s:.0f} s, and a pass is {gain:.2f} times as fast: {pays}{more}"
