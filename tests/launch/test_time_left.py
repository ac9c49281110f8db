"""How long a sweep takes yet, where strategies differ, and what a dry run counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.records import write_json
from harness.launch.ahead import ahead
from harness.launch.outcome import State
from harness.launch.screen import Screen, left_text
from tests.support.sweeps import GRID, jobs_of, sweep_file
from tests.support.sweeps import harness_sweep as main

WAYS = """script: vit
settings: {setup: 2_1}
grid: {strategy: [ddp, fsdp]}
seeds: [1, 2]"""


def ways(tmp_path: Path) -> dict[str, list[State]]:
    states = [State(job) for job in jobs_of(tmp_path, WAYS, tmp_path / "out")]
    return {name: [state for state in states if state.job.label["strategy"] == name]
            for name in ("ddp", "fsdp")}  # fmt: skip


def test_time_left_is_a_bound_where_no_run_had_the_strategy(tmp_path: Path) -> None:
    """A run of fsdp takes several times as long as one of ddp."""
    of = ways(tmp_path)
    states = [*of["ddp"], *of["fsdp"]]
    of["ddp"][0].state, of["ddp"][0].took_s = "finished", 10.0
    assert left_text(states) == "at least 10 s left"
    assert "1 finished, 3 to go, at least 10 s left" in Screen("which?", states)._footer()
    of["ddp"][1].state, of["ddp"][1].took_s = "finished", 10.0
    assert left_text(states) == ""  # of fsdp nothing is known
    of["fsdp"][0].state, of["fsdp"][0].took_s = "finished", 90.0
    assert left_text(states) == "about 1:30 left"


def test_the_time_ahead_is_a_bound_where_no_run_had_the_strategy(tmp_path: Path) -> None:
    of = ways(tmp_path)
    states = [*of["ddp"], *of["fsdp"]]
    folder = of["ddp"][0].job.folder
    folder.write_settings({})
    write_json(folder.summary, {"outcome": "finished", "wall_s": 100.0})
    line, left_s = ahead(states, None)
    assert left_s == 100.0
    assert line == (
        "1 done before, 3 to go, at least 1:40 plus loading libraries; no finished run had the "
        "strategy of 2 runs"
    )
    line, left_s = ahead(of["ddp"][:1] + of["fsdp"], None, 300.0)  # then the header says more
    assert line == "1 done before, 2 to go, about 3:20 by the header of the file"


def test_a_dry_run_counts_behind_its_commands_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--tiny", "--dry_run", "-o", str(tmp_path / "out")]
    file = sweep_file(tmp_path, GRID)
    assert main([str(file), *argv]) == 0 and capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main([str(file), *argv]) == 0
    # A slow machine shows what it loads meanwhile, and clears that line.
    assert capsys.readouterr().err.rpartition("\x1b[K")[2] == (
        "mine-tiny: 12 runs, 0 done before, 8 to go, 4 skipped, how long they take is known "
        "after the first\n"
    )
    file = sweep_file(tmp_path, f"# Time: 3 h; --tiny 10 min\n{GRID}")
    assert main([str(file), *argv]) == 0
    shown = capsys.readouterr()
    assert "8 to go, at most" in shown.out and shown.err.rpartition("\x1b[K")[2] == (
        "mine-tiny: 12 runs, 4 skipped\n"
    )
    assert main([str(file), *argv, "--json"]) == 0
    assert capsys.readouterr().err.rpartition("\x1b[K")[2] == ""
