"""What a measure, an axis, a strategy, a run or a group is called, in every table and figure.

Takes labels and names of axes. A strategy and its own flags are one thing to a reader: ddp
powersgd, diloco h50.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from harness.core.identity import UNKNOWN as UNKNOWN
from harness.core.identity import number
from harness.core.records import FINISHED
from harness.core.strategies import OF_ONE_STRATEGY, is_off, own_strategy

STRATEGY, BATCH = "strategy", "per_gpu_batch"
SIGN = re.compile(r"(?<![\w.])-(?=[\d.])")  # of a number, also in brackets

HEADINGS = {
    "per_gpu_batch": "batch per GPU",
    "number_format": "precision",
    "effective_batch": "batch",
    "train_samples_per_s": "samples/s",
    "train_samples_per_s_per_gpu": "per GPU",
    "train_samples_per_s_gain_percent": "vs base",
    "accuracy_gain_points": "acc. points",
    "peak_memory_first_gib": "first GPU GiB",
    "peak_memory_others_gib": "other GPUs GiB",
    "peak_memory_gib": "peak GiB",
    "tflops_per_s": "TFLOP/s",
    "mfu": "MFU",
    "gpu_utilisation_percent": "GPU busy %",
    "energy_j": "energy J",
    "joules_per_sample": "J/sample",
    "link_rtt_median_ms": "round trip ms",
    "link_bandwidth_mbit": "link Mbit/s",
    "epoch_time_s": "epoch s",
    "train_time_s": "train s",
    "tta_train_s": "target train s",
    "tta_wall_s": "target wall s",
    "tta_epochs": "target epochs",
    "tta_samples": "target samples",
    "tta_train_s_ratio": "target train vs base",
    "tta_wall_s_ratio": "target wall vs base",
    "payload_mb_per_update": "payload MB/update",
    "network_mb_per_update": "sent MB/update",
    "comm_share": "comm. share",
    "comm_exposed_share": "exposed comm.",
}

# Times to a target; what one waits for comes first.
TIMES_TO_TARGET = {"tta_wall_s": "wall time", "tta_train_s": "training time"}

# Values that are understood without the name of their axis.
MACHINE = "machine"
BARE = ("script", "model", "dataset", STRATEGY, "setup", "link", "precision", MACHINE)

# Flags by one letter, where the field has one.
SHORT_FLAGS = {
    "sync_every": "h",
    "sync_first": "first",
    "outer_lr": "lr",
    "outer_momentum": "m",
    "target_batch": "t",
}

# Columns of measures and facts: an axis of this name gets a prefix.
TAKEN = (
    "path", "state", "reason", "machine", "nodes", "processes", "devices", "effective_batch",
    "updates", "samples", "accuracy", "recall", "f1", "attempts", "commit", "dirty",
    "baseline", "planned", "finished", "reached", "outcome", "seeds", "repeats",
)  # fmt: skip


def heading_of(name: str) -> str:
    """The heading of a column of measures."""
    return HEADINGS.get(name, name.replace("_", " "))


def column_of(axis: str) -> str:
    """The column of an axis, renamed as in load() where the axis has the name of a metric."""
    if axis == "precision":
        return "number_format"
    return f"label_{axis}" if axis in TAKEN else axis


def machine_kind(machine: str) -> str:
    """The kind of GPU that a machine label names, without their number."""
    return re.sub(r"x\d+$", "", machine)


def without_tag(setup: str) -> str:
    """A set-up without its tag, which names the link."""
    return "_".join(setup.split("_")[:2])


def shown_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes that are named by themselves; flags of a strategy are named with the strategy."""
    axes = tuple(axes)
    return tuple(a for a in axes if STRATEGY not in axes or a not in OF_ONE_STRATEGY)


def strategy_text(label: Mapping[str, Any]) -> str | None:
    """A strategy with its own flags; None where a label names neither."""
    named = label.get(STRATEGY)
    if own_strategy(named):
        named = str(named).rpartition("/")[2]  # mine.py:Name, without its folder
    flags = [_flag(n, label[n]) for n in OF_ONE_STRATEGY if not is_off(label.get(n))]
    return " ".join([*([str(named)] if named is not None else []), *flags]) or None


def _flag(name: str, value: Any) -> str:
    if name == "compress":
        return str(value)
    if name == "sync_scope":
        return f"by {value}"
    if name in SHORT_FLAGS:
        return f"{SHORT_FLAGS[name]}{number(value)}"
    text = name.replace("_", " ")
    return text if value is True else f"{text} {number(value)}"


def plain_text(value: Any) -> str:
    """A planned value as it stands in the plan."""
    return UNKNOWN if value is None else number(value)


def label_text(label: Mapping[str, Any], axes: tuple[str, ...]) -> str:
    """A label in the order of the axes, and then what repeats it: batch per GPU 16, seed 1."""
    names = [name for name in (*axes, "seed", "repeat") if label.get(name) is not None]
    texts = {**label, **({STRATEGY: strategy_text(label)} if STRATEGY in names else {})}
    return ", ".join(
        f"{heading_of(column_of(n))} {plain_text(texts[n])}" for n in shown_axes(names)
    )


def has_texts(label: Mapping[str, Any], texts: Mapping[str, str]) -> bool:
    """Whether a label has values with these texts on these axes."""
    return all(plain_text(label.get(axis)) == text for axis, text in texts.items())


def group_text(
    label: Mapping[str, Any], axes: tuple[str, ...], machine: str | None = None,
    without: Collection[str] = (),
) -> str:  # fmt: skip
    """The name of a group among others that differ from it on more axes than those left out.

    machine: given only where there are several kinds.
    """
    left_out = {*without, *(OF_ONE_STRATEGY if STRATEGY in without else ())}
    text = label_text({n: v for n, v in label.items() if n not in left_out}, axes)
    return ", ".join(part for part in (text, machine) if part)


def short_text(label: Mapping[str, Any], axes: tuple[str, ...], machine: str | None = None) -> str:
    """The short name of a group: ddp 2_1 b16. A number follows the name of its axis; a flag that is
    on is shown by its name.
    """
    texts = []
    for axis in shown_axes(axes):
        value = strategy_text(label) if axis == STRATEGY else label.get(axis)
        if value is None or value is False:
            continue
        name = {"per_gpu_batch": "b"}.get(axis, f"{axis.replace('_', ' ')} ")
        if value is True:
            texts.append(name.strip())
        elif axis in BARE:
            texts.append(str(value))
        else:
            texts.append(name + (f"{value:g}" if isinstance(value, float) else str(value)))
    return " ".join(texts or ["all runs"]) + (f" {machine}" if machine else "")


def listed(texts: Iterable[str], joined_by: str, most: int) -> str:
    """The first so many texts, and how many more there are."""
    shown = [*texts]
    left = len(shown) - most
    return joined_by.join([*shown[:most], *([f"and {left} more"] if left > 0 else [])])


def counted(count: int, noun: str) -> str:
    """1 run, 2 runs."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def counts_of(states: Iterable[str]) -> str:
    """How many there are of each: 1 failed, 2 waiting."""
    return ", ".join(f"{count} {state}" for state, count in sorted(Counter(states).items()))


def unfinished(states: Collection[str]) -> list[str]:
    """A line with how many runs have not finished, by what became of them, if there are any."""
    others = [state for state in states if state != FINISHED]
    line = f"{len(others)} of {len(states)} runs have not finished: {counts_of(others)}"
    return [line] if others else []


def digits(value: float) -> str:
    """Four digits, or all of a larger number; never in scientific notation."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """A duration as people write it: 1 h 22 min, 12 min 30 s, 8.4 s."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    total_s = round(seconds)
    hours, minutes, left = total_s // 3600, total_s % 3600 // 60, total_s % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s"


def file_name(name: str, taken: Collection[str]) -> str:
    """A folder name that is made of this name and not taken."""
    plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "runs"
    free, number = plain, 2
    while free in taken:
        free, number = f"{plain}_{number}", number + 1
    return free
