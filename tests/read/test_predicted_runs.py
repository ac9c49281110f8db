"""What predict and plan say of whole runs: the curve over nodes, cost, notes, what is left out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.collectives import GLOO, Shape, Wire
from harness.core.settings import UserError
from harness.read.predict.candidates import (
    Candidate,
    _check_alike,
    distinguishing,
    trainings_of,
)
from harness.read.predict.command import half_efficiency_line
from harness.read.predict.computing import fit_line
from harness.read.predict.facts import Overrides
from harness.read.predict.fitting import fit_records
from harness.read.predict.model import (
    COMPUTE,
    SHARING,
    Model,
    below_half_efficiency,
    over_nodes,
    predict,
)
from harness.read.predict.phases import EVALUATION, START, PhaseFit
from harness.read.predict.plan import alone_text, on_one_machine
from harness.read.predict.ratios import STEPS, OverLinks, half_s
from harness.read.predict.scenario import Scenario
from harness.read.records.runs import Target
from harness.read.records.selection import read_selected
from harness.read.statistics import welch_half
from tests.support.paired import Verb, changed, measured, planted_s, timed
from tests.support.predicted import FAR, MODEL
from tests.support.records import Plan, with_epochs

FAR_LINK = ("--link", "20ms/200mbit", "--exchange", "backend", "--batch", "16")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    for batch in (8, 16, 32):
        for seed, noise in ((1, 1.01), (2, 0.99)):
            timed(tmp_path, batch, seed=seed, step_s=noise * planted_s(batch))
    timed(tmp_path, 16, 1, 2)
    timed(tmp_path, 32, 1, 2)
    return tmp_path


@pytest.fixture
def predicted(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("predict", capsys)


def test_each_row_of_the_curve_has_the_updates_of_its_nodes() -> None:
    """An epoch of 1408 samples of batch 16: 44 updates on two nodes, 5 on sixteen."""
    plan = Scenario(Shape(16), 16, FAR, "diloco", sync_every=4, epoch_updates=5, updates=15)
    curve = over_nodes(MODEL, plan, 16, lambda samples: 1408 // samples)
    updates = {each.plan.shape.nodes: each.plan.updates for each in curve}
    assert updates == {1: 264, 2: 132, 4: 66, 8: 33, 16: 15}
    two = replace(plan, shape=Shape(2), epoch_updates=44, updates=132)
    assert curve[1].step_s == predict(MODEL, two).step_s
    assert {each.plan.updates for each in over_nodes(MODEL, plan, 16)} == {15}


def test_an_epoch_has_a_last_batch_where_runs_filled_it(records: Path, predicted: Verb) -> None:
    """Of 1000 samples 31 updates of 32, or 32 with --tail pad; of 2048 none, or one."""
    for file in records.rglob("environment.json"):
        content = json.loads(file.read_text())
        content["data"] = {"train_samples": 1000, "left_out_samples": 0}
        file.write_text(json.dumps(content))
    for tail, counts in (("cut", (31, 0)), ("pad", (32, 1))):
        for file in records.rglob("settings.json"):
            file.write_text(json.dumps({**json.loads(file.read_text()), "tail": tail}))
        for setup, count in zip(("2_1", "128_1"), counts, strict=True):
            prediction = json.loads(predicted(records, *FAR_LINK, "--setup", setup, "--json"))
            assert prediction["updates"] == count, (tail, setup)
            if count:
                assert prediction["epoch_s"] == pytest.approx(count * prediction["step_s"])


def reaching(root: Path, rate: str, seed: int, wall_s: float, accuracy: float = 0.95) -> Path:
    """A run of one process whose only epoch ends after so long, of which two seconds measure."""
    row = {"epoch": 1.0, "updates": 44, "accuracy": accuracy, "samples": 1408,
           "epoch_time_s": 1.0, "wall_s": wall_s, "measuring_s": 2.0}  # fmt: skip
    return with_epochs(timed(root / rate, 16, 1, 1, "--lr", rate, seed=seed), [row])


def test_one_machine_stands_beside_what_a_link_takes(records: Path) -> None:
    """The fastest training that reached the target in every run there."""
    target = Target("accuracy", 0.9)
    assert on_one_machine(fit_records(str(records), Overrides()), target) is None
    for seed, wall_s in ((3, 11.0), (4, 13.0)):
        reaching(records, "0.003", seed, wall_s)
        reaching(records, "0.004", seed, wall_s + 5)
        reaching(records, "0.005", seed, 4.0, 0.95 if seed == 3 else 0.85)
    fitted = fit_records(str(records), Overrides())
    alone = on_one_machine(fitted, target)
    assert alone is not None and alone.mean("tta_wall_s") == pytest.approx(10.0)
    best = Candidate(Scenario(Shape(2), 16), 32, 2, 1.0, {STEPS: 10.5}, 0.5, None, 3, True, None,
                     alone.runs[0])  # fmt: skip
    line = "one machine: single, batch 16 on 1_1 took 10 s"
    less = f"{line}, less than anything over the link (2 runs)"
    assert alone_text(fitted, alone, best, target) == less
    slower = alone_text(fitted, alone, replace(best, parts={STEPS: 9.0}), target)
    assert slower == f"{line} (2 runs)"
    failed = reaching(records, "0.003", 6, 11.0) / "summary.json"
    failed.write_text(json.dumps(json.loads(failed.read_text()) | {"outcome": "diverged"}))
    alone = on_one_machine(fit_records(str(records), Overrides()), target)
    assert alone is not None and alone.mean("tta_wall_s") == pytest.approx(15.0)


def test_the_same_row_whatever_the_last_one_is(records: Path, predicted: Verb) -> None:
    asked = (records, *FAR_LINK, "--strategy", "local_sgd")
    rows = [
        next(line for line in predicted(*asked, "--setup", setup).splitlines() if " 2  " in line)
        for setup in ("2_1", "16_1")
    ]
    assert rows[0].split()[:2] == rows[1].split()[:2]


def test_a_curve_that_rises_again_is_not_said_to_stay_low() -> None:
    low, high = (
        predict(MODEL, Scenario(Shape(nodes), 16, wire))
        for nodes, wire in ((8, FAR), (16, replace(FAR, delay_s=0.0, bytes_per_s=1e15)))
    )
    assert low.efficiency < 0.5 < high.efficiency
    assert below_half_efficiency([high, low]) is low and below_half_efficiency([low, high]) is None
    text = "efficiency is below 0.5 on 8 of these numbers of nodes"
    assert half_efficiency_line([low, high]) == text


def test_the_cost_of_a_run_counts_all_gpus(records: Path, predicted: Verb) -> None:
    asked = (records, "--setup", "1_2", "--batch", "16", "--epochs", "3", "--restarts", "2",
             "--cost_per_gpu_hour", "3600", "--json")  # fmt: skip
    prediction = json.loads(predicted(*asked))
    assert prediction["run_cost"] == pytest.approx(2 * prediction["run_s"])
    assert f"cost         {prediction['run_cost']:,.4g}" in predicted(*asked[:-1])
    assert json.loads(predicted(*asked[:5], "--json"))["run_cost"] is None


def test_an_interval_is_of_what_was_measured(records: Path, predicted: Verb) -> None:
    line = fit_line([(8, 0.018), (16, 0.0265), (32, 0.0415), (16, 0.0255)])
    model = Model(line, 0.1, 0.03, 0.0, 1000, GLOO, shared_by=2, sharing_freedom=1)
    two = predict(model, Scenario(Shape(1, 2), 16))
    off = line.spread_at(16)
    assert two.high_s is not None and off is not None
    errors = (((off * line.step_s(16)) ** 2, 2), ((0.03 * line.step_s(16)) ** 2, 1))
    assert two.high_s - two.step_s == pytest.approx(welch_half(*errors))
    none = predict(replace(model, sharing=0.0), Scenario(Shape(1, 2), 16))  # as uncertain
    assert none.high_s is not None
    assert none.high_s - none.step_s == pytest.approx(welch_half(*errors))
    once = predict(replace(model, sharing=0.0, sharing_spread=None), Scenario(Shape(1, 2), 16))
    assert once.high_s is None
    assert predict(model, Scenario(Shape(1), 64)).high_s is None
    out = predicted.in_one_line(records, "--setup", "1_1", "--batch", "64")
    assert "interval unknown: batch 64 is outside those that were measured" in out


def test_sharing_that_is_given_leaves_the_exchange(records: Path) -> None:
    root = records / "more"
    for batch in (16, 32):
        step_s = 1.2 * planted_s(batch)
        timed(root, batch, 1, 2, step_s=step_s, comm_exposed_share=0.1, seed=4)
    fitted, given = (
        fit_records(str(records), Overrides(sharing=sharing)).model for sharing in (None, 0.0)
    )
    assert given.sharing == 0 and given.inside_s == fitted.inside_s > 0


@pytest.mark.parametrize(("asked", "words"), [
    (("--link", "20ms", "--setup", "2_1"), "note: --link 20ms has no rate: bytes take no time"),
    ((*FAR_LINK, "--setup", "2_1", "--strategy", "diloco", "--sync_every", "30"),
     "note: a run of 44 updates exchanges 2 times, the last time after its last update"),
])  # fmt: skip
def test_notes(asked: tuple[str, ...], words: str, records: Path, predicted: Verb) -> None:
    assert words in predicted.in_one_line(records, *asked)
    longer = (*FAR_LINK, "--setup", "2_1", "--strategy", "diloco", "--epochs", "50")
    assert "note: a run of" not in predicted.in_one_line(records, *longer)


def test_trainings_of_another_kind_are_left_out(records: Path) -> None:
    fitted = fit_records(str(records), Overrides())
    folders = [timed(records, 16, 2, 1, *flags, seed=7 + n) for n, flags in enumerate(
        ((), ("--grad_acc", "4"), ("--lora", "8"), ("--muon",)))]  # fmt: skip
    plain, gathers, *others = (
        next(run for run in read_selected(str(records), None).runs if run.folder.path == folder)
        for folder in folders
    )
    _check_alike(fitted, plain)
    with pytest.raises(UserError, match="--grad_acc 4: runs on one machine have 1"):
        _check_alike(fitted, gathers)
    for other in others:
        with pytest.raises(
            UserError, match="--model, --lora or --muon differs from that of the runs"
        ):
            _check_alike(fitted, other)


def test_a_setting_that_older_records_lack_is_its_default(records: Path) -> None:
    words = ("--strategy", "diloco", "--sync_every", "10")
    old = timed(records, 16, 2, 1, *words, seed=1)
    timed(records, 16, 2, 1, *words, seed=2)
    file = old / "settings.json"
    content: dict[str, Any] = json.loads(file.read_text())
    content["sync_first"] = None
    file.write_text(json.dumps(content))
    runs = [run for run in read_selected(str(records), None).runs if run.nodes == 2]
    assert {run.identity["sync_first"] for run in runs} == {None, 0}
    (training,) = trainings_of(runs)
    assert len(training) == 2 and distinguishing([training]) == [""]


def test_codes_sent_in_another_way_are_another_training(records: Path) -> None:
    """Sums of codes are coded again in one way and not in another; other sums are the same."""
    ways = [(compress, way) for compress in ("none", "int8") for way in ("backend", "direct")]
    for seed, (compress, way) in enumerate(ways, 11):
        timed(records, 16, 2, 1, "--compress", compress, "--exchange", way, seed=seed)
    runs = [run for run in read_selected(str(records), None).runs if (run.seed or 0) > 10]
    kinds = [[(run.identity["compress"], run.identity["exchange"]) for run in same]
             for same in trainings_of(runs)]  # fmt: skip
    plain, *coded = sorted(kinds, key=len, reverse=True)
    assert sorted(plain) == [("none", "backend"), ("none", "direct")]
    assert sorted(coded) == [[("int8", "backend")], [("int8", "direct")]]


@pytest.mark.parametrize(("flags", "words"), [
    (("--sync_every", "50"), "--sync_every does nothing with --strategy ddp: it belongs to "
     "local_sgd, diloco"),
    (("--sync_scope", "node"), "--sync_scope does nothing with --strategy ddp: it belongs to "
     "local_sgd, diloco"),
    (("--strategy", "local_sgd", "--fragments", "2"), "--fragments does nothing with --strategy "
     "local_sgd: it belongs to diloco"),
    (("--strategy", "diloco", "--blocks", "12"), "--blocks does nothing with --strategy diloco: "
     "it belongs to fsdp"),
])  # fmt: skip
def test_flags_of_another_strategy_are_refused(
    flags: tuple[str, ...], words: str, records: Path, predicted: Verb
) -> None:
    assert words in predicted.refused(records, "--setup", "2_1", *FAR_LINK, *flags)


def test_what_is_to_be_measured_on_more_nodes_has_reached_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one process with batch 8, 16 and 32 that with 16 reached it most often."""
    reached = {8: (0.9, 0.8), 16: (0.9, 0.9), 32: (0.8, 0.8)}
    for batch, accuracies in reached.items():
        for seed, accuracy in enumerate(accuracies):
            folder = timed(tmp_path, batch, seed=seed)
            with_epochs(folder, [{"epoch": 1.0, "accuracy": accuracy, "wall_s": 10.0}])
    asked = ("--nodes", "2", "--link", "20ms/200mbit", "--target", "accuracy=0.9")
    text = Verb("plan", capsys).refused(tmp_path, *asked)
    assert "quality was not measured on as many nodes" in text
    assert "--per_gpu_batch 16" in text and "torchrun" in text


ASKED = ("--link", "20ms/200mbit", "--target", "accuracy=0.9")


def reaching_over(root: Path, nodes: int, machine: str = "a-cpux2") -> None:
    """A run over 20 ms and 200 Mbit/s that reached the target."""
    link = measured(20.0, 200.0, 1.0, nodes=nodes)
    folder = timed(root, 16, nodes, 1, link=link, machine=machine)
    with_epochs(folder, [{"epoch": 1.0, "updates": 44, "accuracy": 0.95, "wall_s": 50.0}])


def test_one_machine_has_the_effective_batch_that_is_asked_for(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Verb("plan", capsys)
    reaching_over(records, 2)
    reaching(records, "0.003", 3, 11.0)
    asked = (records, "--nodes", "2", *ASKED)
    assert "one machine: single, batch 16 on 1_1 took 9 s" in plan.in_one_line(*asked)
    of_batch = (*asked, "--effective_batch", "32")
    text = plan.in_one_line(*of_batch)
    wanted = "accuracy at least 0.9 with --effective_batch 32"
    assert f"one machine: {wanted} is not known to be reached there in every run" in text
    assert json.loads(plan(*of_batch, "--json"))["on_one_machine_s"] is None
    row = {"epoch": 1.0, "updates": 44, "accuracy": 0.95, "epoch_time_s": 1.0, "wall_s": 12.0}
    with_epochs(timed(records / "more", 32, 1, 1, "--lr", "0.003"), [row])
    assert "one machine: single, batch 32 on 1_1 took 12 s" in plan.in_one_line(*of_batch)
    answer = json.loads(plan(*of_batch, "--json"))
    assert answer["on_one_machine_s"] == pytest.approx(12.0)
    assert answer["on_one_machine"] in plan.in_one_line(*of_batch)


@pytest.mark.parametrize(("grad_acc", "reason"), [
    (1, "3 nodes cannot share --effective_batch 32 equally: name a multiple of 3"),
    (2, "3 nodes cannot share --effective_batch 32 equally in 2 passes each: name a multiple of 6"),
])  # fmt: skip
def test_an_effective_batch_that_nodes_cannot_share_is_named(
    grad_acc: int, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In place of a command with another batch."""
    folder = timed(tmp_path, 16, 1, 1, "--grad_acc", str(grad_acc))
    with_epochs(folder, [{"epoch": 1.0, "accuracy": 0.95, "wall_s": 10.0}])
    plan = Verb("plan", capsys)
    text = plan.refused(tmp_path, "--nodes", "3", *ASKED, "--effective_batch", "32")
    assert text.strip().endswith(f"but on one alone: {reason}")
    shared = plan.refused(tmp_path, "--nodes", "4", *ASKED, "--effective_batch", "32")
    assert f"--per_gpu_batch {8 // grad_acc}" in shared


def test_a_training_that_this_machine_timed_over_no_link(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its time is marked, and it is left out far beyond all links of this machine's trainings."""
    plan = Verb("plan", capsys)
    reaching_over(records, 4, machine="b-cpux2")
    # With no link of this machine at all, there is none to be beyond.
    far = (records, "--nodes", "2,4", *ASKED, "--link", "900ms/200mbit")
    assert "**: extrapolated by the model alone: no run of this machine" in plan.in_one_line(*far)
    reaching_over(records, 2)
    text = plan.in_one_line(records, "--nodes", "2,4", *ASKED)
    assert " s** " in text and " s* " not in text and " *: extrapolated" not in text
    beyond = "over at most 20 ms and at least 200 Mbit/s, and this link is more than 10 times"
    refused = plan.refused(*far)
    assert f"cannot be predicted: ddp on 2_1: timed {beyond}" in refused
    refused = plan.refused(*far, "--nodes", "4")
    assert f"ddp on 4_1: timed over no link on this machine, other trainings {beyond}" in refused


def test_four_processes_on_two_cores_tell_what_sharing_costs(tmp_path: Path) -> None:
    """They take turns, and are no evidence for a third process with a core of its own."""
    timed(tmp_path, 16)
    timed(tmp_path, 16, 1, 4, step_s=0.026 * 1.2 * 2)
    assert fit_records(str(tmp_path), Overrides()).model.sharing == pytest.approx(1.4 / 3)
    for folder in tmp_path.glob("vit/*/*"):
        changed(folder, cpu_cores=2, threads=1)
    model = fit_records(str(tmp_path), Overrides()).model
    assert (model.own_cores, model.shared_by) == (2, 4)
    assert model.sharing == pytest.approx(0.2)
    two, four = (predict(model, Scenario(Shape(1, n), 16, Wire())).parts for n in (2, 4))
    assert two[COMPUTE] + two[SHARING] == pytest.approx(0.026 * 1.2)
    assert four[COMPUTE] + four[SHARING] == pytest.approx(0.026 * 1.2 * 2)
    changed(next(tmp_path.glob("vit/1_1/*")), cpu_cores=2, threads=2)
    changed(next(tmp_path.glob("vit/1_4/*")), cpu_cores=2, threads=2)
    assert fit_records(str(tmp_path), Overrides()).model.own_cores == 1


def test_a_prediction_is_compared_with_runs_that_measured_it(
    records: Path, predicted: Verb
) -> None:
    """Of the same nodes, settings, link and machine; the quiet ones, if there are any."""
    link = measured(20.0, 200.0, 1.0)
    asked = (str(records), "--setup", "2_1", *FAR_LINK)
    assert "measured     " not in predicted(*asked)
    for seed, step_s in ((1, 0.2), (2, 0.3)):
        timed(records, 16, 2, 1, link=link, seed=seed, step_s=step_s)
    busy = timed(records, 16, 2, 1, link=link, seed=3, step_s=0.9)
    changed(busy, launch={"cpu_busy_share": 0.9})
    other = {"machine": "b-cpux2", "step_s": 0.7}
    timed(records, 16, 2, 1, link=link, **other)  # type: ignore[arg-type]
    timed(records, 16, 2, 1, link=measured(40.0, 200.0, 1.0), seed=4, step_s=0.8)
    diloco = ("--strategy", "diloco", "--sync_every", "10")
    timed(records, 16, 2, 1, *diloco, link=link, seed=5, step_s=0.1)
    text = predicted(*asked)
    result = json.loads(predicted(*asked, "--json"))
    off = result["step_s"] / 0.25 - 1
    assert f"  measured     250 ms, mean of 2 runs: the prediction is off by {off:+.1%}" in text
    assert sorted(result["measured_step_s"]) == pytest.approx([0.2, 0.3])
    assert "measured     100 ms, mean of 1 run" in predicted(*asked, *diloco)
    alone = json.loads(predicted(str(records), "--setup", "1_1", "--batch", "16", "--json"))
    assert alone["measured_step_s"] == pytest.approx([1.01 * planted_s(16), 0.99 * planted_s(16)])


def test_a_wrong_link_is_told_before_records_are_read(tmp_path: Path, predicted: Verb) -> None:
    to_ask = (str(tmp_path / "none"), "--setup", "2_1", "--link", "20ms/200mbi")
    assert "200mbi is no part" in predicted.refused(*to_ask)


def test_what_to_name_once_a_run_of_one_process_is_measured(
    tmp_path: Path, predicted: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep has the runs of its plan alone, so that naming it again would change nothing."""
    root, to_ask = tmp_path / "outputs", ("--setup", "2_2", "--link", "20ms/200mbit")
    paths = [timed(root, batch, 1, 2) for batch in (16, 32)]
    # Runs of other kinds are there already.
    for path in (*paths, timed(root, 16, 1, 2, "--precision", "bf16")):
        changed(path, threads=1)
    changed(timed(root, 8), threads=2)
    runs = [{"label": {"setup": "1_2", "per_gpu_batch": batch}, "skipped": None,
             "path": str(path.relative_to(root))}
            for batch, path in zip((16, 32), paths, strict=True)]  # fmt: skip
    plan = Plan(root)
    plan.content["runs"] = runs
    sweep = plan.write()
    reason = (
        "no finished run of one process. Measure one: OMP_NUM_THREADS=1 python vit.py --tiny "
        f"--per_gpu_batch 16 --output_dir {root} --setup 1_1. Then name "
    )
    named = f"{root}:script=vit,threads=1,precision=fp32"
    refused = predicted.refused(str(sweep), *to_ask)
    assert reason in refused
    assert f"{named}, or add setup 1_1 to the sweep's file, under `grid` or `runs`" in refused
    assert f"Then name {named}\n" in predicted.refused(f"{root}:setup=1_2,precision=fp32", *to_ask)
    monkeypatch.chdir(tmp_path)
    assert "Then name outputs:script=vit,threads=1," in predicted.refused(str(sweep), *to_ask)
    for folder, selector in ((root / "vit", "1_2:precision=fp32"), (paths[0], ".")):
        monkeypatch.chdir(folder)
        assert "Measure one: " in predicted.refused(selector, *to_ask)
    monkeypatch.chdir(tmp_path)
    timed(tmp_path / "plain", 16, 1, 2)  # a folder that is read as it is
    assert "Then name" not in predicted.refused(str(tmp_path / "plain"), *to_ask)
    changed(timed(root, 16), threads=1)
    assert "step time" in predicted(named, *to_ask)


def test_the_set_up_that_the_times_beside_steps_are_from_is_named(
    records: Path, predicted: Verb
) -> None:
    timed(records, 16, 2, 1, link=measured(20, 200, 1.5))
    source = "the times of starting, evaluation and saving are from runs of setup 2_1"
    to_ask = (str(records), "--link", "20ms/200mbit", "--setup")
    assert f"{source}, as none of 4_1 was measured" in predicted(*to_ask, "4_1")
    assert source in (text := predicted(*to_ask, "2_1")) and "as none of" not in text


def test_a_way_of_exchanging_that_no_run_took_is_named(records: Path, predicted: Verb) -> None:
    """Whether it was asked for or chosen."""
    to_ask = (str(records), "--setup", "4_1", "--link", "20ms/200mbit")
    assert "while" not in predicted(*to_ask)  # no run crossed a link
    timed(records, 16, 2, 1, link=measured(20, 200, 1.5))
    timed(records, 16, 2, 1, "--strategy", "diloco", "--exchange", "direct")
    note = (
        "note: predicted with --exchange direct, while 1 run of ddp on several nodes exchanged by "
        "backend: --exchange backend predicts these"
    )
    assert note in predicted.in_one_line(*to_ask)
    by_backend = ("--exchange", "backend")
    assert "note: predicted with" not in predicted(*to_ask, *by_backend)
    out = predicted.in_one_line(*to_ask, *by_backend, "--strategy", "diloco")
    assert "--exchange backend, while 1 run of diloco on several nodes exchanged by direct:" in out


def test_a_plan_combines_errors_as_a_prediction_does() -> None:
    """Of seeds, steps and phases; of steps that of recorded links, or else that of the model."""
    line = fit_line([(8, 0.018), (16, 0.0265), (32, 0.0415), (16, 0.0255)])
    step = predict(Model(line, 0.1, 0.03, 0.0, 1000, GLOO, shared_by=2, sharing_freedom=1),
                   Scenario(Shape(1, 2), 16))  # fmt: skip
    assert step.error is not None and step.high_s is not None
    square, freedom = step.error
    assert welch_half(step.error) == pytest.approx(step.high_s - step.step_s)
    logs = {0.001: 0.0, 0.01: 0.3, 0.1: 0.1}
    links = OverLinks({Wire(delay_s, 1e6): log for delay_s, log in logs.items()})
    phases = {START: PhaseFit(2.0, 0.0, 0.25, 3), EVALUATION: PhaseFit(1.0, 0.0)}
    parts = {STEPS: 100 * step.step_s, START: 0.4, EVALUATION: 0.02}
    of_seeds, of_start = (0.02, 2), (0.1**2, 3)
    off, of_links = links.spread
    assert off is not None
    assert half_s(step, links, phases, parts, of_seeds) == pytest.approx(
        welch_half(of_seeds, ((off * parts[STEPS]) ** 2, of_links), of_start)
    )
    few = OverLinks({})
    assert half_s(step, few, phases, parts, of_seeds) == pytest.approx(
        welch_half(of_seeds, (100**2 * square, freedom), of_start)
    )
    # None where a part that counts has an unknown error.
    assert half_s(replace(step, error=None), few, phases, parts, of_seeds) is None
    assert half_s(step, few, phases, parts, None) is None
    assert half_s(step, few, phases, parts | {EVALUATION: 2.0}, of_seeds) is None


def test_what_links_say_of_another_by_hand() -> None:
    slow, fast = (lambda ms: Wire(ms / 1000, 1e6)), (lambda ms: Wire(ms / 1000, 1e8))
    known = OverLinks({slow(1): 0.0, slow(100): 2.0, fast(1): 1.0})
    assert known.at(fast(1)) == 1.0 and known.at(slow(1)) == 0.0
    assert known.at(fast(1), without=fast(1)) == 0.0
    # Halfway between the logarithms of 1.1 ms and 100.1 ms; beyond both as at the nearest.
    middle_ms = 1e3 * (math.sqrt(0.0011 * 0.1001) - 0.0001)
    assert known.at(slow(middle_ms)) == pytest.approx(1.0)
    assert known.at(slow(500)) == 2.0 and OverLinks({}).at(slow(1)) == 0.0
    # Each from the others: 0 from 1, 2 from 0 and 1 from 0.
    off, freedom = known.spread
    assert (off, freedom) == (pytest.approx(math.sqrt((1 + 4 + 1) / 3)), 2)
    assert OverLinks({slow(1): 0.0, slow(2): 1.0}).spread == (None, 0)
