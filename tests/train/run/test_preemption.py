"""Before a machine is taken away a run saves inside its epoch, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.records import read_json, read_rows
from harness.train.run.checkpoints import complete_checkpoints
from tests.support.broken_runs import ARGV, SHORT, Whole, assert_same_training, only_run
from tests.support.ranks import script

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (1, []),
        (2, []),
        pytest.param(2, ["--strategy", "fsdp"], marks=pytest.mark.slow),
    ],
    ids=["one process", "ddp", "fsdp"],
)
def test_a_last_call_saves_where_it_comes(
    count: int, more: list[str], tmp_path: Path, whole: Whole
) -> None:
    call, out = tmp_path / "last call", tmp_path / "out"
    call.touch()
    flags = [*(SHORT if count == 1 else ARGV), *more]
    argv = [*flags, "--o", str(out)]
    done = script("vit", *argv, count=count, env={"HARNESS_PREEMPTION": str(call)})
    assert done.code == 138, done.err
    folder = only_run(out)
    summary = read_json(folder.summary) or {}
    assert (summary["outcome"], summary["epochs_done"]) == ("interrupted", 0)
    assert summary["reason"].startswith("the time limit is near: saved")
    # All ranks agree on an update a little ahead; one process need not.
    (checkpoint,) = complete_checkpoints(folder.path)
    saved = int(checkpoint.name.split("-")[1])
    assert saved == 1 if count == 1 else 4 <= saved <= 6

    call.unlink()
    done = script("vit", *argv, count=count, env={"HARNESS_PREEMPTION": str(call)})
    assert done.code == 0, done.err
    assert f"goes on from update {saved}" in done.out
    starts = [row for row in read_rows(folder.attempts)[0] if row["event"] == "start"]
    assert starts[1]["redone_updates"] == 0
    assert_same_training(folder, whole("vit", count, flags))


def test_nobody_is_called_where_nothing_is_saved(tmp_path: Path) -> None:
    call = tmp_path / "call"
    call.touch()
    argv = ["--tiny", "--train_size", "64", "--test_size", "32", "--epochs", "1", "--save", "none"]
    done = script("vit", *argv, "--o", str(tmp_path), env={"HARNESS_PREEMPTION": str(call)})
    assert done.code == 0, done.err
