"""What a hypothesis says in numbers is judged by its interval. Every number is by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.core.schema.environment import EXPECTED_MEASURES
from harness.core.settings import UserError
from harness.read.compare.answers import BY_NAME
from harness.read.compare.expected import tally, verdicts
from harness.read.records.sweeps import read_sweep
from harness.read.report.report import make_report
from harness.read.tables.sweep_table import sweep_table
from tests.support.paired import Verb
from tests.support.records import TARGET, Plan, timed_epochs, with_rates

RATE = "train_samples_per_s"


def expect(plan: Plan, *entries: dict[str, Any], **changes: Any) -> list[str]:
    """The verdicts on these, each with what it leaves out."""
    empty = {"of": {"setup": "1_2"}, "against": None, "at_least": None, "at_most": None}
    return verdicts(read_sweep(plan.write(expect=[empty | entry for entry in entries], **changes)))


def test_only_what_the_whole_interval_shows(plan: Plan) -> None:
    """Ratios of 2 and 2.2: 2.10 (1.14 to 3.84), see test_answers.py."""
    with_rates(plan, "1_1", 100.0, 100.0)
    with_rates(plan, "1_2", 200.0, 220.0)
    bounds = (1.1, None), (1.2, None), (4.0, None), (None, 3.9), (None, 1.0), (1.0, 4.0)
    sentences = expect(
        plan, *({"measure": RATE, "at_least": low, "at_most": high} for low, high in bounds)
    )
    texts = ["at least 1.1", "at least 1.2", "at least 4", "at most 3.9", "at most 1",
             "at least 1 and at most 4"]  # fmt: skip
    judged = ["holds", "open", "does not hold", "holds", "does not hold", "holds"]
    assert sentences == [
        f"Expected of setup 1_2 against setup 1_1: samples/s {text} times as many: {verdict}, 2.10 "
        "(1.14 to 3.84); 2 runs each."
        for text, verdict in zip(texts, judged, strict=True)
    ]


def test_shares_differ_by_points(plan: Plan) -> None:
    """Differences of -1 and -2 points: -1.5, and half of the interval is 12.706 * 0.5."""
    for seed, accuracy in enumerate((0.79, 0.78)):
        plan.run("1_1", seed=seed, accuracy=0.8)
        plan.run("1_2", seed=seed, accuracy=accuracy)
    (verdict,) = expect(plan, {"measure": "accuracy", "at_least": -8})
    assert (
        ": difference in accuracy at least -8 points: holds, -1.5 (-7.9 to +4.9); 2 runs each."
        in verdict
    )


def test_one_run_or_no_spread_leaves_it_open(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0)
    with_rates(plan, "1_2", 200.0)
    for seed in (0, 1):
        plan.run("1_1", batch=8, seed=seed, accuracy=0.8 + seed / 10)
        plan.run("1_2", batch=8, seed=seed, accuracy=0.7 + seed / 10)
    at_least = {"measure": RATE, "at_least": 1}
    one, equal = expect(plan, at_least, {"measure": "accuracy", "at_most": 0})
    assert "open in 1 of 2 cases (2.00 for b4)" in one
    assert "holds in 1 of 2 cases (1.00 (1.00 to 1.00) for b8)" in one
    assert "open in 2 of 2 cases (not compared (one seed on a side) for b4, -10.0 (" in equal


def test_a_way_is_named_as_a_baseline_is(plan: Plan) -> None:
    """ddp is ddp without compression; against names other runs than the baseline."""
    axes = ["strategy", "compress"]
    rates = {("ddp", None): 100.0, ("ddp", "int8"): 150.0, ("diloco", None): 300.0}
    for (strategy, compress), rate in rates.items():
        for seed in (0, 1):
            label = {"strategy": strategy, "compress": compress}
            plan.run(seed=seed, train_samples_per_s=rate, label=label)
    of_ddp = {"of": {"strategy": "ddp"}, "measure": RATE, "at_most": 1}
    sentences = expect(plan, of_ddp | {"against": {"strategy": "diloco"}},
                  of_ddp | {"of": {"strategy": "ddp", "compress": "int8"}},
                  axes=axes, baseline={"strategy": "ddp"})  # fmt: skip
    assert sentences[0].startswith("Expected of ddp against diloco: ")
    assert ": open, 0.33 (0.33 to 0.33), no spread to judge noise by; 2 runs each." in sentences[0]
    assert sentences[1].startswith("Expected of ddp int8 against ddp: ")


def test_a_target_that_is_missed_and_runs_that_are_not_there(plan: Plan) -> None:
    wall = {"measure": "tta_wall_s", "at_most": 1}
    none = "wall time to accuracy 0.9 at most 1 times as long: open, no finished run of setup 1_2."
    plan.run("1_1", seed=0, epochs=timed_epochs(0.95))
    plan.planned("1_2", seed=0)
    assert none in expect(plan, wall, target=TARGET)[0]
    plan.run("2_1", seed=0, epochs=timed_epochs(0.5))
    (verdict,) = expect(plan, wall | {"of": {"setup": "2_1"}}, target=TARGET)
    assert ": open, reached by 0 of 1 runs, of the baseline by 1 of 1; one run each" in verdict


def test_what_did_not_finish_is_a_case(plan: Plan) -> None:
    """Of b8 all failed, of b16 the baseline; of b4 one run of three."""
    with_rates(plan, "1_1", 100.0, 100.0, 100.0)
    with_rates(plan, "1_2", 200.0, 202.0)
    plan.run("1_2", seed=2, outcome="diverged", reason="loss is nan", train_samples_per_s=None)
    for seed in (0, 1):
        plan.run("1_1", batch=8, seed=seed)
        plan.run("1_2", batch=8, seed=seed, outcome="failed", reason="no memory")
        plan.planned("1_1", batch=16, seed=seed)
        plan.run("1_2", batch=16, seed=seed)
    (verdict,) = expect(plan, {"measure": RATE, "at_least": 1})
    assert "holds in 1 of 3 cases (2.01 (1.89 to 2.14) for b4); open in 2 of 3 cases" in verdict
    assert "(no finished run of setup 1_2, batch per GPU 8 for b8, " in verdict
    assert "no finished run to compare with for b16); 2 to 3 runs each (of 2 pairs with" in verdict
    assert verdict.endswith("; 3 of 12 runs failed (diverged, failed).")


def test_another_way_never_stands_for_the_one_that_is_named(plan: Plan) -> None:
    """Plain ddp all failed, or is what is compared with: ddp with int8 says nothing of it."""
    axes = ["strategy", "compress"]
    for strategy, compress, outcome in (
        ("ddp", None, "failed"), ("ddp", "int8", "finished"), ("diloco", None, "finished")
    ):  # fmt: skip
        for seed in (0, 1):
            label = {"strategy": strategy, "compress": compress}
            plan.run(seed=seed, outcome=outcome, reason="no memory", label=label)
    of_ddp = {"of": {"strategy": "ddp"}, "measure": RATE, "at_most": 1}
    failed, itself = expect(plan, of_ddp | {"against": {"strategy": "diloco"}}, of_ddp, axes=axes,
                            baseline={"strategy": "ddp"})  # fmt: skip
    assert ": open, no finished run of strategy ddp; 2 of 4 runs failed (failed)." in failed
    assert itself.endswith(": open, no planned runs of both differ in this alone.")


def test_what_disturbed_is_said_and_machines_are_named(plan: Plan) -> None:
    busy = {"launch": {"cpu_busy_share": 0.6}}
    for machine, seeds, rate in (("a-cpux2", (0, 1), 200.0), ("b-cpux2", (2, 3), 50.0)):
        for seed in seeds:
            for setup, value in (("1_1", 100.0), ("1_2", rate + seed)):
                plan.run(setup, seed=seed, machine=machine, train_samples_per_s=value,
                         environment=busy)  # fmt: skip
    (verdict,) = expect(plan, {"measure": RATE, "at_least": 1})
    assert (
        "holds in 1 of 2 cases (2.00 (1.94 to 2.07) for a-cpux2); does not hold in 1 of 2"
        in verdict
    )
    assert "for b-cpux2); 2 runs each; all runs disturbed (other programs)." in verdict


def test_times_of_other_work_are_not_judged(plan: Plan) -> None:
    """`compare` leaves the epoch time out where the samples trained on differ."""
    for seed in (0, 1):
        for setup, samples in (("1_1", 400), ("1_2", 200)):
            rows = [{"epoch": 1.0, "samples": samples, "epoch_time_s": samples / 100 + seed}]
            plan.run(setup, seed=seed, epochs=rows)
    (verdict,) = expect(plan, {"measure": "epoch_time_s", "at_most": 0.65})
    assert ": open, not compared (samples trained on)" in verdict


def test_epochs_of_unequal_length_are_not_judged(plan: Plan) -> None:
    """As many samples in all, spread over two epochs or over three."""
    for seed in (0, 1):
        for setup, epochs in (("1_1", 2), ("1_2", 3)):
            rows = [
                {"epoch": n + 1.0, "samples": 600 // epochs, "epoch_time_s": 6 / epochs + seed}
                for n in range(epochs)
            ]
            plan.run(setup, seed=seed, epochs=rows)
    (verdict,) = expect(plan, {"measure": "epoch_time_s", "at_most": 0.9})
    assert ": open, not compared (epochs)" in verdict


def test_a_part_of_an_epoch_counts_as_that(plan: Plan) -> None:
    """Two runs of 1.5 epochs (--max_steps): 3 s of training are 2 s an epoch."""
    rows = [
        {"epoch": 1.0, "samples": 400, "epoch_time_s": 2.0},
        {"epoch": 1.5, "samples": 200, "epoch_time_s": 1.0},
    ]
    plan.run("1_1", epochs=rows)
    assert plan.groups()[0]["epoch_time_s"] == pytest.approx(2.0)


def test_what_was_changed_after_the_runs_is_told(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0)
    with_rates(plan, "1_2", 200.0)
    entry, more = {"measure": RATE, "at_least": 1}, {"changed_after": "2 of 2 runs"}
    assert len(expect(plan, entry, hypothesis="More is faster.")) == 1
    *_, last = expect(plan, entry, hypothesis="More is faster.", **more)
    assert last == "Written or changed after 2 of 2 runs had finished."
    sweep = read_sweep(plan.folder)
    assert sweep.hypothesis == "More is faster. (Changed after 2 of 2 runs had finished.)"
    assert expect(plan, **more) == []


def test_an_end_beside_the_bound_has_more_digits(plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0, 100.0)
    with_rates(plan, "1_2", 200.0, 220.0)
    (verdict,) = expect(plan, {"measure": RATE, "at_most": 3.84})
    assert ": open, 2.098 (1.145 to 3.843); 2 runs each." in verdict


def test_every_measure_can_be_told(plan: Plan) -> None:
    assert {*EXPECTED_MEASURES} <= BY_NAME.keys()
    with_rates(plan, "1_1", 100.0, 110.0)
    with_rates(plan, "1_2", 200.0, 220.0)
    entries = [{"measure": name, "at_least": 1} for name in EXPECTED_MEASURES]
    sentences = expect(plan, *entries, target=TARGET)
    units = {
        "accuracy": "points",
        "peak_memory_gib": "times as much",
        "tta_wall_s": "times as long",
    }
    for name, unit in units.items():
        assert (
            f" at least {'+' * (unit == 'points')}1 {unit}: "
            in sentences[EXPECTED_MEASURES.index(name)]
        )


def test_verdicts_are_in_table_json_and_report(plan: Plan, table: Verb) -> None:
    with_rates(plan, "1_1", 100.0, 100.0)
    with_rates(plan, "1_2", 200.0, 220.0)
    (verdict,) = expect(plan, {"measure": RATE, "at_least": 1}, hypothesis="It pays.")
    assert sweep_table(read_sweep(plan.folder))[0].verdicts == [verdict]
    assert "- Expected of setup 1_2 against setup 1_1" in table(plan.folder)
    assert json.loads(table(plan.folder, "--json"))["verdicts"] == [verdict]
    files = make_report(plan.output_dir, plan.output_dir / "page")
    page = next(file for file in files if file.suffix == ".md").read_text()
    answers = page[page.index("## Answers") :]
    assert answers.index("Expected of") < answers.index("setup 1_2 against setup 1_1: samples/s")


@pytest.mark.parametrize(
    ("entry", "message"),
    [({"of": {}, "measure": RATE, "at_most": 1.0}, "expect: an entry lacks of"),
     ({"of": {"setup": "1_2"}, "measure": RATE}, "expect: an entry lacks of"),
     ({"of": {"setup": "1_2"}, "measure": RATE, "at_least": 2.0, "at_most": 1.0},
      "expect: at_least 2 is more than at_most 1"),
     ({"of": {"lr": 1}, "measure": RATE, "at_most": 1.0}, "expect: lr does not vary here"),
     ({"of": {"setup": "1_2"}, "measure": "loss", "at_most": 1.0}, "measure"),
     ("1_2", "expect")],
)  # fmt: skip
def test_a_damaged_plan_is_refused(entry: Any, message: str, plan: Plan) -> None:
    with_rates(plan, "1_1", 100.0)
    with pytest.raises(UserError, match=message):
        read_sweep(plan.write(expect=[entry]))


def test_verdicts_are_counted_by_the_worst_of_their_cases() -> None:
    sentences = [
        "Expected of a against b: samples/s at least 1 times as many: holds, 1.2 (1.1 to 1.3)",
        "Expected of c against b: samples/s at least 1 times as many: holds in 1 of 2 cases (x); "
        "does not hold in 1 of 2 cases (y); 3 runs each.",
        "Expected of d against b: samples/s at least 1 times as many: open, 1.0 (0.9 to 1.1)",
        "Expected of e against b: samples/s at least 1 times as many: holds in 1 of 2 cases (x); "
        "open in 1 of 2 cases (y); 3 runs each.",
        "Written or changed after 2 of 4 runs had finished.",
    ]
    assert tally(sentences) == "4 expectations: 1 holds, 1 does not hold, 2 open"
    assert tally(sentences[-1:]) == ""


def test_a_report_begins_with_what_was_found(root: Path, tmp_path: Path) -> None:
    made = make_report(root / "outputs/published/sweeps/demo-tiny", tmp_path)
    assert tmp_path / "report.html" in made
    page, lines = (
        (tmp_path / "report.html").read_text(),
        (tmp_path / "report.md").read_text().splitlines(),
    )
    verdict = (
        "1.40 times for vit, and 1.61 times for bert; one run each, so all of it may be chance"
    )
    assert lines[2:4] == ["## In short", ""] and verdict in lines[5]
    assert lines[5].endswith("; 1 expectation: 1 open")
    nav, _, answers = page.partition("</nav>")
    assert verdict in nav and "<h3>Answer</h3>" in answers


def test_without_a_baseline_the_fastest_batch_is_what_was_found(plan: Plan, tmp_path: Path) -> None:
    for batch, rate in ((16, 100.0), (32, 120.0)):
        for seed in (1, 2, 3):
            plan.run("1_1", batch, seed=seed, train_samples_per_s=rate + seed, accuracy=0.8)
    plan.write(baseline=None)
    make_report(tmp_path / "outputs", tmp_path / "report")
    lines = (tmp_path / "report" / "report.md").read_text().splitlines()
    answer = lines[lines.index("- Which batch?") + 1]
    assert answer.startswith("  - The fastest batch per GPU is 32 (beyond the noise)")
    hint = "no baseline is named, such as baseline: {per_gpu_batch: 16} in its file."
    assert any(hint in line.replace("\\", "") for line in lines)
