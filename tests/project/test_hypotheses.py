"""Hypotheses that stand with published records were committed before the first of these runs."""

from __future__ import annotations

import math
import re
import statistics
import subprocess
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from harness.core.records import FINISHED
from harness.launch.sweepfile import header_of, load
from harness.read.records.runs import Run
from harness.read.records.sweeps import read_results

NAMED = {
    "half": 0.5,
    "all": 1.0,
    "more": 1.0,
    "twice": 2.0,
    "proportion": 2.0,
    "faster": 1.0,
    "slower": 1.0,
}
NO_CHANGE = 0.0  # of what gains or loses, without a number


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def test_the_commit_of_the_records_has_the_hypothesis(root: Path, tmp_path: Path) -> None:
    unknown: set[str] = set()
    published = [
        *root.glob("outputs/published/sweeps/*"),
        *root.glob("outputs/published/*/sweeps/*"),
    ]
    folders = [*root.glob("records/*/sweeps/*"), *published]
    assert len(published) >= 13 and len(folders) >= 28
    for folder in folders:
        sweep = read_results(folder)
        begun = [run for run in sweep.runs if run.state == FINISHED]
        assert begun and sweep.hypothesis
        for commit in {run.environment["commit"] for run in begun}:
            if not git(root, "cat-file", "-t", commit):
                unknown.add(commit)
                continue
            (name,) = (root / "experiments").rglob(f"{folder.name.removesuffix('-tiny')}.yaml")
            (tmp_path / "then.yaml").write_text(
                git(root, "show", f"{commit}:{name.relative_to(root)}")
            )
            then = header_of(tmp_path / "then.yaml")["hypothesis"]
            if after := sweep.changed_after:  # of slow_link_muon, a line of its `expect`
                assert folder.name == "slow_link_muon-tiny"
                then += f" (Changed after {after} had finished.)"
            assert then == sweep.hypothesis
            starts = [
                row["unix"] for run in begun if run.environment["commit"] == commit
                for row in run.attempts
            ]  # fmt: skip
            assert int(git(root, "show", "-s", "--format=%ct", commit)) < min(starts)
    if unknown:
        pytest.skip(f"the history does not have {', '.join(sorted(unknown))}")


def test_what_is_expected_repeats_numbers_of_the_hypothesis(root: Path) -> None:
    checked = 0
    for file in (root / "experiments").rglob("*.yaml"):
        text = header_of(file)["hypothesis"]
        said = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)}
        said |= {value for word, value in NAMED.items() if word in text} | {NO_CHANGE}
        for tiny in (False, True):
            for entry in load(file, tiny).expect:
                bounds = {entry["at_least"], entry["at_most"]} - {None}
                assert {abs(bound) for bound in bounds} <= said, (file.name, entry)
                checked += 1
    assert checked > 30


# Of the sweep: the way, the bound, and what the page says of its wall time against DDP, by the
# backend where ways of exchanging are compared.
SENT = "records/xeon/sweeps/slow_link_exchange"
EPYC = "outputs/published/exchange/sweeps/slow_link_exchange"
WAYS = "outputs/published/exchange/sweeps/slow_link_ways"
MEANT = (
    (SENT, {"strategy": "ddp", "exchange": "direct"}, 0.5, "0.49 of the backend's (0.48 to 0.50; "),
    (SENT, {"strategy": "diloco", "exchange": "backend"}, 0.15, "0.22 (0.20 to 0.24; "),
    (SENT, {"strategy": "diloco", "exchange": "direct"}, 0.15, "0.21 (0.18 to 0.23; "),
    (EPYC, {"strategy": "ddp", "exchange": "direct"}, 0.5, "0.47 of the backend's (0.46 to 0.48; "),
    (EPYC, {"strategy": "diloco", "exchange": "backend"}, 0.15, "0.20 (0.17 to 0.22; "),
    (EPYC, {"strategy": "diloco", "exchange": "direct"}, 0.15, "0.19 (0.16 to 0.21; "),
    (WAYS, {"strategy": "ddp", "compress": "int8"}, 0.85, "0.85 of DDP's (0.83 to 0.86; "),
    (WAYS, {"strategy": "hivemind"}, 0.65, "0.72 (0.64 to 0.82; "),
)


@pytest.mark.parametrize(("name", "way", "bound", "said"), MEANT)
def test_the_wall_time_that_was_meant_had_measuring_in_it(
    name: str, way: dict[str, str], bound: float, said: str, root: Path
) -> None:
    """As it was defined when these hypotheses were written: all until the row of the target."""
    sweep = read_results(root / f"{name}-tiny")
    assert sweep.target is not None
    plain = {"strategy": "ddp", "compress": "none"}
    if name in (SENT, EPYC):
        plain["exchange"] = "backend"
    times: list[dict[Hashable, float]] = [{}, {}]
    for side, named in zip(times, (way, plain), strict=True):
        for run in sweep.runs:
            if {key: run.identity[key] for key in named} == named:
                reached = next(r for r in run.epochs if sweep.target.reached(r["accuracy"]))
                side[run.seed] = math.log(reached["wall_s"] or math.nan)
    found = [
        math.exp(x) for x in t_interval([times[0][seed] - times[1][seed] for seed in times[0]])
    ]
    assert len(times[0]) == len(times[1]) >= 5
    ratio, low, high = (f"{value:.2f}" for value in found)
    assert said.startswith(f"{ratio} ") and f"({low} to {high}; " in said
    verdict = "holds" if found[2] <= bound else "does not hold" if found[1] > bound else "open"
    assert f"{said}{verdict})" in " ".join((root / "docs/strategies.md").read_text().split())


# Way, bound against DDP by the backend, and what the page says with the measuring, of MiniLM.
OF_MINILM = (
    ({"strategy": "ddp", "compress": "int8"}, 0.35, "0.32 of DDP's (0.31 to 0.32; ", ".2f"),
    ({"strategy": "local_sgd", "sync_every": 10}, 0.1, "0.093 every 10 updates (0.093 to 0.094; ",
     ".3f"),
    ({"strategy": "local_sgd", "sync_every": 20}, 0.1, "0.082 every 20 (0.067 to 0.101; ", ".3f"),
)  # fmt: skip


@pytest.mark.parametrize(("way", "bound", "said", "form"), OF_MINILM)
def test_the_wall_time_of_minilm_that_was_meant(
    way: dict[str, Any], bound: float, said: str, form: str, root: Path
) -> None:
    sweep = read_results(root / "records/xeon/sweeps/slow_link_pretrained")
    plain = {"strategy": "ddp", "compress": "none"}
    times: list[dict[Hashable, float]] = [{}, {}]
    measuring: dict[str, list[float]] = {}
    for run in sweep.finished:
        strategy = f"{run.identity['strategy']} {run.identity['compress']}"
        measuring.setdefault(strategy, []).append(run.epochs[-1]["measuring_s"] or math.nan)
        if strategy.startswith(("ddp", "local_sgd")):
            assert run.observed["exchange"] == "backend"
        for side, named in zip(times, (way, plain), strict=True):
            if {key: run.identity[key] for key in named} == named:
                reached = next(r for r in run.epochs if r["accuracy"] >= 0.85)
                side[run.seed] = math.log(reached["wall_s"] or math.nan)
    pairs = [times[0][seed] - times[1][seed] for seed in times[1]]
    ratio, low, high = (math.exp(x) for x in t_interval(pairs))
    assert len(pairs) == 2
    assert said.startswith(f"{ratio:{form}} ") and f"({low:{form}} to {high:{form}}; " in said
    page = " ".join((root / "docs/strategies.md").read_text().split())
    assert f"{said}{'holds' if high <= bound else 'open'})" in page and ratio < bound
    local, coded, whole = (
        statistics.mean(measuring[name]) for name in ("local_sgd int8", "ddp int8", "ddp none")
    )
    took = f"{local:.0f} s of a run of local SGD, {coded:.0f} s with int8 and {whole:.0f} s of DDP"
    assert took in page


# Sweep, way, and each side that it is compared with: of the table of wall times with all measuring.
MUON, MUON_TWO, EPOCHS, NODES = (
    f"records/{folder}/sweeps/{sweep}-tiny"
    for folder, sweep in (
        ("muon", "slow_link_muon"),
        ("muon_two", "slow_link_muon_two"),
        ("epochs", "slow_link_epochs"),
        ("xeon_far", "slow_link_nodes"),
    )
)
PLAIN = {"strategy": "ddp", "muon": False}
WITH_MEASURING = (
    (MUON, {"strategy": "diloco"}, PLAIN | {"exchange": "all_to_all"}),
    (MUON, {"strategy": "diloco"}, {"strategy": "ddp", "muon": True}),
    (MUON, {"strategy": "diloco"}, PLAIN | {"exchange": "backend"}),
    (MUON_TWO, {"strategy": "diloco"}, PLAIN | {"exchange": "direct"}),
    (MUON_TWO, {"strategy": "diloco"}, PLAIN | {"exchange": "backend"}),
    (EPOCHS, {"strategy": "diloco", "compress": "int8"}, PLAIN | {"exchange": "backend"}),
    (NODES, {"strategy": "diloco", "setup": "2_1"}, PLAIN | {"setup": "2_1", "exchange": "direct"}),
    (NODES, {"strategy": "diloco", "setup": "2_1"},
     PLAIN | {"setup": "2_1", "exchange": "backend"}),
    (NODES, {"strategy": "diloco", "setup": "4_1"},
     PLAIN | {"setup": "4_1", "exchange": "all_to_all"}),
    (NODES, {"strategy": "diloco", "setup": "4_1"},
     PLAIN | {"setup": "4_1", "exchange": "backend"}),
)  # fmt: skip


def test_wall_times_with_all_measuring_are_those_of_the_records(root: Path) -> None:
    """Each row of the table: by pairs of seeds, without the measuring and with it."""
    page = (root / "docs/strategies.md").read_text()
    table = page.partition("Wall times to accuracy 0.9 with all measuring:")[2].split("\n\n")[1]
    rows = [tuple(map(str.strip, line.strip("|").split("|"))) for line in table.splitlines()[2:]]
    assert len(rows) == len(WITH_MEASURING)
    for (name, way, against), (*_, without, whole, seeds) in zip(WITH_MEASURING, rows, strict=True):
        runs = read_results(root / name).finished
        sides = [
            {run.seed: reached_s(run) for run in runs if is_of(run, s)} for s in (way, against)
        ]
        assert sides[1].keys() <= sides[0].keys() and len(sides[1]) == int(seeds)
        for number, shown in enumerate((without, whole)):
            logs = [math.log(sides[0][s][number] / sides[1][s][number]) for s in sides[1]]
            ratio, low, high = (f"{math.exp(x):#.2g}" for x in t_interval(logs))
            assert shown == f"{ratio} ({low} to {high})", name


def reached_s(run: Run) -> tuple[float, float]:
    """Wall time until accuracy 0.9: without what was measured for the record, and with it."""
    row = next(each for each in run.epochs if each["accuracy"] >= 0.9)
    return row["wall_s"] - row["measuring_s"], row["wall_s"]


def is_of(run: Run, named: dict[str, Any]) -> bool:
    own = {**run.identity, "muon": bool(run.identity.get("muon"))}
    return all(str(own[key]).startswith(str(value)) for key, value in named.items())


def t_interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval."""
    mean = statistics.mean(values)
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
