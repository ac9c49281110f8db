"""Checkpoints that are whole or ignored, under the names that the weights have in memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from harness.core.records import write_json
from harness.core.settings import Settings
from harness.core.strategies import is_apart
from harness.train.context import COMPLETE, Context
from harness.train.loop.elastic_schedule import BySamples
from harness.train.loop.epoch import Sums
from harness.train.run.checkpoint_copies import give_to_leader, on_own_disk
from harness.train.run.recorder import Recorder
from harness.train.strategy import sharding
from harness.train.strategy.base import Exchange

WEIGHTS = "model.safetensors"  # in a checkpoint's folder


class Checkpoints(BySamples):
    """The part of ExactTrainer that saves and loads."""

    context: Context
    recorder: Recorder
    settings: Settings
    sums: Sums
    exchange: Exchange

    def _checkpoint(self, update: int) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{update}"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        edge = abs((self.state.epoch or 0) - round(self.state.epoch or 0)) < 1e-6
        so_far = self.recorder.partial_epoch()
        if edge and so_far:
            return  # a run resumed from here would never write this epoch's row: save after it
        sharding.average_buffers(self.model)
        folder = self._checkpoint(self.state.global_step)
        # A rank that does not see it, on a disk of its own, would forget which one is the best.
        folder.mkdir(parents=True, exist_ok=True)
        with self.exchange.shared():
            super()._save_checkpoint(model, trial)
        self.exchange.save(folder)
        so_far |= {name: self._of_all_ranks(so_far.get(name)) for name in ("sent", "measured")}
        so_far["sums"] = self.sums.total()
        give_to_leader(folder / f"rng_state_{self.context.world.rank}.pth", self.context.world)
        if self.args.world_size > 1:
            dist.barrier()  # every rank has written its part
        if self.args.should_save:
            write_json(
                folder / COMPLETE,
                {
                    "fingerprint": self.context.fingerprint,
                    "processes": self.args.world_size,
                    "position": {
                        "update": self.state.global_step,
                        "epoch": int((self.state.epoch or 0) + 1e-6),
                        "samples": so_far.get("samples", 0),
                    },
                    "epoch": so_far,
                },
            )
        own_disk = on_own_disk(folder / COMPLETE, self.context.world)
        if self.args.should_save or own_disk:
            best = self.state.best_model_checkpoint
            for other in folder.parent.glob("checkpoint-*"):
                if other != folder and (best is None or other.resolve() != Path(best).resolve()):
                    shutil.rmtree(other, ignore_errors=True)

    def _of_all_ranks(self, value: Any) -> list[Any]:
        everyone = [value] * self.args.world_size
        if self.args.world_size > 1:
            dist.all_gather_object(everyone, value)
        return everyone

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = sharding.whole_weights(self.model) if self.settings.strategy == "fsdp" else None
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        # Under the names that the weights have in memory: the Trainer saves a ViT under the names
        # of its first publication, and when it resumes it finds none of them.
        folder = output_dir or self.args.output_dir
        if isinstance(self.model, PreTrainedModel):
            self.model.save_pretrained(folder, state_dict=state_dict, save_original_format=False)
        else:
            Path(folder).mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_model(self.model, str(Path(folder) / WEIGHTS))
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        file = Path(resume_from_checkpoint) / WEIGHTS
        if self.settings.strategy == "fsdp":
            sharding.load_weights(self.model, safetensors.torch.load_file(file))
        else:
            # Strict: a weight that is not found would stay as it was first drawn.
            safetensors.torch.load_model(self.model, file, strict=True)

    def _load_best_model(self) -> None:
        if self.test_dataset is None:  # otherwise test() does it
            file = self._checkpoint(self.state.best_global_step) / WEIGHTS
            sharding.load_from_leader(self.model, file, self.settings)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if is_apart(self.settings):
            return  # each has its own: exchange.save()
        if self.settings.strategy != "fsdp":
            return super()._save_optimizer_and_scheduler(output_dir)
        state = sharding.whole_optimizer(self.model, _bare(self.optimizer))
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if is_apart(self.settings):
            return
        if self.settings.strategy != "fsdp":
            return super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, weights_only=True)
            sharding.load_optimizer(self.model, _bare(self.optimizer), state)
            schedule = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
            self.lr_scheduler.load_state_dict(schedule)


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """torch's optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
