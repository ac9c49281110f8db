"""The identity of a run: the settings that can change its result, and the name made from them."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from harness.core.settings import IF_SET, Settings, flag_fields

# Trainer flags that decide how a run is shown, published, saved or given up, not what it measures.
SHOWN_ONLY = (
    "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "report_to", "run_name",
    "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "push_to_hub",
    "hub_model_id", "hub_private_repo", "hub_revision",
    "save_steps", "save_on_each_node", "ddp_timeout",
)  # fmt: skip


# Default of --eval_batch. GPUs use more (train/loop/evaluation.py), but the run id keeps 64, as it
# is made before the device is known, and metrics do not depend on the evaluation batch.
EVAL_BATCH = 64
# Settings that distinguish repetitions of a measurement: they are no axis of a sweep or table.
REPETITIONS = ("seed", "repeat")
UNKNOWN = "-"  # a value that is not known, in tables


def number(value: Any) -> str:
    """The one spelling of a number, so that 2e-5, 0.00002 and 2E-05 give the same run: 2e-05."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def identity(settings: Settings) -> dict[str, Any]:
    """Everything that can change the result, and nothing else. An option that is declared IF_SET
    is part of it only where it is set.

    --tiny is not part of it, as it only chooses defaults; the chosen values are part of it.
    """
    named = {
        name: value
        for name, f in flag_fields().items()
        if name != "tiny" and _enters(f.metadata["identity"], value := getattr(settings, name))
    }
    named["eval_batch"] = settings.eval_batch or EVAL_BATCH
    named["augment"] = settings.augment or "none"
    if settings.validation_split is not None:
        # The final test depends on which weights are kept until then.
        named["tested"] = settings.best_metric if settings.save == "best" else "last epoch"
    passed = {name: value for name, value in settings.trainer if name not in SHOWN_ONLY}
    return {"script": settings.script, **named, "trainer": passed}


def _enters(when: bool | str, value: Any) -> bool:
    return bool(value) if when == IF_SET else bool(when)


def _how(settings: Settings) -> str:
    """The strategy, with the settings that usually distinguish its runs."""
    parts = [str(settings.strategy).rpartition(":")[2]]  # the class of FILE.py:CLASS
    if settings.compress != "none":
        parts.append(settings.compress.replace(":", ""))
    if settings.exchange not in ("auto", "backend"):
        parts.append(settings.exchange)
    if settings.sync_every is not None:
        parts.append(f"h{settings.sync_every}")
    if settings.sync_first:
        parts.append(f"first{settings.sync_first}")
    if settings.muon:
        parts.append("muon")
    if settings.target_batch is not None:
        parts.append(f"t{settings.target_batch}")
    return "-".join(parts)


def stem(settings: Settings) -> str:
    """The part of a run's name that people read; programs never parse it."""
    model = re.sub(r"[^A-Za-z0-9.]+", "-", str(settings.model).rstrip("/").rsplit("/", 1)[-1])
    parts = [model, _how(settings), f"b{settings.per_gpu_batch}"]
    if settings.grad_acc > 1:
        parts.append(f"acc{settings.grad_acc}")
    parts += [f"lr{number(settings.lr)}", f"e{settings.epochs}", f"s{settings.seed}"]
    if settings.balance is not None:
        parts.append("balanced")
    if settings.lora:
        parts.append(f"lora{settings.lora}")
    if settings.precision != "fp32":
        parts.append(settings.precision)
    if settings.repeat > 1:
        parts.append(f"r{settings.repeat}")
    return "_".join(parts)


def run_id(settings: Settings) -> str:
    """A stem for people and a hash of the whole identity."""
    canonical = json.dumps(identity(settings), sort_keys=True, default=str, separators=(",", ":"))
    return f"{stem(settings)}_{hashlib.sha256(canonical.encode()).hexdigest()[:8]}"


def run_path(settings: Settings) -> str:
    """The folder of a run, below the output folder."""
    return f"{settings.script}/{settings.setup}/{run_id(settings)}"
