"""Each record file has one writer and one reader, and its name stands in one place."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, cast

import pytest

from harness.core.records import SCHEMA, SWEEP, RunFolder, read_json, write_sweep
from harness.core.records.checksums import is_changed
from harness.core.schema.environment import EnvironmentRecord, SweepRecord, environment_record
from harness.core.schema.machine import MachineRecord
from harness.core.schema.rows import (
    AttemptStart,
    EpochRow,
    FailureRecord,
    PeerRecord,
    RankRow,
    ReportedProgress,
    SummaryRecord,
)
from harness.core.settings import UserError

NAMES = ("settings.json", "environment.json", "attempts.jsonl", "epochs.jsonl", "summary.json",
         "progress.json", "peers.json", "peer.json", "telemetry/")  # fmt: skip
DIRECT = ("write_json", "append_row", "read_json", "read_rows")
FAILURE: FailureRecord = {"rank": 2, "outcome": "oom", "reason": "memory", "unix": 1.5}
PEER = cast(PeerRecord, {"rank": 0, "fed": 8.0})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_settings({"lr": 0.5})
    folder.write_environment(cast(EnvironmentRecord, {"machine": "cpux2", "memory_gib": 1.5}))
    folder.write_failure(FAILURE)
    folder.write_peers({"a": PEER})
    assert folder.read_settings() == {"schema": SCHEMA, "lr": 0.5}
    assert folder.read_environment() == {"machine": "cpux2", "memory_gib": 1.5}
    assert folder.read_failure(2) == FAILURE and folder.read_failures() == [FAILURE]
    assert folder.read_peers() == {"a": PEER}
    assert folder.environment.read_text() == '{\n  "machine": "cpux2",\n  "memory_gib": 1.5\n}\n'
    assert RunFolder(tmp_path / "none").read_peers() == {}


def test_summary_and_progress_have_a_checksum_of_what_is_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_summary(cast(SummaryRecord, {"outcome": "failed", "wall_s": float("nan")}))
    folder.write_progress(cast(ReportedProgress, {"attempt": 1, "loss": float("inf")}))
    summary, progress = folder.read_summary(), folder.read_progress()
    assert summary is not None and summary["wall_s"] is None and not is_changed(summary)
    assert progress is not None and progress["loss"] is None and not is_changed(progress)


def test_an_environment_is_in_the_order_in_which_it_becomes_known() -> None:
    machine = cast(MachineRecord, {"machine": "cpux2"})
    record = environment_record(
        machine, 1, 2, 16, None, {"observed": {}}, {"link": None}, {"first_learning_rate": 0.1}
    )
    assert [*record] == [
        "machine", "observed", "nodes", "processes_per_node", "link", "effective_batch", "updates",
        "first_learning_rate",
    ]  # fmt: skip
    assert [record["nodes"], record["processes_per_node"], record["effective_batch"]] == [1, 2, 16]


@pytest.mark.parametrize(("change", "message"), [
    ({"observed": {"exhanges": 3}}, "observed.exhanges is not declared in harness/core/schema"),
    ({"observed": {"reads_padding": {"train_batch": 8, "batch": 8}}},
     "observed.reads_padding.batch is not declared"),
    ({"link": {"rtt_ms": 1.0}}, "link.rtt_ms is not declared"),
    ({"link": {"pairs": [{"nodes": [0, 1]}, {"node": 0}]}}, "link.pairs.node is not declared"),
    ({"data": {"samples": 8}}, "data.samples is not declared"),
    ({"machnie": "cpux2"}, "machnie is not declared"),
    ({"observed": {"exchanges": "3"}}, "observed.exchanges is '3': expected integer >= 0"),
    ({"link": {"pairs": [{"nodes": 1}]}}, r"link.pairs\[0\].nodes is '1': expected list"),
    ({"data": {"pixels_on": "disk"}}, "data.pixels_on is 'disk': expected `device` or `host`"),
])  # fmt: skip
def test_an_environment_that_is_not_as_declared_is_not_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    record = cast(EnvironmentRecord, {"machine": "cpux2", "observed": {"world": 2}} | change)
    with pytest.raises(UserError, match=f"^environment.json: {message}"):
        folder.write_environment(record)
    assert not folder.environment.exists()


def test_free_names_inside_an_environment_are_written(tmp_path: Path) -> None:
    content = {
        "versions": {"mine": "1.0"}, "variables": {"A": "1"}, "telemetry_missing": {"power": "no"},
        "observed": {"exchange_estimates_s": {"direct": 0.5}}, "data": {}, "cpu": None,
        "link": {"asked": [{"nodes": [0, 1], "delay_ms": 20}]},
    }  # fmt: skip
    folder = RunFolder(tmp_path / "run")
    folder.write_environment(cast(EnvironmentRecord, content))
    assert folder.read_environment() == content


def test_rows_are_appended_to_their_files(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.append_attempt(cast(AttemptStart, {"event": "start", "attempt": 1}))
    folder.append_epoch(cast(EpochRow, {"epoch": 1.0}))
    folder.append_rank(cast(RankRow, {"rank": 3, "epoch": 1.0}))
    (row,) = folder.read_attempts()
    assert row["event"] == "start" and not is_changed(row)
    assert folder.read_epochs() == ([{"epoch": 1.0}], 0)
    assert folder.read_ranks() == {3: [{"rank": 3, "epoch": 1.0}]}
    write_sweep(tmp_path, cast(SweepRecord, {"name": "mine"}))
    assert read_json(tmp_path / SWEEP) == {"name": "mine"}


def parts(tree: ast.Module) -> tuple[list[str], list[str]]:
    """The texts in code, without docstrings, and the first argument of the calls in DIRECT."""
    texts, calls = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in DIRECT:
            calls.append(ast.unparse(node.args[0]))
    return texts, calls


def test_a_name_stands_once(root: Path) -> None:
    found: dict[str, list[str]] = {name: [] for name in NAMES}
    for file in (*(root / "harness").rglob("*.py"), root / "logcallback.py"):
        texts, _ = parts(ast.parse(file.read_text("utf-8")))
        for text in texts:
            if text in found:
                found[text].append(str(file.relative_to(root)))
    assert found.pop("peer.json") == ["harness/train/strategy/hivemind/exchange.py"]
    assert found.pop("telemetry/") == []
    # Two kinds of rows are in attempts.jsonl.
    assert sorted(found) == sorted(NAMES[:-2]) and len(found.pop("attempts.jsonl")) == 2
    assert found == {name: ["harness/core/schema/checks.py"] for name in found}


@pytest.mark.parametrize("attribute", [
    "settings", "environment", "summary", "progress", "peers", "attempts", "epochs",
])  # fmt: skip
def test_only_the_folder_opens_its_files(root: Path, attribute: str) -> None:
    own = root / "harness" / "core" / "records"
    files = [f for f in (root / "harness").rglob("*.py") if own not in f.parents]
    for file in (*files, root / "logcallback.py"):
        _, calls = parts(ast.parse(file.read_text("utf-8")))
        around = [call for call in calls if call.endswith((f"folder.{attribute}", ".failure(0)"))]
        assert around == [], file


def test_a_sweep_has_one_writer(root: Path) -> None:
    """What plans a sweep writes no JSON but by write_sweep()."""
    folder = root / "harness" / "launch"
    for file in folder.glob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text("utf-8")))
        called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        assert "write_json" not in called, file
        assert "write_sweep" not in called or file.name == "sweep.py"
