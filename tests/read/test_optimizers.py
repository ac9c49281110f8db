"""Runs with and without --muon are different trainings, whoever reads them."""

from __future__ import annotations

from harness.read.explain.baseline import MAY_DIFFER
from harness.read.predict.basis import PREDICTED_OVER
from tests.support.records import Plan

AXES = ["setup", "strategy", "muon"]


def measured(plan: Plan, setup: str, strategy: str, muon: bool, rate: float) -> None:
    plan.run(
        setup, devices=int(setup[-1]), train_samples_per_s=rate,
        label={"strategy": strategy, "muon": muon},
    )  # fmt: skip


def test_scaling_is_told_against_one_process_with_the_same_optimizer(plan: Plan) -> None:
    measured(plan, "1_1", "single", False, 100.0)
    measured(plan, "1_1", "single", True, 80.0)
    measured(plan, "1_2", "ddp", False, 150.0)
    measured(plan, "1_2", "ddp", True, 144.0)
    baseline = {"setup": "1_1", "strategy": "single"}
    *_, plain, muon = plan.groups(axes=AXES, baseline=baseline)
    assert (plain["scaling_efficiency"], muon["scaling_efficiency"]) == (0.75, 0.9)


def test_one_process_with_another_optimizer_tells_no_scaling(plan: Plan) -> None:
    measured(plan, "1_1", "single", False, 100.0)
    measured(plan, "1_2", "ddp", True, 144.0)
    baseline = {"setup": "1_1", "strategy": "single"}
    _, muon = plan.groups(axes=AXES, baseline=baseline)
    assert muon["scaling_efficiency"] is None


def test_it_changes_the_time_of_a_step() -> None:
    assert "sync_every" in MAY_DIFFER and "muon" not in MAY_DIFFER
    assert "sync_every" in PREDICTED_OVER and "muon" not in PREDICTED_OVER


def test_a_run_that_does_not_name_the_flag_has_it_off(plan: Plan) -> None:
    plan.run("1_1", train_samples_per_s=100.0, label={"strategy": "single"})
    measured(plan, "1_2", "ddp", False, 150.0)
    measured(plan, "1_2", "ddp", True, 144.0)
    for baseline in ({"setup": "1_1", "strategy": "single"}, {"setup": "1_1"}):
        _, plain, muon = plan.groups(axes=AXES, baseline=baseline)
        assert (plain["scaling_efficiency"], muon["scaling_efficiency"]) == (0.75, None)
