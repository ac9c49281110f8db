"""Manifests of checkpoints and of the cache are read as they are declared, and by one reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.core.records import COMPLETE, read_json, write_json
from harness.core.records.checksums import vouched
from harness.core.records.manifests import (
    CHECKPOINT_FORMAT,
    KEY,
    Calibration,
    problem_of,
    read_calibration,
    read_checkpoint,
    read_peer_position,
    write_calibration,
    write_peer_position,
)
from harness.core.settings import UserError
from tests.support.manifests import facts_of

FILES: dict[str, Any] = {"files": {"weights": [8, "0123"]}}
WITHOUT = object()
REFUSED: list[tuple[str, Any, str]] = [
    *((name, WITHOUT, f"{name} is missing")
      for name in ("files", "fingerprint", "processes", "position", "epoch")),
    ("processes", None, "processes is missing"),
    ("processes", "2", "processes is '2': expected integer >= 1"),
    ("processes", 0, "processes is '0': expected integer >= 1"),
    ("fingerprint", "abc", "fingerprint is 'abc': expected object"),
    ("position", {"update": 3, "epoch": 1}, "position.samples is missing"),
    ("position", {"update": -1, "epoch": 1, "samples": 0}, "position.update is '-1': expected"),
    ("best", 8, "best is '8': expected text"),
    ("epoch", [], "epoch is '[]': expected object"),
    ("files", {"weights": [8]}, "weights has no length and checksum"),
    ("files", {"weights": ["8", "0123"]}, "weights has no length and checksum"),
    ("files", {"weights": "0123"}, "files.weights is '0123': expected list"),
    ("files_elsewhere", {"own": [None, "0123"]}, "own has no length and checksum"),
    ("row_checksums", "abc", "row_checksums is 'abc': expected list"),
    ("complete_unix", "today", "complete_unix is 'today': expected number"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "problem"), REFUSED)
def test_what_in_a_checkpoint_is_not_as_declared_is_named(
    name: str, value: Any, problem: str, tmp_path: Path
) -> None:
    content: dict[str, Any] = {**FILES, **facts_of(4)}
    assert problem_of(COMPLETE, content) is None
    content[name] = value
    if value is WITHOUT:
        del content[name]
    assert str(problem_of(COMPLETE, content)).startswith(problem)
    write_json(tmp_path / COMPLETE, content)
    assert read_checkpoint(tmp_path) is None


def test_a_checkpoint_is_read_as_written(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) is None
    content = {**FILES, **facts_of(4, best="checkpoint-2", row_checksums=["a", None])}
    write_json(tmp_path / COMPLETE, content)
    assert read_checkpoint(tmp_path) == content
    (tmp_path / COMPLETE).write_text("{")
    assert read_checkpoint(tmp_path) is None


def test_resuming_refuses_another_format_and_not_its_reader(tmp_path: Path) -> None:
    """Its fields are those of its version; the fingerprint tells which that is."""
    other = {**FILES, "fingerprint": {"format": CHECKPOINT_FORMAT + 1}}
    assert problem_of(COMPLETE, other) is None
    assert problem_of(COMPLETE, {"fingerprint": other["fingerprint"]}) == "files is missing"
    write_json(tmp_path / COMPLETE, other)
    assert read_checkpoint(tmp_path) == other


def test_an_entry_of_the_cache_has_files_and_a_format() -> None:
    assert problem_of(KEY, {**FILES, "format": 7, "dataset": "mine"}) is None
    assert problem_of(KEY, {**FILES, "dataset": "mine"}) == "format is missing"
    assert problem_of(KEY, {"format": 7}) == "files is missing"
    assert str(problem_of(KEY, {**FILES, "format": "7"})).startswith("format is '7'")


def test_the_position_of_a_peer_is_read_as_written(tmp_path: Path) -> None:
    file = tmp_path / "peer.json"
    assert read_peer_position(file) == 0  # a checkpoint without one
    write_peer_position(file, 96)
    assert read_peer_position(file) == 96 and read_json(file) == {"position": 96}
    for content, problem in (
        ({}, "position is missing"),
        ({"position": "many"}, "position is 'many': expected integer >= 0"),
        ({"position": -1}, "position is '-1': expected integer >= 0"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(UserError) as error:
            read_peer_position(file)
        fix = "restore the file, or use --rerun to start afresh"
        assert str(error.value) == f"{file}: {problem}: {fix}"
    file.write_text("{")  # torn
    assert read_peer_position(file) == 0


def test_a_calibration_that_is_not_as_declared_is_none(tmp_path: Path) -> None:
    file = tmp_path / "processor.json"
    known: Calibration = {
        "fp32_tflops": 0.1, "bf16_tflops": 0.3, "memory_gb_per_s": 9.0, "threads": 1, "unix": 5.0,
    }  # fmt: skip
    assert read_calibration(file) is None
    write_calibration(file, known)
    assert read_calibration(file) == known
    edits: list[dict[str, Any]] = [
        {"fp32_tflops": "0.1"}, {"fp32_tflops": -1.0}, {"bf16_tflops": None}, {"threads": 0},
        {"memory_gb_per_s": None}, {"unix": "now"},
    ]  # fmt: skip
    for edited in edits:
        write_json(file, vouched({**known, **edited}))
        assert read_calibration(file) is None, edited
    for name in known:
        write_json(file, vouched({n: v for n, v in known.items() if n != name}))
        assert read_calibration(file) is None, name
    write_json(file, known)
    assert read_calibration(file) is None  # without a checksum
    write_json(file, {**vouched(known), "threads": 2})
    assert read_calibration(file) is None
