"""What a prediction or a plan needs and no record says is named at once, not one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paired import Verb, measured, timed
from tests.support.records import with_epochs

OVER = ("--nodes", "4", "--link", "40ms/200mbit", "--target", "accuracy=0.9")


def reaching(root: Path, batch: int, nodes: int = 1, per_node: int = 1) -> None:
    """A run that reaches the target at the end of its only epoch."""
    row = {"epoch": 1.0, "updates": 22, "accuracy": 0.9, "timed_steps": 22, "timed_s": 4.0,
           "epoch_time_s": 4.0, "eval_time_s": 0.4, "samples": 1408, "wall_s": 5.0}  # fmt: skip
    link = measured(40.0, 200.0, 1.0, nodes) if nodes > 1 else None
    with_epochs(timed(root, batch, nodes, per_node, link=link, updates=22, epochs_done=1), [row])


def test_a_prediction_names_all_that_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed(tmp_path, 16)
    argv = [tmp_path, "--setup", "2_2", "--link", "20ms/200mbit"]
    predicted = Verb("predict", capsys)
    batch = "measure one more, with --setup 1_1 --per_gpu_batch 64"
    several = "2_2: what several processes of one machine cost each other is not known: measure"
    assert f"{batch}; {several}" in predicted.refused(*argv, "--batch", "64")
    told = predicted.refused(*argv)
    assert several in told and batch not in told


def test_a_plan_names_the_missing_fit_and_the_missing_quality(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reaching(tmp_path, 16, 1, 2)
    plan = Verb("plan", capsys)
    alone = f"{tmp_path}: no finished run of one process. Measure one: "
    quality = "--nodes 4: quality was not measured on as many nodes, but on 1: measure it over any"
    told = plan.refused(tmp_path, *OVER)
    assert alone in told and f"; {quality}" in told
    reaching(tmp_path, 16)
    told = plan.refused(tmp_path, *OVER)
    assert alone not in told and quality in told


def test_a_plan_names_each_reason_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reaching(tmp_path, 16)
    for batch, nodes in ((32, 4), (32, 2), (64, 4)):
        reaching(tmp_path, batch, nodes)
    told = Verb("plan", capsys).refused(tmp_path, *OVER, "--nodes", "2,4")
    for batch in (32, 64):
        assert told.count(f"measure one more, with --setup 1_1 --per_gpu_batch {batch}") == 1
