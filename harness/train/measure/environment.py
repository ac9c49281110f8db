"""The environment of a run: machine, versions, commit and command, without names or secrets."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from harness.core.command_line import print_json
from harness.core.identity import SHOWN_ONLY
from harness.core.process import text_of, usable_cores
from harness.core.provenance import SHARED_GPUS, commit, nvidia_driver, versions
from harness.core.records.redact import (
    SECRET,
    redacted,
    redacted_argument,
    redacted_command,
    settings_of,
)
from harness.core.schema.machine import LaunchRecord, MachineRecord, TcpRecord
from harness.core.settings import Settings
from harness.core.strategies import DP
from harness.core.topology import World, per_gpu_batch_of_trainer
from harness.train.measure.sampler import GIB

# Variables that change what is measured; nothing else of the environment is recorded.
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME",
    "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_ALGO", "NCCL_PROTO",
    "GLOO_SOCKET_IFNAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE",
    "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVIDIA_TF32_OVERRIDE", "NCCL_P2P_LEVEL", "NCCL_NET", "NCCL_IB_HCA",
)  # fmt: skip
# Parts of the names of Trainer arguments that are paths, secrets or names of projects.
HIDDEN = ("dir", "hub_", "_path", "trackio", "run_name", "project", "resume_from")


def environment(cuda: bool = True) -> MachineRecord:
    """The facts that explain measured numbers, without names of persons or hosts.

    cuda: whether the GPUs, where there are any, are what is measured.
    """
    driver, code = nvidia_driver(), commit()
    gpus = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
    return {
        "machine": machine_label(max(gpus, driver.gpus if driver else 0) if gpus else 0),
        "cpu": cpu_name(),
        "cpu_cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": [torch.cuda.get_device_name(number) for number in range(gpus)],
        "driver": (driver.version if driver else None) or None,
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "tcp": tcp(),
        "versions": versions(),
        "commit": code["commit"],
        "dirty": code["dirty"],
        "command": redacted_command([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "launch": _recorded_launch(gpus),
        "variables": {k: os.environ[k] for k in VARIABLES if k in os.environ},
    }


def tcp() -> TcpRecord | None:
    """What decides whether an idle TCP connection starts slowly again; None if no file tells."""
    folder = Path("/proc/sys/net/ipv4")
    try:
        control = (folder / "tcp_congestion_control").read_text().strip()
        slow_start = (folder / "tcp_slow_start_after_idle").read_text().strip() != "0"
    except OSError:
        return None
    return {"congestion_control": control, "slow_start_after_idle": slow_start}


def launch() -> dict[str, Any]:
    """How a sweep or `harness nodes` started this run; empty where neither did."""
    facts: dict[str, Any] = json.loads(os.environ.get("HARNESS_LAUNCH") or "{}")
    return facts


def _recorded_launch(gpus: int) -> LaunchRecord | None:
    """How the run was launched, with numbers that `harness nodes` cannot know beforehand."""
    facts = launch()
    if facts.get("sweep", "") is None and "WORLD_SIZE" in os.environ and not gpus:
        processes = int(os.environ["WORLD_SIZE"])
        facts["processes_per_core"] = round(processes / len(usable_cores()), 3)
    if gpus and (shared := processes_per_gpu()) is not None:
        facts["processes_per_gpu"] = shared
    return cast(LaunchRecord, facts) if facts else None


def processes_per_gpu() -> float | None:
    """Processes per GPU where emulated nodes share GPUs; None where each has one of its own."""
    if SHARED_GPUS not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return round(int(os.environ["WORLD_SIZE"]) / int(os.environ[SHARED_GPUS]), 3)


def run(options: argparse.Namespace) -> int:
    """python -m harness env"""
    of_runs = ("command", "launch")
    print_json({name: fact for name, fact in environment().items() if name not in of_runs})
    return 0


def machine_label(gpus: int) -> str:
    """A short name for this kind of machine: results of different machines are never averaged.

    gpus: all that the machine has, so that it has one name however many of them a run sees.
    """
    if gpus:
        name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
        return f"{name.removeprefix('nvidia-')}x{gpus}"
    name = re.sub(r"\(r\)|\(tm\)|cpu|processor|@.*", " ", cpu_name().lower())
    return f"{re.sub(r'[^a-z0-9]+', '-', name).strip('-')}x{psutil.cpu_count(logical=True)}"


def resolved_arguments(args: Any) -> dict[str, Any]:
    """The Trainer's arguments without paths, secrets and names of projects."""
    return {
        name: redacted_argument(value, name)
        for name, value in args.to_dict().items()
        if not any(word in name for word in HIDDEN)
        and not (isinstance(value, str) and SECRET.search(name))
    }


def recorded_settings(
    settings: Settings | None, args: Any, world: World, model: Any, data: Any,
    per_gpu_batch: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All settings, and every resolved argument of the Trainer; its batch may be another."""
    arguments = resolved_arguments(args)
    if settings is not None:
        return {**settings_of(settings), "training_arguments": arguments}
    named = {name: arguments[of] for name, of in OF_TRAINER.items()}
    gpus = gpus_of(args, model)
    if gpus > 1:  # as in records of --strategy dp
        named["strategy"] = DP
    formats = {"bf16": args.bf16, "fp16": args.fp16, "fp32": True}
    named |= {
        "per_gpu_batch": per_gpu_batch or per_gpu_batch_of_trainer(args),
        "model": redacted(model_name(model)),
        "dataset": redacted(_dataset_name(data)),
        "setup": f"{world.nodes}_{world.per_node * gpus}",
        "precision": next(name for name, used in formats.items() if used),
        "trainer": _changed(args, arguments),
    }
    return {**named, "training_arguments": arguments}


# Settings of ours that LogCallback alone takes from the Trainer's arguments.
OF_TRAINER = {
    "lr": "learning_rate", "seed": "seed", "grad_acc": "gradient_accumulation_steps",
    "epochs": "num_train_epochs",
}  # fmt: skip
NAMED = ("per_device_train_batch_size", "bf16", "fp16")  # recorded under other names


def gpus_of(args: Any, model: Any) -> int:
    """GPUs of this process: all that it sees where the Trainer uses nn.DataParallel."""
    whole = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
    return 1 if whole else max(int(args.n_gpu), 1)


def model_name(model: Any) -> str:
    """What a model was loaded from, else its class, with a checksum of its configuration."""
    config = getattr(inner := getattr(model, "module", model), "config", None)
    if loaded_from := getattr(config, "_name_or_path", None):
        return str(loaded_from)
    name = type(inner).__name__
    if config is None or not hasattr(config, "to_dict"):
        return name
    values = {n: value for n, value in config.to_dict().items() if n not in FILLED_IN}
    return f"{name} (config {_checksum(values)})"


# Parts of a configuration that training, saving or another version of transformers fills in.
FILLED_IN = ("_name_or_path", "architectures", "dtype", "problem_type", "transformers_version")


def _dataset_name(data: Any) -> str:
    """The data's name, else class, and size. Runs on data of another name or size are never
    averaged with these; other data of the same name and size are not told apart.
    """
    name = getattr(getattr(data, "info", None), "dataset_name", None) or type(data).__name__
    return f"{name} of {len(data):,} samples" if hasattr(data, "__len__") else str(name)


def _changed(args: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The other arguments that are not the Trainer's defaults; of those that are not recorded or
    are no single values, checksums.
    """
    defaults = {f.name: redacted_argument(f.default, f.name) for f in dataclasses.fields(args)}
    return _checksums(args, arguments) | {
        name: value
        for name, value in arguments.items()
        if name in defaults and name not in (*OF_TRAINER.values(), *SHOWN_ONLY, *NAMED)
        and isinstance(value, (str, int, float)) and value != defaults[name]
    }  # fmt: skip


# Own arguments that say where a training writes or who may read change no result. Whole parts of
# their names tell, such as log_path and logdir, not dialog_path.
NO_RESULT = re.compile(
    r"(?:^|_)(?:out(?:put)?|log(?:ging)?|save|cached?|result|checkpoint|ckpt|te?mp|hub|run_name|"
    r"project|trackio|resume|secret|passw(?:or)?d|passphrase|pwd|credential|api|access|auth|private|"
    r"wandb|hf)s?(?:dir|path|file|folder|key|token)?s?(?:_|$)|^tokens?$|"
    r"(?<!bos)(?<!eos)(?<!pad)(?<!sep)(?<!cls)(?<!unk)(?<!mask)_token$",
    re.IGNORECASE,
)


@cache
def _filled() -> dict[str, list[tuple[str, Any]]]:
    """Pairs that the Trainer fills in."""
    from transformers.trainer_pt_utils import AcceleratorConfig

    return {"accelerator_config": [*AcceleratorConfig().to_dict().items()]}


def _checksums(args: Any, arguments: dict[str, Any]) -> dict[str, str]:
    """Of arguments that can change a result, and whose values are paths, names, dicts or lists."""
    sums = {}
    for field in dataclasses.fields(args):
        name, value, hidden = field.name, getattr(args, field.name), field.name not in arguments
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        shown = redacted_argument(value)  # also a default may be an array, which has no one ==
        if shown == redacted_argument(default) or name in SHOWN_ONLY:
            continue
        if hidden and NO_RESULT.search(name):
            continue
        shown = arguments.get(name, shown)
        if isinstance(shown, dict):
            shown = dict(pair for pair in shown.items() if pair not in _filled().get(name, ()))
        if hidden or (shown and isinstance(shown, (dict, list, tuple))):
            sums[name] = f"checksum {_checksum(shown)}"
    return sums


def _checksum(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def cpu_name() -> str:
    text = text_of(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())
