"""Text files with a list a line, one value an epoch, and the settings in the name of the file.

    bert/2_1_2e-05_16_P100far.txt       <script>/<N>_<M>_<lr>_<batch>[_<tag>].txt

    f1=[0.8863,0.8937]
    times=[118.35,116.3]                seconds of an epoch's training, without evaluation
    loss=[0.2869,0.2222]                of the test set
    samples/s=[196.201,196.268]         of EVALUATION: training's speed is not in these files

The callback that wrote them cut the first two characters off the learning rate: 0.0002 is 0002,
and of 2e-05 only -05 is left, which may have been any number of that size.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from harness.read.foreign import Foreign, check_share, digest
from harness.records import FINISHED
from harness.settings import UserError

FORMAT = "callback-text"
# Name in the file -> field of epochs.jsonl.
NAMES = {
    "f1": "f1",
    "accuracy": "accuracy",
    "precision": "precision",
    "recall": "recall",
    "times": "epoch_time_s",
    "loss": "eval_loss",
    "samples/s": "eval_samples_per_s",
}
NAME = re.compile(r"^(\d+_\d+)_([^_]+)_(\d+)(?:_([A-Za-z0-9.-]+))?$")
NOTES = (
    "eval_loss is as the source defines it, which need not be cross-entropy",
    "how precision, recall and f1 are averaged over the classes is not said",
    "gradient accumulation, data and machine are not in the file",
)


def read_text(file: Path, content: bytes) -> Foreign:
    lists = _lists(file, content)
    epochs = _epochs(file, lists)
    rows = [
        {"epoch": float(n + 1), **{NAMES[name]: values[n] for name, (_, values) in lists.items()}}
        for n in range(epochs)
    ]
    broken = next((n + 1 for n, row in enumerate(rows) if _is_nan(row.get("eval_loss"))), None)
    return Foreign(
        file=file,
        format=FORMAT,
        sha256=digest(content),
        settings={**settings_in(file), "epochs": epochs},
        rows=tuple(rows),
        epochs_done=epochs,
        outcome=FINISHED if broken is None else "diverged",
        reason=None if broken is None else f"the test loss of epoch {broken} is not finite",
        notes=NOTES,
    )


def settings_in(file: Path) -> dict[str, Any]:
    """What folder and name say; a name of another form says nothing."""
    script = file.absolute().parent.name
    found: dict[str, Any] = {"script": script} if script in ("bert", "vit") else {}
    match = NAME.match(file.stem)
    if match is None:
        return found
    setup, lr, batch, tag = match.groups()
    found |= {"setup": f"{setup}_{tag}" if tag else setup, "per_gpu_batch": int(batch)}
    rate = learning_rate(lr)
    return found if rate is None else {**found, "lr": rate}


def learning_rate(text: str) -> float | None:
    """None where digits are lost: -05 is what was left of 2e-05, or of 3e-05."""
    if re.fullmatch(r"0\d+", text):
        text = f"0.{text}"
    elif not re.fullmatch(r"\d+(\.\d+)?e-?\d+|\d+\.\d+", text):
        return None
    value = float(text)
    return value if value > 0 and math.isfinite(value) else None


def _lists(file: Path, content: bytes) -> dict[str, tuple[int, list[float]]]:
    """Name -> (number of its line, values)."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file}: is no text") from None
    found: dict[str, tuple[int, list[float]]] = {}
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
        if name in found:
            raise UserError(f"{where}: {name} stands in line {found[name][0]} already")
        values = [_number(where, name, part) for part in match[2].split(",") if match[2].strip()]
        found[name] = number, values
    if not found:
        raise UserError(f"{file}: holds no line such as f1=[0.90,0.91]")
    return found


def _number(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{where}: {text.strip()[:40]!r} in {name} is no number") from None
    if math.isnan(value) and name == "loss":
        return value  # it diverged, and says so
    if not math.isfinite(value) or (name in ("times", "samples/s") and value <= 0):
        raise UserError(f"{where}: {name} cannot be {text.strip()}")
    check_share(where, NAMES[name], value)
    return value


def _epochs(file: Path, lists: dict[str, tuple[int, list[float]]]) -> int:
    counts = {len(values) for _, values in lists.values()}
    if len(counts) > 1:
        said = ", ".join(f"{name} {len(v)} (line {n})" for name, (n, v) in lists.items())
        raise UserError(f"{file}: the lists are of unequal length: {said}")
    (count,) = counts
    if count == 0:
        raise UserError(f"{file}: all lists are empty: the run ended before its first epoch")
    return count


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
