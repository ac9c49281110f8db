"""Attempts after crashes of every kind: what is known of them, whatever their files hold."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from harness.core import attempts
from harness.core.records import RunFolder, append_row, read_rows, write_json
from harness.core.records.disk import DiskError
from harness.core.schema.checks import check_fields

START = {"event": "start", "attempt": 1, "unix": 100.0, "from_update": 0, "processes": 1,
         "effective_batch": 16, "restarts": 0, "gap_s": None, "lost_s": None,
         "redone_updates": None}  # fmt: skip
END = {"event": "end", "attempt": 1, "outcome": "interrupted", "reason": "SIGTERM",
       "unix": 107.0, "update": 5, "wall_s": 7.0, "user_s_per_rank": [6.0],
       "system_s_per_rank": [1.0]}  # fmt: skip
EPOCH = {"epoch": 1, "updates": 8, "samples": 128, "timed_s": 2.0, "timed_samples": 100,
         "epoch_time_s": 3.0, "eval_time_s": 1.0, "accuracy": 0.5, "gpu": None, "energy_j": 1.5,
         "peak_memory_gib_per_rank": [1.0]}  # fmt: skip
ODD: list[Any] = [
    None,
    [1.0, None],
    "text",
    -1,
    [],
    {},
    [None],
    ["text"],
    True,
    float("nan"),
    10**400,
]


@pytest.mark.parametrize("name", [*START, *END])
def test_odd_rows_never_stand_in_the_way(name: str, tmp_path: Path) -> None:
    for number, odd in enumerate([*ODD, "left out"]):
        folder = RunFolder(tmp_path / str(number))
        folder.write_settings({})
        rows = [{**row, name: odd} if name in row else row for row in (START, END)]
        if odd == "left out":
            rows = [{n: v for n, v in row.items() if n != name} for row in rows]
        folder.attempts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        opened = attempts.Opened(time.time(), 103.0, 90.0)
        attempts.begin(folder, 4, 1, 16, opened)
        attempts.write_progress(folder, {"attempt": 1, "wall_s": odd, "update": odd})
        attempts.begin(folder, 4, 1, 16, opened)
        attempts.end(folder, "finished", None, 1.0)
        attempts.write_summary(folder, "finished")
        assert folder.outcome() == "finished"
        for row in attempts.starts_of(folder.read_attempts())[1:]:
            # Since the launcher began.
            assert row["lost_s"] is None or 0 <= row["lost_s"] <= time.time() - 90.0


def test_records_nested_without_end_are_unreadable(tmp_path: Path) -> None:
    folder, deep = RunFolder(tmp_path), '{"a":' * 100_000
    for file in (folder.attempts, folder.progress, folder.epochs):
        file.write_text(deep)
    assert attempts.begin(folder, 0, 1) == 1
    assert (folder.read_progress(), folder.read_epochs()) == (None, ([], 1))


@pytest.mark.parametrize("name", EPOCH)
def test_odd_epochs_are_unknown(name: str, tmp_path: Path) -> None:
    for number, odd in enumerate(ODD):
        folder = RunFolder(tmp_path / str(number))
        folder.write_settings({})
        folder.epochs.write_text(json.dumps({**EPOCH, name: odd}) + "\n")
        folder.environment.write_text(json.dumps({"comm_probe": odd}))
        attempts.write_summary(folder, "finished", None, "accuracy")
        assert folder.outcome() == "finished"


def test_a_fact_that_does_not_fit_is_unknown_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_settings({"script": "vit"})
    facts = {"attempts": 2, "save_time_s": -1.0, "test_accuracy": 80.0, "test_rmse": 80.0}
    attempts.write_summary(folder, "finished", facts=facts)
    assert "save_time_s, test_accuracy\n" in capsys.readouterr().err
    summary: Any = folder.read_summary()
    assert (summary["outcome"], summary["attempts"], summary["test_rmse"]) == ("finished", 2, 80.0)
    assert summary["save_time_s"] is summary["test_accuracy"] is None
    check_fields("summary", summary, folder.summary)
    folder.write_settings({})  # of a script with metrics of its own, which may be in per cent
    attempts.write_summary(folder, "finished", facts=facts)
    summary = folder.read_summary()
    assert summary["save_time_s"] is None and summary["test_accuracy"] == 80.0


def test_a_clock_that_was_set_changes_no_duration() -> None:
    ahead = 3600.0
    rows: Any = [START, {**END, "unix": 107.0 + ahead}]
    # Of the 7 s of the attempt no more than 7 can be lost, whatever the clock says of its end.
    opened = attempts.Opened(110.0 + ahead, counted_unix=103.0)
    assert attempts.lost(rows, 4, opened, now_unix=111.0 + ahead)["lost_s"] == 7.0 + 1.0
    behind: Any = [START, {**END, "unix": 107.0 - ahead}]
    assert attempts.lost(behind, 4, opened, now_unix=111.0 + ahead)["lost_s"] == 1.0
    # The launcher began 13 s before: no gap is longer.
    opened = attempts.Opened(110.0 + ahead, 103.0, launcher_unix=97.0 + ahead)
    set_later: Any = [START, {**END, "unix": 99.0 + ahead}]
    assert attempts.lost(set_later, 4, opened, 111.0 + ahead)["gap_s"] == pytest.approx(11.0)
    # Set between two attempts: no gap is negative, but one that is too long by the step forward
    # cannot be told from a long one.
    unmoved: Any = [START, END]
    for step, gap_s in ((-ahead, 0.0), (0.0, 3.0), (ahead, 3.0 + ahead)):
        opened = attempts.Opened(110.0 + step, 103.0, launcher_unix=90.0)
        assert attempts.lost(unmoved, 4, opened, 111.0 + step)["gap_s"] == gap_s


def test_the_loss_since_an_unknown_checkpoint_is_unknown() -> None:
    rows: Any = [START, END]
    opened = attempts.Opened(110.0)
    assert attempts.lost(rows, 4, opened, 111.0)["lost_s"] is None
    assert attempts.lost(rows, 0, opened, 111.0)["lost_s"] == 7.0 + 1.0


def test_a_killed_attempt_keeps_its_own_reason(tmp_path: Path) -> None:
    folder, now = RunFolder(tmp_path), time.time()
    append_row(folder.attempts, {**START, "unix": now - 60})
    failure = {"rank": 0, "outcome": "failed", "reason": "of the next one", "unix": now - 1,
               "in_step": False}  # fmt: skip
    write_json(folder.failure(0), failure)
    # It opened the run five seconds ago, and failed before training began.
    attempts.end(folder, "failed", "of the next one", wall_s=5.0, begun=False)
    killed, own = attempts.ends_of(folder.read_attempts())
    assert (killed["attempt"], killed["outcome"]) == (1, "interrupted")
    assert (killed["reason"], own["reason"]) == ("the process was killed", "of the next one")
    # One that began after the failure takes it for the cause.
    append_row(folder.attempts, {**START, "attempt": 2, "unix": now - 3})
    attempts.begin(folder, 0, 1, opened=attempts.Opened(now))
    closed = read_rows(folder.attempts)[0][-2]
    assert (closed["reason"], closed["in_step"]) == ("of the next one", False)


@pytest.mark.parametrize(("epoch", "update", "rows", "in_step"), [
    (0, 0, 0, None), (0.5, 4, 0, None), (1.5, 12, 1, None),  # at a step
    (1, 8, 0, False), (2, 16, 1, False),  # evaluating, or before its row
    (1, 8, 1, None),  # saving, or the first steps of the next epoch
    (3, 24, 2, False), (3, 24, 3, False), (2.5, 24, 2, False),  # no step is left
    (None, 8, 0, None), (1, None, 0, None),
])  # fmt: skip
def test_where_a_killed_attempt_may_have_been(
    epoch: float | None, update: int | None, rows: int, in_step: bool | None, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    for number in range(rows):
        append_row(folder.epochs, {**EPOCH, "epoch": number + 1})
    progress = {"attempt": 1, "epoch": epoch, "update": update, "updates": 24}
    assert attempts.may_be_in_step(folder, progress) is in_step
    append_row(folder.attempts, START)
    attempts.write_progress(folder, progress)
    attempts.begin(folder, 0, 1)
    assert read_rows(folder.attempts)[0][1]["in_step"] is in_step


def test_a_removed_folder_is_not_made_anew(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    attempts.begin(folder, 0, 1)
    folder.attempts.unlink()
    with pytest.raises(DiskError, match="run was removed while the run was in progress"):
        attempts.write_progress(folder, {"attempt": 1})
    assert not folder.progress.exists()


def test_a_run_that_lost_its_attempts_does_not_know_its_time(tmp_path: Path) -> None:
    """It went on from a checkpoint, so there was an attempt before the first one that is known."""
    folder = RunFolder(tmp_path)
    folder.write_settings({})
    opened = attempts.Opened(time.time(), None, None)
    attempts.begin(folder, 0, 1, 16, opened)
    append_row(folder.epochs, {**EPOCH, "wall_s": 25.0})
    attempts.end(folder, "interrupted", "SIGTERM", 30.0)
    assert attempts.wall_s_before(folder) == 30.0
    folder.attempts.unlink()
    attempts.begin(folder, 8, 1, 16, opened)
    assert attempts.wall_s_before(folder) == 25.0  # what the last row says
    attempts.end(folder, "finished", None, 2.0)
    attempts.write_summary(folder, "finished")
    summary = folder.read_summary() or {}
    assert summary["wall_s"] is None and summary["train_time_s"] == 3.0


def test_times_that_were_changed_are_not_believed(tmp_path: Path) -> None:
    """Whatever they say: the run goes on, and knows its time no more."""
    folder = RunFolder(tmp_path)
    folder.write_settings({})
    attempts.begin(folder, 0, 1, 16)
    append_row(folder.epochs, {**EPOCH, "wall_s": 25.0})
    attempts.end(folder, "interrupted", "SIGTERM", 30.0)
    attempts.begin(folder, 8, 1, 16)
    attempts.write_progress(folder, {"attempt": 2, "update": 9, "wall_s": 2.0})
    assert (folder.read_progress() or {})["wall_s"] == 2.0
    for file in (folder.attempts, folder.progress):
        file.write_text(file.read_text().replace('"wall_s": ', '"wall_s": 5'))
    assert folder.read_progress() is None
    assert attempts.wall_s_before(folder) == 25.0
    assert attempts.begin(folder, 8, 1, 16) == 3
    attempts.end(folder, "finished", None, 2.0)
    attempts.write_summary(folder, "finished")
    assert (folder.read_summary() or {})["wall_s"] is None
    assert folder.read_attempts()[3]["wall_s"] is None  # of the second one, which was killed


@pytest.mark.parametrize(("reported", "redone"), [(6, 2), (4, None), (None, None)])
def test_what_a_killed_attempt_did_not_report_is_unknown(
    reported: int | None, redone: int | None, tmp_path: Path
) -> None:
    """It was said to be nothing."""
    folder = RunFolder(tmp_path)
    folder.write_settings({})
    attempts.begin(folder, 0, 1)
    attempts.write_progress(folder, {"attempt": 1, "update": reported, "wall_s": 1.0})
    attempts.begin(folder, 4, 1)
    _, end, start = folder.read_attempts()
    assert end["as_reported"] is True and start["redone_updates"] == redone
    attempts.end(folder, "finished", None, 1.0)
    attempts.write_summary(folder, "finished")
    assert (folder.read_summary() or {})["redone_updates"] == redone


def test_an_end_from_outside_has_what_the_attempt_reported_last(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    attempts.begin(folder, 0, 1)
    told = {"attempt": 1, "wall_s": 7.5, "measuring_s": 1.5, "update": 4}
    attempts.write_progress(folder, told)
    attempts.end_from_outside(folder, "timeout", "no news", 9.0)
    _, end = read_rows(folder.attempts)[0]
    assert {name: end[name] for name in told} == told


def test_what_another_version_observed_is_left_out(tmp_path: Path) -> None:
    """A resumed run can write what it knows of earlier attempts."""
    folder = RunFolder(tmp_path)
    assert attempts.observed_of(folder) == {} and attempts.recorded(folder, "machine") is None
    known = {"world": 2, "exchange_estimates_s": {"direct": 0.5}}
    older = {"renamed": 1, "reads_padding": {"train_batch": 8, "renamed": 8}}
    write_json(folder.environment, {"machine": "cpux2", "observed": known | older})
    assert attempts.observed_of(folder) == known
    assert attempts.recorded(folder, "machine") == "cpux2"
    write_json(folder.environment, {"machine": "cpux2", "observed": {"world": "two"}})
    assert attempts.observed_of(folder) == {}
