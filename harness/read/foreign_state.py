"""trainer_state.json, as the Hugging Face Trainer leaves it beside a checkpoint.

A row for each evaluation, so there are several an epoch where it evaluated several times. Its
times hold evaluation, saving and warm-up: none of them is taken for a time of ours.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.read.foreign import ROW, Foreign, check_share, digest
from harness.read.sweeps import is_number
from harness.records import FINISHED
from harness.settings import UserError
from harness.summary import QUALITY

FORMAT = "trainer-state"
# What the Trainer adds to an evaluation that is no quality.
TIMING = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
# Of the whole training, kept under the Trainer's own names: evaluation and saving are in them.
SAID = ("train_runtime", "train_steps_per_second")
NOTES = (
    "eval_loss depends on batch and ranks as the Trainer computes it; its metrics are defined by "
    "the script that ran",
    "train_loss is the mean of what was logged, on one rank",
)


def read_state(file: Path, content: bytes) -> Foreign:
    state = _state(file, content)
    history = state["log_history"]
    if broken := next((e for e in history if not isinstance(e, dict)), None):
        raise UserError(f"{file}: log_history holds {str(broken)[:40]!r}, which is no entry")
    rows = list(_rows(file, history))
    end: dict[str, Any] = next((e for e in history if "train_runtime" in e), {})
    updates, planned = _count(file, state, "global_step"), _count(file, state, "max_steps")
    outcome, reason = _outcome(history, updates, planned, bool(end))
    epochs = state.get("num_train_epochs")
    batch = state.get("train_batch_size")
    return Foreign(
        file=file,
        format=FORMAT,
        sha256=digest(content),
        settings={
            "epochs": epochs if is_number(epochs) and epochs > 0 else None,
            **({"per_gpu_batch": batch} if isinstance(batch, int) and batch > 0 else {}),
        },
        rows=tuple(rows),
        epochs_done=state["epoch"] if is_number(state.get("epoch")) else None,
        updates=updates,
        outcome=outcome,
        reason=reason,
        best_metric=_best_metric(state, rows),
        summary={
            "train_loss": _finite(end.get("train_loss")),
            "trainer_train_samples_per_second": _finite(end.get("train_samples_per_second")),
        },
        said={name: end[name] for name in SAID if is_number(end.get(name))},
        begins=_begins(history),
        notes=NOTES,
    )


def _state(file: Path, content: bytes) -> dict[str, Any]:
    try:
        state = json.loads(content)
    except json.JSONDecodeError as error:
        raise UserError(f"{file} line {error.lineno}: not readable as JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: is no text") from None
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise UserError(f"{file}: has no log_history: it is no trainer_state.json")
    if not state["log_history"]:
        raise UserError(f"{file}: log_history is empty: nothing had been logged yet")
    return state


def _count(file: Path, state: dict[str, Any], name: str) -> int | None:
    value = state.get(name)
    if value is None or (isinstance(value, int) and value >= 0):
        return value
    raise UserError(f"{file}: {name} is {value!r}: a whole number is expected")


def _rows(file: Path, history: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One for each evaluation; without any, one for the whole."""
    losses: list[float] = []
    last: dict[str, Any] = {}
    evaluated = False
    for number, entry in enumerate(history):
        where = f"{file} log_history[{number}]"
        if "loss" in entry:
            losses.append(_value(where, "loss", entry["loss"]))
        if any(name.startswith("eval_") for name in entry):
            yield {**_at(where, entry), "train_loss": _mean(losses), **_quality(where, entry)}
            losses, evaluated = [], True
        last = entry if "epoch" in entry else last
    if not evaluated:
        yield {**_at(f"{file} log_history", last), "train_loss": _mean(losses)}


def _at(where: str, entry: dict[str, Any]) -> dict[str, Any]:
    epoch, step = entry.get("epoch"), entry.get("step")
    if not is_number(epoch):
        raise UserError(f"{where}: epoch is {epoch!r}: a number is expected")
    return {"epoch": float(epoch), "updates": step if isinstance(step, int) else None}


def _quality(where: str, entry: dict[str, Any]) -> dict[str, Any]:
    given = {k.removeprefix("eval_"): v for k, v in entry.items() if k.startswith("eval_")}
    seconds, rate = given.get("runtime"), given.get("samples_per_second")
    row: dict[str, Any] = {
        "eval_time_s": seconds if is_number(seconds) else None,
        "eval_samples_per_s": rate if is_number(rate) else None,
    }
    for name, value in given.items():
        if name not in TIMING and isinstance(value, (int, float)):
            row[_column(name)] = _value(where, name, value)
    return row


def _column(name: str) -> str:
    """eval_samples are not the samples of training, which have the name without the prefix."""
    taken = {"loss", *ROW} - {"accuracy", "precision", "recall", "f1"}
    return f"eval_{name}" if name in taken else name


def _value(where: str, name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UserError(f"{where}: {name} is {value!r}: a number is expected")
    if math.isfinite(value):
        check_share(where, name, value)
    return float(value)


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _finite(value: Any) -> float | None:
    return value if is_number(value) else None


def _outcome(
    history: list[dict[str, Any]], updates: int | None, planned: int | None, ended: bool
) -> tuple[str, str | None]:
    """A state beside a checkpoint in the middle says nothing of the end."""
    for entry in history:
        for name in ("loss", "eval_loss"):
            if isinstance(entry.get(name), float) and not math.isfinite(entry[name]):
                return "diverged", f"{name} at update {entry.get('step')} is not finite"
    if ended or not planned or (updates or 0) >= planned:
        return FINISHED, None
    return "interrupted", f"the state is that after {updates} of {planned} updates"


def _best_metric(state: dict[str, Any], rows: list[dict[str, Any]]) -> str | None:
    """Whose best value the state holds; none where it chose by nothing that it logged."""
    best = state.get("best_metric")
    chosen_by = set(QUALITY) - {"train_loss"}
    known = [n for row in rows for n, value in row.items() if n in chosen_by and value == best]
    return known[0] if is_number(best) and known else None


def _begins(history: list[dict[str, Any]]) -> str | None:
    """Told by the first entry with a time, which no two runs share to the digit."""
    first = next((e for e in history if "eval_runtime" in e or "train_runtime" in e), None)
    if first is None:
        return None
    return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:16]
