"""The GPUs of this process: chosen, or refused with the reason, before anything is loaded."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress

import torch

from harness.core.provenance import build_of_torch, nvidia_driver, visible_gpus
from harness.core.rules import DEVICE, Combination, refuse
from harness.core.settings import Settings, UserError
from harness.core.strategies import strategy_of
from harness.core.topology import World

HIDDEN = ("", "-1", "NoDevFiles")  # of CUDA_VISIBLE_DEVICES; the last is a cluster's word
ON_CPU = "or train on the CPU with --use_cpu"


def choose_gpus(settings: Settings, world: World) -> int:
    """How many GPUs this process sees; call it before CUDA is initialised.

    0 means the CPU, on purpose or because there is no GPU: one that torch cannot use is an error,
    as a run on the CPU would not be what the machine is for.
    """
    if uses_cpu(settings):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for whatever asks for the devices
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    _pin(settings, world.local_rank)
    if (problem := why_unusable(visible)) is not None:
        raise UserError(problem)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mig = gpus > 0 and " MIG " in torch.cuda.get_device_name(0)
    gpus = min(gpus, 1) if mig else gpus
    if gpus and strategy_of(settings).needs_launcher and world.per_node > gpus:
        what = "1 GPU (CUDA shows a process only one MIG slice)" if mig else f"{gpus} GPU(s)"
        raise UserError(
            f"{world.per_node} processes on this machine and {what}, and NCCL needs one for each: "
            f"start it with --nproc_per_node={gpus}, {ON_CPU}"
        )
    return gpus


def uses_cpu(settings: Settings) -> bool:
    return bool(settings.passed.get("use_cpu"))


def trains_on_one(settings: Settings) -> bool:
    """Whether a process trains on one of the GPUs: the Trainer would use DataParallel.

    Ranks get their GPU from torchrun, and a batch that is split is to use all GPUs.
    """
    strategy = strategy_of(settings)
    return not (strategy.needs_launcher or strategy.splits_batch)


def _pin(settings: Settings, local_rank: int) -> None:
    """Hide all GPUs but one where a process trains on one. Processes of one machine that share no
    process group each take their own.

    The driver counts the GPUs: torch may have to initialise CUDA to do so.
    """
    driver = nvidia_driver() if trains_on_one(settings) else None
    names = visible_gpus(driver.gpus) if driver else ()
    if len(names) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank % len(names)]


def why_unusable(visible: str | None) -> str | None:
    """Why torch cannot use the GPUs of this machine; None if it can, or if there is none.

    visible: what the user has left visible.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own words for the same
        if torch.cuda.is_available():
            with suppress(RuntimeError, AssertionError):  # NVML counts also what CUDA cannot use
                return _not_in_this_build()
    driver = nvidia_driver()
    if driver is None or visible in HIDDEN or not (driver.gpus or driver.problem):
        return None
    if driver.problem:
        return f"NVIDIA's driver does not answer ({driver.problem}): fix that, {ON_CPU}"
    problem = f"this machine has {driver.gpus} GPU(s), but torch cannot use them"
    built, newest = torch.version.cuda, ".".join(map(str, driver.cuda))
    if built is None:
        return f"{problem}: it is built without CUDA; {driver.advice}, {ON_CPU}"
    if tuple(map(int, built.split("."))) > driver.cuda:
        reason = (
            f"it is built for CUDA {built}, and the driver {driver.version} runs up to {newest}"
        )
        return f"{problem}: {reason}; {driver.advice}, {ON_CPU}"
    reason = "it gives no reason"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    if visible is not None:
        reason += f" (CUDA_VISIBLE_DEVICES={visible})"
    return f"{problem}: {reason}; fix that, {ON_CPU}"


def _not_in_this_build() -> str | None:
    if torch.version.cuda is None:
        return None  # AMD's, which have other names
    names = torch.cuda.get_arch_list()
    built = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name) for name in names]
    codes = [(m[1], (int(m[2]), int(m[3]))) for m in built if m]
    for number in range(torch.cuda.device_count()):
        own = torch.cuda.get_device_capability(number)
        runs = any(
            code <= own if kind == "compute" else code[0] == own[0] and code <= own
            for kind, code in codes
        )
        if codes and not runs:
            name, (major, minor) = torch.cuda.get_device_name(number), own
            build = "cu126" if own < (7, 5) else "cu130"
            return (
                f"{name} has compute capability {major}.{minor}, and this torch is built for "
                f"{' '.join(names)}: install {build_of_torch(build)}, or another that names "
                f"it, hide the GPU (CUDA_VISIBLE_DEVICES), {ON_CPU}"
            )
    return None


def refuse_impossible(settings: Settings, cuda: bool) -> None:
    """Refuse what this device cannot do, with the reason; nothing is silently replaced."""
    precision = settings.precision
    override = os.environ.get("NVIDIA_TF32_OVERRIDE", "")
    if cuda and override == {"fp32": "1", "tf32": "0"}.get(precision):
        raise UserError(
            f"NVIDIA_TF32_OVERRIDE={override} turns --precision {precision} into another one: "
            "unset it"
        )
    nvidia = torch.version.hip is None
    ampere = precision != "tf32" or (
        cuda and nvidia and torch.cuda.get_device_capability() >= (8, 0)
    )
    # Emulated, it is slower than fp32.
    bf16 = precision != "bf16" or (cuda and torch.cuda.is_bf16_supported(including_emulation=False))
    refuse(DEVICE, Combination(settings, cuda=cuda, ampere=ampere, bf16=bf16))
