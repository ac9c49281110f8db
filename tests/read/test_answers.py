"""What a sweep answers against its baseline, and what it must not say. Every number is by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core.records import RunFolder
from harness.read.compare.answers import answers, finding
from harness.read.compare.compare import compare, judgement
from harness.read.explain.explain import _notes, memory_bounds
from harness.read.explain.time_breakdown import REST
from harness.read.figures.breakdown import _parts
from harness.read.predict.facts import Overrides, step_s
from harness.read.records.comparable import TARGET as TO_TARGET
from harness.read.records.comparable import judge, without_times
from harness.read.records.groups import Group
from harness.read.records.recorded import attempts_of
from harness.read.records.sweeps import read_sweep
from tests.support.paired import Verb
from tests.support.records import TARGET, Plan, epochs, lines, row_of, with_rates

RATE = "train_samples_per_s"
BUSY = {"launch": {"cpu_busy_share": 0.6}}
NO_SPREAD = "no spread to judge noise by"


def in_format(folder: Path, precision: str) -> None:
    (folder / "settings.json").write_text(json.dumps({"schema": 1, "precision": precision}))


def test_a_factor_with_its_interval(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0, 100.0)
    with_rates(plan, "1_2", 200.0, 220.0)
    (answer,) = map(str, answers(read_sweep(plan.write())))
    # Ratios 2 and 2.2: half of the interval of the logarithms is 12.706 * sd / sqrt(2).
    low, high = (math.sqrt(4.4) * math.exp(s * 12.7062 * math.log(1.1) / 2) for s in (-1, 1))
    assert f"samples/s: 2.10 times as many ({low:.2f} to {high:.2f})" in answer
    assert answer.startswith("setup 1_2 against setup 1_1: ") and answer.endswith("; 2 runs each.")
    assert "; accuracy: equal; " in answer


def test_what_is_noise_is_called_noise(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0, 110.0, 90.0)
    with_rates(plan, "1_2", 90.0, 112.0, 103.0)
    (answer,) = map(str, answers(read_sweep(plan.write())))
    assert "), within the noise;" in answer


def test_an_interval_of_more_than_tenfold_asks_for_more_runs(plan: Plan) -> None:
    """Of ratios 1 and 4 the ends are 12.706 * log(4) apart; of 1 and 1.1, 12.706 * log(1.1)."""
    with_rates(plan, "1_1", 100.0, 100.0)
    with_rates(plan, "1_2", 100.0, 400.0)
    with_rates(plan, "2_1", 100.0, 110.0)
    wide, narrow = map(str, answers(read_sweep(plan.write())))
    too_few = "too uncertain to tell (more quiet runs are needed)"
    # It is 0.0003 to 13,000: no range that is worth its numbers.
    many = "2.00 times as many (no usable interval from 2 runs)"
    assert f"samples/s: {many}, {too_few}; accuracy" in wide
    assert "samples/s: 1.05 times as many (0.57 to 1.92), within the noise; accuracy" in narrow


def test_an_interval_of_accuracy_that_says_nothing_asks_for_more_runs(plan: Plan) -> None:
    """Differences of 0 and 2 points: half of the interval is 12.706; of 0 and 1 it is 6.353."""
    for setup, accuracies in (("1_1", (0.8, 0.8)), ("1_2", (0.8, 0.82)), ("2_1", (0.8, 0.81))):
        for seed, accuracy in enumerate(accuracies):
            plan.run(setup, seed=seed, accuracy=accuracy)
    wide, narrow = map(str, answers(read_sweep(plan.write())))
    too_few = "too uncertain to tell (more seeds are needed)"
    assert f"accuracy: +1.0 points (-11.7 to +13.7), {too_few}; " in wide
    assert "accuracy: +0.5 points (-5.9 to +6.9), within the noise; " in narrow


def test_an_interval_of_no_width_is_no_finding(plan: Plan, table: Verb) -> None:
    """Each seed has one of 320 test samples fewer: by chance as well as not. `compare` says so."""
    for seed, right in ((0, 301), (1, 307)):
        plan.run("1_1", seed=seed, accuracy=right / 320)
        plan.run("1_2", seed=seed, accuracy=(right - 1) / 320)
    sweep = read_sweep(plan.write())
    (answer,) = map(str, answers(sweep))
    assert "accuracy: -0.3 points, no spread to judge noise by; 2 runs each" in answer
    assert finding(sweep, "accuracy").endswith("-0.3 points, no spread to judge noise by")
    (row,) = [row for row in compare(*sweep.groups).rows if row.measure.name == "accuracy"]
    assert judgement(row) == NO_SPREAD
    plan.write(columns=["accuracy_gain_points"])
    assert row_of(table(plan.folder), "1_2")[-3:] == ["-0.31", "(no", "spread)"]


def test_one_run_shows_nothing(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0)
    with_rates(plan, "1_2", 200.0)
    (answer,) = map(str, answers(read_sweep(plan.write())))
    assert "2.00 times as many; accuracy: not compared (one seed on a side); " in answer
    assert answer.endswith("; one run each, so all of it may be chance.")


def test_several_cases_are_counted(plan: Plan) -> None:
    for batch, rates in ((4, (200.0, 202.0)), (8, (50.0, 50.1)), (16, (100.0, 101.0))):
        with_rates(plan, "1_1", 100.0, 100.5, batch=batch)
        with_rates(plan, "1_2", *rates, batch=batch)
    sweep = read_sweep(plan.write())
    (answer,) = map(str, answers(sweep))
    assert (
        "in 3 cases of batch per GPU: samples/s: 0.50 (b8) to 2.00 (b4) times as many, " in answer
    )
    named = "faster in 1 (b4), slower in 1 (b8), within the noise in 1 (b16)"
    assert f"{named}; accuracy: equal in all 3 " in answer
    (one,) = map(str, answers(sweep, {"per_gpu_batch": "8"}))
    assert "samples/s: 0.50 times as many (" in one and "cases" not in one
    assert answers(sweep, {"per_gpu_batch": "32"}) == []


def test_of_many_cases_the_first_are_named(plan: Plan) -> None:
    """How many are too uncertain is of no use without their names."""
    for batch in (1, 2, 4, 8, 16, 32):
        with_rates(plan, "1_1", 100.0, 100.5, batch=batch)
        with_rates(
            plan, "1_2", *((60.0 + batch, 900.0) if batch > 1 else (200.0, 202.0)), batch=batch
        )
    sweep = read_sweep(plan.write())
    (answer,) = map(str, answers(sweep))
    uncertain = "too uncertain to tell (more quiet runs are needed) in 5"
    assert f"faster in 1 (b1), {uncertain} (b2, b4, b8, and 2 more); " in answer
    assert f"faster in 1, {uncertain}" in finding(sweep, RATE)


def test_cases_of_the_very_same_values_count_once(plan: Plan) -> None:
    """A link changes the time and not the accuracy: three links tell of it what one does."""
    changed = {"1_1": (0.9, 0.9), "1_2": (0.8, 0.81), "2_1": (0.9, 0.906), "2_2": (0.85, 0.86)}
    for n, link in enumerate(("1ms", "20ms", "80ms")):
        for strategy in ("ddp", "local_sgd"):
            for setup, accuracies in changed.items():
                for seed, accuracy in enumerate(
                    accuracies if strategy == "local_sgd" else [0.9] * 2
                ):
                    plan.run(setup, seed=seed, label={"strategy": strategy, "link": link},
                             accuracy=accuracy, train_samples_per_s=100.0 + n + seed)  # fmt: skip
    asked = {"axes": ["strategy", "setup", "link"], "baseline": {"strategy": "ddp"}}
    (answer,) = map(str, answers(read_sweep(plan.write(**asked))))
    assert (
        "accuracy: -9.5 (1_2) to +0.3 (2_1) points, lower in 1 (1_2), equal in 1 (1_1), within the "
        "noise in 2 (2_1, 2_2) (4 different results in 12 cases); "
    ) in answer
    two = plan.content["runs"]
    plan.content["runs"] = [run for run in two if run["label"]["setup"] in ("1_2", "2_2")]
    sweep = read_sweep(plan.write(**asked))
    (answer,) = map(str, answers(sweep))
    found = (
        "accuracy: -9.5 points (-15.9 to -3.1) for 1_2, and -4.5 points (-10.9 to +1.9) for 2_2, "
        "within the noise (2 different results in 6 cases)"
    )
    assert found in answer and found in finding(sweep, "accuracy")


def test_of_two_cases_each_is_named_with_its_own_numbers(plan: Plan) -> None:
    """Which of them gained less is part of the answer."""
    for script, rates in (("vit", (150.0, 166.0)), ("bert", (180.0, 199.0))):
        with_rates(plan, "1_1", 100.0, 110.0, label={"script": script})
        with_rates(plan, "1_2", *rates, label={"script": script})
    sweep = read_sweep(plan.write(axes=["script", "setup"]))
    (answer,) = map(str, answers(sweep))
    vit = "1.50 times as many (1.45 to 1.56) for vit"
    bert = "1.80 times as many (1.75 to 1.86) for bert"
    assert answer == (
        "setup 1_2 against setup 1_1 in 2 cases of script: "
        f"samples/s: {vit}, and {bert}; "
        "accuracy: equal in all 2 cases; 2 runs each."
    )
    title = f"samples/s: {vit}, and {bert}".replace(" as many", "")  # the axis says it
    assert finding(sweep, RATE).endswith(title)


def test_a_case_without_a_value_is_named_by_its_axis(plan: Plan) -> None:
    for link, rate in ((None, 100.0), ("1ms", 50.0), ("none", 20.0)):
        with_rates(plan, "1_2", 100.0, 100.0, label={"link": link})
        with_rates(plan, "2_1", rate, rate * (1.01 if link else 1), label={"link": link})
    asked = {"axes": ["setup", "link"], "baseline": {"setup": "1_2"}}
    (answer,) = map(str, answers(read_sweep(plan.write(**asked))))
    assert "samples/s: 0.20 (link none) to 1.00 (link -) times as many, slower in 2" in answer
    assert " (1ms, link none), equal in 1 (link -); accuracy: equal in all 3 cases; " in answer


def test_times_to_target_stand_beside_the_rate_and_a_miss_has_no_factor(plan: Plan) -> None:
    for seed in (0, 1):
        plan.run("1_1", seed=seed, epochs=epochs(0.5, 0.95))
        plan.run("1_2", seed=seed, epochs=epochs(0.95, 0.95))
        plan.run("2_1", seed=seed, epochs=epochs(0.5, 0.95 if seed else 0.6))
    two, missed = map(str, answers(read_sweep(plan.write(target=TARGET))))
    # To the end of the first epoch: half of the wall time (6 of 12 s) and of the training (2 of 4).
    wall, training = "wall time to accuracy 0.9: ", "training time to accuracy 0.9: "
    assert (
        f"{wall}0.50 times as long, {NO_SPREAD}; {training}0.50 times as long, {NO_SPREAD}; " in two
    )
    by = "reached by 1 of 2 runs, of the baseline by 2 of 2"
    assert f"{wall}{by}; {training}{by}" in missed
    for seed in (0, 1):
        plan.run("1_1", 64, seed=seed, epochs=epochs(0.5, 0.95))
        plan.run("2_1", 64, seed=seed, epochs=epochs(0.5, 0.6))
    missed = str(answers(read_sweep(plan.write(target=TARGET)))[1])
    both = f"{by} for b4, and {by.replace('1 of 2 runs', '0 of 2 runs')} for b64"
    assert f"{wall}{both}; {training}{both}" in missed
    # What devices buy is a rate, too; ways to train on the same ones are told apart by the times.
    assert two.startswith("setup 1_2 against setup 1_1: samples/s: equal; wall time")


def test_a_miss_beside_disturbed_runs_is_the_reason(plan: Plan, table: Verb) -> None:
    """Two of three reach the target, and the time of one of these does not count."""
    for seed in (0, 1, 2):
        plan.run("1_1", seed=seed, epochs=epochs(0.5, 0.95))
        last, busy = 0.6 if seed == 0 else 0.95, BUSY if seed == 1 else {}
        plan.run("2_1", seed=seed, epochs=epochs(0.5, last), environment=busy)
    sweep = read_sweep(plan.write(target=TARGET))
    why = "misses beside disturbed runs"
    (answer,) = map(str, answers(sweep))
    for measure in ("wall time", "training time"):
        assert f"{measure} to accuracy 0.9: not compared ({why}); " in answer
    assert f"-: no time to the target of 1 group with {why}" in table(plan.folder)
    plan.write(target=TARGET, columns=["tta_train_s_ratio"])
    said = table(plan.folder)
    assert f"-: time to the target not compared with the baseline in 1 row ({why})" in said
    one, other = sweep.groups
    assert judge(replace(one, name="A"), replace(other, name="B"))[TO_TARGET].reasons == [
        "misses beside disturbed runs: 1 of 3 runs of B miss the target, and not all others have "
        "times that count: the median is unknown"
    ]


def test_what_a_side_does_not_record_is_the_reason(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0, 101.0)
    with_rates(plan, "1_2", 200.0, 201.0, peak_memory_gib=None)
    (answer,) = map(str, answers(read_sweep(plan.write(columns=["peak_memory_gib"]))))
    assert "peak memory: not compared (not recorded on a side)" in answer


def test_another_training_has_no_difference_in_quality(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0, 101.0)
    with_rates(plan, "1_2", 200.0, 201.0, devices=2, updates=50)
    (answer,) = map(str, answers(read_sweep(plan.write())))
    assert "accuracy: not compared (effective batch, updates)" in answer


def test_batches_are_compared_in_quality_where_they_are_the_question(plan: Plan) -> None:
    """Another batch makes other updates; whoever compares batches asks what that costs."""
    for seed in (1, 2):
        plan.run("1_1", 4, seed, accuracy=0.9)
        plan.run("1_1", 8, seed, updates=50, accuracy=0.7, train_samples_per_s=150.0)
        plan.run("1_2", 8, seed, 2, updates=25, accuracy=0.7, train_samples_per_s=300.0)
    (answer,) = map(str, answers(read_sweep(plan.write(baseline={"per_gpu_batch": 4}))))
    start = "batch per GPU 8 against batch per GPU 4 for setup 1_1: samples/s: 1.50 times as many, "
    assert answer.startswith(start)
    assert "accuracy: -20.0 points, " in answer
    # A set-up that changes the batch with the devices is asked for something else.
    both = map(str, answers(read_sweep(plan.write(baseline={"per_gpu_batch": 4, "setup": "1_1"}))))
    (other,) = [text for text in both if "setup 1_2" in text]
    assert "accuracy: not compared (effective batch, updates)" in other


def test_number_formats_are_compared_where_they_are_the_question(plan: Plan) -> None:
    for precision, rate, gib in (("fp32", 100.0, 1.0), ("bf16", 200.0, 0.5)):
        for seed in (1, 2):
            measured = {"train_samples_per_s": rate, "peak_memory_gib": gib, "accuracy": 0.9}
            in_format(plan.run(seed=seed, label={"precision": precision}, **measured), precision)
    asked = {"axes": ["precision"], "baseline": {"precision": "fp32"}}
    (answer,) = map(str, answers(read_sweep(plan.write(**asked, columns=["peak_memory_gib"]))))
    assert answer.startswith("precision bf16 against precision fp32: samples/s: 2.00 times as many")
    assert f"; peak memory: 0.50 times as much, {NO_SPREAD}; accuracy: equal; 2 runs" in answer
    (answer,) = map(str, answers(read_sweep(plan.write(**asked))))
    assert "peak memory" not in answer


def test_several_processes_are_compared_with_the_single_one(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0, 100.0, label={"strategy": "single"})
    for strategy, rate in (("ddp", 150.0), ("fsdp", 120.0)):
        with_rates(plan, "1_2", rate, rate, devices=2, label={"strategy": strategy})
    ddp, fsdp = map(str, answers(read_sweep(plan.write(axes=["setup", "strategy"]))))
    text = "setup 1_2, strategy {} against setup 1_1, strategy single: samples/s: {} times"
    assert ddp.startswith(text.format("ddp", "1.50"))
    assert fsdp.startswith(text.format("fsdp", "1.20"))


def test_without_a_baseline_or_without_runs_there_is_no_answer(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0)
    plan.run("1_2", outcome="oom", reason="no room")
    assert answers(read_sweep(plan.write())) == []
    assert answers(read_sweep(plan.write(baseline=None))) == []


@pytest.fixture
def disturbed(plan: Plan) -> Plan:
    """Of three runs on two processes, one began beside another program, and was half as fast."""
    with_rates(plan, "1_1", 100.0, 100.0, 100.0)
    with_rates(plan, "1_2", 200.0, 200.0)
    plan.run("1_2", seed=2, train_samples_per_s=100.0, accuracy=0.3, environment=BUSY)
    return plan


def test_disturbed_runs_are_marked_and_their_times_left_out(disturbed: Plan, table: Verb) -> None:
    _, group = disturbed.groups()
    assert group["train_samples_per_s"] == 200 and group["disturbed"] == 1
    assert group["train_samples_per_s_values"] == [200, 200, None]
    assert group["accuracy_n"] == 3  # quality does not depend on how busy the machine was
    said = table(disturbed.write())
    assert row_of(said, "1_2")[1] == "3/3§" and "§ 1 run with others on the machine" in said


def test_a_disturbed_run_that_misses_its_target_counts(plan: Plan) -> None:
    plan.run("1_1", seed=0, epochs=epochs(0.95))
    plan.run("1_1", seed=1, epochs=epochs(0.5), environment=BUSY)
    (group,) = plan.groups(target=TARGET)
    assert group["tta_train_s"] == math.inf and (group["reached"], group["finished"]) == (1, 2)


def groups_of(plan: Plan) -> tuple[Group, Group]:
    one, two = read_sweep(plan.write()).groups
    return one, two


def test_compare_says_where_the_load_is_not_known(plan: Plan) -> None:
    quiet = [row | {"others_cpu_share": 0.0} for row in epochs(0.5)]
    for seed in (0, 1):
        plan.run("1_1", seed=seed, epochs=quiet)
        plan.run("1_2", seed=seed, epochs=quiet if seed else epochs(0.5))
    groups = groups_of(plan)
    verdicts = compare(*groups).verdicts
    note = "other programs: not recorded during 1 of 2 runs of "
    note += f"{groups[1].name}: counted as none"
    for question, notes in ((q, v.notes) for q, v in verdicts.items()):
        assert (note in notes) == (question != "quality"), question


def test_compare_leaves_disturbed_runs_out_or_refuses(disturbed: Plan) -> None:
    comparison = compare(*groups_of(disturbed))
    (rate,) = [row for row in comparison.rows if row.measure.name == "train_samples_per_s"]
    assert rate.values == ((100, 100, 100), (200, 200))
    notes = comparison.verdicts["speed"].notes
    assert any("1 of 3 runs" in note and "left out of its times" in note for note in notes)
    for run in disturbed.content["runs"]:
        if run["label"]["setup"] == "1_2":
            file = disturbed.output_dir / run["path"] / "environment.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | BUSY))
    verdict = compare(*groups_of(disturbed)).verdicts["speed"]
    assert any("other programs: 3 of 3 runs" in reason for reason in verdict.reasons)


def test_an_answer_counts_the_runs_whose_times_it_takes(disturbed: Plan) -> None:
    (answer,) = map(str, answers(read_sweep(disturbed.write())))
    assert answer.endswith(
        "3 runs each; where some were undisturbed, only those are timed (2 to 3)."
    )


def test_where_all_runs_were_disturbed_they_are_compared_with_a_note(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0, environment=BUSY)
    with_rates(plan, "1_2", 200.0, environment=BUSY)
    verdict = compare(*groups_of(plan)).verdicts["speed"]
    assert not verdict.reasons and sum("other programs" in note for note in verdict.notes) == 2


def test_an_answer_from_disturbed_runs_alone_says_so_first(plan: Plan, table: Verb) -> None:
    with_rates(plan, "1_1", 100.0, 100.0, environment=BUSY)
    with_rates(plan, "1_2", 200.0, 201.0, environment=BUSY)
    text = "all runs disturbed (other programs)"
    (answer,) = map(str, answers(read_sweep(plan.write())))
    assert answer.startswith(f"setup 1_2 against setup 1_1: {text}: samples/s: 2.00 times as many")
    title = finding(read_sweep(plan.write()), RATE)
    assert title.startswith(f"setup 1_2 against setup 1_1: {text}: samples/s: 2.00 times")
    said = table(plan.write())
    assert -1 < said.index(text) < said.index("vs base")  # before any number
    with_rates(plan, "1_1", 100.0, batch=8)
    with_rates(plan, "1_2", 200.0, batch=8)
    (answer,) = map(str, answers(read_sweep(plan.write())))
    assert ": all runs of setup 1_2 in 1 of 2 cases and all runs of setup 1_1 in 1 of 2 " in answer
    assert text not in table(plan.write()).split("setup")[0]


def test_an_answer_says_which_side_was_disturbed(disturbed: Plan) -> None:
    assert " disturbed" not in str(answers(read_sweep(disturbed.write()))[0])  # one of three was
    with_rates(disturbed, "2_1", 50.0, 50.0, environment=BUSY)
    _, answer = map(str, answers(read_sweep(disturbed.write())))
    text = "setup 2_1 against setup 1_1: all runs of setup 2_1 disturbed (other programs): "
    assert answer.startswith(f"{text}samples/s: not compared (other programs)")


def test_an_answer_says_how_many_runs_had_another_link(plan: Plan) -> None:
    warned = {"link": {"warning": "asked for 50 Mbit/s, measured 29"}}
    with_rates(plan, "1_2", 100.0, 101.0)
    with_rates(plan, "2_1", 50.0, 50.0)
    plan.run("2_1", seed=2, train_samples_per_s=40.0, environment=warned)
    sweep = read_sweep(plan.write(baseline={"setup": "1_2"}))
    text = "; 1 of 5 runs over another link than asked for"
    assert str(answers(sweep)[0]).endswith(f"; 2 to 3 runs each{text}.")
    assert finding(sweep, RATE).endswith(text)


def test_sessions_of_unlike_processors_are_not_compared_in_time(plan: Plan, table: Verb) -> None:
    for setup, rate, tflops in (("1_1", 100.0, 0.1), ("1_2", 200.0, 0.2)):
        known = {"fp32_tflops": tflops, "bf16_tflops": 0.1, "threads": 1}
        facts = {"cpu_calibration": known, "observed": {"device": "cpu"}}
        for seed in (1, 2):
            measured = {"train_samples_per_s": rate + seed, "accuracy": 0.9}
            in_format(plan.run(setup, seed=seed, environment=facts, **measured), "fp32")
    (answer,) = map(str, answers(read_sweep(plan.write())))
    assert "samples/s: not compared (processor)" in answer and "accuracy: equal" in answer
    text = "before these runs matrix products ran at 0.1 to 0.2 TFLOP/s in fp32 (1 thread(s)): "
    assert text in " ".join(table(plan.write()).split())


def test_runs_side_by_side_disturb_each_other(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0, environment={"launch": {"packed": True}})
    (group,) = plan.groups()
    assert group["disturbed"] == 1


LACKED = {"event": "end", "attempt": 1, "outcome": "oom", "per_gpu_batch": 4, "in_step": True,
          "wall_s": 0.0}  # fmt: skip
FITTED = {"event": "end", "attempt": 2, "outcome": "finished", "per_gpu_batch": 2, "update": 8,
          "wall_s": 40.0}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "bounds"),
    [
        ({}, (2, 4)),
        ({"in_step": None, "per_gpu_batch": None}, (2, 4)),  # its start knows the batch
        ({"in_step": False}, None),
        ({"outcome": "interrupted"}, None),
    ],
)
def test_memory_did_for_what_made_updates_and_not_for_what_may_have_been_a_step(
    changes: dict[str, Any], bounds: tuple[int, int] | None, tmp_path: Path
) -> None:
    """The third attempt, with 3 samples, was stopped before its first update."""
    starts = [{"event": "start", "attempt": n, "from_update": 8 * (n == 3), "per_gpu_batch": b}
              for n, b in ((1, 4), (2, 2), (3, 3))]  # fmt: skip
    stopped = {"event": "end", "attempt": 3, "outcome": "interrupted", "update": 8}
    lines(tmp_path / "attempts.jsonl", [*starts, {**LACKED, **changes}, FITTED, stopped])
    run: Any = SimpleNamespace(attempts=attempts_of(RunFolder(tmp_path))[0])
    assert memory_bounds(run) == bounds


def test_a_run_in_another_batch_than_asked_for_has_no_times(plan: Plan, table: Verb) -> None:
    """--auto_batch: its name and settings say 4, its attempts 2."""
    with_rates(plan, "1_1", 100.0, 100.0)
    for seed in (0, 1):
        folder = plan.run("1_2", seed=seed, train_samples_per_s=70.0, accuracy=0.3)
        (folder / "settings.json").write_text(json.dumps({"schema": 1, "per_gpu_batch": 4}))
        batches = (4,) if seed == 0 else (4, 2)
        starts = [{"event": "start", "attempt": n, "per_gpu_batch": b, "from_update": 0}
                  for n, b in enumerate(batches, start=1)]  # fmt: skip
        lines(folder / "attempts.jsonl", [*starts, *[LACKED, FITTED][: 2 * seed]])
    _, group = plan.groups()
    assert group["finished"] == 2, [run.reason for run in groups_of(plan)[1].runs]
    assert group["train_samples_per_s_values"] == [70, None] and group["disturbed"] == 1
    assert group["accuracy_n"] == 2 and group["peak_memory_gib_n"] == 1
    said = table(plan.write())
    assert row_of(said, "1_2")[1] == "2/2§" and "§ 1 run in another batch per process" in said
    assert any("batch: 1 of 2" in n for n in compare(*groups_of(plan)).verdicts["speed"].notes)
    plan.content["runs"] = [r for r in plan.content["runs"] if r["path"] != "bert/1_2_4_0"]
    verdict = compare(*groups_of(plan)).verdicts["speed"]
    assert any("ran with 2 per process" in reason for reason in verdict.reasons)
    left_out = without_times(groups_of(plan), name=lambda group: group.topology)
    assert left_out == [
        "no times of 1 group whose runs all ran in another batch than asked for (1_2)"
    ]
    own = groups_of(plan)[1]
    assert step_s(own.runs[0], Overrides()) is None  # predict cannot take it
    breakdown: Any = SimpleNamespace(parts={REST: None})
    note, memory, *_ = _notes(own, breakdown)
    assert memory == "Memory sufficed for 2 samples per process and forward pass, but not for 4."
    assert note.startswith("1 run(s) ran in another batch") and "not those of the batch" in note
    unknown: dict[str, list[str]] = {}
    assert _parts(SimpleNamespace(short_name_of=str), own, unknown) == {}  # type: ignore[arg-type]
    assert [*unknown] == ["run in another batch per process than asked for"]


def test_a_default_is_no_value_of_every_run(plan: Plan) -> None:
    """A baseline that left the learning rate to its default is that of runs with this rate."""
    plan.run("1_1", 8)
    for lr in (1e-3, 1e-5):
        plan.run("1_2", 8, label={"lr": lr}, train_samples_per_s=200.0)
    base = plan.output_dir / plan.content["runs"][0]["path"] / "settings.json"
    base.write_text(json.dumps({"schema": 1, "lr": 1e-3}))
    (answer,) = answers(read_sweep(plan.write(axes=["setup", "per_gpu_batch", "lr"])))
    assert answer.compared == "setup 1_2 against setup 1_1 for lr 0.001"
