"""A training begins to be recorded, or goes on."""

from __future__ import annotations

from transformers import TrainingArguments

from harness import attempts
from harness.records import SCHEMA, RunFolder, write_json
from harness.train.environment import recorded_settings
from harness.train.run import Run


def open_record(
    folder: RunFolder,
    run: Run | None,
    args: TrainingArguments,
    update: int,
    processes: int,
    batch: int,
) -> int:
    """The number of the attempt that begins after this update; its settings are written."""
    opened = run.opened if run is not None else None
    attempt = attempts.begin(folder, update, processes, batch, opened)
    if run is not None:
        run.attempt, run.update = attempt, update
    # What became of the attempts before stands in attempts.jsonl; this one has no end yet.
    folder.summary.unlink(missing_ok=True)
    settings = recorded_settings(run.settings if run is not None else None, args)
    write_json(folder.settings, {"schema": SCHEMA, **settings})
    return attempt
