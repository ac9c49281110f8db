"""python -m harness import FILES: other people's records become ours, marked as imported.

Nothing is computed that the source does not hold: what it does not say is null.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from harness.core import tasks
from harness.core.command_line import print_json
from harness.core.identity import number
from harness.core.process import complain
from harness.core.records import SCHEMA, RunFolder, find_runs
from harness.core.records.disk import draft_or_refusal
from harness.core.records.summary import QUALITY_FIELDS, best_of, total_of
from harness.core.records.walking import as_typed
from harness.core.schema.environment import EnvironmentRecord, environment_record
from harness.core.schema.machine import MachineRecord
from harness.core.schema.rows import EpochRow, SummaryRecord
from harness.core.settings import UNRECORDED, UserError, flag_fields, parse_setup
from harness.core.strategies import recorded_strategy
from harness.core.topology import effective_batch
from harness.read.imports.formats import (
    ROW,
    STATE,
    STATE_NOTES,
    TEXT,
    TEXT_NOTES,
    Foreign,
    read_foreign,
)

SCRIPT = f"--script {tasks.names(' or ')}"
# Without these a record has no place, or could not be distinguished from others.
NEEDED = {
    TEXT: {
        "script": SCRIPT,
        "setup": "--setup N_M",
        "lr": "--lr",
        "per_gpu_batch": "--batch",
    },
    STATE: {"script": SCRIPT, "setup": "--setup N_M"},
}
FLAGS = (
    "script", "setup", "lr", "per_gpu_batch", "grad_acc", "epochs", "seed", "model", "dataset",
    "train_size", "test_size", "precision", "strategy",
)  # fmt: skip
UNKNOWN_OF_MACHINE = (
    "cpu", "cpu_cores", "memory_gib", "gpus", "driver", "cuda", "nccl", "threads", "python",
    "system", "versions", "commit", "dirty", "command", "launch", "variables",
)  # fmt: skip
PREFIX = "imported-"
IMPORTED, KNOWN, OTHER_STATE = "imported", "already imported", "not imported"
ROUNDED = 0.01  # of a size, by the digits of the rates and times that it is computed from


class Result(NamedTuple):
    """What became of a file; `path` is the folder that holds it, or another state of its run."""

    file: str
    result: str
    path: str
    notes: list[str]

    @property
    def text(self) -> str:
        if self.result == OTHER_STATE:
            return (
                f"{OTHER_STATE}: {self.file} is another state of the run that {self.path} holds; "
                "to take it instead, remove that folder"
            )
        return "; ".join([f"{self.result}: {self.file} is {self.path}", *self.notes])


def run(options: argparse.Namespace) -> int:
    flags = {name: value for name in FLAGS if (value := getattr(options, name)) is not None}
    if "setup" in flags:
        parse_setup(flags["setup"])
    results = import_files(options.files, flags, options.source, options.out)
    lines = [result.text for result in results]
    if options.json:
        print(*lines, sep="\n", file=sys.stderr)
        print_json({"results": [result._asdict() for result in results]})
    else:
        records = shlex.quote(str(as_typed(options.out)))
        print(*lines, f"next: python -m harness table {records}", sep="\n")
    return 0


def import_files(
    files: list[Path], flags: dict[str, Any], source: str | None, output_dir: Path
) -> list[Result]:
    """Import all files, or none if one is wrong; return a result for each file."""
    read: list[Foreign] = []
    errors: list[UserError] = []
    # The imported runs of the folder, each with its settings.
    known = {
        run.path: run.read_settings() or {}
        for run in (find_runs(output_dir) if output_dir.exists() else ())
        if run.path.name.startswith(PREFIX)
    }
    for file in files:
        try:
            read.append(_complete(read_foreign(file), flags))
            _check_known(read[-1], {**flags, "source": source}, known)
        except UserError as error:
            errors.append(error)
    if errors:
        for mistake in errors:
            complain("harness import", mistake)
        raise UserError("nothing was imported")
    return [_place(foreign, source, output_dir, known) for foreign in read]


def _complete(foreign: Foreign, flags: dict[str, Any]) -> Foreign:
    """The record completed by flags, which must not contradict the file."""
    if foreign.format == STATE and recorded_strategy(flags).splits_batch and flags.get("setup"):
        of_one = _of_one_gpu(foreign, flags["setup"])
        foreign = replace(foreign, settings={**foreign.settings, **of_one})
    for name, value in flags.items():
        if (known := foreign.settings.get(name)) not in (None, value):
            raise UserError(
                f"{foreign.file}: {_flag(name)} {number(value)} contradicts the file, "
                f"which says {number(known)}: import it without"
            )
    settings = {**foreign.settings, **flags}
    lr = settings.get("lr")
    if lr is not None and foreign.highest_lr is not None and lr < foreign.highest_lr * (1 - 1e-6):
        raise UserError(
            f"{foreign.file}: --lr {number(lr)} contradicts the file, which logged "
            f"{number(foreign.highest_lr)}"
        )
    missing = [flag for name, flag in NEEDED[foreign.format].items() if settings.get(name) is None]
    if missing:
        raise UserError(
            f"{foreign.file}: name and content do not say all: give {', '.join(missing)}"
        )
    _check_sizes(foreign, settings)
    return replace(foreign, settings=settings)


def _of_one_gpu(foreign: Foreign, setup: str) -> dict[str, Any]:
    """DataParallel's batch of one GPU: the Trainer's is that of the process with all its GPUs."""
    batch, (_, gpus, _) = foreign.settings.get("per_gpu_batch"), parse_setup(setup)
    if batch is None:
        return {}
    if batch % gpus:
        raise UserError(
            f"{foreign.file}: --strategy dp on {gpus} GPUs contradicts the file, whose batch of "
            f"{batch} is not divisible by them"
        )
    return {"per_gpu_batch": batch // gpus}


def _check_sizes(foreign: Foreign, settings: dict[str, Any]) -> None:
    """UserError where sizes that were given do not fit the file's rates and updates."""
    tested, trained = settings.get("test_size"), settings.get("train_size")
    for row in foreign.rows:
        rate, took_s = row.get("eval_samples_per_s"), row.get("eval_time_s")
        if not (rate and took_s and isinstance(tested, int)):
            continue
        if abs(rate * took_s - tested) > 1 + ROUNDED * tested:
            raise UserError(
                f"{foreign.file}: --test_size {tested} contradicts the file, whose evaluations had "
                f"about {rate * took_s:,.0f} samples"
            )
    samples, updates, epochs = _update_of(settings), foreign.updates, foreign.epochs_done
    if not (samples and updates and epochs and isinstance(trained, int)):
        return
    # The last update of an epoch may be smaller.
    if abs(updates * samples - epochs * trained) > samples * (math.ceil(epochs) + 1):
        raise UserError(
            f"{foreign.file}: {updates:,} updates of {samples:,} samples are not {epochs:g} epochs "
            f"of {trained:,}: check --setup, --strategy, --grad_acc and --train_size"
        )


def _update_of(settings: Mapping[str, Any]) -> int | None:
    """The samples of an update, where they are known."""
    nodes, per_node, _ = parse_setup(settings["setup"])
    batch, grad_acc = settings.get("per_gpu_batch"), settings.get("grad_acc")
    return effective_batch(batch, grad_acc, nodes * per_node) if batch and grad_acc else None


def _check_known(
    foreign: Foreign, flags: Mapping[str, Any], known: Mapping[Path, dict[str, Any]]
) -> None:
    """UserError where a folder holds this file with other flags than these."""
    for path, settings in known.items():
        imported = settings.get("imported") or {}
        if imported.get("sha256") != foreign.sha256:
            continue
        there = {**settings, "source": imported.get("source")}
        unlike = [name for name, value in flags.items()
                  if name in there and value not in (None, there[name])]  # fmt: skip
        if unlike:
            names = ", ".join(_flag(name) for name in unlike)
            raise UserError(
                f"{foreign.file}: {path} holds it with other flags ({names}); to give it these, "
                "remove that folder"
            )


def _flag(name: str) -> str:
    return f"--{'batch' if name == 'per_gpu_batch' else name}"


def _place(
    foreign: Foreign, source: str | None, output_dir: Path, known: dict[Path, dict[str, Any]]
) -> Result:
    """Write one file's record, unless it or another state of the same run is already there."""
    for path, there in known.items():
        imported = there.get("imported") or {}
        if imported.get("sha256") == foreign.sha256:
            return Result(str(foreign.file), KNOWN, str(path), [])
        if foreign.begins is not None and imported.get("begins") == foreign.begins:
            return Result(str(foreign.file), OTHER_STATE, str(path), [])
    settings = foreign.settings
    stem = re.sub(r"[^A-Za-z0-9_.+-]+", "-", foreign.file.stem).strip("-.") or "record"
    name = f"{PREFIX}{stem}-{foreign.sha256[:8]}"
    path = output_dir / settings["script"] / settings["setup"] / name
    source = source or foreign.format
    _write_record(foreign, source, path)
    known[path] = _settings(foreign, source)
    of_this_file = [note for note in foreign.notes if note not in (*TEXT_NOTES, *STATE_NOTES)]
    return Result(str(foreign.file), IMPORTED, str(path), of_this_file)


def _write_record(foreign: Foreign, source: str, path: Path) -> None:
    """The whole folder or none of it."""
    nodes, per_node, _ = parse_setup(foreign.settings["setup"])
    samples = _update_of(foreign.settings)
    rows = [_full_row(foreign, row, samples) for row in foreign.rows]
    environment = _environment(foreign, source, (nodes, per_node), samples)
    with draft_or_refusal(path) as draft:
        folder = RunFolder(draft)
        # The file that makes a folder a run comes first, as in a run.
        folder.write_settings(_settings(foreign, source))
        folder.write_environment(environment)
        for row in rows:
            folder.append_epoch(cast(EpochRow, row))
        folder.write_summary(cast(SummaryRecord, _summary(foreign, rows)))


def _settings(foreign: Foreign, source: str) -> dict[str, Any]:
    names = [name for name in flag_fields() if name not in UNRECORDED]
    return {
        "script": foreign.settings["script"],
        **{name: foreign.settings.get(name) for name in names},
        "trainer": {},
        "imported": {
            "source": source,
            "format": foreign.format,
            "file": foreign.file.name,
            "sha256": foreign.sha256,
            "begins": foreign.begins,
            "source_numbers": foreign.unnamed,
            "notes": list(foreign.notes),
        },
    }


def _environment(
    foreign: Foreign, source: str, setup: tuple[int, int], batch: int | None
) -> EnvironmentRecord:
    sizes = [foreign.settings.get(name) for name in ("train_size", "test_size")]
    train_samples, test_samples = (None if size == "all" else size for size in sizes)
    # A machine of its own: nothing imported is ever averaged with what was measured here.
    unknown = dict.fromkeys(UNKNOWN_OF_MACHINE)
    machine = cast(MachineRecord, {"machine": f"imported:{source}", **unknown})
    record = environment_record(machine, *setup, batch, foreign.updates)
    record["link"] = None
    record["data"] = {
        "dataset": foreign.settings.get("dataset"),
        "train_samples": train_samples,
        "test_samples": test_samples,
        "data_checksum": None,
    }
    return record


def _full_row(foreign: Foreign, row: Mapping[str, Any], batch: int | None) -> dict[str, Any]:
    tested, rate = foreign.settings.get("test_size"), row.get("eval_samples_per_s")
    known: dict[str, Any] = {"effective_batch": batch}
    if isinstance(tested, int):
        known |= {"eval_samples": tested, "eval_time_s": tested / rate if rate else None}
    return {**dict.fromkeys(ROW), **known, **row}


def _summary(foreign: Foreign, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a run's own summary, as far as the rows determine them."""
    last = rows[-1] if rows else {}
    # A value that is not finite cannot be the best.
    finite = [
        {n: v for n, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
        for row in rows
    ]
    return {
        "schema": SCHEMA,
        "outcome": foreign.outcome,
        "reason": foreign.reason,
        "epochs_done": foreign.epochs_done,
        "updates": foreign.updates,
        "samples": total_of(rows, "samples"),
        **{name: last[name] for name in QUALITY_FIELDS if name in last},
        **best_of(finite, foreign.best_metric),
        "train_samples_per_s": None,
        "train_samples_per_s_per_gpu": None,
        "train_time_s": total_of(rows, "epoch_time_s"),
        "eval_time_s": total_of(rows, "eval_time_s"),
        "wall_s": None,
        "energy_j": None,
        "joules_per_sample": None,
        **foreign.summary,
    }
