"""What the Trainer does on the host at every step and need not do: the numbers stay the same.

A device waits for the host wherever a step is short, and on a CPU the host is the device. Nothing
here changes what is computed: tests hold losses and weights against the Trainer's, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import accelerate.optimizer
from accelerate.utils import is_lomo_available
from torch import nn

from harness.train.loop.evaluation import Evaluation


class Lean(Evaluation):
    """The part of ExactTrainer that leaves work out."""

    parameters: list[nn.Parameter]  # of the model, as training steps on them

    def settle(self, model: nn.Module) -> None:
        """The model is as it will be trained: what a walk over its modules finds stays the same."""
        self.parameters = list(model.parameters())
        # In the instance, also where a wrapper hands attributes on to the model inside.
        model.__dict__["train"] = _train_once(model, self.model)
        model.__dict__["zero_grad"] = functools.partial(_forget_gradients, self.parameters)
        # It looks for a package on the disk, twice a step.
        accelerate.optimizer.is_lomo_available = functools.cache(is_lomo_available)

    def _clip_grad_norm(self, model: Any) -> Any:
        self.accelerator.unscale_gradients()
        return nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return grad_norm  # where nothing is clipped, it is not computed for the log alone

    def floating_point_ops(self, inputs: Any) -> int:
        """The Trainer's count is wrong for most models (FLOPs are counted by closed form)."""
        return 0

    def store_flos(self) -> None:
        """Nothing is counted: no collective and no waiting at each log entry."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs.pop("total_flos", None)  # not counted is not zero
        super().log(logs, start_time)


def _train_once(model: nn.Module, inner: nn.Module) -> Callable[..., nn.Module]:
    """model.train(), but where the model is in training mode already it walks over no module.

    An evaluation puts the inner model into the other mode, whatever it is wrapped in.
    """
    walk = type(model).train

    def train(mode: bool = True) -> nn.Module:
        return model if mode and model.training and inner.training else walk(model, mode)

    return train


def _forget_gradients(parameters: list[nn.Parameter], set_to_none: bool = True) -> None:
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


# ----
# --torch_compile: that the model was compiled, and in which updates.
#
# Compiling takes seconds to minutes. It belongs into the first updates, which are left out of the
# rates; where texts of a new length or a last short batch set it off later, the record says so.

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
