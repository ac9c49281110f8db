"""One report counts each run once, as what became of it."""

from __future__ import annotations

from harness.read.explain.context import not_counted
from harness.read.records.comparable import disturbed
from harness.read.records.sweeps import read_sweep
from harness.read.tables.results import fairness
from tests.support.records import Plan

BUSY = {"launch": {"cpu_busy_share": 0.6}}


def test_limits_count_the_disturbed_runs_that_captions_count(plan: Plan) -> None:
    for seed in (1, 2):
        plan.run(seed=seed, environment=BUSY)
    plan.run(seed=3, environment=BUSY | {"dirty": True}, outcome="failed", reason="why")
    sweep = read_sweep(plan.write())
    (note,) = disturbed(sweep.finished)
    assert note.startswith("2 runs with others on the machine")
    busy = "began or trained while others used more than 25% of the cores."
    assert [text for text in fairness(sweep) if " of " in text] == [
        "1 of 3 runs ran from a checkout with changed files.",
        f"2 of 2 finished runs {busy}",
    ]
    assert f"2 of 2 runs {busy}" in fairness(sweep.only(sweep.finished))


def test_a_run_that_has_not_begun_did_not_fail_to_finish(plan: Plan) -> None:
    plan.run(seed=1)
    plan.planned(seed=2)
    (group,) = read_sweep(plan.write()).groups
    assert [*not_counted(group)] == ["1 run(s) have not begun."]
    plan.run(seed=3, outcome="failed", reason="why")
    plan.planned(seed=4, skipped="needs 2 nodes")
    (group,) = read_sweep(plan.write()).groups
    assert [*not_counted(group)] == [
        "1 run(s) did not finish and are not counted.", "1 run(s) have not begun.",
        "1 run(s) were skipped.",
    ]  # fmt: skip
