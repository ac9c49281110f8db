"""Removes host work that the Trainer repeats at every step without need; results stay the same.

Where a step is short, the device waits for the host, and on a CPU the host is the device. Nothing
here changes what is computed: tests compare losses and weights with the Trainer's, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import accelerate
import accelerate.optimizer
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import is_lomo_available
from torch import nn
from torch.distributed.tensor import DTensor

from harness.train.patches import check_patched

# What ExactTrainer overrides: under another name, an override would never be called.
OVERRIDDEN = (
    "create_accelerator_and_postprocess", "is_world_process_zero", "_get_train_sampler",
    "get_train_dataloader", "_prepare_inputs", "compute_loss_context_manager", "training_step",
    "compute_loss", "_clip_grad_norm", "_get_grad_norm", "_defer_fsdp_gradient_reduction",
    "floating_point_ops", "store_flos", "_wrap_model", "_prepare_for_training", "create_optimizer",
    "create_scheduler", "set_initial_training_values", "_init_training_state", "_run_epoch",
    "_load_rng_state", "log", "evaluate", "evaluation_loop", "prediction_step", "_save_checkpoint",
    "save_model", "_save", "_load_from_checkpoint", "_load_best_model",
    "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler",
)  # fmt: skip


def patch_libraries() -> None:
    """Patch the Trainer's libraries, here alone; fails with versions that were not checked."""
    overridden = [(transformers.Trainer, name) for name in OVERRIDDEN]
    check_patched(transformers, "for training", overridden)
    replaced = [
        (accelerate.optimizer, "is_lomo_available"),
        (accelerate.Accelerator, "multi_device"),
    ]
    check_patched(accelerate, "for training", replaced)
    check_patched(torch, "for training", [(torch.serialization, "set_crc32_options")])
    # accelerate looks for the lomo package on the disk, twice a step.
    accelerate.optimizer.is_lomo_available = functools.cache(is_lomo_available)
    # The manifest of a checkpoint has a checksum of each file, made in a tenth of the time.
    torch.serialization.set_crc32_options(False)


class Distributed(accelerate.Accelerator):
    """An Accelerator that wraps a single process in DDP on a GPU, too.

    The Trainer makes its Accelerator itself, and of no other class: the class is set afterwards.
    """

    multi_device = True


def settle(model: nn.Module, inner: nn.Module) -> list[nn.Parameter]:
    """Avoid repeated walks over the modules of a model that is ready to be trained.

    Returns its parameters.
    """
    parameters = list(model.parameters())
    # Set in the instance itself, also where a wrapper forwards attributes to the inner model.
    model.__dict__["train"] = _train_once(model, inner)
    model.__dict__["zero_grad"] = functools.partial(_forget_gradients, parameters)
    return parameters


def clip_gradients(trainer: Any) -> Any:
    """Clip as accelerate does, without its walk over the modules to find the parameters."""
    trainer.accelerator.unscale_gradients()
    if trainer.settings.fsdp_offload:
        return clip_offloaded(trainer.parameters, trainer.args.max_grad_norm, trainer.args.device)
    return nn.utils.clip_grad_norm_(trainer.parameters, trainer.args.max_grad_norm)


def clip_offloaded(parameters: list[nn.Parameter], most: float, device: torch.device) -> Any:
    """Clip shards in CPU memory, which NCCL does not reach: norms are added up on the GPU."""
    gradients: Any = (p.grad for p in parameters if p.grad is not None)
    shards = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    square = nn.utils.get_total_norm(shards).to(device).square()
    if dist.is_initialized():
        dist.all_reduce(square)
    norm = square.sqrt()
    factor = torch.clamp(most / (norm + 1e-6), max=1.0).cpu()  # as in torch's own clipping
    for shard in shards:
        shard.mul_(factor)
    return norm


def _train_once(model: nn.Module, inner: nn.Module) -> Callable[..., nn.Module]:
    """model.train() that walks over no module if the model is in training mode already.

    An evaluation puts the inner model into evaluation mode, whatever it is wrapped in.
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
