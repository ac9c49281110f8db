"""Small JSON files that a checkpoint and the cache hold beside the data: how each is declared.

Each has one reader, which checks it, and one writer. Manifests, which list the files of a folder,
are written by harness/train/manifest.py, which makes the checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from harness.core.records import COMPLETE, read_json, write_json
from harness.core.records.checksums import OWN, is_changed, vouched
from harness.core.schema.checks import unfit
from harness.core.schema.fields import (
    Count,
    GigabytePerSecond,
    Positive,
    TflopPerSecond,
    Unix,
)
from harness.core.settings import UserError

CHECKPOINT_FORMAT = 2  # of what the harness writes into a checkpoint beside the Trainer's files
KEY = "key.json"  # the manifest of a cache's entry


class Manifest(TypedDict):
    """The manifest of a folder."""

    files: dict[str, list[Any]]  # by name: length and checksum


class EntryManifest(Manifest):
    """Of a cache's entry; the other fields are what was prepared, and give the folder its name."""

    format: Count


class PositionRecord(TypedDict):
    """Where in the training a checkpoint was written."""

    update: Count
    epoch: Count  # completed epochs
    samples: Count  # of the epoch in progress


class CheckpointFacts(TypedDict):
    """What the manifest of a checkpoint holds beside its files."""

    # Whoever resumes compares it as a whole; it has CHECKPOINT_FORMAT as `format`.
    fingerprint: dict[str, Any]
    processes: Positive
    best: str | None  # name of the best checkpoint so far
    position: PositionRecord
    epoch: dict[str, Any]  # what is known of the epoch in progress
    files_elsewhere: NotRequired[dict[str, list[Any]]]  # that only the disks of other nodes hold
    row_checksums: NotRequired[list[Any]]  # of the rows recorded before it
    complete_unix: NotRequired[Unix]  # when it was completed; copies have other times


class CheckpointManifest(CheckpointFacts, Manifest):
    """The manifest that marks a checkpoint as complete."""


class PeerPosition(TypedDict):
    """Where in its order of samples a hivemind peer was when it wrote a checkpoint."""

    position: Count


class Calibration(TypedDict):
    """What a processor can do; a peak that other programs disturbed is null, and is not cached."""

    fp32_tflops: TflopPerSecond | None
    bf16_tflops: TflopPerSecond | None
    memory_gb_per_s: GigabytePerSecond
    threads: Positive
    unix: Unix


MANIFESTS: dict[str, type] = {COMPLETE: CheckpointManifest, KEY: EntryManifest}


def problem_of(name: str, content: Mapping[str, Any]) -> str | None:
    """What in a manifest of this name is missing or not as declared.

    Of a checkpoint in another format only the files: by its fingerprint, resuming refuses it.
    """
    fingerprint, declared = content.get("fingerprint"), MANIFESTS.get(name, Manifest)
    if name == COMPLETE and isinstance(fingerprint, dict):
        known = fingerprint.get("format", CHECKPOINT_FORMAT) == CHECKPOINT_FORMAT
        declared = declared if known else Manifest
    if problem := unfit(declared, content):
        return problem
    elsewhere = content.get("files_elsewhere") if declared is CheckpointManifest else None
    listed = {**content["files"], **(elsewhere or {})}
    wrong = (file for file, entry in listed.items() if not _is_entry(entry))
    return next((f"{file} has no length and checksum" for file in wrong), None)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list) and [*map(type, entry)] == [int, str]


def read_checkpoint(checkpoint: Path) -> CheckpointManifest | None:
    """The manifest of a checkpoint; None if there is none, or if it is not as declared.

    harness/train/manifest.py checks whether it, and the files in it, are as they were written.
    """
    content = read_json(checkpoint / COMPLETE)
    if content is None or problem_of(COMPLETE, content):
        return None
    return cast(CheckpointManifest, content)


def read_peer_position(file: Path) -> int:
    """In samples; 0 where there is no such file, as in a checkpoint of another strategy."""
    content = read_json(file)
    if content is None:
        return 0
    if problem := unfit(PeerPosition, content):
        raise UserError(f"{file}: {problem}: restore the file, or use --rerun to start afresh")
    return int(content["position"])


def write_peer_position(file: Path, samples: int) -> None:
    content: PeerPosition = {"position": samples}
    write_json(file, content)


def read_calibration(file: Path) -> Calibration | None:
    """None if the file is missing, has changed, or is not as declared: then measure again."""
    content = read_json(file)
    if content is None or OWN not in content or is_changed(content):
        return None
    known = {name: value for name, value in content.items() if name != OWN}
    if unfit(Calibration, known) or None in (known.get("fp32_tflops"), known.get("bf16_tflops")):
        return None
    return cast(Calibration, known)


def write_calibration(file: Path, known: Calibration) -> None:
    """With a checksum, and not durable: it can be measured again."""
    write_json(file, vouched(known), durable=False)
