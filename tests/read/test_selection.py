"""What an argument selects, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.records import RunFolder
from harness.core.settings import UserError
from harness.read.records.groups import Group
from harness.read.records.runs import Run
from harness.read.records.selection import (
    command_for_seeds,
    describe,
    differing,
    read_selected,
    select,
    without_flags,
)
from harness.read.records.sweeps import read_sweep
from tests.support.records import Plan


def test_of_a_sweep_only_believed_records_are_selected(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2, 3):
        plan.run(seed=seed)
    plan.planned(seed=4)  # not begun
    label = {"setup": "1_1", "per_gpu_batch": 4, "seed": 5}
    plan.content["runs"].append({"label": label, "path": None, "skipped": "too large"})
    bad = plan.output_dir / "bert" / "1_1_4_3"
    (bad / "summary.json").write_text("{")
    found = read_selected(str(plan.write()), None)
    assert [run.seed for run in found.runs] == [1, 2]
    (line,) = found.not_read
    assert str(bad) in line and line in capsys.readouterr().err


def test_a_part_of_a_sweep_has_the_runs_that_were_read(plan: Plan) -> None:
    for seed in (1, 2):
        plan.run(seed=seed)
    sweep = read_sweep(plan.write())
    part = sweep.only(sweep.runs[1:])
    assert part.runs[0] is sweep.runs[1] and part.planned == sweep.planned[1:]
    assert [run.seed for run in part.finished] == [2]


def run(seed: int | None = 1, path: str = "out/vit/1_1/run", **settings: object) -> Run:
    facts = {"command": "vit.py --tiny", "machine": "a-cpux2"}
    return Run({}, path, "finished", folder=RunFolder(Path(path)), environment=facts,
               settings={"script": "vit", "seed": seed, **settings})  # fmt: skip


def test_an_unknown_setting_is_answered_with_those_that_have_values() -> None:
    with pytest.raises(UserError) as refused:
        select(Path("out"), [run(lr=0.001)], {"size": "4"})
    known = str(refused.value).partition("they have ")[2].split(", ")
    assert {"lr", "seed", "script"} <= {*known} and "threads" not in known


def test_a_group_is_described_by_its_seeds() -> None:
    def described(*seeds: int | None) -> str:
        return describe(Group(tuple(map(run, seeds)), selector="out"))

    assert described(1) == "out (1 finished run, seed 1, a-cpux2)"
    assert described(1, 2) == "out (2 finished runs, seeds 1, 2, a-cpux2)"
    assert described(None) == "out (1 finished run, a-cpux2)"


def test_only_what_an_import_does_not_say_is_no_difference() -> None:
    def names(other: Run) -> set[str]:
        return {name for name, *_ in differing(Group((run(lr=0.001),)), Group((other,)))}

    assert names(run(lr=0.002)) == {"lr"}
    assert "lr" in names(run(lr=None))
    foreign = {"imported": {"source": "them"}}
    assert "lr" not in names(run(lr=None, **foreign))
    assert "lr" in names(run(lr=0.002, **foreign))


def test_more_seeds_are_measured_into_the_same_folder() -> None:
    group = Group((run(path="there/vit/1_1/run"),))
    command = "for seed in 2 3; do python vit.py --tiny"
    assert command_for_seeds(group, (2, 3)) == f"{command} --output_dir there --seed $seed; done"
    own = replace(run(), environment={"command": "vit.py --tiny --o here --lr 1"})
    assert command_for_seeds(Group((own,)), [2]) == (
        "for seed in 2; do python vit.py --tiny --o here --lr 1 --seed $seed; done"
    )
    for flag in ("--out=here", "--output_dir here", "--output-dir here", "--o=here"):
        named = replace(own, environment={"command": f"vit.py {flag}"})
        assert command_for_seeds(Group((named,)), [2]) == (
            f"for seed in 2; do python vit.py {flag} --seed $seed; done"
        )
    # Other flags that begin with --o name no folder.
    for flag in ("--outer_lr 0.7", "--outer_momentum=0.5", "--overlap 1", "--optim sgd"):
        there = replace(own, path="there/vit/1_1/run", folder=RunFolder(Path("there/vit/1_1/run")),
                        environment={"command": f"vit.py {flag}"})  # fmt: skip
        assert command_for_seeds(Group((there,)), [2]) == (
            f"for seed in 2; do python vit.py {flag} --output_dir there --seed $seed; done"
        )
    bare = Group((run(path="vit/run"),))  # in a folder that says no output folder
    assert command_for_seeds(bare, (2, 3)) == f"{command} --seed $seed; done"


def test_a_printed_command_names_a_folder_as_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the absolute path that the run was started with."""
    folder = RunFolder(tmp_path / "there" / "vit" / "1_1" / "run")
    outside = (
        f"for seed in 2; do python vit.py --output_dir {tmp_path / 'there'} --seed $seed; done"
    )
    inside = "for seed in 2; do python vit.py --output_dir there --seed $seed; done"
    for command in ("vit.py --out=/then/out", "vit.py --o ~/out", "vit.py"):
        group = Group((replace(run(), folder=folder, environment={"command": command}),))
        monkeypatch.chdir("/")
        assert command_for_seeds(group, [2]) in (outside, outside.replace(" /", " ", 1))
        monkeypatch.chdir(tmp_path)
        assert command_for_seeds(group, [2]) == inside


def test_flags_are_left_out_however_they_are_spelled() -> None:
    words = ["vit.py", "--per-gpu-batch", "4", "--out=x", "--overlap", "1"]
    assert without_flags(words, ["--per_gpu_batch", "--out"]) == ["vit.py", "--overlap", "1"]
