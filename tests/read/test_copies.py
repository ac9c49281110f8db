"""Copies of a record count once, whichever verb reads them; runs measured again count again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core import attempts
from harness.core.records import RunFolder, append_row, find_runs
from harness.core.records.archives import SUFFIX
from harness.read import load, load_runs
from harness.read.explain.explain import runs_beside
from harness.read.records.copies import without_copies
from harness.read.records.selection import read_group
from harness.read.records.sweeps import read_all, read_results
from tests.support.paired import Verb, imported, pairs, text_file, timed
from tests.support.records import Plan, lines, record, timed_epochs, with_epochs


def started(root: Path, unix: float = 1000.0) -> Path:
    """Each run below began at a moment of its own, from this one on."""
    for n, run in enumerate(find_runs(root)):
        lines(run.attempts, [{"event": "start", "attempt": 1, "unix": unix + n}])
    return root


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Two settings with three seeds, in one output folder."""
    out = tmp_path / "all" / "out"
    pairs(out, [0.49, 0.50, 0.51], rate=100.0)
    pairs(out, [0.59, 0.61, 0.64], "--lr", "0.01", rate=110.0)
    for run in find_runs(out):
        with_epochs(run.path, timed_epochs(0.4, 0.5))
    return started(out).parent


def as_folders(out: Path) -> None:
    shutil.copytree(out, out.parent / "out2")


def as_renamed_runs(out: Path) -> None:
    for run in find_runs(out):
        shutil.copytree(run.path, run.path.with_name(f"{run.path.name} (copy)"))


def as_archive(out: Path) -> None:
    (out.parent / "packed").mkdir()
    assert main(["pack", str(out), "--out", str(out.parent / "packed" / f"out{SUFFIX}")]) == 0


@pytest.mark.parametrize("copy", [as_folders, as_renamed_runs, as_archive])
def test_copies_count_once_in_every_verb(
    copy: Any, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [f"{measured}:lr=0.003", f"{measured}:lr=0.01"]
    commands = [
        ["compare", *sides], ["table", measured], ["table", measured, "--json"],
        ["batches", measured, "--target", "accuracy=0.5"],
    ]  # fmt: skip
    before = []
    for words in commands:
        before.append((main([*map(str, words)]), capsys.readouterr().out))
    frames = load(measured), load_runs(measured)
    copy(measured / "out")
    capsys.readouterr()
    for words, (code, out) in zip(commands, before, strict=True):
        assert main([*map(str, words)]) == code, words
        said = capsys.readouterr()
        if "--json" in words:  # which also says what is left out
            told, alone = json.loads(said.out), json.loads(out)
            assert told.pop("not_read") == [said.err.strip().removeprefix("warning: not read: ")]
            assert alone.pop("not_read") == [] and told == alone
        else:
            assert said.out == out, words
        warned = [line for line in said.err.splitlines() if line.startswith("warning: ")]
        assert len(warned) == (2 if words[0] == "compare" else 1), words
        assert "6 copies of runs that count already, for example " in warned[0], words
        assert "other content" not in warned[0]
    for frame, once in zip((load(measured), load_runs(measured)), frames, strict=True):
        assert frame.equals(once)
    results = read_results(measured)
    assert [len(group.runs) for group in results.groups] == [3, 3]
    (problem,) = results.problems
    assert problem.startswith("6 copies of runs that count already")
    (part,), (problem,) = read_all(measured)
    assert len(part.runs) == 6 and problem.startswith("6 copies of runs")


def test_the_same_settings_on_another_day_are_other_runs(measured: Path) -> None:
    again = shutil.copytree(measured / "out", measured / "out2")
    for run in find_runs(again):
        run.attempts.unlink()
    started(again, unix=5000.0)
    assert len(read_group("A", f"{measured}:lr=0.01", None).finished) == 6


def test_runs_of_other_settings_may_have_begun_at_one_moment(tmp_path: Path) -> None:
    for seed in (1, 2):
        run = record(tmp_path / "bert" / "1_2" / f"run {seed}", "--seed", str(seed))
        lines(run.attempts, [{"event": "start", "attempt": 1, "unix": 7.0}])
    assert without_copies(find_runs(tmp_path)) == (find_runs(tmp_path), [])


def test_records_that_say_nothing_of_their_start_all_count(tmp_path: Path) -> None:
    for place in ("a", "b"):
        record(tmp_path / place / "bert" / "1_2" / "run")
    damaged = record(tmp_path / "c" / "bert" / "1_2" / "run")
    damaged.settings.write_text("{")
    empty = record(tmp_path / "d" / "bert" / "1_2" / "run")
    lines(empty.attempts, [{"event": "start", "attempt": 1}])
    assert without_copies(find_runs(tmp_path)) == (find_runs(tmp_path), [])


def copied(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    """A run, and its copy in a folder that comes later."""
    first = record(tmp_path / "a" / "bert" / "1_2" / "run")
    lines(first.attempts, [{"event": "start", "attempt": 1, "unix": 1.0}])
    shutil.copytree(first.path, second := tmp_path / "b" / "bert" / "1_2" / "run")
    return first, RunFolder(second)


def test_of_copies_in_different_states_the_fullest_counts(tmp_path: Path) -> None:
    first, second = copied(tmp_path)
    assert without_copies(find_runs(tmp_path))[0] == [first]
    append_row(second.attempts, {"event": "start", "attempt": 2, "unix": 9.0})
    kept, (line,) = without_copies(find_runs(tmp_path))
    assert kept == [second]  # it went on
    assert line == (
        f"1 copy of runs that count already, for example {first.path} of {second.path}; "
        f"1 with other content, for example {first.path}"
    )
    second.summary.unlink()
    assert without_copies(find_runs(tmp_path))[0] == [first]  # it is finished
    first.epochs.unlink()
    assert without_copies(find_runs(tmp_path))[0] == [second]  # it is believed


@pytest.mark.parametrize("torn", [False, True])
def test_a_copy_that_has_lost_its_attempts_is_not_counted(torn: bool, measured: Path) -> None:
    """Nothing told that it was a copy, so each run counted twice."""
    as_folders(measured / "out")
    for run in find_runs(measured / "out2"):
        if torn:
            run.attempts.write_text(run.attempts.read_text()[:20])
        else:
            run.attempts.unlink()
    group = read_group("A", f"{measured}:lr=0.01", None)
    assert len(group.finished) == 3 and len(group.not_read) == 6
    assert all("attempts.jsonl" in line for line in group.not_read)


def torn_starts(tmp_path: Path, kept: int) -> list[RunFolder]:
    """A run without an outcome; a copy with `kept` characters of its first start; and a copy of
    that which was resumed.
    """
    first, torn = copied(tmp_path)
    for run in (first, torn):
        run.summary.unlink()
        run.attempts.unlink()
    attempts.begin(first, 0, 1)
    torn.attempts.write_text(first.attempts.read_text()[:kept])
    resumed = RunFolder(tmp_path / "c" / "bert" / "1_2" / "run")
    shutil.copytree(torn.path, resumed.path)
    attempts.begin(resumed, 0, 1)
    return [first, torn, resumed]


@pytest.mark.parametrize("packed", [False, True])
def test_copies_with_a_torn_first_start_count_once(tmp_path: Path, packed: bool) -> None:
    """The start that resumed a copy counted as its first, and a torn copy had none."""
    _, torn, _ = torn_starts(tmp_path, kept=80)
    if packed:
        archive = tmp_path / "b" / f"b{SUFFIX}"
        assert main(["pack", str(tmp_path / "b"), "--out", str(archive)]) == 0
        shutil.rmtree(torn.path)
    kept, (line,) = without_copies(find_runs(tmp_path))
    assert len(kept) == 1 and line.startswith("2 copies of runs that count already")
    assert read_results(tmp_path).problems[-1].startswith("2 copies of runs")


def test_a_start_torn_before_its_time_identifies_no_run(tmp_path: Path) -> None:
    runs = torn_starts(tmp_path, kept=50)
    assert without_copies(find_runs(tmp_path)) == (runs, [])


def test_imported_copies_count_once(tmp_path: Path) -> None:
    words = [text_file(tmp_path), "--source", "them"]
    for place in ("a", "b"):
        imported(tmp_path / "out" / place, *words)
    kept, (line,) = without_copies(find_runs(tmp_path / "out"))
    assert len(kept) == 1 and line.startswith("1 copy of runs")


def test_a_copy_on_the_other_side_is_no_other_run(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = Verb("compare", capsys)
    out = measured / "out"
    as_folders(out)
    one, other = f"{out}:lr=0.01,seed=1", f"{measured / 'out2'}:lr=0.01"
    assert "run_1_3 is on both sides, there as " in compared.refused(one, other)
    assert "accuracy: B is equal to A" in compared(f"{out}:lr=0.01", other)


def test_copies_of_the_runs_of_a_sweep_are_no_runs_of_none(plan: Plan) -> None:
    for seed in (1, 2):
        plan.run(seed=seed)
    plan.write()
    started(plan.output_dir / "bert")
    assert read_all(plan.output_dir)[1] == []
    shutil.copytree(plan.output_dir / "bert", plan.output_dir / "kept")
    (part,), (problem,) = read_all(plan.output_dir)
    assert part.name == "sizes" and problem.startswith("2 copies of runs that count already")


def test_a_copied_sweep_is_shown_once(plan: Plan, tmp_path: Path) -> None:
    for seed in (1, 2):
        plan.run(seed=seed)
    plan.write()
    started(plan.output_dir / "bert")
    root = tmp_path / "root"
    for place in ("earlier", "later"):
        shutil.copytree(plan.output_dir, root / place)
    shutil.rmtree(root / "earlier" / "bert" / "1_1_4_2")  # not begun when it was copied
    (part,), (problem,) = read_all(root)
    assert part.folder == root / "later" / "sweeps" / "sizes"
    assert problem == (
        f"sweep not shown: {root}/earlier/sweeps/sizes is a copy of {root}/later/sweeps/sizes"
    )
    (root / "earlier" / "bert" / "1_1_4_1" / "attempts.jsonl").write_text(
        json.dumps({"event": "start", "attempt": 1, "unix": 5000.0}) + "\n"
    )
    parts, problems = read_all(root)
    assert len(parts) == 2 and problems == []  # measured again


def test_a_copied_baseline_counts_once(tmp_path: Path) -> None:
    for seed in (1, 2):
        timed(tmp_path, 8, seed=seed)
    run = timed(tmp_path, 8, 1, 2)
    started(tmp_path)
    as_renamed_runs(tmp_path)
    (base,) = runs_beside(read_group("RUN", str(run), None))
    assert len(base.finished) == 2
