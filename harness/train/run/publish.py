"""--push_to_hub: the trained model on the Hub, with a card of what was measured, and the record.

The Trainer's own upload takes its whole folder, with pickled arguments and the paths in them, and
the last weights even where others were the best.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCardData, constants, get_token

from harness.core.process import complain
from harness.core.records import COMPLETE, RunFolder, update_of
from harness.core.records.archives import SUFFIX, files_of, write_archive
from harness.core.records.manifests import read_checkpoint
from harness.core.records.places import HUB_NAME, without_places
from harness.core.records.redact import first_line
from harness.core.settings import Settings, UserError
from harness.core.tasks import TASKS, task_of
from harness.train.context import Context
from harness.train.data.models import from_hub
from harness.train.manifest import damage
from harness.train.run.checkpoints import complete_checkpoints

RECORD = f"record{SUFFIX}"
# Of a checkpoint: weights, configuration and processor, and nothing that says where it was made.
MODEL_FILES = ("model*.safetensors", "model*.safetensors.index.json", "*config.json", "tokenizer*",
               "vocab*", "merges.txt", "special_tokens_map.json", "*.model")  # fmt: skip
HUB_METRICS = ("accuracy", "top5_accuracy", "f1", "precision", "recall", "loss")
COST = {
    "samples/s": ("train_samples_per_s", "{:,.0f}"), "training": ("train_time_s", "{:,.1f} s"),
    "wall time": ("wall_s", "{:,.1f} s"), "energy": ("energy_j", "{:,.0f} J"),
    "MFU": ("mfu", "{:.1%}"), "peak memory": ("peak_memory_gib", "{:.2f} GiB"),
}  # fmt: skip
CARD = """---
{metadata}
---

# {name}

{model}, trained on {data}: one run, with seed {seed}.

## What was measured

{measured}

## Setting

{setting}

## Record

`{record}` holds the whole record: settings, rows of every epoch, environment and outcome, as JSON.
Download it and name its folder: `python -m harness table FOLDER`.
"""


def check_hub(settings: Settings) -> None:
    """Fail now where the upload at the end would fail."""
    if not settings.passed.get("push_to_hub"):
        return
    if settings.save == "none":
        raise UserError("--push_to_hub uploads a saved model: use --save last or best")
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push_to_hub needs the Hub, and HF_HUB_OFFLINE is set")
    if not get_token():
        raise UserError(
            "--push_to_hub needs a token that may write: set HF_TOKEN, or use hf auth login"
        )


def publish(context: Context) -> None:
    """Upload a finished run once, if asked to; a failure is one line, and the record stays."""
    if not (context.settings.passed.get("push_to_hub") and context.is_rank0):
        return
    try:
        repo = _upload(context.settings, context.folder)
    except Exception as error:  # of any library on the way: the run itself is finished
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = first_line(error)
        if status in (401, 403, 404):
            reason = f"the Hub answers {status}: check the name and the token"
        complain(
            "harness",
            f"--push_to_hub: nothing was uploaded ({reason}); the run is finished and recorded, "
            "and the same command uploads it",
        )
        sys.exit(1)
    print(f"  the model, its card and its record are in {constants.ENDPOINT}/{repo}")


def _upload(settings: Settings, folder: RunFolder) -> str:
    passed, model = settings.passed, _kept(folder.path)
    api = HfApi(token=get_token())
    name = passed.get("hub_model_id") or folder.path.name
    created = api.create_repo(name, private=passed.get("hub_private_repo"), exist_ok=True)
    repo, revision = str(created.repo_id), passed.get("hub_revision")
    if revision and not str(revision).startswith("refs/"):  # refs/ is an open pull request
        api.create_branch(repo, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        card = card_of(settings, folder, model, repo.rpartition("/")[2])
        Path(work, "README.md").write_text(card, "utf-8")
        of_run = folder.path.relative_to(folder.path.parents[2]).as_posix()
        named = (*settings.passed.values(), settings.output_dir, Path.cwd() / "file")
        records = without_places({of_run: files_of(folder.path)}, named)
        write_archive(Path(work, RECORD), records)
        # A tokenizer's configuration fits two patterns.
        for file in {file for pattern in MODEL_FILES for file in model.glob(pattern)}:
            Path(work, file.name).symlink_to(file.absolute())
        api.upload_folder(
            repo_id=repo, folder_path=work, revision=revision,
            commit_message=f"{folder.path.name}, as trained and measured",
        )  # fmt: skip
    return repo


def _kept(folder: Path) -> Path:
    """The best checkpoint where one was asked for, else the last."""
    for last in reversed(complete_checkpoints(folder)):
        manifest = read_checkpoint(last)
        model = last.with_name((manifest and manifest.get("best")) or last.name)
        if problem := damage(model / COMPLETE):
            raise UserError(f"{model.name} is damaged: {problem}")
        return model
    raise UserError("it keeps no checkpoint")


def card_of(settings: Settings, folder: RunFolder, model: Path, name: str) -> str:
    """The model card, made from the record; what is unknown is left out."""
    summary: dict[str, Any] = dict(folder.read_summary() or {})
    environment: dict[str, Any] = dict(folder.read_environment() or {})
    update = update_of(model)
    rows = [dict(row) for row in folder.read_epochs()[0] if row.get("updates") == update]
    quality = _quality(summary, rows[-1] if rows else {})
    cost = {
        label: text.format(summary[key])
        for label, (key, text) in COST.items()
        if summary.get(key) is not None
    }
    task = f"{task_of(settings.script).input}-classification"
    results = [
        EvalResult(
            task_type=task, dataset_type=_shown(settings.dataset), metric_type=metric,
            dataset_name=_shown(settings.dataset), metric_value=round(value, 4),
        ) for metric, value in quality.items() if metric in HUB_METRICS
    ]  # fmt: skip
    metadata = ModelCardData(
        library_name="transformers", pipeline_tag=task, tags=["training-records"],
        model_name=name, eval_results=results or None,
        base_model=str(settings.model) if _is_public(settings.model) else None,
        datasets=[str(settings.dataset)] if _is_public(settings.dataset) else None,
        metrics=[metric for metric in quality if metric in HUB_METRICS] or None,
    )  # fmt: skip
    measured = {label: f"{value:.4f}" for label, value in quality.items()} | cost
    return CARD.format(
        metadata=metadata.to_yaml(), name=name, model=_shown(settings.model), record=RECORD,
        data=_shown(settings.dataset), seed=settings.seed, measured=_table(measured),
        setting=_table(_setting(settings, environment)),
    )  # fmt: skip


def _quality(summary: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """The quality of the uploaded weights: on a separate test set, or else of their epoch."""
    tested = {name.removeprefix("test_"): summary[name] for name in summary if name[:5] == "test_"}
    metrics = tested or row | {"loss": row.get("eval_loss")}
    names = (*HUB_METRICS, str(summary.get("best_metric")))
    return {name: metrics[name] for name in names if isinstance(metrics.get(name), int | float)}


def _setting(settings: Settings, environment: dict[str, Any]) -> dict[str, Any]:
    data, versions = environment.get("data") or {}, environment.get("versions") or {}
    gpus = environment.get("gpus") or []
    return {
        "strategy": settings.strategy,
        "set-up": f"{settings.setup} (nodes_processes)",
        "device": ", ".join(sorted({*gpus})) or environment.get("cpu"),
        "precision": settings.precision,
        "effective batch": environment.get("effective_batch"),
        "batch per process": settings.per_gpu_batch,
        "accumulation": settings.grad_acc,
        "updates": environment.get("updates"),
        "learning rate": f"{settings.lr:g}",
        "epochs": settings.epochs,
        "training samples": data.get("train_samples"),
        "test samples": data.get("test_samples"),
        "checksum of the data": data.get("data_checksum"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _table(rows: dict[str, Any]) -> str:
    known = [f"| {label} | {value} |" for label, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *known])


def _is_public(name: str | None) -> bool:
    """Whether the Hub may know this name: neither a local folder nor part of this package."""
    listed = any(name in task.architectures for task in TASKS.values())
    return bool(name and HUB_NAME.fullmatch(name) and not listed and from_hub(name))


def _shown(name: str | None) -> str:
    return Path(str(name)).expanduser().name if not _is_public(name) else str(name)
