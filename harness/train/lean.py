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

from harness.train.evaluation import Evaluation


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
