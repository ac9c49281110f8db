"""The table of a sweep: groups of runs, what is compared with what, and what is written.

Every expected number here was worked out by hand.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from harness.read import load_sweep, load_sweep_runs
from harness.read.figures.catalogue import draw
from harness.read.records.runs import memory_of_devices
from harness.read.records.sweeps import read_sweep
from harness.read.tables.columns import number_text
from harness.read.tables.results import fairness
from tests.support.paired import Verb
from tests.support.records import STARTED, TARGET, Plan, epochs, lines, record, row_of, timed_epochs
from tests.support.settings import whole_settings


def test_runs_that_differ_in_seed_or_repeat_are_one_group(plan: Plan) -> None:
    plan.run("1_2", 8, seed=1, accuracy=0.8)
    plan.run("1_1", 4, seed=1, accuracy=0.5)
    plan.run("1_2", 8, seed=2, accuracy=0.9)
    plan.run("1_2", 8, seed=2, accuracy=1.0, label={"repeat": 2})
    first, second = plan.groups()
    assert (first["setup"], first["per_gpu_batch"]) == ("1_2", 8)  # the order of the plan
    assert (first["planned"], first["finished"], first["outcome"]) == (3, 3, "finished")
    assert first["seeds"] == [1, 2, 2] and first["repeats"] == [None, None, 2]
    assert first["accuracy_values"] == [0.8, 0.9, 1.0]
    # Of quality one value for each seed, of times one for each run.
    assert first["accuracy"] == pytest.approx(0.875) and first["accuracy_n"] == 2
    assert first["accuracy_sd"] == pytest.approx(0.15 / 2**0.5)
    assert first["train_samples_per_s_n"] == 3
    assert first["epoch_time_s"] == 15  # 30 s in 2 epochs
    assert (second["accuracy"], second["accuracy_sd"], second["accuracy_low"]) == (0.5, None, None)


def test_a_value_that_a_run_lacks_is_unknown_not_zero(plan: Plan) -> None:
    plan.run(seed=1, user_s=12.0)
    plan.run(seed=2)
    (group,) = plan.groups()
    assert (group["user_s"], group["user_s_n"], group["user_s_sd"]) == (12, 1, None)
    assert group["user_s_values"] == [12, None] and "system_s" not in group


def test_a_mean_over_different_exchanges_is_named(plan: Plan, table: Verb) -> None:
    """--exchange auto chooses for each run; table, fairness of a report and figures say so."""
    for seed, way in ((1, "direct"), (2, "backend"), (3, "direct")):
        row = epochs(0.7, 0.8, seconds=15.0)
        path = plan.run(seed=seed, environment={"observed": {"exchange": way}}, epochs=row)
        lines(path / "settings.json", [whole_settings(exchange="auto", per_gpu_batch=4, seed=seed)])
        lines(path / "attempts.jsonl", STARTED)
        text = "1 of 1 groups: --exchange auto chose different ways for runs that are averaged here"
        assert (text in table(plan.write())) == (seed > 1)
        sweep = read_sweep(plan.folder)
        assert (f"{text}." in fairness(sweep)) == (seed > 1)
        assert (text in draw("accuracy", sweep).notes) == (seed > 1)


def test_unlike_machines_are_never_averaged(plan: Plan, table: Verb) -> None:
    for seed, machine, rate in ((1, "a-cpux2", 100.0), (2, "b-cpux4", 300.0), (3, "a-cpux2", 120)):
        plan.run("1_1", seed=seed, machine=machine, train_samples_per_s=rate)
    plan.run("1_2", seed=1, machine="b-cpux4", devices=2, train_samples_per_s=450.0)
    plan.planned("1_1", seed=4)
    one, other, begun, two = plan.groups()
    assert (one["machine"], one["planned"]) == ("a-cpux2", 2)
    assert one["train_samples_per_s"] == pytest.approx(2 / (1 / 100 + 1 / 120))
    assert (other["machine"], other["train_samples_per_s"]) == ("b-cpux4", 300)
    assert (begun["machine"], begun["outcome"]) == (None, "waiting")  # on which, nobody knows
    # The baseline is the one on the machine of the group: 450 / (2 * 300).
    assert two["scaling_efficiency"] == pytest.approx(0.75)
    text = table(plan.folder)
    assert "machine" in text and row_of(text, "1_1", "b-cpux4")[2] == "1/1"


def test_one_gpu_of_a_kind_is_the_baseline_of_four(plan: Plan) -> None:
    four = {"gpus": ["T4"] * 4}
    plan.run("1_1", machine="t4x1", environment={"gpus": ["T4"]})
    plan.run("1_4", machine="t4x4", devices=4, environment=four, train_samples_per_s=300.0)
    plan.run("1_2", machine="p100x4", devices=2, environment=four)
    _, group, unlike = plan.groups()
    assert group["scaling_efficiency"] == pytest.approx(0.75)
    assert unlike["scaling_efficiency"] is None
    assert unlike["train_samples_per_s_gain_percent"] is None


@pytest.mark.parametrize(("device", "known"), [("cpu", False), ("cuda:0", True)])
def test_a_process_with_more_threads_is_no_baseline_of_times(
    device: str, known: bool, plan: Plan, table: Verb
) -> None:
    for setup, devices, threads in (("1_1", 1, 2), ("1_2", 2, 1)):
        facts = {"threads": threads, "observed": {"device": device}}
        rows = epochs(0.4, 0.7 + devices / 10)
        facts["effective_batch"] = 4
        for seed in (1, 2):
            plan.run(setup, seed=seed, devices=devices, environment=facts, epochs=rows,
                 train_samples_per_s=75.0 * devices**2, accuracy=0.7 + devices / 10)  # fmt: skip
    _, two = plan.groups(target={"metric": "accuracy", "value": 0.5})
    for name in ("train_samples_per_s_gain_percent", "tta_train_s_ratio"):
        assert (two[name] is not None) == known, name
    assert two["accuracy_gain_points"] == pytest.approx(10)
    why = "-: samples/s not compared with the baseline in 1 row (threads per process)"
    assert (why in table(plan.folder)) == (not known)


def test_a_run_that_waits_belongs_to_the_only_machine_of_its_group(plan: Plan) -> None:
    plan.run(seed=1)
    plan.planned(seed=2)
    (group,) = plan.groups()
    assert (group["machine"], group["planned"], group["finished"]) == ("a-cpux2", 2, 1)


def test_the_baseline_agrees_on_every_axis_that_it_does_not_name(plan: Plan) -> None:
    for batch, rate in ((4, 100.0), (8, 200.0)):
        for seed in (1, 2):
            plan.run("1_1", batch, seed, train_samples_per_s=rate * seed)
            plan.run("1_2", batch, seed, 2, train_samples_per_s=1.5 * rate * seed)
    groups = {(g["setup"], g["per_gpu_batch"]): g for g in plan.groups()}
    for batch in (4, 8):
        base, group = groups["1_1", batch], groups["1_2", batch]
        assert base["baseline"] and not group["baseline"]
        assert base["train_samples_per_s_gain_percent"] == 0
        for end in ("", "_low", "_high"):  # both seeds say 1.5
            assert group[f"train_samples_per_s_gain_percent{end}"] == pytest.approx(50)
            assert group[f"scaling_efficiency{end}"] == pytest.approx(0.75)
        assert group["scaling_kind"] == "weak"


def test_the_batch_that_is_compared_is_not_held_fixed(plan: Plan, table: Verb) -> None:
    plan.run("1_1", 4)
    plan.run("1_2", 4, devices=2)
    assert "held fixed: batch per GPU" in table(plan.write())
    plan.run("1_1", 8)
    assert "held fixed: batch per GPU" in table(plan.write())  # of each row and its baseline
    assert "held fixed" not in table(plan.write(baseline={"setup": "1_1", "per_gpu_batch": 4}))


def test_a_baseline_without_a_value_on_an_axis_is_that_of_every_value(plan: Plan) -> None:
    plan.content["axes"] = ["setup", "per_gpu_batch", "link"]
    plan.run("1_1", train_samples_per_s=100.0)
    plan.run("1_1", 8, train_samples_per_s=50.0)
    plan.run("2_1", label={"link": "1ms"}, train_samples_per_s=80.0)
    plan.run("2_1", label={"link": "20ms"}, train_samples_per_s=20.0)
    gains = {(g["setup"], g["link"]): g["train_samples_per_s_gain_percent"]
             for g in plan.groups() if g["per_gpu_batch"] == 4}  # fmt: skip
    assert gains["2_1", "1ms"] == pytest.approx(-20)
    assert gains["2_1", "20ms"] == pytest.approx(-80)
    # The nearest, where there is one with the value and one without.
    plan.run("1_1", label={"link": "20ms"}, train_samples_per_s=10.0)
    (far,) = [g for g in plan.groups() if (g["setup"], g["link"]) == ("2_1", "20ms")]
    assert far["train_samples_per_s_gain_percent"] == pytest.approx(100)


def test_a_single_run_has_no_interval_against_the_baseline(plan: Plan) -> None:
    plan.run("1_1")
    plan.run("1_2", devices=2, train_samples_per_s=160.0)
    _, group = plan.groups()
    assert group["train_samples_per_s_gain_percent"] == pytest.approx(60)
    assert group["train_samples_per_s_gain_percent_low"] is None
    assert group["scaling_efficiency"] == pytest.approx(0.8)  # 160 / (2 * 100)
    assert group["scaling_efficiency_high"] is None


def test_strong_scaling_at_equal_effective_batch(plan: Plan, table: Verb) -> None:
    batch = {"environment": {"effective_batch": 8}}
    plan.run("1_1", train_time_s=30.0, **batch)
    plan.run("1_2", devices=2, train_time_s=20.0, **batch)
    plan.run("1_4", devices=4, train_time_s=10.0, samples=800, **batch)
    base, group, more = plan.groups()
    assert (base["scaling_efficiency"], base["scaling_kind"]) == (1, None)
    assert group["scaling_efficiency"] == pytest.approx(0.75)  # 30 / (2 * 20)
    assert group["scaling_kind"] == "strong"
    assert more["scaling_efficiency"] is None  # twice the samples: another amount of work
    text = table(plan.folder)
    assert "strong T_1/(N T_N)" in text and "weak" not in text


def test_one_process_is_the_baseline_of_every_strategy(plan: Plan, table: Verb) -> None:
    """It has none itself: with the batch of each process it shows weak, with that of all strong
    scaling. One with that strategy is nearer, and one with another batch is none.
    """
    batch = {"environment": {"effective_batch": 8}}
    plan.run("1_1", 8, label={"strategy": "single"})
    plan.run("1_2", 8, devices=2, train_samples_per_s=150.0, label={"strategy": "ddp"})
    plan.run("1_2", 4, devices=2, train_time_s=20.0, label={"strategy": "ddp"}, **batch)
    plan.run("1_2", 2, devices=2, label={"strategy": "ddp"})
    plan.run("1_1", 8, train_samples_per_s=80.0, label={"strategy": "fsdp"})
    plan.run("1_2", 8, devices=2, train_samples_per_s=120.0, label={"strategy": "fsdp"})
    axes = ["setup", "strategy", "per_gpu_batch"]
    _, weak, strong, other, _, same = plan.groups(axes=axes)
    assert (weak["scaling_efficiency"], weak["scaling_kind"]) == (0.75, "weak")
    assert (strong["scaling_efficiency"], strong["scaling_kind"]) == (0.75, "strong")  # 30 / 2 * 20
    assert other["scaling_efficiency"] is None and other["baseline_finished"] is None
    assert same["scaling_efficiency"] == pytest.approx(0.75)  # 120 / (2 * 80)
    assert "base: setup 1_1; " in table(plan.folder)  # of no other axis, as none is always equal
    # Where not set-ups but batches are compared, they are compared within one set-up.
    *_, other, _, _ = plan.groups(axes=axes, baseline={"per_gpu_batch": 8})
    assert other["baseline_finished"] == 1 and other["scaling_efficiency"] is None


@pytest.mark.parametrize(
    ("gib", "text"), [(0.02134, "0.0213"), (0.2134, "0.213"), (2.134, "2.13"), (21.34, "21.34")]
)
def test_memory_of_a_small_model_has_three_digits(gib: float, text: str) -> None:
    assert number_text("peak_memory_gib", gib) == text


def test_counts_of_one_s_own_have_no_decimals(tmp_path: Path, table: Verb) -> None:
    for name, value, text in (
        ("mistakes", 15.0, "15"), ("mistakes", 1500, "1,500"), ("mistakes", 15.25, "15.25"),
        ("kappa", 1.0, "1.0000"), ("kappa", -4.0, "-4.0000"), ("kappa", 0.0, "0.0000"),
        ("eval_loss", 2.0, "2.0000"),
    ):  # fmt: skip
        assert number_text(name, value) == text
    run = record(tmp_path / "run")
    rows = [{"epoch": 1.0, "mistakes": 15, "kappa": 0.5}]
    lines(run.epochs, rows)
    run.summary.write_text(json.dumps({"schema": 1, "outcome": "finished", **rows[0]}))
    assert {"15", "0.5000"} <= {*table(tmp_path).split()}


def test_neither_weak_nor_strong(plan: Plan) -> None:
    plan.run("1_1", environment={"effective_batch": 4})
    plan.run("1_2", devices=2, environment={"effective_batch": 6})  # neither 8 nor 4
    plan.run("1_1_far", train_samples_per_s=70.0)  # as many devices: not scaling
    _, other, far = plan.groups()
    assert (other["scaling_efficiency"], other["scaling_kind"]) == (None, None)
    assert far["scaling_efficiency"] is None
    assert far["train_samples_per_s_gain_percent"] == pytest.approx(-30)


def test_devices_of_dp_are_those_of_its_one_process(plan: Plan) -> None:
    plan.run("1_1")
    observed = {"observed": {"strategy": "dp", "devices": 4}, "effective_batch": 16}
    plan.run("1_1_dp", environment=observed, train_samples_per_s=200.0)
    _, group = plan.groups()
    assert (group["processes"], group["devices"]) == (1, 4)
    assert group["scaling_efficiency"] == pytest.approx(0.5)  # 200 / (4 * 100)


def test_weak_and_strong_scaling_are_distinguished(plan: Plan, table: Verb) -> None:
    plan.run("1_1")
    plan.run("1_2", devices=2, train_samples_per_s=160.0)
    plan.run("1_3", devices=3, train_time_s=20.0, environment={"effective_batch": 4})
    text = table(plan.write())
    assert "0.80 weak" in text and "0.50 strong" in text  # 30 / (3 * 20)


def test_other_updates_are_another_training(plan: Plan, table: Verb) -> None:
    plan.run("1_1", updates=2000)
    plan.run("1_2", devices=2, updates=1000)
    plan.run("2_1", devices=2, updates=2000)
    assert [g["other_updates"] for g in plan.groups()] == [False, True, False]
    text = table(plan.folder)
    assert "1,000†" in row_of(text, "1_2") and "2,000" in row_of(text, "2_1")
    meaning = "† other number of updates than the baseline: not the same training"
    assert text.count(meaning) == 1
    # Without a column of updates the mark stands at the number of runs.
    plan.write(columns=["accuracy"])
    assert row_of(table(plan.folder), "1_2")[1] == "1/1†"


@pytest.mark.parametrize("begun", [True, False])
def test_no_baseline_finished(plan: Plan, begun: bool, table: Verb) -> None:
    if begun:
        plan.run("1_1", outcome="failed", reason="no")
    plan.run("1_2", devices=2)
    group = plan.groups()[-1]
    for name in ("train_samples_per_s_gain_percent", "accuracy_gain_points", "scaling_efficiency"):
        assert group[name] is None
    assert group["other_updates"] is None
    text = table(plan.folder)
    assert "no run of the baseline (setup 1_1)" in text
    assert ("with the same other settings on the same kind" in text) is not begun
    assert ("has finished" in text) is begun
    assert "-" in row_of(text, "1_2")


def test_without_a_baseline_nothing_is_compared(plan: Plan, table: Verb) -> None:
    plan.run("1_1")
    plan.run("1_2", devices=2)
    text = table(plan.write(baseline=None))
    assert "vs base" not in text and "base:" not in text and "eff." not in text and "†" not in text


def test_time_to_the_first_epoch_that_reaches_the_target(plan: Plan) -> None:
    plan.run(seed=1, epochs=timed_epochs(0.5, 0.9, 0.8))  # reached exactly, and lost again
    plan.run(seed=2, epochs=timed_epochs(0.5, None, 0.95, 0.99))
    (group,) = plan.groups(target=TARGET)
    assert group["tta_train_s_values"] == [20, 30] and group["tta_train_s"] == 25
    assert group["tta_wall_s_values"] == [26, 39] and group["tta_wall_s"] == 32.5
    assert group["tta_epochs_values"] == [2, 3] and group["tta_samples_values"] == [400, 600]
    assert (group["reached"], group["tta_train_s_n"]) == (2, 2)
    assert group["tta_train_s_sd"] == pytest.approx(7.0710678)
    # 12.7062 * 7.0711 / sqrt(2) = 63.531
    assert group["tta_train_s_low"] == pytest.approx(-38.531, abs=1e-3)


def test_a_loss_is_reached_from_above(plan: Plan, table: Verb) -> None:
    plan.run(epochs=timed_epochs(0.7, 0.4, 0.1, metric="eval_loss"))
    (group,) = plan.groups(target={"metric": "eval_loss", "value": 0.5})
    assert group["tta_epochs"] == 2
    assert "eval_loss at most 0.5" in table(plan.folder)


@pytest.mark.parametrize(
    ("reached", "mean", "median", "shown"),
    [(3, 10, 10, "10.0±0.0"), (2, math.inf, 10, "median"), (1, math.inf, math.inf, "missed")],
)
def test_a_missed_target_counts_in_mean_and_median(
    plan: Plan, table: Verb, reached: int, mean: float, median: float, shown: str
) -> None:
    for seed in (1, 2, 3):
        plan.run(seed=seed, epochs=timed_epochs(0.95 if seed <= reached else 0.85, 0.85))
    (group,) = plan.groups(target=TARGET)
    assert (group["tta_train_s"], group["tta_train_s_median"]) == (mean, median)
    assert (group["reached"], group["tta_train_s_n"]) == (reached, 3)
    text = table(plan.folder)
    assert row_of(text, "1_1")[-1] == f"{reached}/3" and shown in row_of(text, "1_1")
    if reached < 3:
        assert group["tta_train_s_sd"] is None
        plan.write(target=TARGET, columns=["tta_train_s"])
        cells = " ".join(row_of(table(plan.folder), "1_1"))  # no column of its own says how many
        assert cells.endswith((" missed 2 of 3", " (2/3)")[reached - 1])


def test_a_target_that_nobody_measured_is_unknown_not_missed(plan: Plan, table: Verb) -> None:
    plan.run(epochs=timed_epochs(0.95))
    (group,) = plan.groups(target={"metric": "acuracy", "value": 0.9})
    assert group["tta_train_s"] is None and group["tta_train_s_n"] == 0
    assert "no epoch of any run has a number named acuracy" in table(plan.folder)


def test_failed_skipped_and_waiting_runs_are_rows(plan: Plan, table: Verb) -> None:
    plan.run("1_1", seed=1, accuracy=0.8)
    plan.run("1_1", seed=2, outcome="timeout", reason="over 60 s", accuracy=0.1)
    oom = plan.run("1_2", seed=1, outcome="oom", reason="[rank0]: no room\nfor 7 GiB", devices=2)
    to_go = plan.planned("1_2", seed=2)
    for seed in (1, 2):
        plan.planned("2_1", seed=seed, skipped="needs 2 nodes")
    killed = plan.planned("1_4", seed=1)
    killed.mkdir(parents=True)
    (killed / "settings.json").write_text('{"schema": 1}')
    one, two, skipped, going = plan.groups()
    assert (one["finished"], one["planned"], one["accuracy"]) == (1, 2, 0.8)
    assert (two["finished"], two["outcome"]) == (0, "oom, waiting")
    assert (skipped["outcome"], going["outcome"]) == ("skipped", "unfinished")
    assert two["accuracy"] is None and two["effective_batch"] == 8
    text = table(plan.folder)
    assert row_of(text, "1_1")[1] == "1/2"
    assert row_of(text, "1_2")[1:7] == ["0/2", "8", "-", "oom,", "waiting", "-"]
    assert "timeout: over 60 s (setup 1_1, seed 2)" in text
    # Brackets are not taken for markup.
    assert f"oom: [rank0]: no room for 7 GiB (setup 1_2, seed 1)\n  bert/{oom.name}" in text
    assert text.count("needs 2 nodes") == 1 and "skipped: needs 2 nodes (2 runs)" in text
    assert "waiting: not begun (1 run)" in text
    # What a cluster's queue has; a damaged line of it is no reason to show no table.
    row = dict(event="submitting", name="x", runs=[f"bert/{to_go.name}"], unix=1.0, command="x")
    lines(plan.folder / "jobs.jsonl", [row])
    assert "waiting: submitted to the cluster (1 run)" in table(plan.folder)
    lines(plan.folder / "jobs.jsonl", [row, {"event": "submitted"}])
    assert "waiting: not begun (1 run)" in table(plan.folder)
    assert "interrupted: 0 epochs recorded (setup 1_4, seed 1)" in text


def test_a_row_a_run(plan: Plan) -> None:
    plan.run("1_1", 8, seed=7, accuracy=0.8, epochs=timed_epochs(0.95, 0.8))
    plan.run("1_2", 8, seed=7, outcome="failed", reason="why", devices=2, accuracy=0.1)
    plan.planned("2_1", 8, seed=7, skipped="needs 2 nodes")
    done, failed, skipped = load_sweep_runs(plan.write(target=TARGET)).to_dict("records")
    for name, value in {
        "setup": "1_1", "per_gpu_batch": 8, "seed": 7, "path": "bert/1_1_8_7", "state": "finished",
        "machine": "a-cpux2", "devices": 1, "accuracy": 0.8, "tta_train_s": 10,
        "torch_version": "2.13.0", "commit": "0123456789abcdef",
    }.items():  # fmt: skip
        assert done[name] == value, name
    assert (failed["state"], failed["reason"], failed["devices"]) == ("failed", "why", 2)
    assert math.isnan(failed["tta_train_s"])  # not measured, and no miss
    assert (skipped["state"], skipped["reason"]) == ("skipped", "needs 2 nodes")


def test_a_record_counts_more_than_the_plan(plan: Plan) -> None:
    """What this launcher left out may have been run on a cluster, into the same folder."""
    plan.run("1_1")
    plan.content["runs"][0]["skipped"] = "needs 2 nodes"
    assert plan.groups()[0]["outcome"] == "finished"


def test_memory_of_the_first_device_and_of_the_others() -> None:
    rows: list[dict[str, Any]] = [
        {"peak_memory_gib_per_rank": [5.0, 2.0, 3.0]}, {"peak_memory_gib_per_rank": [6.0, 2.5, 1.0]}
    ]  # fmt: skip
    both = {"peak_memory_first_gib": 6.0, "peak_memory_others_gib": 3.0}
    assert memory_of_devices(rows) == both
    one = [{"peak_memory_gib_per_rank": [4.0]}]
    assert memory_of_devices(one) == {"peak_memory_first_gib": 4.0}
    assert memory_of_devices([{}, {"peak_memory_gib_per_rank": [None, None]}]) == {}


def test_a_row_for_each_node(plan: Plan, table: Verb) -> None:
    nodes = {"nodes": 2, "processes_per_node": 2}
    folder = plan.run("2_2", environment=nodes, user_s=30.0, accuracy=0.8)
    for rank, (user_s, samples, accuracy) in enumerate(
        [(1.0, 100, 0.9), (2.0, 300, 0.7), (4.0, 50, 0.6), (8.0, 50, 0.8)]
    ):
        shared = {"epoch": 2, "rank": rank, "user_s": user_s, "eval_samples": samples}
        rows = [{"epoch": 1, "user_s": 99.0}, {**shared, "eval_accuracy": accuracy}]
        lines(folder / "ranks" / f"rank_{rank}.jsonl", rows)
    plan.run("1_1", accuracy=0.7)  # a record of before there were such fields
    group, old = plan.groups(per_node=True)
    assert group["user_s_per_node"] == [3, 12]
    # (100 * 0.9 + 300 * 0.7) / 400 and (50 * 0.6 + 50 * 0.8) / 100
    assert group["accuracy_per_node"] == [pytest.approx(0.75), pytest.approx(0.7)]
    assert group["system_s_per_node"] == [None, None] and old["user_s_per_node"] == [None]
    plan.write(per_node=True, columns=["accuracy", "user_s", "system_s", "wall_s"])
    printed = [line.split() for line in table(plan.folder).splitlines()]
    start = next(n for n, words in enumerate(printed) if words[:1] == ["2_2"])
    assert printed[start : start + 5] == [
        ["2_2", "1/1", "all", "0.8000", "30.0", "-", "40.0"],
        ["0", "0.7500", "3.00", "-", "-"],
        ["1", "0.7000", "12.0", "-", "-"],
        ["1_1", "1/1", "all", "0.7000", "-", "-", "40.0"],
        ["0", "-", "-", "-", "-"],
    ]


def test_columns_that_were_asked_for(plan: Plan, table: Verb) -> None:
    plan.run("1_1", seed=1, wall_s=40.0)
    plan.run("1_1", seed=2, wall_s=44.0)
    plan.run("1_2", devices=2)
    asked = ["f1", "samples_per_s", "wall_s", "peak_memory_gib", "user_s", "setup"]
    text = table(plan.write(columns=asked))
    # sd of 40 and 44 is 2.83
    assert row_of(text, "1_1") == ["1_1", "2/2", "0.7000±0.0000", "100±0", "42.0±2.8", "1.50±0.00",
                                   "-"]  # fmt: skip
    assert "accuracy" not in text[: text.index("- setup 1_2 against")]


def test_what_exchanging_costs_is_a_column_where_it_is_known(plan: Plan, table: Verb) -> None:
    plan.run("1_1")
    plan.run("1_2", devices=2, comm_share=0.125, comm_exposed_share=0.25, compute_skew=1.5)
    asked = ["comm_share", "comm_exposed_share", "compute_skew"]
    text = table(plan.write(columns=asked))
    assert row_of(text, "1_1") == ["1_1", "1/1", "-", "-", "-"]
    assert row_of(text, "1_2") == ["1_2", "1/1", "0.1250", "0.2500", "1.5000"]


def test_columns_of_devices_where_they_are_known(plan: Plan, table: Verb) -> None:
    plan.run("1_1", mfu=None, tflops_per_s=0.5)
    assert "MFU" not in table(plan.write())  # nobody knows the peak of a CPU
    plan.run("1_2", devices=2, mfu=0.4125, gpu_utilisation_percent=97.5, energy_j=812.0,
             joules_per_sample=2.03)  # fmt: skip
    text = table(plan.write())
    assert "MFU: share of what the devices can do" in text and "J/sample: of the devices" in text
    words = row_of(text, "1_2")
    at = words.index("0.4125")
    assert words[at : at + 3] == ["0.4125", "97.50", "2.03"]
    # Asked for by name, one brings the other with it, beside it.
    for names in (["mfu"], ["gpu_utilisation_percent"], ["gpu_utilisation_percent", "mfu"]):
        text = table(plan.write(columns=["wall_s", *names, "tflops_per_s"]))
        assert row_of(text, "1_2")[2:] == ["40.0", "0.4125", "97.50", "-"]
        assert row_of(text, "1_1")[2:] == ["40.0", "-", "-", "0.500"]
    assert row_of(table(plan.write(columns=["energy_j"])), "1_2")[2:] == ["812.00"]


def test_no_gpu_is_busy_in_a_table_of_cpus(plan: Plan, table: Verb) -> None:
    """Where the peak of a processor is known its runs have an MFU, and its GPUs are none."""
    cpu = {"observed": {"device": "cpu"}}
    plan.run(seed=1, mfu=0.25, environment=cpu)
    for content in ({}, {"columns": ["wall_s", "mfu"]}):
        text = table(plan.write(**content))
        assert "MFU" in text and "GPU busy" not in text
    text = table(plan.output_dir).replace(str(plan.output_dir), "")
    assert "MFU" in text and "busy" not in text
    plan.run("1_2", mfu=0.25, environment={"observed": {"device": "cuda:0"}})
    assert "GPU busy" in table(plan.write())


@pytest.mark.parametrize(
    ("name", "near"), [("acuracy", "accuracy"), ("samples_pers", "samples_per_s")]
)
def test_an_unknown_column_names_the_nearest(plan: Plan, table: Verb, name: str, near: str) -> None:
    plan.run()
    assert f"named {name}: did you mean {near}?" in table.refused(plan.write(columns=[name]))


def test_axis_values_are_shown_as_planned(plan: Plan, table: Verb) -> None:
    plan.content["axes"] = ["link", "lr", "precision"]
    for link, lr in (("20ms/200mbit", 2e-5), (None, 3e-3)):
        plan.run(batch=4, label={"link": link, "lr": lr, "precision": "fp32"})
    text = table(plan.write(baseline={"link": None}))
    assert row_of(text, "20ms/200mbit", "2e-05") and row_of(text, "-", "0.003")
    # What is the same for all is said once; the metric precision keeps its name in the frame.
    assert "all: precision fp32" in text and "number_format" in load_sweep(plan.folder)
