"""Checkpoints that are whole or ignored, under the names that the weights have in memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from harness.core.records import write_json
from harness.core.settings import Settings
from harness.train.context import COMPLETE, Context
from harness.train.run.checkpoint_copies import give_to_rank0, on_own_disk
from harness.train.strategy import sharding

WEIGHTS = "model.safetensors"  # in a checkpoint's folder


def complete(
    folder: Path, context: Context, state: TrainerState, epoch_so_far: dict[str, Any]
) -> None:
    """All has been written: mark it, and remove the checkpoints before it (a collective)."""
    args, world = context.args, context.world
    for name in ("sent", "measured"):
        epoch_so_far[name] = _of_all_ranks(epoch_so_far.get(name), args.world_size)
    give_to_rank0(folder / f"rng_state_{world.rank}.pth", world)
    if args.world_size > 1:
        dist.barrier()  # every rank has written its part
    if args.should_save:
        position = {
            "update": state.global_step,
            "epoch": int((state.epoch or 0) + 1e-6),
            "samples": epoch_so_far.get("samples", 0),
        }
        mark = {"fingerprint": context.fingerprint, "processes": args.world_size}
        write_json(folder / COMPLETE, {**mark, "position": position, "epoch": epoch_so_far})
    own_disk = on_own_disk(folder / COMPLETE, world)
    if args.should_save or own_disk:
        best = state.best_model_checkpoint
        for other in folder.parent.glob("checkpoint-*"):
            if other != folder and (best is None or other.resolve() != Path(best).resolve()):
                shutil.rmtree(other, ignore_errors=True)


def _of_all_ranks(value: Any, ranks: int) -> list[Any]:
    values = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(values, value)
    return values


def save_weights(model: nn.Module, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """The model's own weights, or those of its shards put together."""
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(folder, state_dict=weights, save_original_format=False)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_model(model, str(folder / WEIGHTS))


def load_weights(model: nn.Module, folder: Path, settings: Settings) -> None:
    if settings.strategy == "fsdp":
        sharding.load_weights(model, safetensors.torch.load_file(folder / WEIGHTS))
    else:
        safetensors.torch.load_model(model, folder / WEIGHTS, strict=True)


def save_sharded_optimizer(trainer: Any, folder: Path) -> None:
    """In one piece, so that another number of processes can go on with it (a collective)."""
    state = sharding.whole_optimizer(trainer.model, _torch_optimizer(trainer.optimizer))
    if trainer.args.should_save:
        torch.save(state, folder / OPTIMIZER_NAME)
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_sharded_optimizer(trainer: Any, folder: Path) -> None:
    state = torch.load(folder / OPTIMIZER_NAME, weights_only=True)
    sharding.load_optimizer(trainer.model, _torch_optimizer(trainer.optimizer), state)
    schedule = torch.load(folder / SCHEDULER_NAME, weights_only=True)
    trainer.lr_scheduler.load_state_dict(schedule)


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """torch's optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
