"""The clock that all arms share, and sums over what their models were fed.

The time between two events of transformers' Trainer counts for what the second event ends: a step,
an evaluation, a checkpoint. The hand-written loop reports the same events. The first epoch is not
timed; what the model is fed is counted in it, so that no figure includes the counting.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import CallbackHandler

PARTS = {
    "on_epoch_begin": "train_s",
    "on_step_end": "train_s",
    "on_epoch_end": "train_s",
    "on_evaluate": "evaluate_s",
    "on_save": "save_s",
}


class EpochClock:
    """Seconds of each epoch, for training, evaluation and saving, which add up to all of it."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.epochs: list[dict[str, float]] = []
        self.last_s = 0.0
        self.fed = Fed()

    def note(self, event: str, more_follows: bool = False) -> None:
        """Note an event. more_follows: something other than training comes after this step."""
        if event not in PARTS:
            return
        if self.cuda and (event != "on_step_end" or more_follows):
            torch.cuda.synchronize()  # work in flight belongs to the part that ends here
        now_s = time.perf_counter()
        if event == "on_epoch_begin":
            self.epochs.append({"train_s": 0.0, "evaluate_s": 0.0, "save_s": 0.0, "updates": 0})
            # What a trainer does between two epochs belongs to the second.
            self.last_s = self.last_s or now_s
        epoch = self.epochs[-1]
        epoch[PARTS[event]] += now_s - self.last_s
        epoch["updates"] += event == "on_step_end"
        self.last_s = now_s

    def watch_trainers(self) -> None:
        """Note the events of any Trainer of this process from now on."""
        call = CallbackHandler.call_event

        def noted(
            handler: Any, event: str, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> Any:
            if event == "on_train_begin":
                self.fed.begin(handler.model)
            if event == "on_epoch_end":
                self.fed.end()
            control = call(handler, event, args, state, control, **kwargs)
            self.note(event, control.should_evaluate or control.should_save)
            return control

        CallbackHandler.call_event = noted

    def result(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "fed": self.fed.total()}


class Fed:
    """Sums over what a model is fed in an epoch; neither order nor padding changes them."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor | int]] = []
        self.handle: Any = None

    def begin(self, model: nn.Module) -> None:
        self.handle = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def end(self) -> None:
        """Stop counting, at the end of the first epoch."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def _look(self, module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        if not module.training:
            return
        found: dict[str, torch.Tensor | int] = {
            "samples": len(inputs["labels"]), "labels": inputs["labels"].sum(),
        }  # fmt: skip
        if (ids := inputs.get("input_ids")) is not None:
            # The padding of these tokenizers is token 0.
            found |= {"tokens": ids.numel(), "token_sum": ids.sum()}
            found["real_tokens"] = (ids != 0).sum()
        if (pixels := inputs.get("pixel_values")) is not None:
            found["pixel_squares"] = pixels.double().square().sum()
        self.seen.append(found)

    def total(self) -> dict[str, float]:
        names = dict.fromkeys(name for found in self.seen for name in found)
        return {name: sum(float(found[name]) for found in self.seen) for name in names}
