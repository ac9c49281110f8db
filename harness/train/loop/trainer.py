"""transformers' Trainer without the traps that falsify a comparison (docs/traps.md).

The loop, the optimizer, the schedule and the distribution are the Trainer's. Every overridden
method is in ExactTrainer, once, with its reason. Work of more than a few lines is done by
collaborators: the modules beside this one, and the strategy's Exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, Trainer
from transformers.trainer_utils import align_special_tokens

from harness.core import attempts
from harness.core.records.disk import writing_to
from harness.core.schema.environment import LinkRecord, ObservedRecord
from harness.core.strategies import is_apart
from harness.train.context import Context, autocast
from harness.train.data import text_layout
from harness.train.data.samples import EpochOrder, check_model
from harness.train.data.texts import join_predictions, parts_of
from harness.train.loop import host_overhead
from harness.train.loop.balance import Balance
from harness.train.loop.compiling import Compiled
from harness.train.loop.elastic_schedule import ElasticSchedule, by_samples
from harness.train.loop.epoch import EpochEvents, EpochSums, seed_from, untouched_random_state
from harness.train.loop.evaluation import Evaluation, eval_batch_of, logits_first, test_metrics
from harness.train.loop.observations import TrainerObservations
from harness.train.loop.progress import Console, add_trackers
from harness.train.measure.communication import CommProbe, Exposure
from harness.train.measure.flops import Utilisation, batch_shape
from harness.train.measure.link import link_of_run
from harness.train.measure.metrics import BatchMetrics, beside_ours, check_before
from harness.train.run.checkpoints import Written, agree_to_save, complete, require_sound
from harness.train.run.failures import Diverged, preemption
from harness.train.run.recorder import Recorder
from harness.train.strategy import choice, exchange_of, sharding, verify
from harness.train.strategy.muon import with_muon
from harness.train.strategy.weights import arrange_ddp, is_wrapped, settle_unused


class ExactTrainer(Trainer):
    """The Trainer with a run's context, a last step per batch on its device, and a test set."""

    elastic: ElasticSchedule | None = None  # with --elastic_batch scale
    compiled: Compiled | None = None  # with --torch_compile
    order: EpochOrder
    part_weight = 1.0  # of the batch's samples, in the part being trained on
    rehearsing = False
    link: LinkRecord | None = None  # between nodes, on rank 0
    late_rng_state: str | None = None  # checkpoint whose random state is still to be loaded

    def __init__(
        self,
        context: Context,
        to_device: Callable[[dict[str, Any]], dict[str, Any]],
        test_dataset: Dataset | None = None,
        **kwargs: Any,
    ) -> None:
        host_overhead.patch_libraries()
        self.context, self.settings, self.to_device = context, context.settings, to_device
        self.test_dataset = test_dataset
        self.is_apart = is_apart(context.settings)
        args, model, settings = kwargs["args"], kwargs["model"], context.settings
        context.session.model_made(verify.own_model(model, str(settings.model)))
        # The models' heads take **kwargs but ignore num_items_in_batch. The Trainer relies on it:
        # it would multiply loss and gradient by the number of ranks and of accumulation steps.
        model.accepts_loss_kwargs = False
        if settings.batchnorm == "sync":
            kwargs["model"] = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if settings.eval_batch is None and (data := kwargs.get("eval_dataset")) is not None:
            args.per_device_eval_batch_size = eval_batch_of(args, len(data))
        kwargs["compute_metrics"] = beside_ours(kwargs.get("compute_metrics"), context)
        super().__init__(**kwargs)
        if isinstance(self.processing_class, PreTrainedTokenizerBase) and hasattr(model, "config"):
            # The Trainer aligns them when training begins, but the model is tried out before that.
            align_special_tokens(self.model, self.processing_class)
        if settings.elastic_batch == "scale":
            self.elastic = ElasticSchedule.of(context, len(kwargs["train_dataset"]))
        self.exchange = exchange_of(context)
        self.evaluation = Evaluation()
        # Before the model is sharded or wrapped, because its shapes are inspected.
        with untouched_random_state():
            check_before(self.compute_metrics, settings.best_metric)
            check_model(self.data_collator, str(settings.model), self.model)
            self.utilisation = Utilisation(
                context, self.model, self._samples, lambda: self.observations.devices,
                lambda: self._samples(args.per_device_train_batch_size),
            )  # fmt: skip
            self.balance = Balance(context, self.model, self._samples)
            self.laid_out = text_layout.arrange(
                self.model, self.data_collator, settings, self.args, text_layout.has_own_loss(self)
            )
            is_spread = self.exchange.spread(self.model, self._samples)
        if is_spread:
            # The Trainer's flag for a model that manages its own placement and gradients: it is
            # neither wrapped in DDP nor moved. Set after __init__, which would refuse to save.
            self.is_distributed_loading_by_transformers = True
        self.sums = self.empty_sums()
        self.exposure, self.comm_probe = Exposure(context), CommProbe(self)
        self.number_format = verify.NumberFormat(settings)
        self.built: ObservedRecord = {}  # what is verified before the first step
        self.tested: dict[str, Any] = {}  # metrics of the one test at the end
        self.observations = TrainerObservations(self)
        self._arrange_callbacks()

    def create_accelerator_and_postprocess(self) -> None:
        # accelerate wraps the model of a single process in DDP on a CPU, but not on a GPU.
        super().create_accelerator_and_postprocess()
        if is_wrapped(self.settings) and self.args.device.type == "cuda":
            self.accelerator.__class__ = host_overhead.Distributed

    def _arrange_callbacks(self) -> None:
        """EpochEvents come first, as the recorder needs an epoch's sums; the probe comes last, as
        it may run only when the step has been recorded.
        """
        for stock in (ProgressCallback, PrinterCallback):
            self.remove_callback(stock)
        callbacks = self.callback_handler.callbacks
        self.recorder = next((c for c in callbacks if isinstance(c, Recorder)), Recorder())
        self.recorder.observations = self.observations
        self.epochs = EpochEvents(self)
        callbacks.insert(0, self.epochs)
        if callback := preemption(self.settings, self.exchange):
            self.add_callback(callback)
        add_trackers(self)
        self.add_callback(self.comm_probe)

    def close(self) -> None:
        """Give the terminal back when training has ended or broken off."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Console):
                callback.close()

    def is_world_process_zero(self) -> bool:
        # Without a process group the Trainer takes every process for the first; only one records.
        return bool(super().is_world_process_zero()) and self.context.is_rank0

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        # The Trainer shuffles by seed + epoch: runs with neighbouring seeds would share orders.
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        multiple = 1 if self.elastic is None else self.elastic.batch
        order = self.exchange.sampler(len(data))
        self.order = order or EpochOrder(len(data), self.settings.seed, multiple)
        self.order.draws = self.args.dataloader_num_workers > 0
        return self.order

    def get_train_dataloader(self) -> Any:
        # Workers' seeds come from a generator of their own: they would be drawn from torch's in the
        # first epoch of a process only, and dropout would differ after a resume. Then --balance.
        loader = super().get_train_dataloader()
        if self.args.dataloader_num_workers > 0:
            loader.base_dataloader.generator = torch.Generator().manual_seed(self.settings.seed)
        return self.balance.dealt(loader)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # Normalising, augmenting and the like are done on the device, for the whole batch.
        return self.to_device(super()._prepare_inputs(inputs))

    def _samples(self, count: int = 1) -> dict[str, Any]:
        first = range(min(count, len(self.train_dataset)))
        return self._prepare_inputs(self.data_collator([self.train_dataset[i] for i in first]))

    def compute_loss_context_manager(self) -> Any:
        # accelerate adds autocast to no model that it has not wrapped itself.
        stack = super().compute_loss_context_manager()
        stack.enter_context(self.exchange.computing())
        return stack

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # The step is measured; and a batch of texts may come in parts of similar length.
        shape, parts = batch_shape(inputs), parts_of(inputs)
        if parts:
            loss = self._training_step_in_parts(model, parts, *args, **kwargs)
        else:
            loss = super().training_step(model, inputs, *args, **kwargs)
        self.exposure.backward_ended(self.accelerator.sync_gradients)
        if not self.rehearsing:
            self.utilisation.add(self.state.global_step, shape)
            (self.compiled or self.comm_probe).fed(inputs)  # CommProbe is off with --torch_compile
        return loss

    def _training_step_in_parts(self, model: Any, parts: Any, *args: Any, **kwargs: Any) -> Any:
        """Sum the losses and gradients of the parts, each weighted by its share of the samples; the
        gradients are exchanged with the last part.
        """
        samples, losses = sum(len(part["labels"]) for part in parts), []
        for part in parts[:-1]:
            self.part_weight = len(part["labels"]) / samples
            with self.accelerator.no_sync(model):
                losses.append(super().training_step(model, part, *args, **kwargs))
        self.part_weight = len(parts[-1]["labels"]) / samples
        losses.append(super().training_step(model, parts[-1], *args, **kwargs))
        self.part_weight = 1.0
        return torch.stack(losses).sum()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Losses are added up for the epoch's exact loss; the Trainer logs a mean of rounded means.
        samples = len(inputs["labels"])  # before label smoothing removes them
        if self.compiled is not None and model.training:
            self.compiled.mark(inputs)
        result = super().compute_loss(model, inputs, *args, **kwargs)
        loss, *outputs = result if isinstance(result, tuple) else (result,)
        if model.training:
            self.sums.add_loss(loss, samples)
            weight = self.part_weight * self.balance.weight
            loss = loss if weight == 1.0 else loss * weight
        return (loss, *map(logits_first, outputs)) if outputs else loss

    def _clip_grad_norm(self, model: Any) -> Any:
        # The parameters are known; the Trainer would walk over all modules each time.
        if self.exchange.update_norm is not None:
            return self.exchange.update_norm
        norm = host_overhead.clip_gradients(self)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.sums.add_norm(norm, self.args.max_grad_norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # Where nothing is clipped, the norm is not computed for the log alone.
        return grad_norm

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        # no_sync for our sharding: gradients are exchanged with the last batch of an update.
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        # The Trainer's count is wrong for most models: measure/flops.py counts.
        return 0

    def store_flos(self) -> None:
        """Do not count FLOPs: the Trainer's count needs a collective at each log entry."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        # nn.DataParallel also on one GPU, where the Trainer would not use it.
        wrapped = super()._wrap_model(model, training, dataloader)
        return self.exchange.wrap(self.model, wrapped) if training else wrapped

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        skips_layers = False
        if is_wrapped(self.settings):
            with untouched_random_state(), autocast(self.settings, self.args.device):
                count = self.args.per_device_train_batch_size if self.is_apart else 1
                handler, sample = self.accelerator.ddp_handler, self._samples(count)
                skips_layers = settle_unused(handler, self.model, sample, self.settings)
            arrange_ddp(self.accelerator, self.model, self.context.world)
        # From here on the model is as it will be trained: the strategy attaches; all is verified.
        model, loader = super()._prepare_for_training(*args, **kwargs)
        checked: ObservedRecord = {
            **self.exchange.observe(model),
            **verify.observe_optimizer(self.optimizer, self.settings),
            **self.laid_out,
            **self.context.session.observed,
            **self.balance.observed,
        }
        self.exchange.prepare(
            optimizer=self.optimizer, schedule=self.lr_scheduler, scaler=self.accelerator.scaler
        )
        self.link = link_of_run(self.model, self.context.world, self.args.device)
        way = choice.set_way(self.exchange, self.link)
        self.exchange.attach(model, self.optimizer)
        hook = verify.observe_hook(model, self.settings, self.exchange.way, self.context.world)
        self.built = {**checked, **way, **hook}
        self.exposure.watch(model, choice.early_s(self.exchange, self.link))
        self.comm_probe.use(model, skips_layers)
        if self.context.checkpoint is not None:
            self.exchange.load(self.context.checkpoint)
        self.parameters = host_overhead.settle(model, self.model)
        self.compiled = Compiled(self, model) if self.args.torch_compile else None
        if self.compiled is None:
            self.number_format.watch(self.model)
        return model, loader

    def create_optimizer(self, *args: Any) -> Any:
        # With --muon, the Trainer's AdamW shares the weights with Muon.
        optimizer = super().create_optimizer(*args)
        if self.settings.muon:
            optimizer = self.optimizer = with_muon(self.model, optimizer)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        # Where updates change in size, the learning rate follows the samples.
        if self.elastic is None:
            return super().create_scheduler(num_training_steps, optimizer)
        return by_samples(
            super().create_scheduler(self.elastic.full_updates(), optimizer), self.elastic
        )

    def set_initial_training_values(self, *args: Any) -> Any:
        # The Trainer divides updates, whose number or size changes as processes come and go.
        if (values := self.exchange.training_values()) is not None:
            return values
        values = super().set_initial_training_values(*args)
        if self.elastic is None:
            return values
        self.order.trained = {self.elastic.position.epoch: self.elastic.position.samples}
        return (*values[:-1], self.elastic.updates)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        # As above, for a resumed run. An elastic run's sampler leaves out samples trained on.
        position: tuple[int, int] = super()._init_training_state(*args)
        if (of_exchange := self.exchange.resume_at(self.state.global_step)) is not None:
            return of_exchange
        return position if self.elastic is None else (self.elastic.position.epoch, 0)

    def _run_epoch(self, **kwargs: Any) -> None:
        # As above, for the rest of the epoch in which an elastic run resumes.
        schedule = self.elastic
        if schedule is None or kwargs["epoch"] != schedule.position.epoch:
            super()._run_epoch(**kwargs)
            return
        kwargs["num_update_steps_per_epoch"] = schedule.rest
        kwargs["steps_in_epoch"] = schedule.rest * self.args.gradient_accumulation_steps
        if schedule.rest == 0:
            self.state.epoch = schedule.position.epoch + 1
        super()._run_epoch(**kwargs)
        if schedule.rest == 0:
            # The Trainer takes an epoch without updates for the end of all data.
            self.control.should_training_stop = False

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # With another number of processes, the saved states belong to other ranks. And an elastic
        # run fetches the batches of its epoch first, which draws random numbers: then load later.
        if self.context.other_processes:
            own = self.settings.rank_dropout == "own"
            rank = self.args.process_index if own else 0
            seed_from(self.settings.seed, rank, self.state.global_step)
        elif self.elastic and self.elastic.position.samples and self.late_rng_state is None:
            self.late_rng_state = checkpoint
        else:
            super()._load_rng_state(checkpoint)

    def load_late_rng_state(self) -> None:
        if self.late_rng_state:
            self._load_rng_state(self.late_rng_state)
            self.late_rng_state = ""

    def empty_sums(self) -> EpochSums:
        compiled = self.args.torch_compile
        return EpochSums(self.args.device, reused=compiled, replicas_differ=self.is_apart)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # A run that diverges ends here; and FLOPs, which are not counted, are not logged as zero.
        logs.pop("total_flos", None)
        if "loss" in logs:
            logs["loss"] = self.exchange.logged_loss(logs["loss"], self.state.global_step)
        super().log(logs, start_time)
        # A loss is that of all ranks; a norm that only this rank knows would end this rank alone.
        own = self.args.fp16 or self.is_apart
        for name in ("loss", "eval_loss") if own else ("loss", "grad_norm", "eval_loss"):
            if name in logs and not math.isfinite(logs[name]):
                where = f"at update {self.state.global_step}{self.exchange.caution}"
                raise Diverged(f"{name} is {logs[name]} {where}")

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Allow passes and exchanges between two updates that leave the training unchanged."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        sums, self.sums = self.sums, self.empty_sums()
        self.rehearsing = True
        with untouched_random_state(), self.exchange.rehearsed(), self.recorder.paused():
            yield
            self.model.zero_grad()
            for buffer, before in buffers:
                buffer.copy_(before)
        self.sums, self.rehearsing = sums, False

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # All ranks evaluate one model; but for averaged buffers, training goes on as without it.
        sharding.average_buffers(self.model)
        if self.compiled is not None:
            # Not earlier: the hook would split the graph, and its removal would compile all again.
            self.number_format.watch(self.model)
        with untouched_random_state(), self.exchange.shared():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        return metrics

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        *args: Any,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> Any:
        # Each rank counts its own samples; the Trainer would gather the logits of every batch.
        metrics, kwargs["metric_key_prefix"] = self.compute_metrics, metric_key_prefix
        if not isinstance(metrics, BatchMetrics) or description == "Prediction":
            return super().evaluation_loop(dataloader, description, *args, **kwargs)
        with self.evaluation.counting(metrics, self.args):
            output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        values = self.evaluation.result(len(dataloader.dataset), self.args, self.settings)
        output.metrics.update({f"{metric_key_prefix}_{k}": v for k, v in values.items()})
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Results are counted where they are computed; a batch of texts may come in parts.
        if parts := parts_of(inputs, evaluates=True):
            predict = super().prediction_step
            results = [predict(model, part, *args, **kwargs) for part in parts]
            loss, logits, labels = join_predictions(inputs, results)
        else:
            loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if self.evaluation.active is None:
            return loss, logits, labels
        self.evaluation.active.add(logits, labels)
        return None, None, None

    def test(self) -> None:
        """Evaluate the test set, once, where epochs are evaluated on a validation set."""
        self.tested = test_metrics(self)

    def weights_file(self, update: int) -> Path:
        """The weights in the checkpoint that was written after this update."""
        return self.context.folder.checkpoint(update) / sharding.WEIGHTS

    def best_weights(self) -> Path:
        """The file with the weights of the best epoch, checked against its checksum."""
        file = self.weights_file(self.state.best_global_step)
        require_sound(file.parent, self.context.world)
        return file

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # A checkpoint is whole or ignored; the Trainer would resume from a half-written one.
        epoch, epoch_so_far = self.state.epoch or 0, self.recorder.partial_epoch()
        if epoch_so_far and abs(epoch - round(epoch)) < 1e-6:
            return  # a run resumed from here would never write this epoch's row: save after it
        sharding.average_buffers(self.model)
        folder = self.weights_file(self.state.global_step).parent
        finite = not self.is_apart or sharding.has_finite_weights(self.model)  # the rank's own
        with self.exchange.shared():
            finite &= sharding.has_finite_weights(self.model)
        if self.recorder.attempt:
            attempts.require(self.context.folder)
        with writing_to(folder.parent):
            all_finite, own_disk = agree_to_save(folder, self.context.world, finite, model)
            if not all_finite:  # a loss of this update may not have been logged yet
                where = f"at update {self.state.global_step}{self.exchange.caution}"
                raise Diverged(f"weights are not finite {where}")
            # Without the folder, a rank on a disk of its own would forget which checkpoint is best.
            folder.mkdir(parents=True, exist_ok=True)
            with self.exchange.shared():
                super()._save_checkpoint(model, trial)
            epoch_so_far |= {"sums": self.sums.own(), "shares": self.balance.shares}
            own = Written(self.exchange.save(folder), own_disk)
            complete(folder, self.context, self.state, epoch_so_far, own)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Every rank takes part in gathering the shards, and one rank writes them.
        weights = self.exchange.whole_weights(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # Under the names that the weights have in memory: the Trainer saves a ViT under the names
        # of its first publication, and does not find these names when it resumes.
        folder = output_dir or self.args.output_dir
        sharding.save_weights(self.model, Path(folder), state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # Strict: a weight missing from the file would keep its initial value.
        file = Path(resume_from_checkpoint, sharding.WEIGHTS)
        sharding.load_weights(self.model, file, self.settings, everywhere=True)

    def _load_best_model(self) -> None:
        # Every rank gets rank 0's weights; the Trainer would read a file that may not be there.
        if self.test_dataset is None:  # otherwise test() does it
            sharding.load_weights(self.model, self.best_weights(), self.settings)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # Replicas that train apart save their own, and shards are put together.
        if not self.exchange.save_optimizer(self, Path(output_dir)):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # The counterpart of _save_optimizer_and_scheduler().
        if checkpoint is None or not self.exchange.load_optimizer(self, Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
