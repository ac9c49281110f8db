"""Settings -> transformers' TrainingArguments."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import HfArgumentParser, IntervalStrategy, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import SaveStrategy

from harness.elastic import for_world
from harness.flags import trainer_argv
from harness.identity import EVAL_BATCH, number
from harness.settings import Settings, UserError
from harness.summary import larger_is_better
from harness.world import World


def arguments_of(settings: Settings, folder: Path, world: World, peers: Any) -> TrainingArguments:
    """Of this process; a peer is alone as far as the Trainer knows."""
    if settings.strategy in ("single", "dp") or peers is not None:
        _forget_launcher()
    if peers is None:
        return training_arguments(for_world(settings, world.size), folder, world.size)
    args = training_arguments(settings, folder, 1)
    if not peers.records:
        args.eval_strategy, args.save_strategy = IntervalStrategy.NO, SaveStrategy.NO
        args.load_best_model_at_end, args.report_to = False, []
    return args


def _forget_launcher() -> None:
    """torchrun with one process: the Trainer would wrap the model in DDP all the same."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


class _Parser(HfArgumentParser):
    """Raises what argparse would print with its whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.replace("argument ", "", 1))


def training_arguments(settings: Settings, folder: Path, world: int) -> TrainingArguments:
    """Ours, then what was passed through; the two share no flag."""
    passed = dict(settings.trainer)
    ours: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": settings.per_gpu_batch,
        "per_device_eval_batch_size": settings.eval_batch or EVAL_BATCH,
        "gradient_accumulation_steps": settings.grad_acc,
        "num_train_epochs": settings.epochs,
        "learning_rate": number(settings.lr),
        "seed": settings.seed,
        "dataloader_num_workers": settings.num_workers,
        "logging_steps": settings.log_every,
        "logging_nan_inf_filter": False,
        "eval_strategy": "epoch",
        "batch_eval_metrics": True,
        "remove_unused_columns": False,
        "label_names": "labels",
        "average_tokens_across_devices": False,
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": _has_cuda(),
        "bf16": settings.precision == "bf16",
        "fp16": settings.precision == "fp16",
        **_saving(settings, passed),
    }
    if not _has_cuda() and "use_cpu" not in passed:
        # Without it, torchrun on a machine without GPU starts as many separate trainings.
        ours["use_cpu"] = not torch.backends.mps.is_available() or world > 1
    if settings.precision in ("fp32", "tf32") and _has_cuda():
        ours["tf32"] = settings.precision == "tf32"
    if settings.num_workers > 0:
        ours["dataloader_persistent_workers"] = True
    trackers = passed.get("report_to")
    if isinstance(trackers, tuple):  # the Trainer's parser takes one alone
        others = tuple(pair for pair in settings.trainer if pair[0] != "report_to")
        settings = replace(settings, trainer=others)
    argv = [w for k, v in ours.items() if k not in passed for w in (f"--{k}", str(v))]
    try:
        (args,) = _Parser(TrainingArguments).parse_args_into_dataclasses(
            [*argv, *trainer_argv(settings)]
        )
    except (ValueError, ImportError) as error:
        raise UserError(" ".join(str(error).split())) from None
    if args.world_size != world:
        raise UserError(
            f"{world} processes were started, but the Trainer sees {args.world_size}: "
            "leave out --use_cpu and --ddp_backend"
        )
    # Copies out of pinned pages go on while the host does.
    args.accelerator_config.non_blocking = _has_cuda() and args.dataloader_pin_memory
    if isinstance(trackers, tuple):
        args.report_to = list(trackers)
    _check_trackers(args.report_to)
    return args


def _check_trackers(names: list[str]) -> None:
    """The Trainer would find out only after the data and the model have been loaded."""
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise UserError(f"--report_to {name}: expected {', '.join(INTEGRATION_TO_CALLBACK)}")
        if name not in get_available_reporting_integrations():
            raise UserError(f"--report_to {name} needs its package: pip install {name}")


def _saving(settings: Settings, passed: dict[str, Any]) -> dict[str, Any]:
    if settings.save == "none":
        return {"save_strategy": "no"}
    kept: dict[str, Any] = {"save_strategy": "steps" if "save_steps" in passed else "epoch"}
    if settings.save == "best":
        kept |= {
            "load_best_model_at_end": True,
            "metric_for_best_model": settings.best_metric,
            "greater_is_better": larger_is_better(settings.best_metric),
        }
    return kept


def _has_cuda() -> bool:
    return torch.cuda.is_available()
