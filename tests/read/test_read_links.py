"""The link between nodes in tables: its numbers, and a mark where it is not the one asked for."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from harness.core.collectives import Wire
from harness.core.links import slowest_rate
from harness.read import load, load_runs
from harness.read.predict.fitting import wire_between
from harness.read.records.runs import link_numbers
from tests.support.paired import Verb
from tests.support.records import TARGET, Plan, record, row_of, timed_epochs

WARNING = "the link is not the one that was asked for: between nodes 0 and 1 it carries 9 Mbit/s"


def two_nodes(rtt: float | None = 40.25, warning: str | None = None) -> dict[str, Any]:
    link = {
        "asked": {"delay_ms": 20.0, "rate_mbit": 200.0}, "interface": "v0", "pairs": [],
        "rtt_min_ms": 40.0, "rtt_median_ms": rtt, "bandwidth_mbit": 190.5,
        "gradient_bytes": 400, "allreduce_bytes": 400, "allreduce_s": 0.5,
        "allreduce_algbw_mbit": 100.0, "allreduce_busbw_mbit": 100.0, "took_s": 3.0,
        "warning": warning,
    }  # fmt: skip
    return {"nodes": 2, "link": link}


def test_columns_come_with_the_first_run_on_several_nodes(plan: Plan, table: Verb) -> None:
    plan.run("1_1", environment={"link": None})
    said = table(plan.write())
    assert "round trip" not in said and "Mbit/s" not in said and "‡" not in said
    for seed, rtt in ((1, 40.0), (2, 44.0)):
        plan.run("2_1", seed=seed, environment=two_nodes(rtt))
    plan.run("2_2", environment=two_nodes(None))
    said = table(plan.write())
    assert "42.0" in row_of(said, "2_1") and "190" in row_of(said, "2_1")
    assert "42.0" not in row_of(said, "1_1") and "190" not in row_of(said, "1_1")
    assert "190" in row_of(said, "2_2")
    assert "round trip ms: measured between nodes before training" in said and "‡" not in said


def test_a_warning_is_a_mark_and_a_footnote(plan: Plan, table: Verb) -> None:
    plan.run("2_1", environment=two_nodes())
    plan.run("2_2", seed=1, environment=two_nodes())
    plan.run("2_2", seed=2, environment=two_nodes(warning=WARNING))
    # What did not finish has no number in the table, so no mark either.
    plan.run("2_3", environment=two_nodes(warning="of a failed run"), outcome="oom")
    said = table(plan.write())
    assert [word for word in row_of(said, "2_2") if "‡" in word] == ["40.2‡"]
    assert not any("‡" in word for word in row_of(said, "2_1"))
    assert f"‡ 1 run: {WARNING}\n" in said and "of a failed run" not in said
    plan.run("2_4", environment=two_nodes(warning=WARNING + ", not 200"))
    assert f"‡ 2 runs: {WARNING}, ...\n" in table(plan.write())
    # Columns of one's own: the mark stands where something is always shown.
    said = table(plan.write(columns=["accuracy"]))
    assert "1/1‡" in row_of(said, "2_4") and "1/1" in row_of(said, "2_1")
    said = table(plan.write(columns=["link_bandwidth_mbit"]))
    assert "190‡" in row_of(said, "2_4")


def test_files_hold_the_numbers(plan: Plan, table: Verb) -> None:
    plan.run("2_1", seed=1, environment=two_nodes(40.0))
    plan.run("2_1", seed=2, environment=two_nodes(44.0, warning=WARNING))
    plan.run("1_1", environment={"link": None})
    folder = plan.write()
    table(folder, "--write")
    far, near = csv.DictReader((folder / "table.csv").open())
    assert float(far["link_rtt_median_ms"]) == 42.0 and far["link_rtt_median_ms_n"] == "2"
    assert far["link_bandwidth_mbit_values"] == "190.5;190.5"
    assert float(far["link_allreduce_busbw_mbit"]) == 100.0
    assert far["link_warnings"] == "1"
    assert near["link_rtt_median_ms"] == "" and near["link_warnings"] == "0"
    first, second, third = csv.DictReader((folder / "runs.csv").open())
    assert [first["link_warning"], second["link_warning"]] == ["", WARNING]
    assert second["link_rtt_median_ms"] == "44.0" and third["link_rtt_median_ms"] == ""


def test_a_transfer_cut_off_is_no_rate() -> None:
    """The first 64 KiB over 160 ms would have been taken for 2.1 Mbit/s."""
    facts = two_nodes()
    pair = {"nodes": [0, 1], "rtt_min_ms": 160.4, "rtt_median_ms": 160.5}
    cut_off = {**pair, "bandwidth_mbit": None, "transfer_bytes": 65536}
    facts["link"] |= {"pairs": [cut_off], "bandwidth_mbit": None, "rtt_min_ms": 160.4}
    assert "link_bandwidth_mbit" not in link_numbers(facts)
    assert wire_between({**facts["link"], "asked": None}) is None
    whole = {**pair, "bandwidth_mbit": 48.3, "transfer_bytes": 2**20}
    facts["link"]["pairs"].append(whole)
    facts["link"]["bandwidth_mbit"] = slowest_rate(facts["link"]["pairs"])
    assert link_numbers(facts)["link_bandwidth_mbit"] == 48.3
    assert wire_between({**facts["link"], "asked": None}) == Wire(160.4 / 2000, 48.3e6 / 8)


def test_the_table_of_single_runs(tmp_path: Path, table: Verb) -> None:
    record(tmp_path / "one", "--seed", "1")
    assert "round trip" not in table(tmp_path)
    two = record(tmp_path / "two", "--seed", "2")
    facts = json.loads(two.environment.read_text())
    two.environment.write_text(json.dumps({**facts, **two_nodes(40.25, WARNING)}))
    said = table(tmp_path, warned=f"warning: {two.path}: {WARNING}\n")
    assert "40.25" in said and "190" in said
    assert "warning:" not in said
    runs = load_runs(tmp_path).set_index("seed")
    assert runs.loc[2, "link_rtt_min_ms"] == 40.0 and runs.loc[2, "link_warning"] == WARNING
    assert set(load(tmp_path).dropna(subset="link_rtt_min_ms")["seed"]) == {2}


def test_wall_time_to_a_target_leaves_out_what_the_record_measured(plan: Plan) -> None:
    reaching = timed_epochs(0.5, 0.9)  # 26 s to the target
    plan.run("2_1", epochs=reaching, environment=two_nodes() | {"comm_probe": {"took_s": 2.5}})
    plan.run("2_2", epochs=reaching, environment=two_nodes() | {"comm_probe": None})
    plan.run("1_1", epochs=reaching, environment={"link": None, "comm_probe": {"took_s": None}})
    both, link, neither = plan.groups(target=TARGET)
    assert (both["tta_wall_s"], link["tta_wall_s"], neither["tta_wall_s"]) == (20.5, 23, 26)
    assert {group["tta_train_s"] for group in (both, link, neither)} == {20}


def test_each_row_says_how_long_was_measured_until_then(plan: Plan) -> None:
    """By the row that reaches the target: what is measured later is no part of its time."""
    said = [row | {"measuring_s": 2.0 * n} for n, row in enumerate(timed_epochs(0.5, 0.9, 0.9))]
    plan.run("2_1", epochs=said, environment=two_nodes())
    more = [row | {"measuring_s": 99.0} for row in timed_epochs(0.5, 0.9)]
    plan.run("2_2", epochs=more, environment=two_nodes())
    by_rows, longer = plan.groups(target=TARGET)
    assert by_rows["tta_wall_s"] == 24
    assert longer["tta_wall_s"] is None and longer["tta_train_s"] == 20  # unknown, not negative
