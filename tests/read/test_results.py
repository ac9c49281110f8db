"""The tables of a report: what they have of the question, and in which units."""

from __future__ import annotations

from harness.read.tables.results import by_node, results
from harness.read.tables.sweep_table import sweep_table
from tests.support.drawn import measured
from tests.support.records import Plan, epochs, with_ranks

TARGET = {"metric": "accuracy", "value": 0.9}
AXES = {"axes": ["setup", "strategy"], "baseline": {"strategy": "ddp"}}


def two_ways(plan: Plan) -> None:
    for strategy, rate, last in (("ddp", 100.0, 0.95), ("diloco", 162.0, 0.85)):
        for seed in (1, 2):
            plan.run("2_1", 4, seed, 2, label={"strategy": strategy}, train_samples_per_s=rate,
                     epochs=epochs(0.5, last, seconds=3.0))  # fmt: skip


def cells(plan: Plan, **changes: object) -> list[dict[str, str]]:
    sweep = measured(plan, **{**AXES, **changes})
    _, rows = sweep_table(sweep)
    table = results(sweep, rows)
    return [dict(zip(table.headings, map(str, row), strict=True)) for row in table.rows]


def test_results_have_the_numbers_of_the_question(plan: Plan) -> None:
    """In the form of the sweep's own table: no per cent where a figure has a share."""
    two_ways(plan)
    ddp, diloco = cells(plan, target=TARGET)
    assert ddp["accuracy"].startswith("0.9500") and diloco["accuracy"].startswith("0.8500")
    assert ddp["samples/s"].startswith("100") and diloco["samples/s"].startswith("162")
    assert (ddp["vs base"], diloco["vs base"]) == ("base", "+62.0%")
    assert ddp["target wall s"].startswith("18.0") and ddp["target train s"].startswith("6.0")
    assert diloco["target wall s"] == diloco["target train s"] == "not reached (0/2)"


def test_results_without_target_and_baseline_have_no_empty_columns(plan: Plan) -> None:
    two_ways(plan)
    (row, _) = cells(plan, baseline=None, target=None)
    assert "samples/s" in row and not {"vs base", "target wall s", "target train s"} & {*row}


def test_the_accuracy_of_a_node_is_named_that_of_its_share(plan: Plan) -> None:
    folder = plan.run("2_1", 4, devices=2, environment={"nodes": 2, "processes_per_node": 1})
    with_ranks(folder, {"eval_accuracy": 0.9375, "eval_samples": 32},
               {"eval_accuracy": 0.8929, "eval_samples": 28})  # fmt: skip
    table = by_node(measured(plan))
    assert table.headings[-2:] == ["accuracy of its share", "top-5 of its share"]
    assert [row[4] for row in table.rows] == ["0.9375", "0.8929"]
