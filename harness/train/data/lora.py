"""--lora R: low-rank adapters by peft, trained with the head instead of all weights.

The adapters are inside the model, which keeps its class and its inputs. Weights that are saved for
others have the adapters merged into them; a checkpoint also holds what was trained, to resume from.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from harness.core.provenance import PEFT
from harness.core.settings import UserError

TRAINED = "trained.safetensors"  # in a checkpoint's folder, beside the merged weights
SCALE = 2  # of what adapters add, whatever their rank: the learning rate need not follow the rank


def add(model: Any, rank: int, drawn: Collection[str] = ()) -> None:
    """Freeze the model, and train adapters, the head, and the parameters that were `drawn` because
    the checkpoint lacks them.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError(
            f"--lora {rank} needs peft, which is not installed: {PEFT.install}"
        ) from None
    head = {*head_of(model), *drawn}
    targets = _targets(model, head)
    if not targets:
        raise UserError(
            f"--lora {rank}: {type(model).__name__} has no linear layers before its head; leave "
            "--lora out"
        )
    adapters = LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=targets)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # peft finds it out layer by layer
        inject_adapter_in_model(adapters, model)
    for name, parameter in model.named_parameters():
        if name in head:
            parameter.requires_grad_()


def head_of(model: Any) -> list[str]:
    """The parameters outside the body or, where all are inside, those of the last linear layer."""
    names = [name for name, _ in model.named_parameters()]
    body = f"{getattr(model, 'base_model_prefix', '')}."
    outside = [name for name in names if not name.startswith(body)]
    if outside and len(outside) < len(names):
        return outside
    last = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1:]
    return [name for name in names if last and name.startswith(f"{last[0]}.")]


def _targets(model: Any, head: Collection[str]) -> list[str]:
    """The layers that get adapters: those that peft chooses for this architecture, or, where it
    makes no choice or the layers have other names now, all linear ones before the head.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOICES

    layers = [
        name
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and f"{name}.weight" not in head
    ]
    chosen = CHOICES.get(str(getattr(getattr(model, "config", None), "model_type", None)), ())
    return [name for name in layers if name.rpartition(".")[2] in chosen] or layers


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer"):
            yield name, module


def is_adapted(model: nn.Module) -> bool:
    return next(_adapted(model), None) is not None


def merged(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the plain model that computes the same, under its names: what the adapters add
    is included.
    """
    weights = dict(model.state_dict())
    for name, layer in _adapted(model):
        inside = {key: weights.pop(key) for key in [*weights] if key.startswith(f"{name}.")}
        base = f"{name}.base_layer."
        weights |= {
            f"{name}.{key.removeprefix(base)}": w
            for key, w in inside.items()
            if key.startswith(base)
        }
        with torch.no_grad():
            weights[f"{name}.weight"] = inside[f"{base}weight"] + layer.get_delta_weight("default")
    return weights


def _trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """What training changes: trained parameters, and buffers (BatchNorm's statistics)."""
    named = model.named_parameters(remove_duplicate=False)  # tied ones have several names
    frozen = {name for name, p in named if not p.requires_grad}
    return {name: w for name, w in model.state_dict().items() if name not in frozen}


def save_trained(model: nn.Module, folder: Path) -> None:
    weights = {name: w.detach().clone().contiguous() for name, w in _trained(model).items()}
    safetensors.torch.save_file(weights, folder / TRAINED)


def _is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal up to rounding: another device multiplies adapters with other last bits."""
    if not theirs.is_floating_point():
        return bool(torch.equal(ours, theirs))
    most = float(theirs.abs().max()) if theirs.numel() else 0.0
    rounding = max(1e-4, 4 * torch.finfo(theirs.dtype).eps)
    return bool(torch.allclose(ours, theirs, rtol=0.0, atol=rounding * most))


def load_trained(model: nn.Module, weights_file: Path) -> None:
    """Load what was trained into the model, which was built with the frozen weights.

    Raises if these differ from the checkpoint's: the merged weights are compared.
    """
    stored = safetensors.torch.load_file(weights_file.with_name(TRAINED))
    own = _trained(model)
    if own.keys() != stored.keys():
        raise RuntimeError(f"{weights_file.parent.name} has other trained weights than the model")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])
    ours, theirs = merged(model), safetensors.torch.load_file(weights_file)
    unlike = [name for name, w in theirs.items() if not _is_same(ours[name].cpu(), w)]
    if unlike:
        raise RuntimeError(
            f"{weights_file.parent.name}: its weights are not those that the model was built with "
            f"and trained, such as {unlike[0]}: --rerun starts again"
        )
