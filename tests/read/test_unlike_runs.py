"""What is never averaged: unlike links, machines and passes, runs that did not finish."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core.collectives import GLOO, Shape, Wire
from harness.core.settings import UserError
from harness.read.explain import sweep as explain_module
from harness.read.explain.explain import _startup, group_breakdown
from harness.read.explain.time_breakdown import REST, TimeBreakdown
from harness.read.figures.catalogue import draw
from harness.read.predict.candidates import ratios_of
from harness.read.predict.cases import workloads_of
from harness.read.predict.facts import Overrides, is_timed_like
from harness.read.predict.fitting import fit_records
from harness.read.predict.model import predict
from harness.read.predict.plan import alone_text, on_one_machine
from harness.read.predict.scenario import Scenario
from harness.read.records.groups import Group
from harness.read.records.processors import by_speed
from harness.read.records.runs import Target
from harness.read.records.selection import read_selected
from harness.read.records.sweeps import read_results
from harness.read.statistics import spread
from tests.support.drawn import measured as read_plan
from tests.support.paired import Verb, changed, measured, pair, planted_s, timed
from tests.support.records import (
    TARGET,
    Plan,
    bare_epochs,
    epochs,
    lines,
    record,
    with_epochs,
)

AT = ("--target", "accuracy=0.8")
Far: Any = SimpleNamespace(wall_s=1e9)  # a candidate that takes longer


def over(delay_ms: float) -> dict[str, Any]:
    return {"link": {"delay_ms": delay_ms, "rate_mbit": None, "jitter_ms": 0.0, "loss": 0.0}}


def test_links_that_the_set_up_does_not_name_make_groups(tmp_path: Path) -> None:
    """`harness nodes` writes the link into the launch alone."""
    for name, delay_ms in (("a", 20.0), ("b", 80.0)):
        changed(record(tmp_path / name / "run", "--setup", "1_2").path, launch=over(delay_ms))
    sweep = read_results(tmp_path)
    assert [group.label["link"] for group in sweep.groups] == ["20ms", "80ms"]
    assert "link" in sweep.axes


def test_a_link_that_the_set_up_tells_is_no_axis(tmp_path: Path) -> None:
    for name, setup, delay_ms in (("a", "1_2", 20.0), ("b", "1_2_far", 80.0)):
        changed(record(tmp_path / name / "run", "--setup", setup).path, launch=over(delay_ms))
    sweep = read_results(tmp_path)
    assert len(sweep.groups) == 2 and sweep.axes == ("setup",)


def test_the_end_of_a_curve_is_that_of_finished_runs(plan: Plan) -> None:
    for seed, last in ((1, 0.8), (2, 0.9)):
        plan.run(seed=seed, epochs=epochs(0.5, last))
    plan.run(seed=3, epochs=epochs(0.1), outcome="oom", epochs_done=1)
    drawn = draw("accuracy", read_plan(plan))
    assert "0.85 (from 0.8 to 0.9, n = 2)" in drawn.alt and "n = 3" not in drawn.alt
    (axes,) = drawn.figure.axes
    assert list(axes.lines[0].get_ydata()) == pytest.approx([0.5, 0.85])  # type: ignore[arg-type]
    assert any("oom" in text.get_text() for text in axes.texts)


def test_runs_none_of_which_finished_have_no_end(plan: Plan) -> None:
    plan.run(seed=1, epochs=epochs(0.5, 0.6), outcome="diverged")
    assert "not finished" in draw("accuracy", read_plan(plan)).alt


def test_per_cent_of_a_script_is_read_as_a_share(tmp_path: Path) -> None:
    for seed, most in ((1, 91.0), (2, 0.93), (3, 1.0000001192)):
        folder = pair(tmp_path, seed, accuracy=most, f1=0.5, best_metric="accuracy",
                      best_value=most)  # fmt: skip
        with_epochs(folder, epochs(most / 2, most))
        without_script(folder)
    runs = sorted(read_selected(str(tmp_path), None).runs, key=lambda run: run.seed or 0)
    assert [run.measures["accuracy"] for run in runs] == pytest.approx([0.91, 0.93, 1.0])
    assert [row["accuracy"] for row in runs[0].epochs] == pytest.approx([0.455, 0.91])
    assert runs[0].measures["f1"] == 0.5  # is a share already


def fitted_on(root: Path, *, machine: str = "a-cpux2") -> None:
    for batch in (8, 16, 32):
        timed(root, batch, machine=machine)
    timed(root, 16, 1, 2, machine=machine)


def test_steps_of_another_machine_correct_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted_on(tmp_path)
    for machine, step_s in (("a-cpux2", 0.1), ("b-cpux2", 0.7)):
        for delay_ms in (20.0, 40.0):
            folder = timed(tmp_path, 16, 2, 1, machine=machine, step_s=step_s,
                           link=measured(delay_ms, 200.0, 1.0), seed=int(delay_ms))  # fmt: skip
            with_epochs(folder, [{"epoch": 1.0, "updates": 44, "accuracy": 0.9}])
    fitted = fit_records(str(tmp_path), Overrides())
    far = [run for run in fitted.selected if run.nodes == 2]
    here = [run for run in far if run.machine == "a-cpux2"]
    assert len(far) == 4 and len(here) == 2
    assert ratios_of(fitted, far) == ratios_of(fitted, here)
    assert '"elsewhere": 2' in Verb("plan", capsys)(
        tmp_path, "--nodes", "2", "--link", "20ms/200mbit", "--target", "accuracy=0.8", "--json"
    )
    # Nor do those of another version of torch, unless one of both is not known.
    other = changed(here[0].recorded_folder.path, versions={"torch": "1.0"})
    (old,) = read_selected(str(other), None).runs
    changed(Path(fitted.first.recorded_folder.path), versions={"torch": "2.13.0"})
    (first,) = read_selected(str(fitted.first.recorded_folder.path), None).runs
    assert is_timed_like(fitted.first, here[0]) and not is_timed_like(first, old)


def test_steps_of_processors_with_unlike_speeds_are_named(tmp_path: Path) -> None:
    for batch, tflops in ((8, 0.1), (16, 0.1), (32, 0.12)):
        calibrated(timed(tmp_path, batch), tflops)
    (text,) = fit_records(str(tmp_path), Overrides()).assumed
    assert "matrix products ran at 0.1 to 0.12 TFLOP/s in fp32" in text


def calibrated(folder: Path, tflops: float | None) -> Path:
    return changed(folder, cpu_calibration={"fp32_tflops": tflops, "threads": 1})


def test_times_of_processors_of_another_speed_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in steps, nor in what was measured, nor in the time on one machine."""
    fitted_on(tmp_path)
    row = {"epoch": 1.0, "updates": 44, "accuracy": 0.9, "epoch_time_s": 4.0}
    for tflops, step_s in ((0.11, 0.1), (0.0775, 0.3)):
        for delay_ms in (20.0, 40.0):
            folder = timed(tmp_path / str(tflops), 16, 2, 1, step_s=step_s, seed=int(delay_ms),
                           link=measured(delay_ms, 200.0, 1.0))  # fmt: skip
            calibrated(with_epochs(folder, [row | {"wall_s": 60.0}]), tflops)
    for folder in (tmp_path / "vit").glob("*/*"):
        calibrated(folder, 0.11)
    rate = ("--lr", "0.003")  # of runs that tell their accuracy
    slow = calibrated(timed(tmp_path / "slow", 16, 1, 1, *rate, step_s=0.2), 0.0775)
    with_epochs(slow, [row | {"wall_s": 4.2}])
    fitted = fit_records(str(tmp_path), Overrides())
    far = [run for run in fitted.selected if run.nodes == 2]
    here = [run for run in far if run.calibration["fp32_tflops"] == 0.11]
    assert len(far) == 4 and len(here) == 2
    assert ratios_of(fitted, far) == ratios_of(fitted, here)
    link = ("--link", "20ms/200mbit")
    two = ("--setup", "2_1", "--batch", "16", "--exchange", "backend")
    found = json.loads(Verb("predict", capsys)(tmp_path, *link, *two, "--json"))
    assert found["measured_step_s"] == pytest.approx([0.1])
    plan, asked = Verb("plan", capsys), (tmp_path, "--nodes", "2", *link, *AT)
    found = json.loads(plan(*asked, "--json"))
    assert found["elsewhere"] == 2 and found["on_one_machine_s"] is None
    assert found["on_one_machine"] == (
        "one machine: accuracy at least 0.8 is known to be reached only on a processor of 0.0775 "
        "TFLOP/s, whose times are not comparable with those above: single, batch 16 on 1_1 took "
        "4.2 s there (1 run)"
    )
    text = plan.in_one_line(*asked)
    assert "2 runs of another machine, processor speed, torch or number of threads:" in text
    # Of the processor of the fit one took longer, and is what goes with the plan.
    other = calibrated(timed(tmp_path / "slower", 32, 1, 1, *rate, seed=7), 0.11)
    with_epochs(other, [row | {"wall_s": 6.0}])
    found = json.loads(plan(*asked, "--json"))
    assert found["on_one_machine_s"] == pytest.approx(6.0)
    assert found["on_one_machine"].startswith("one machine: single, batch 32 on 1_1 took 6 s")
    # What missed on the other one did so in some run.
    missed = calibrated(timed(tmp_path / "missed", 32, 1, 1, *rate, seed=8), 0.0775)
    with_epochs(missed, [row | {"accuracy": 0.1, "wall_s": 9.0}])
    assert json.loads(plan(*asked, "--json"))["on_one_machine_s"] is None


def test_speeds_are_divided_at_the_largest_gap(tmp_path: Path) -> None:
    """A chain of speeds is no one class; those of unknown speed are with the most."""
    rates = (0.1, 0.119, 0.15, 0.149, None)
    folders = [calibrated(timed(tmp_path, 8, seed=n), rate) for n, rate in enumerate(rates)]
    runs = [run for folder in folders for run in read_selected(str(folder), None).runs]
    found = [[run.seed for run in each] for each in by_speed(runs)]
    assert found == [[0, 1, 4], [3, 2]]  # of two equal classes the first is the most
    assert by_speed([]) == [] and by_speed(runs[4:]) == [runs[4:]]
    assert len(by_speed(runs[:2])) == 1


def test_a_fit_is_of_processors_of_one_speed(tmp_path: Path) -> None:
    """Clouds sell several under one name. The runs over nodes decide, else the most runs; runs of
    unknown speed are with the most.
    """
    for batch, tflops, step_s in ((8, 0.1, 1.0), (16, 0.1, 2.0), (8, 0.2, 0.5), (32, None, 4.0)):
        folder = timed(tmp_path, batch, seed=int(10 * (tflops or 0)), step_s=step_s)
        calibrated(folder, tflops)
    fitted = fit_records(str(tmp_path), Overrides())
    assert fitted.model.line.step_s(8) == pytest.approx(1.0) and fitted.runs == 3
    left_out = "left out: 1 run on a processor of 0.2 TFLOP/s; under the same name, the others had "
    assert f"{left_out}0.1 TFLOP/s" in fitted.assumed
    # What lacks because of it: runs that are there, but of another speed.
    pair = Scenario(Shape(1, 2), 8, Wire(0.0, math.inf))
    with pytest.raises(UserError, match=rf"measure --setup 1_2 as well, .*; {left_out}0.1 TFLOP"):
        predict(fitted.model, pair)
    far = calibrated(timed(tmp_path, 8, 2, 1, link=measured(1.0, 200.0, 1.0)), 0.19)
    fitted = fit_records(str(tmp_path), Overrides())
    assert fitted.model.line.step_s(8) == pytest.approx(0.5) and fitted.runs == 1
    # Where the speed of the runs over nodes has no run of one process, another one has to do.
    calibrated(far, 0.4)
    assert fit_records(str(tmp_path), Overrides()).runs == 3


def test_what_is_predicted_in_a_sweep_has_the_speed_of_what_it_is_fitted_on(tmp_path: Path) -> None:
    for tflops, step_s in ((0.1, 1.0), (0.2, 0.5)):
        calibrated(timed(tmp_path, 8, seed=int(10 * tflops), step_s=step_s), tflops)
    link = measured(1.0, 200.0, 1.0)
    for lr, tflops in (("0.1", 0.1), ("0.2", 0.2), ("0.3", 0.4)):
        for seed in (1, 2, 3):
            far = timed(tmp_path / lr, 8, 2, 1, "--lr", lr, link=link, seed=seed)
            calibrated(far, 0.1 if seed == 3 else tflops)
    workloads, excluded = workloads_of(read_results(tmp_path))
    assert [each.fitted.model.line.step_s(8) for each in workloads] == pytest.approx([1.0, 0.5])
    runs = [{c.runs[0].identity["lr"]: len(c.runs) for c in each.cases} for each in workloads]
    assert runs == [{0.1: 3, 0.2: 1, 0.3: 1}, {0.2: 2}]  # a group of two speeds is two cases
    ((reason, names),) = excluded.items()
    assert ", on a processor of 0.4 TFLOP/s: no finished run of one process" in reason
    assert names == ["lr 0.3 ddp 2_1"] and "in its file" not in reason
    asked = replace(read_results(tmp_path), question="how far off?")
    assert "a sweep is predicted from its own runs: list it in" in next(
        iter(workloads_of(asked)[1])
    )


def test_one_gpu_of_a_machine_and_four_are_one_machine(tmp_path: Path) -> None:
    """The fastest on one machine is the one with more GPUs, though its label differs."""
    fitted_on(tmp_path, machine="h200x1")
    rows = [{"epoch": 1.0, "updates": 44, "accuracy": 0.9, "epoch_time_s": 4.0, "wall_s": 5.0}]
    with_epochs(timed(tmp_path, 64, machine="h200x1"), rows)
    quick = [{**rows[0], "epoch_time_s": 1.0, "wall_s": 2.0}]
    with_epochs(timed(tmp_path, 64, 1, 4, machine="h200x4"), quick)
    fitted = fit_records(str(tmp_path), Overrides())
    alone = on_one_machine(fitted, Target("accuracy", 0.8))
    assert alone is not None and alone.runs[0].machine == "h200x4"


def test_one_machine_reached_a_target_in_runs_that_tell(tmp_path: Path, plan: Plan) -> None:
    fitted_on(tmp_path)
    rows = [{"epoch": 1.0, "updates": 44, "accuracy": 0.9, "epoch_time_s": 4.0, "wall_s": 5.0}]
    for seed in (1, 2, 3):
        folder = with_epochs(timed(tmp_path, 64, seed=seed), rows)
    target = Target("accuracy", 0.8)
    fitted = fit_records(str(tmp_path), Overrides())
    alone = on_one_machine(fitted, target)
    assert alone is not None and "took 5 s" in alone_text(fitted, alone, Far, target)
    assert "(3 runs)" in alone_text(fitted, alone, Far, target)
    changed(folder, launch={"cpu_busy_share": 0.9})  # its time does not count
    fitted = fit_records(str(tmp_path), Overrides())
    alone = on_one_machine(fitted, target)
    assert alone is not None and "(2 runs)" in alone_text(fitted, alone, Far, target)
    with_epochs(folder, [{name: rows[0][name] for name in rows[0] if name != "accuracy"}])
    assert on_one_machine(fit_records(str(tmp_path), Overrides()), target) is None


def test_weights_that_were_tested_tell_runs_apart(tmp_path: Path) -> None:
    """The last epoch's test accuracy was averaged with that of the best epoch."""
    for save in ("last", "best"):
        pair(tmp_path / "held", 1, "--validation_split", "0.1", "--save", save)
        pair(tmp_path / "all", 1, "--save", save)
    held, together = (read_results(tmp_path / name) for name in ("held", "all"))
    assert {group.label["tested"] for group in held.groups} == {"accuracy", "last epoch"}
    assert len(together.groups) == 1 and len(together.groups[0].runs) == 2


def test_runs_of_two_machines_are_not_explained_as_one(tmp_path: Path) -> None:
    for seed, machine in ((1, "a-cpux2"), (2, "b-cpux2")):
        pair(tmp_path, seed, environment={"machine": machine})
    group = Group(tuple(read_selected(str(tmp_path), None).runs), name="RUN", selector="x")
    with pytest.raises(UserError, match="machine") as refused:
        group_breakdown(group)
    assert "a-cpux2" in str(refused.value) and "b-cpux2" in str(refused.value)


def test_a_run_without_the_metric_has_not_reached_the_target(plan: Plan) -> None:
    for seed, rows in enumerate((epochs(0.5), epochs(0.6), bare_epochs(1))):
        plan.run(seed=seed, epochs=rows)
    (group,) = read_plan(plan, target=TARGET).groups
    assert isinstance(group, Group) and group.reached == "0 of 3"


def test_a_metric_that_epochs_have_is_not_said_to_be_missing(plan: Plan, table: Verb) -> None:
    for seed in (1, 2):  # times of unlike threads do not count
        plan.run(seed=seed, epochs=epochs(0.5, 0.95), environment={"threads": seed})
    folder = plan.write(target=TARGET)
    said = table(folder)
    assert "no epoch of any run" not in said and "unlike numbers of threads" in said
    folder = plan.write(target={"metric": "acuracy", "value": 0.9})
    assert "no epoch of any run has a number named acuracy: did you mean accuracy?" in table(folder)


def test_a_group_without_times_to_a_target_that_is_made_is_named(plan: Plan) -> None:
    """It had no row in the figure, and no word."""
    for seed, last in enumerate((0.95, 0.95, 0.5)):
        busy = {"launch": {"cpu_busy_share": 0.9}} if seed == 0 else {}
        plan.run("1_1", seed=seed, epochs=epochs(0.5, 0.95))
        plan.run("1_2", seed=seed, epochs=epochs(0.5, last), environment=busy)
    drawn = draw("time_to_accuracy", read_plan(plan))
    text = "no time to the target of 1 group with misses beside disturbed runs (1_2)"
    assert text in drawn.notes, drawn.notes


def test_a_baseline_over_a_link_is_not_drawn_as_one_without(plan: Plan) -> None:
    plan.content["axes"] = ["setup", "link", "per_gpu_batch"]
    for link, rate in (("1ms/100mbit", 100.0), ("5ms/100mbit", 80.0), ("20ms/100mbit", 50.0)):
        for seed in (1, 2):
            plan.run("2_1", seed=seed, label={"link": link}, train_samples_per_s=rate + seed)
    sweep = read_plan(plan, baseline={"link": "1ms/100mbit"})
    said = [text.get_text() for axes in draw("propagation", sweep).figure.axes
            for text in axes.texts]  # fmt: skip
    assert "2_1, 1ms/100mbit" in said and not any("no network" in t for t in said), said


def test_readings_that_say_nothing_have_no_column_of_the_usage(plan: Plan) -> None:
    node = {"cpu_percent": 50.0, "memory_gib": 3.0}
    for batch, of_node in ((4, node), (8, dict.fromkeys(node))):
        folder = plan.run("1_1", batch, epochs=epochs(0.5)) / "telemetry" / "node_0.jsonl"
        lines(folder, [{"unix": 1000.0 + s, "gpus": [], "node": of_node} for s in range(5)])
    assert len(draw("usage", read_plan(plan)).figure.axes) == 2  # of one run


def test_a_report_explains_runs_by_their_settings(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that the sweep names and its baseline has as well differed from nothing."""
    for seed in (1, 2):
        plan.run("1_2", seed=seed, devices=2, label={"save": "none"})
    asked: list[Group] = []

    def explained(group: Group, near: Any) -> Any:
        asked.append(group)
        return SimpleNamespace(sentences=("so",))

    monkeypatch.setattr(explain_module, "explain", explained)
    explain_module.explain_sweep(read_plan(plan))
    assert [run.label for group in asked for run in group.runs] == [{}, {}]


def test_what_sharing_was_fitted_on_is_what_counts(tmp_path: Path) -> None:
    """Of batches that no single process ran nobody knows what sharing costs."""
    for seed in (1, 2):
        timed(tmp_path, 32, seed=seed)
        timed(tmp_path, 32, 1, 2, seed=seed)
    for seed in (1, 2, 3):
        timed(tmp_path, 16, 1, 2, seed=seed)
    timed(tmp_path, 8, 1, 4)
    model = fit_records(str(tmp_path), Overrides()).model
    assert (model.sharing_freedom, model.shared_by, model.backend) == (1, 2, GLOO)
    assert model.line.step_s(32) == pytest.approx(planted_s(32))


def test_two_sizes_of_the_test_set_are_named(tmp_path: Path) -> None:
    fitted_on(tmp_path)
    assert not any("evaluation" in line for line in fit_records(str(tmp_path), Overrides()).assumed)
    for number, folder in enumerate(sorted(tmp_path.glob("*/*/*"))):
        data = {"train_samples": 1408, "left_out_samples": 29, "test_samples": 200 + 300 * number}
        changed(folder, data=data)
    (line,) = [x for x in fit_records(str(tmp_path), Overrides()).assumed if "evaluation" in x]
    assert "those of the runs have 200, 500, 800, 1100" in line


def test_batches_of_unlike_passes_have_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        for own, acc in ((8, 1), (32, 1), (16, 2)):
            folder = pair(tmp_path, seed, "--b", str(own), "--grad_acc", str(acc),
                          environment={"effective_batch": 2 * own * acc})  # fmt: skip
            with_epochs(folder, epochs(0.5, 0.9))
    text = Verb("batches", capsys).in_one_line(tmp_path, *AT)
    assert "no times of batch 64: its runs made unlike passes (16 x 2, 32 x 1)" in text
    assert "least training time" not in text  # of one batch alone
    family = json.loads(Verb("batches", capsys)(tmp_path, *AT, "--json"))["families"][0]
    small, large = family["batches"]
    assert (large["train_samples_per_s"], large["tta_train_s"]) == (None, [])
    assert small["train_samples_per_s"] == 100 and len(small["tta_train_s"]) == 2
    assert len(large["interpolated_samples"]) == 2


def test_a_run_that_does_not_tell_leaves_its_batch_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        for batch in (8, 32):
            folder = pair(tmp_path, seed, "--b", str(batch),
                          environment={"effective_batch": 2 * batch})  # fmt: skip
            rows = epochs(0.5, 0.9)
            if (seed, batch) == (2, 32):
                rows[1]["samples"] = None
            with_epochs(folder, rows)
    text = Verb("batches", capsys).in_one_line(tmp_path, *AT)
    assert "batch 64 is left out: 1 of 2 do not tell" in text


def test_the_startup_is_that_of_the_runs_that_are_timed(plan: Plan) -> None:
    for seed in (1, 2):
        plan.run(seed=seed)
    plan.run(seed=3, environment={"launch": {"cpu_busy_share": 0.9}}, lost_s=300.0)
    (group,) = read_plan(plan).groups
    assert isinstance(group, Group) and len(group.timed) == 2
    parts: dict[str, float | None] = {REST: 0.6, "computing": 0.4}
    breakdown = TimeBreakdown(1, 4, 100, spread([40.0]), 0.4, parts, {}, None, None, None)
    assert _startup(group, breakdown) == "60 s of 100 s"


def test_what_is_not_known_of_all_is_not_that_of_all(tmp_path: Path, table: Verb) -> None:
    for name, seed in (("a", "1"), ("b", "2")):
        record(tmp_path / name, "--seed", seed)
    assert ", batch 64" in table.in_one_line(tmp_path)
    file = tmp_path / "b" / "environment.json"
    facts = json.loads(file.read_text())
    del facts["effective_batch"]
    file.write_text(json.dumps(facts))
    assert ", batch 64" not in table.in_one_line(tmp_path)


def without_script(folder: Path) -> Path:
    """The record as LogCallback alone writes it, in a script of somebody's own."""
    settings = json.loads((folder / "settings.json").read_text())
    del settings["script"]
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder


def test_runs_in_per_cent_and_in_shares_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of 1 % and less, of a script that gives per cent, looks like a share."""
    for name, most in (("high", 5.6), ("low", 0.4)):
        folder = without_script(pair(tmp_path / name, 1, accuracy=most))
        with_epochs(folder, epochs(most / 2, most))
    text = Verb("compare", capsys).in_one_line(tmp_path / "high", tmp_path / "low")
    assert "unit: accuracy is in per cent in some runs and a share in others" in text
    # One that gives further metrics differs in none that both have.
    more = without_script(pair(tmp_path / "more", 1, accuracy=5.6, f1=4.0))
    with_epochs(more, [{**row, "f1": 4.0} for row in epochs(2.8, 5.6)])
    assert "unit: " not in Verb("compare", capsys).in_one_line(tmp_path / "high", more)
    # Of a script of ours nobody doubts the unit.
    ours = with_epochs(pair(tmp_path / "ours", 1, accuracy=0.05), epochs(0.02, 0.05))
    assert "unit: " not in Verb("compare", capsys).in_one_line(tmp_path / "high", ours)


def test_metrics_of_several_evaluation_sets_in_per_cent_are_shares(tmp_path: Path) -> None:
    folder = without_script(pair(tmp_path, 1, accuracy=None))
    others = {"epoch": 1.0, "dev_loss": 0.5, "weight_precision": 16.0, "inaccuracy": 9.0}
    with_epochs(folder, [{**others, "test_accuracy": 92.0, "dev_accuracy": 0.5}])
    (run,) = read_selected(str(tmp_path), None).runs
    assert run.epochs[0] == {**others, "test_accuracy": 0.92, "dev_accuracy": 0.005}
    assert run.in_per_cent == ("accuracy",)


def test_rows_measured_with_another_torch_than_the_baseline_are_named(
    plan: Plan, table: Verb
) -> None:
    def of(version: str) -> dict[str, Any]:
        return {"environment": {"versions": {"torch": version, "transformers": "5.14"}}}

    plan.run("1_1", **of("2.13"))
    plan.run("1_2", devices=2, **of("2.13"))
    plan.groups()
    assert "from the baseline in" not in table(plan.folder)
    plan.run("1_4", devices=4, **of("2.12"))
    plan.groups()
    assert "1 row differs from the baseline in versions" in table(plan.folder)
