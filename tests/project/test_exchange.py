"""How long exchanges over a link take, and how far that is from what is possible."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.exchange import (
    SIZES,
    compared,
    floors,
    gathered_s,
    ideal_s,
    link_of,
    simulated,
    simulated_table,
)
from harness.core.collectives import MEANS, MIB, Shape, wire_of
from harness.core.records import write_json
from harness.core.settings import UserError
from tests.support.benchmarked import benchmark


def test_what_a_link_makes_possible() -> None:
    assert ideal_s(10**6, 2, "40ms/50mbit") == pytest.approx(0.16 + 0.04)
    assert ideal_s(10**6, 4, "40ms/50mbit") == pytest.approx(0.5 * 0.16 + 2 * 0.04)
    assert ideal_s(10**5, 4, "40ms/50mbit") == pytest.approx(0.016 + 0.04)
    assert ideal_s(4, 3, "20ms") == pytest.approx(0.02)
    assert ideal_s(4, 2, "loopback") is None
    assert gathered_s(10**6, 4, "40ms/50mbit") == pytest.approx(0.16 + 0.04)
    assert gathered_s(1, 4, "loopback") is None


def test_simulated_times_stand_beside_measured_ones(tmp_path: Path) -> None:
    found = {"backend 4": [0.03, 0.05], "direct 4": [0.01, 0.02]}  # the first is not counted
    steady = {"10ms": found, "loopback": found, "2+1:within=rack:between=20ms/50mbit": found}
    without = {"environment": {"tcp": None}, "nodes": 3, "links": steady}
    assert compared(without) == [] and simulated_table([without]) == ""
    write_json(tmp_path / "steady" / "of_3.json", without)
    with pytest.raises(UserError, match="steady has no link with loss or jitter"):
        simulated(tmp_path / "steady")
    tcp = {"tcp": {"congestion_control": "bbr"}}
    record = {"environment": tcp, "nodes": 2, "links": {**steady, "10ms/50mbit/loss1%": found}}
    write_json(tmp_path / "of_2.json", record)
    heads, _, backend, direct, _, summary = simulated(tmp_path).splitlines()
    assert heads.startswith("| link, bbr | bytes | way |")
    assert backend.startswith("| 10ms/50mbit/loss1% | 4 | backend |")
    link, size, way, without, more, measured, off = direct.strip("| ").split(" | ")
    assert (link, size, way, without) == ("10ms/50mbit/loss1%", "4", "direct", "10.0")
    assert 11 < float(more) < 20 and measured == "15.0"
    assert float(off.strip("%")) == pytest.approx(100 * (float(more) / 15 - 1), abs=0.6)
    error = off.strip("+-")
    assert summary == (
        f"These 1 times are off by {error} in the median, {error} in 9 of 10, {error} at most."
    )


def test_records_of_unlike_congestion_control_have_no_table_in_common(tmp_path: Path) -> None:
    links = {"10ms/50mbit/loss1%": {"direct 4": [0.01, 0.02]}}
    for nodes, control in ((2, "bbr"), (3, "cubic")):
        tcp = {"tcp": {"congestion_control": control}}
        record = {"environment": tcp, "nodes": nodes, "links": links}
        write_json(tmp_path / f"of_{nodes}.json", record)
        assert f"| link, {control} |" in simulated_table([record])
    with pytest.raises(UserError, match=r"^records of TCP's bbr and cubic have no table in "):
        simulated(tmp_path)


def test_how_far_exchanges_are_from_the_possible(tmp_path: Path) -> None:
    """A round trip for 4 bytes by gloo, half of it by direct: twice and once what is possible."""
    times = {f"{way} {size}": [s, s] for size in SIZES for way, s in
             (("backend", 0.08), ("direct", 0.04))}  # fmt: skip
    for nodes in (4, 2):
        record = {"nodes": nodes, "links": {"40ms": times}}
        write_json(tmp_path / f"of_{nodes}.json", record)
    assert floors(tmp_path).splitlines() == [
        "| link one way | nodes | 4 bytes | 1 MiB | 4 MiB | 25 MiB |",
        "|---|--:|--:|--:|--:|--:|",
        "| 40ms | 2 | 1.00 (2.0) | 1.00 (2.0) | 1.00 (2.0) | 1.00 (2.0) |",
        "| 40ms | 4 | 1.00 (2.0) | 1.00 (2.0) | 1.00 (2.0) | 1.00 (2.0) |",
    ]
    with pytest.raises(UserError, match="has no record of benchmarks"):
        floors(tmp_path / "empty")


def test_the_words_about_closed_forms_are_those_of_the_records(root: Path) -> None:
    """How far exchanges that were timed alone are from the forms that predictions are made of."""
    errors: dict[int, list[float]] = {}
    for nodes in (2, 3, 4, 8):
        record = json.loads((root / f"records/exchange/nodes_{nodes}.json").read_text())
        for link, by in record["links"].items():
            for name, each in by.items():
                way, size = name.split()
                if way in MEANS and int(size) >= MIB:
                    form = MEANS[way](int(size), Shape(nodes), wire_of(link_of(link)), True)
                    off = form.alone_s / statistics.median(each) - 1
                    errors.setdefault(nodes, []).append(off)
    middles = {nodes: f"{-100 * statistics.median(of):.0f} %" for nodes, of in errors.items()}
    every = [off for of in errors.values() for off in of]
    page = " ".join((root / "docs/prediction.md").read_text().split())
    assert max(every) < 0 and f"in all {len(every)} cases of the" in page
    least = f"{-100 * min(errors[2]):.0f} %"
    assert (
        f"the forms are {middles[2]} too short in the median on two nodes ({least} at most), "
        f"{middles[3]} on three, {middles[4]} on four and {middles[8]} on eight" in page
    )


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("more", "sizes", "largest"),
                         [([], 4, "26,214,400"), (["--messages"], 3, "20,000")])  # fmt: skip
def test_exchange_times_both_ways(
    more: list[str], sizes: int, largest: str, tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    done = benchmark("exchange", "--links=loopback", "--rounds=1", *more, f"--out={out}")
    by = json.loads(out.read_text())["links"]["loopback"]
    assert len(by) == 2 * sizes and all(len(of) == 1 and of[0] > 0 for of in by.values())
    table = out.with_suffix(".md").read_text()
    assert table.strip() == done.out.strip()
    assert table.count("| loopback |") == sizes and f"| {largest} |" in table
