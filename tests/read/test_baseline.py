"""Which run explain compares with, and what it advises where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.read.explain.explain import explain
from harness.read.explain.sweep import explain_sweep
from harness.read.records.selection import read_group
from harness.read.records.sweeps import read_sweep
from harness.read.tables.sweep_table import sweep_table
from tests.support.explained import FACTS, on_one, written
from tests.support.paired import Verb
from tests.support.records import Plan

BUSY = {"launch": {"cpu_busy_share": 0.9}}


def on_two(root: Path, **facts: Any) -> Path:
    """Two processes with a batch of 32 each, on one machine."""
    return written(root, "--per_gpu_batch", "32", environment={**FACTS, "effective_batch": 64,
                                                               **facts})  # fmt: skip


def told(run: Path) -> str:
    return " ".join(explain(read_group("RUN", str(run), None)).sentences)


def test_the_baseline_has_the_batch_of_a_device_or_else_that_of_all(tmp_path: Path) -> None:
    run = on_two(tmp_path)
    large = on_one(tmp_path, 64)
    assert f"one process with batch 64 ({large}, found beside it)" in told(run)
    same = on_one(tmp_path, 32)
    assert f"one process with batch 32 ({same}, found beside it)" in told(run)


def test_runs_of_the_same_sweep_are_the_baseline_where_there_are_some(tmp_path: Path) -> None:
    swept = {"launch": {"sweep": "mine"}}
    run = on_two(tmp_path, **swept)
    on_one(tmp_path, 32, 1.0)
    one = on_one(tmp_path, 32, 8.0, seed=2, **swept)
    assert f"one process with batch 32 ({one}, found beside it). It reaches 8 samples" in told(run)


def test_another_batch_is_no_substitute_for_a_disturbed_baseline(tmp_path: Path) -> None:
    """What it would say is of another question."""
    run = on_two(tmp_path)
    same = on_one(tmp_path, 32, **BUSY)
    on_one(tmp_path, 64)
    text = told(run)
    assert "The baseline is" not in text
    assert f"beside it ({same} is not: other programs: 1 of 1 runs of the other ran" in text
    quiet = on_one(tmp_path, 32, seed=2)
    # Of runs that repeat one measurement the quiet ones count.
    assert f"one process with batch 32 ({quiet.parent}, found beside it)" in told(run)


def test_another_strategy_is_no_substitute_for_a_disturbed_baseline(tmp_path: Path) -> None:
    """Where the own one is not there, it is a baseline, with its name."""
    run = on_two(tmp_path)
    other = on_one(tmp_path, 32, more=("--strategy", "local_sgd", "--sync_every", "10"))
    assert f"one process of local_sgd with batch 32 ({other}, found beside it)" in told(run)
    same = on_one(tmp_path, 32, seed=2, **BUSY)
    text = told(run)
    assert "The baseline is" not in text
    assert f"({same} is not: other programs: 1 of 1 runs of the other ran" in text
    # The same strategy with another number of epochs is the same question.
    longer = on_one(tmp_path, 32, seed=3, more=("--epochs", "7"))
    assert f"one process with batch 32 ({longer}, found beside it)" in told(run)


def test_repeats_of_a_baseline_with_other_threads_do_not_spoil_it(tmp_path: Path) -> None:
    run = on_two(tmp_path)
    on_one(tmp_path, 32, 1.0, threads=2)
    one = on_one(tmp_path, 32, 8.0, seed=2)
    assert f"one process with batch 32 ({one}, found beside it). It reaches 8 samples" in told(run)


def test_of_two_disturbed_runs_both_are_said_to_be(tmp_path: Path) -> None:
    said = "Other programs ran beside it and its baseline"
    run = on_two(tmp_path / "a", **BUSY)
    on_one(tmp_path / "a", 32, **BUSY)
    assert said in told(run)
    quiet = on_two(tmp_path / "b")
    on_one(tmp_path / "b", 32)
    assert "The baseline is" in told(quiet) and said not in told(quiet)


def test_processes_that_share_a_gpu_are_said_to(tmp_path: Path) -> None:
    run = on_two(tmp_path, launch={"processes_per_gpu": 2.0})
    on_one(tmp_path, 32)
    assert "Its processes share GPUs and slow each other." in told(run)


def test_a_ratio_by_pairs_of_seeds_says_so(tmp_path: Path) -> None:
    run = on_two(tmp_path)  # 8 samples/s
    on_one(tmp_path, 32, 2.0)
    assert "Training reaches 0.250 times its samples/s on 2x the devices (12 % eff" in told(run)
    on_one(tmp_path, 32, 4.0, seed=2)
    assert "(12 % efficiency), by 1 pair with the same seed alone." in told(run)


@pytest.mark.parametrize(
    ("batch", "scaling"),
    [
        (32, " (12 % efficiency). This is weak scaling: samples/s at the same batch per device."),
        (64, " (50 % efficiency). This is strong scaling: training times at the same effective "
             "batch."),
        (16, "."),
    ],
)  # fmt: skip
def test_efficiency_is_that_of_tables(batch: int, scaling: str, tmp_path: Path) -> None:
    """The training times are equal, the steps of one process four times as fast."""
    run, one = on_two(tmp_path), on_one(tmp_path, batch, 2.0)
    groups = (read_group(*each, None) for each in (("RUN", str(run)), ("BASELINE", str(one))))
    sentences = explain(*groups).sentences
    assert f"Training reaches 0.250 times its samples/s on 2x the devices{scaling}" in sentences


@pytest.mark.parametrize(("timed_s", "said"), [(8.0, "1.00"), (8.16, "1.02"), (1.0, "0.125")])
def test_a_ratio_has_three_digits(timed_s: float, said: str, tmp_path: Path) -> None:
    run = on_two(tmp_path)
    on_one(tmp_path, 32, timed_s)
    assert f"Training reaches {said} times its samples/s on 2x the devices" in told(run)


def test_an_argument_that_is_advised_can_be_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings and threads differ, and of the first kind no run has finished."""
    explained = Verb("explain", capsys)
    written(tmp_path, "--lr", "0.001", "--dropout", "0.5", outcome="failed", reason="a reason")
    for threads, copies in ((2, 2), (1, 3)):
        for _ in range(copies):
            on_two(tmp_path, threads=threads)
    text = explained.refused(tmp_path)
    advised = text.rpartition("for example python -m harness explain ")[2].strip()
    assert "its runs differ in dropout (0.5, none), lr (0.001, 0.003): name one" in text
    assert advised == f"{tmp_path}:dropout=none,lr=0.003,threads=1"
    assert "(harmonic mean and standard deviation of 3 runs)" in explained.in_one_line(advised)
    # Of those with one kind of settings, too.
    fewer = f"{tmp_path}:lr=0.003"
    text = explained.refused(fewer)
    assert "differ in threads (1, 2)" in text and f"for example {fewer},threads=1" in text


def test_a_kind_that_no_condition_can_name_is_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explained = Verb("explain", capsys)
    first = written(tmp_path, "--optim_args", "a=1,b=2")
    written(tmp_path, "--optim_args", "a=1,b=3")
    advised = explained.refused(tmp_path).rpartition("harness explain ")[2].strip()
    assert advised == str(first) and "8 samples/s" in explained(advised)


def test_a_baseline_is_that_of_quiet_runs_of_the_same_folder(tmp_path: Path) -> None:
    """8 samples/s. One beside others had 16, and one of a folder inside this one 32."""
    run = written(tmp_path, environment=FACTS)
    on_one(tmp_path, 32)
    on_one(tmp_path, 32, 4.0, seed=2, **BUSY)
    on_one(tmp_path / "demo", 32, 2.0, seed=3)
    told = explain(read_group("RUN", str(run), None)).sentences[1]
    assert "reaches 8 samples/s" in told and "demo" not in told, told


def test_why_a_run_beside_it_is_no_baseline(tmp_path: Path) -> None:
    run = written(tmp_path, environment=FACTS)
    one = on_one(tmp_path, 32, threads=2)
    told = explain(read_group("RUN", str(run), None)).sentences[1]
    assert f"found beside it ({one} is not: threads per process: RUN has 1, the other has 2" in told


def test_a_planned_seed_without_a_record_hides_nothing(plan: Plan) -> None:
    """It comes first in the plan, and knows no settings: the others of its group tell them."""
    root = plan.output_dir
    two = written(root, "--per_gpu_batch", "32", train_samples_per_s_per_gpu=8.0,
                  environment={**FACTS, "effective_batch": 64})  # fmt: skip
    runs = [two, on_one(root, 32)]
    for setup, path in zip(("1_2", "1_1"), runs, strict=True):
        for seed in (7, 1):
            plan.planned(setup, 32, seed)
        plan.content["runs"][-1]["path"] = str(path.relative_to(root))
    sweep = read_sweep(plan.write())
    assert [run.state for run in sweep.groups[0].runs] == ["waiting", "finished"]
    (item,) = explain_sweep(sweep)
    text = " ".join(item.below)
    alone = told(runs[0])
    assert text.startswith("bert-nano with ddp on 2 processes on 1 node, batch 32 each. It reaches")
    assert f"The baseline is one process with batch 32 ({runs[1]}, found beside it)" in text
    assert text == f"{alone} 1 run(s) have not begun."
    # Rows are filtered by settings that no axis names.
    attributes = sweep_table(sweep)[0].table.attributes
    assert attributes is not None and [row["strategy"] for row in attributes] == ["ddp", "single"]
