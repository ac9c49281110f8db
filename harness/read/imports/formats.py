"""Records of other programs, converted to this project's names and units; unknown values are null.

callback-text: one list per line, one value per epoch, and the settings in the name of the file.

    bert/2_1_2e-05_16_P100far.txt       <script>/<N>_<M>_<lr>_<batch>[_<tag>].txt

    f1=[0.8863,0.8937]
    times=[118.35,116.3]                seconds of an epoch's training, without evaluation
    loss=[0.2869,0.2222]                of the test set
    samples/s=[196.201,196.268]         of EVALUATION: training's speed is not in these files

The callback that wrote them cut the first two characters off the learning rate: 0.0002 is 0002,
and of 2e-05 only -05 is left, which may have been any number of that size.

trainer-state: trainer_state.json, as the Hugging Face Trainer leaves it beside a checkpoint. One
row per evaluation, so several per epoch if it evaluated more often. Evaluations at one update (of
several test sets, or once more after training) become one row; of equal names the first counts. An
evaluation before training is left out. The Trainer's times include evaluation, saving and warm-up:
none of them is taken for a time of ours.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from harness.core.records import FINISHED
from harness.core.records.summary import QUALITY_FIELDS, TIMING
from harness.core.schema.fields import LARGEST
from harness.core.settings import UserError
from harness.core.tasks import TASKS
from harness.read.records.recorded import is_number

TEXT, STATE = "callback-text", "trainer-state"

# The fields of an epoch's row that an import may have, in the order of those that are measured.
ROW = (
    "epoch", "updates", "samples", "fed_samples", "effective_batch", "learning_rate", "train_loss",
    "epoch_time_s", "train_samples_per_s", "train_samples_per_s_per_gpu", "timed_samples",
    "timed_s", "energy_j", "eval_loss", "accuracy", "precision", "recall", "f1", "eval_samples",
    "eval_time_s", "eval_samples_per_s", "wall_s", "unix",
)  # fmt: skip
SHARES = {*QUALITY_FIELDS} - {"train_loss", "eval_loss"}
MOST_DIGITS = 100  # of a whole number, so that it is below LARGEST


@dataclass(frozen=True)
class Foreign:
    """The content of an imported file."""

    file: Path
    format: str
    sha256: str
    settings: dict[str, Any]  # from the file's name and content, by our names
    rows: tuple[dict[str, Any], ...]
    epochs_done: float | None
    updates: int | None = None
    outcome: str = FINISHED
    reason: str | None = None
    best_metric: str | None = "accuracy"
    highest_lr: float | None = None  # the highest that was logged; no higher than the one set
    summary: dict[str, Any] = field(default_factory=dict)
    unnamed: dict[str, Any] = field(default_factory=dict)  # numbers without a name here
    begins: str | None = None  # identifies the run: the same for two states of one run
    notes: tuple[str, ...] = ()


def read_foreign(file: Path) -> Foreign:
    try:
        content = file.read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: is not text") from None
    read = _read_state if file.suffix == ".json" else _read_text
    return read(file, text, hashlib.sha256(content).hexdigest())


def check_share(where: str, name: str, value: float) -> None:
    """UserError for a share beyond 0 to 1: per cent would be a hundred times too high in tables."""
    if name in SHARES and not 0 <= value <= 1:
        raise UserError(
            f"{where}: {name} {value:g} is not a share: 0 to 1 is expected, not per cent"
        )


# Name in a text file -> field of epochs.jsonl.
NAMES = {
    "f1": "f1",
    "accuracy": "accuracy",
    "precision": "precision",
    "recall": "recall",
    "times": "epoch_time_s",
    "loss": "eval_loss",
    "samples/s": "eval_samples_per_s",
}
FILE_NAME = re.compile(r"^(\d+_\d+)_([^_]+)_(\d+)(?:_([A-Za-z0-9.-]+))?$")
TEXT_NOTES = (
    "eval_loss is as the source defines it, which need not be cross-entropy",
    "how precision, recall and f1 are averaged over the classes is not said",
    "gradient accumulation, data and machine are not in the file",
)


def _read_text(file: Path, text: str, sha256: str) -> Foreign:
    lists = _lists(file, text)
    epochs = _epochs(file, lists)
    rows = [
        {"epoch": float(n + 1), **{NAMES[name]: values[n] for name, (_, values) in lists.items()}}
        for n in range(epochs)
    ]
    broken = next((row["epoch"] for row in rows if math.isnan(row.get("eval_loss", 0.0))), None)
    return Foreign(
        file=file,
        format=TEXT,
        sha256=sha256,
        settings={**settings_in(file), "epochs": epochs},
        rows=tuple(rows),
        epochs_done=epochs,
        outcome=FINISHED if broken is None else "diverged",
        reason=None if broken is None else f"the test loss of epoch {broken:g} is not finite",
        notes=(*TEXT_NOTES, *_may_be_cut(file)),
    )


def _may_be_cut(file: Path) -> list[str]:
    match = FILE_NAME.match(file.stem)
    if match is None or not re.fullmatch(r"\de-?\d+", rate := match[2]):
        return []
    return [f"the callback may have cut the learning rate: 1.{rate} was written as {rate}, too"]


def settings_in(file: Path) -> dict[str, Any]:
    """Settings in the names of folder and file; none in a name of another form."""
    script = file.absolute().parent.name
    settings: dict[str, Any] = {"script": script} if script in TASKS else {}
    match = FILE_NAME.match(file.stem)
    if match is None:
        return settings
    setup, lr, batch, tag = match.groups()
    settings |= {"setup": f"{setup}_{tag}" if tag else setup, "per_gpu_batch": int(batch)}
    rate = learning_rate(lr)
    return settings if rate is None else {**settings, "lr": rate}


def learning_rate(text: str) -> float | None:
    """The learning rate in a file's name; None where digits are lost: -05 may be left of 2e-05 or
    of 3e-05, and 25e-05 is left of 1.25e-05. 5e-05, perhaps left of 1.5e-05, is taken as it is.
    """
    if re.fullmatch(r"0\d+", text):
        text = f"0.{text}"
    elif not re.fullmatch(r"\d(\.\d+)?e-?\d+|\d+\.\d+", text):
        return None
    value = float(text)
    return value if value > 0 and math.isfinite(value) else None


def _lists(file: Path, text: str) -> dict[str, tuple[int, list[float]]]:
    """Name -> (number of its line, values)."""
    lists: dict[str, tuple[int, list[float]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        match = re.fullmatch(r"\s*([^=\s]+)\s*=\s*\[(.*)\]\s*", line)
        if match is None:
            raise UserError(f"{where}: {line.strip()[:40]!r} is not of the form f1=[0.90,0.91]")
        name = match[1]
        if name not in NAMES:
            raise UserError(f"{where}: {name} is not known: {', '.join(NAMES)} are")
        if name in lists:
            raise UserError(f"{where}: {name} stands in line {lists[name][0]} already")
        values = [_number(where, name, part) for part in match[2].split(",") if match[2].strip()]
        lists[name] = number, values
    if not lists:
        raise UserError(f"{file}: holds no line such as f1=[0.90,0.91]")
    return lists


def _number(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{where}: {text.strip()[:40]!r} in {name} is not a number") from None
    if math.isnan(value) and name == "loss":
        return value  # it diverged, and says so
    if not math.isfinite(value) or (name in ("times", "samples/s") and value <= 0):
        raise UserError(f"{where}: {name} cannot be {text.strip()[:40]}")
    check_share(where, NAMES[name], value)
    return value


def _epochs(file: Path, lists: dict[str, tuple[int, list[float]]]) -> int:
    counts = {len(values) for _, values in lists.values()}
    if len(counts) > 1:
        lengths = ", ".join(f"{name} {len(v)} (line {n})" for name, (n, v) in lists.items())
        raise UserError(f"{file}: the lists are of unequal length: {lengths}")
    (count,) = counts
    if count == 0:
        raise UserError(f"{file}: all lists are empty: the run ended before its first epoch")
    return count


# Numbers of the whole training, evaluation and saving included, under the Trainer's own names.
WHOLE = ("train_runtime", "train_steps_per_second")
STATE_NOTES = (
    "eval_loss depends on batch and ranks as the Trainer computes it; its metrics are defined by "
    "the script that ran",
    "train_loss is the mean of what was logged since the evaluation before, on one rank",
)


def _read_state(file: Path, text: str, sha256: str) -> Foreign:
    state = _state(file, text)
    history = state["log_history"]
    for entry in history:
        if not isinstance(entry, dict):
            raise UserError(f"{file}: log_history holds {str(entry)[:40]!r}, which is no entry")
    rows = _with_epochs(_rows(file, history), state)
    end: dict[str, Any] = next((e for e in reversed(history) if "train_runtime" in e), {})
    updates, planned = _count(file, state, "global_step"), _count(file, state, "max_steps")
    outcome, reason = _outcome(history, updates, planned, bool(end))
    epochs = state.get("num_train_epochs")
    batch = state.get("train_batch_size")
    return Foreign(
        file=file,
        format=STATE,
        sha256=sha256,
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
        highest_lr=max(
            (r for e in history if is_number(r := e.get("learning_rate"))), default=None
        ),
        summary={
            "train_loss": _finite(end.get("train_loss")),
            "trainer_train_samples_per_second": _finite(end.get("train_samples_per_second")),
        },
        unnamed={name: end[name] for name in WHOLE if is_number(end.get(name))},
        begins=_begins(history),
        notes=(*STATE_NOTES, *_of_an_earlier_update(rows, updates)),
    )


def _whole(digits: str) -> int:
    """A whole number that a float holds, too; ValueError for others."""
    if (count := len(digits.removeprefix("-"))) > MOST_DIGITS:
        of = f"{digits[:12]}... of {count:,} digits"
        raise ValueError(f"holds the number {of}: at most {MOST_DIGITS} are expected")
    return int(digits)


def _state(file: Path, text: str) -> dict[str, Any]:
    try:
        state = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise UserError(f"{file}: not readable as JSON: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file} line {error.lineno}: not readable as JSON: {error.msg}") from None
    except ValueError as error:  # of _whole()
        raise UserError(f"{file}: {error}") from None
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise UserError(f"{file}: has no log_history: it is not a trainer_state.json")
    if not state["log_history"]:
        raise UserError(f"{file}: log_history is empty: nothing had been logged yet")
    return state


def _count(file: Path, state: dict[str, Any], name: str) -> int | None:
    value = state.get(name)
    if value is None or (type(value) is int and 0 <= value <= LARGEST):
        return value
    raise UserError(f"{file}: {name} is {str(value)[:40]}: a whole number is expected")


def _rows(file: Path, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per update with an evaluation; without any evaluation, one row for the whole run."""
    losses: list[tuple[Any, float]] = []  # since the last evaluation, by update
    rates: dict[float, float] = {}
    last: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    since: Any = 0  # the update of the last loss before those
    for number, entry in enumerate(history):
        where = f"{file} log_history[{number}]"
        if "loss" in entry:
            losses.append((entry.get("step"), _value(where, "loss", entry["loss"])))
        if is_number(entry.get("learning_rate")):
            rates[_moment(_at(where, entry))] = float(entry["learning_rate"])
        if any(name.startswith("eval_") for name in entry):
            row = {**_at(where, entry), **_quality(where, entry)}
            row["learning_rate"] = rates.get(_moment(row))  # of the update that was evaluated
            if rows and _moment(rows[-1]) == _moment(row):
                rows[-1] |= {n: v for n, v in row.items() if rows[-1].get(n) is None}
            elif _moment(row) > 0:
                rows.append(row | {"train_loss": _mean_loss(losses, since)})
                losses, since = [], losses[-1][0] if losses else since
        last = entry if "epoch" in entry else last
    if rows:
        return rows
    return [{**_at(f"{file} log_history", last), "train_loss": _mean_loss(losses, since)}]


def _mean_loss(losses: list[tuple[Any, float]], since: Any) -> float | None:
    """The mean of logged losses, each of which is that of the updates since the one before; where
    these are not known, each counts the same.
    """
    updates = [since, *(update for update, _ in losses)]
    known = all(isinstance(update, int) for update in updates)
    counts = [after - before for before, after in pairwise(updates)] if known else []
    if not counts or min(counts) <= 0:
        counts = [1] * len(losses)
    total = sum(count * loss for count, (_, loss) in zip(counts, losses, strict=True))
    return total / sum(counts) if losses else None


def _moment(row: dict[str, Any]) -> float:
    """The update of a row; where it is not known, the epoch, which may be rounded."""
    updates, epoch = row["updates"], row["epoch"]
    return float(epoch if updates is None else updates)


def _with_epochs(rows: list[dict[str, Any]], state: dict[str, Any]) -> list[dict[str, Any]]:
    """Compute the epochs from the updates where rounding gave two updates the same epoch."""
    epochs = [row["epoch"] for row in rows]
    end, updates = state.get("epoch"), state.get("global_step")
    known = is_number(end) and end > 0 and updates and all(row["updates"] for row in rows)
    if len({*epochs, 0.0}) > len(epochs) or not known:
        return rows
    return [row | {"epoch": row["updates"] * end / updates} for row in rows]


def _of_an_earlier_update(rows: list[dict[str, Any]], updates: int | None) -> list[str]:
    evaluated = rows[-1]["updates"]
    if not evaluated or not updates or evaluated >= updates:
        return []
    return [f"the last evaluation is that after update {evaluated:,} of {updates:,}"]


def _at(where: str, entry: dict[str, Any]) -> dict[str, Any]:
    epoch, step = entry.get("epoch"), entry.get("step")
    if not is_number(epoch):
        raise UserError(f"{where}: epoch is {epoch!r}: a number is expected")
    return {"epoch": float(epoch), "updates": step if isinstance(step, int) else None}


def _quality(where: str, entry: dict[str, Any]) -> dict[str, Any]:
    values = {k.removeprefix("eval_"): v for k, v in entry.items() if k.startswith("eval_")}
    row: dict[str, Any] = {
        "eval_time_s": _finite(values.get("runtime")),
        "eval_samples_per_s": _finite(values.get("samples_per_second")),
    }
    for name, value in values.items():
        if name.endswith(TIMING) or type(value) is bool:  # a yes or no is no measure
            continue
        if isinstance(value, (int, float)):
            row[_column(name)] = _value(where, name, value)
    return row


def _column(name: str) -> str:
    """The column of a metric: eval_samples keeps its prefix, as `samples` are those of training."""
    reserved = {"loss", *ROW} - {"accuracy", "precision", "recall", "f1"}
    return f"eval_{name}" if name in reserved else name


def _value(where: str, name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UserError(f"{where}: {name} is {value!r}: a number is expected")
    if math.isfinite(value):
        check_share(where, name, value)
    return float(value)


def _finite(value: Any) -> float | None:
    return value if is_number(value) else None


def _outcome(
    history: list[dict[str, Any]], updates: int | None, planned: int | None, ended: bool
) -> tuple[str, str | None]:
    """(outcome, reason); a state at a checkpoint before the end is of an interrupted run."""
    for entry in history:
        for name in ("loss", "eval_loss"):
            if isinstance(entry.get(name), float) and not math.isfinite(entry[name]):
                return "diverged", f"{name} at update {entry.get('step')} is not finite"
    # The Trainer logs a finite loss in place of nan; its gradients stay nan to the end.
    norms = [e for e in history if isinstance(e.get("grad_norm"), float)]
    broken = [*takewhile(lambda e: math.isnan(e["grad_norm"]), reversed(norms))]
    if len(broken) > 1 or (broken and broken[0].get("loss") == 0):
        return "diverged", f"grad_norm is nan from update {broken[-1].get('step')} on"
    if ended or not planned or (updates or 0) >= planned:
        return FINISHED, None
    return "interrupted", f"the state is that after {updates} of {planned} updates"


def _best_metric(state: dict[str, Any], rows: list[dict[str, Any]]) -> str | None:
    """The metric whose best value the state holds; None where no logged metric, or more than one,
    had that value at that update.
    """
    best, update = state.get("best_metric"), state.get("best_global_step")
    if not is_number(best):
        return None
    if update is not None:  # older states do not say it
        rows = [row for row in rows if row["updates"] == update]
    chosen_by = [name for name in QUALITY_FIELDS if name != "train_loss"]
    named = [name for name in chosen_by if any(row.get(name) == best for row in rows)]
    return named[0] if len(named) == 1 else None


def _begins(history: list[dict[str, Any]]) -> str | None:
    """Identifies the run by its first entry with a time, which no two runs share to the digit."""
    first = next((e for e in history if "eval_runtime" in e or "train_runtime" in e), None)
    if first is None:
        return None
    return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:16]
