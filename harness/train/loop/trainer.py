"""transformers' Trainer with the traps taken out that falsify a comparison (docs/traps.md).

The loop, the optimizer, the schedule and the distribution are the Trainer's. What differs is
listed here in one place: the loss is a mean over samples however the batch is split, an epoch's
order depends on (seed, epoch) alone, evaluation leaves the random state alone, the epoch's loss is
that of all samples on all ranks, a run that diverges ends, and checkpoints are whole or ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers import (
    PrinterCallback,
    ProgressCallback,
)

from harness.core.strategies import is_apart
from harness.train.context import Context
from harness.train.data import text_layout
from harness.train.data.samples import EpochOrder
from harness.train.loop.checkpoints import WEIGHTS
from harness.train.loop.elastic_schedule import Plan
from harness.train.loop.epoch import EpochEdges, Sums, draw_from, untouched_random_state
from harness.train.loop.host_overhead import Compiled, Lean
from harness.train.loop.progress import Console, follow
from harness.train.measure.communication import CommProbe, Exposure
from harness.train.measure.flops import Utilisation, batch_shape
from harness.train.measure.link import link_of_run
from harness.train.measure.metrics import BatchMetrics
from harness.train.run.failures import Diverged, last_call
from harness.train.run.recorder import Observations, Recorder
from harness.train.strategy import exchange_of, sharding, verify


class ExactTrainer(Lean):
    """Takes the run it belongs to; everything else as for the Trainer."""

    compiled: Compiled | None = None  # with --torch_compile
    rehearsing = False

    def __init__(
        self,
        context: Context,
        to_device: Callable[[dict[str, Any]], dict[str, Any]],
        test_dataset: Dataset | None = None,
        **kwargs: Any,
    ) -> None:
        # These heads take **kwargs but ignore num_items_in_batch, on which the Trainer relies: it
        # would multiply loss and gradient by the number of ranks and of accumulation steps.
        kwargs["model"].accepts_loss_kwargs = False
        self.context, self.settings, self.to_device = context, context.settings, to_device
        self.test_dataset = test_dataset  # for once, at the end; each epoch has the eval_dataset
        if self.settings.batchnorm == "sync":
            kwargs["model"] = torch.nn.SyncBatchNorm.convert_sync_batchnorm(kwargs["model"])
        self.choose_eval_batch(kwargs["args"], kwargs.get("eval_dataset"))
        super().__init__(**kwargs)
        if self.settings.elastic_batch == "scale":
            self.plan = Plan.of(context, len(kwargs["train_dataset"]))
        self.exchange = exchange_of(context)
        self.observations = Observations(context.recorded_world.size, self.exchange)
        if isinstance(self.compute_metrics, BatchMetrics):
            self.observations.metrics = self.compute_metrics
        recorders = [c for c in self.callback_handler.callbacks if isinstance(c, Recorder)]
        self.recorder = recorders[0] if recorders else Recorder()
        self.recorder.observations = self.observations
        # Before the model is split or wrapped: its shapes are looked at.
        self.utilisation = Utilisation(
            context, self.model, self._one_sample, lambda: self.observations.devices
        )
        self.laid_out = text_layout.arrange(
            self.model, self.data_collator, self.settings, self.args
        )
        if self.settings.strategy == "fsdp":
            sharding.shard(self.model, self.settings, self.args.device)
            # The Trainer's own name for a model that looks after its placement and gradients: it
            # is neither wrapped in DDP nor moved. Set after __init__, which would refuse to save.
            self.is_distributed_loading_by_transformers = True
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        for stock in (ProgressCallback, PrinterCallback):
            self.remove_callback(stock)
        self.callback_handler.callbacks.insert(0, EpochEdges(self))
        if self.settings.save != "none" and (call := last_call()):
            self.add_callback(call)
        follow(self)
        self.sums = self._no_sums()
        self.exposure, self.comm_probe = Exposure(context), CommProbe(self)
        self.observations.measures = [self.utilisation, self.exposure, self.comm_probe]
        self.add_callback(self.comm_probe)  # last: the step has been recorded

    # ---- batches, loss and gradient ----

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        whole = 1 if self.plan is None else self.plan.batch
        order = self.exchange.sampler(len(data))
        self.order = order or EpochOrder(len(data), self.settings.seed, whole)
        return self.order

    def _one_sample(self) -> dict[str, Any]:
        collate: Any = getattr(self.data_collator, "padded", self.data_collator)
        with untouched_random_state():
            return self.to_device(collate([self.train_dataset[0]]))

    def begin_epoch(self) -> None:
        self.exchange.begin_epoch()
        if hasattr(self.to_device, "set_epoch"):
            self.to_device.set_epoch(self.order.epoch)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return self.to_device(super()._prepare_inputs(inputs))

    def compute_loss_context_manager(self) -> Any:
        stack = super().compute_loss_context_manager()
        if self.settings.strategy == "dp" and self.settings.precision in (
            "bf16",
            "fp16",
        ):
            # accelerate casts in the model that it prepares, and it does not prepare DataParallel.
            dtype = torch.bfloat16 if self.settings.precision == "bf16" else torch.float16
            stack.enter_context(torch.autocast(self.args.device.type, dtype=dtype))
        return stack

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        shape = batch_shape(inputs)
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.exposure.backward_ended(self.accelerator.sync_gradients)
        if not self.rehearsing:
            self.utilisation.add(self.state.global_step, shape)
            self.comm_probe.fed(inputs)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        samples = len(inputs["labels"])  # label smoothing takes them out
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            loss = result[0] if isinstance(result, tuple) else result
            self.sums.add_loss(loss, samples)
            return result if self.share == 1.0 else loss * self.share
        return result

    def _clip_grad_norm(self, model: Any) -> Any:
        if self.exchange.update_norm is not None:
            return self.exchange.update_norm
        norm = super()._clip_grad_norm(model)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._record_norm(norm)
        return norm

    def _record_norm(self, norm: torch.Tensor) -> None:
        self.sums.add_norm(norm, self.args.max_grad_norm)

    def is_world_process_zero(self) -> bool:
        # Without a process group every process is the Trainer's first: one of them records.
        return bool(super().is_world_process_zero()) and self.context.is_rank0

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """no_sync for our sharding: gradients are exchanged with the last batch of an update."""
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        wrapped = super()._wrap_model(model, training, dataloader)
        if self.settings.strategy == "dp" and training and wrapped is self.model:
            return torch.nn.DataParallel(wrapped)  # one GPU only: the Trainer would not wrap it
        return wrapped

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model, loader = super()._prepare_for_training(*args, **kwargs)
        checked = self.observations.checked = self.exchange.observe(model)
        checked |= verify.observe_decay(self.optimizer) | self.laid_out
        self.exchange.states = {
            "optimizer": self.optimizer,
            "schedule": self.lr_scheduler,
            "scaler": self.accelerator.scaler,
        }
        self.exchange.record_norm = self._record_norm
        self.exchange.attach(model, self.optimizer)
        checked |= verify.observe_hook(model, self.settings)
        self.exposure.watch(model)
        self.comm_probe.use(model)
        if self.context.checkpoint is not None:
            self.exchange.load(self.context.checkpoint)
        self.settle(model)
        self.compiled = Compiled(model, self.model) if self.args.torch_compile else None
        if self.compiled is None:
            verify.observe_dtype(self.model, self.settings, self.observations.checked)
        self.observations.link = link_of_run(self.model, self.context.world, self.args.device)
        return model, loader

    # ---- the epoch's sums ----

    def close(self) -> None:
        """The training has ended or broken off."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Console):
                callback.close()

    def _no_sums(self) -> Sums:
        apart = is_apart(self.settings)
        return Sums(self.args.device, reused=self.args.torch_compile, apart=apart)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Batches may be fed and gradients exchanged, and the training goes on as if they had not
        been. Between two updates.
        """
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        sums, self.sums = self.sums, self._no_sums()
        self.rehearsing = True
        with untouched_random_state(), self.exchange.rehearsed(), self.recorder.paused():
            yield
            self.model.zero_grad()
            for buffer, before in buffers:
                buffer.copy_(before)
        self.sums, self.rehearsing = sums, False

    def begin_training(self) -> None:
        self.sums = self._no_sums()
        if before := self.context.epoch_so_far.get("sums"):
            self.sums.restore(before, leader=self.args.process_index == 0)
        if self.settings.rank_dropout == "own":
            # One seed for all would give every rank the same dropout mask at every step.
            draw_from(self.settings.seed, self.context.world.rank)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.context.other_processes:
            # The states in a checkpoint are those of other ranks.
            own = self.settings.rank_dropout == "own"
            rank = self.args.process_index if own else 0
            draw_from(self.settings.seed, rank, self.state.global_step)
        else:
            super()._load_rng_state(checkpoint)

    def log_epoch(self) -> None:
        totals = self.exchange.end_epoch(self.state.epoch or 0.0, self.sums.total())
        loss, samples, norm, clipped, updates, overflowed = totals
        self.sums = self._no_sums()
        # fp16 looks for the largest scale that fits, and skips the updates in which it does not.
        if not math.isfinite(loss) or (overflowed and not self.args.fp16):
            where = f"in epoch {self.state.epoch:.0f}{self.exchange.caution}"
            raise Diverged(f"loss or gradient is not finite {where}")
        entry = {
            "epoch_train_loss": loss / max(samples, 1),
            "epoch_train_samples": samples,
        }
        if updates > overflowed:
            entry |= {
                "epoch_grad_norm": norm / (updates - overflowed),
                "epoch_clipped_share": clipped / (updates - overflowed),
                "epoch_skipped_updates": int(overflowed),
            }
        self.log(entry)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["loss"] = self.exchange.logged_loss(logs["loss"], self.state.global_step)
        super().log(logs, start_time)
        # A loss is that of all ranks; a norm that only this rank knows would end it alone.
        own = self.args.fp16 or is_apart(self.settings)
        for name in ("loss", "eval_loss") if own else ("loss", "grad_norm", "eval_loss"):
            if name in logs and not math.isfinite(logs[name]):
                where = f"at update {self.state.global_step}{self.exchange.caution}"
                raise Diverged(f"{name} is {logs[name]} {where}")

    # ---- evaluation ----

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        sharding.average_buffers(self.model)
        if self.compiled is not None and "dtype" not in self.observations.checked:
            # A hook would break the graph in two, and without it all would be compiled again.
            verify.observe_dtype(self.model, self.settings, self.observations.checked)
        with untouched_random_state(), self.exchange.shared():
            return super().evaluate(*args, **kwargs)

    def test(self) -> None:
        """The test set, once, where each epoch is evaluated on a validation set."""
        if self.test_dataset is None:
            return
        update = self.state.global_step
        if self.args.load_best_model_at_end:
            update = self.state.best_global_step
            file = self._checkpoint(update) / WEIGHTS
            sharding.load_from_leader(self.model, file, self.settings)
        sharding.average_buffers(self.model)
        loader = self.get_test_dataloader(self.test_dataset)
        # Not evaluate(): this belongs to no epoch, and those who record epochs are not told.
        found = self.evaluation_loop(loader, "Test", metric_key_prefix="test").metrics
        if not math.isfinite(found["test_loss"]):
            raise Diverged(f"test_loss is {found['test_loss']} at update {update}")
        found.pop("test_model_preparation_time", None)
        evaluated = (log for log in self.state.log_history if "eval_loss" in log)
        epochs = {log["step"]: log["epoch"] for log in evaluated}
        self.observations.test_metrics = {**found, "test_epoch": round(epochs[update], 6)}
