"""python -m harness plan over links with loss or jitter, against predict and what was measured."""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.prediction_fresh import KEY, key_of
from benchmarks.regret import took
from benchmarks.results import off
from harness.core.collectives import Shape, Wire, wire_of
from harness.core.links import Link, plain_link
from harness.read.predict.candidates import Candidate, candidates
from harness.read.predict.exchange import SIMULATED_FREEDOM, SIMULATED_SPREAD
from harness.read.predict.facts import Overrides, shape_of, step_s
from harness.read.predict.fitting import Fitted, fit_records, wire_between
from harness.read.predict.lossy import compared, messages
from harness.read.predict.model import EXCHANGE, Prediction, predict
from harness.read.predict.ratios import STEPS, OverLinks, half_s
from harness.read.predict.scenario import Scenario
from harness.read.records.runs import Run, Target
from harness.read.records.selection import read_selected
from harness.read.statistics import welch_half
from tests.support.paired import Verb, measured, planted_s, timed
from tests.support.predicted import FAR, MODEL
from tests.support.records import with_epochs
from tests.support.sweeps import ROOT

RECORDS = str(ROOT / "records/predicted_lossy")
LINKS = ("2ms/200mbit/jitter1.5ms/loss0.1%", "15ms/80mbit/loss0.5%", "25ms/60mbit/jitter4ms",
         "30ms/20mbit/jitter10ms/loss0.5%")  # fmt: skip
TARGET = Target("accuracy", 0.6)  # all trainings reached it in every run
TO_ASK = ("--nodes", "2", "--target", "accuracy=0.6")
LOSSES = "where packets are lost, codes (int8, int4) and rare exchanges (local_sgd, diloco) are"
BY_SIMULATION = "loss and jitter by simulation (seed 1"


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("plan", capsys)


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    """On the published runs of one machine."""
    return fit_records(RECORDS, Overrides())


def planned(fitted: Fitted, link: str) -> list[Candidate]:
    wire = wire_of(plain_link(link))
    return candidates(fitted, fitted.selected, [2], wire, TARGET, emulated=True).reached


class Case(NamedTuple):
    """A training that was planned and measured over a link."""

    plan: Candidate
    step: Prediction
    wall_s: float  # as measured, like the next
    step_s: float


def cases(fitted: Fitted, link: str) -> Iterator[Case]:
    wire = wire_of(plain_link(link))
    there = [run.toward(TARGET) for run in fitted.selected
             if shape_of(run).nodes == 2 and wire_between(run.measured_link) == wire]  # fmt: skip
    for each in planned(fitted, link):
        wall_s = took(there, each.plan)
        steps = [step_s(run, Overrides()) or 0.0 for run in there if is_of(run, each.plan)]
        assert wall_s is not None and len(steps) == 3
        yield Case(each, predict(fitted.model, each.plan), wall_s, statistics.mean(steps))


def is_of(run: Run, plan: Scenario) -> bool:
    names = ("strategy", "compress", "exchange")
    same = all(run.identity[name] == getattr(plan, name) for name in names)
    return same and (run.identity["sync_every"] or plan.sync_every) == plan.sync_every


@pytest.mark.parametrize("flags", [
    ("--strategy", "ddp", "--exchange", "backend"),
    ("--strategy", "ddp", "--compress", "int8", "--exchange", "direct"),
    ("--strategy", "diloco", "--sync_every", "50", "--exchange", "direct"),
])  # fmt: skip
def test_steps_take_what_predict_says(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], plan: Verb
) -> None:
    """Of the published runs, none of which is over a link without loss and jitter."""
    link = ("--link", "mobile")
    answer = json.loads(plan(RECORDS, *TO_ASK, *link, "--emulated", "--json"))
    asked = (*link, "--setup", "2_1", "--batch", "16", "--epochs", "2", "--emulated", *flags)
    step = json.loads(Verb("predict", capsys)(RECORDS, *asked, "--json"))
    wanted = dict(zip((flag.removeprefix("--") for flag in flags[::2]), flags[1::2], strict=True))
    (choice,) = (
        each for each in answer["choices"]
        if all(str(each[name]) == value for name, value in ({"compress": "none"} | wanted).items())
    )  # fmt: skip
    updates = choice["epochs"] * step["updates"]
    assert choice["parts_s"][STEPS] == pytest.approx(updates * step["step_s"], rel=1e-9)
    assert choice["simulated"] and step["simulated"]
    assert [*filter(is_of_simulation, answer["assumed"])] == [
        *filter(is_of_simulation, step["assumed"])
    ]
    if flags[1:] == ("ddp", "--exchange", "backend"):
        # All seeds take one epoch, and all else is too short to count: the error is of steps alone.
        half = choice["wall_high_s"] - choice["wall_s"]
        assert half == pytest.approx(updates * (step["step_high_s"] - step["step_s"]))


def is_of_simulation(text: str) -> bool:
    return text.startswith(BY_SIMULATION)


def test_plans_have_the_order_that_was_measured(fitted: Fitted) -> None:
    """Where intervals are apart: of steps, and of wall times that have one."""
    disjoint, errors, regrets, swapped = [0, 0], list[float](), list[float](), 0
    held = list[bool]()
    for link in LINKS:
        of_link = [*cases(fitted, link)]
        for one, other in itertools.combinations(of_link, 2):
            steps = [(case.step.low_s or 0.0, case.step.high_s or math.inf)
                     for case in (one, other)]  # fmt: skip
            swapped += one.wall_s > other.wall_s  # the plan's order
            if are_disjoint(*steps):
                disjoint[0] += 1
                assert (one.step.step_s < other.step.step_s) == (one.step_s < other.step_s)
            walls = [case.plan.interval for case in (one, other)]
            if walls[0] and walls[1] and are_disjoint(walls[0], walls[1]):
                disjoint[1] += 1
                assert one.wall_s < other.wall_s
        errors += [case.plan.wall_s / case.wall_s - 1 for case in of_link]
        regrets.append(of_link[0].wall_s / min(case.wall_s for case in of_link) - 1)
        held += [low <= case.wall_s <= high for case in of_link if case.plan.interval
                 for low, high in [case.plan.interval]]  # fmt: skip
    assert disjoint[0] > 100 and disjoint[1] > 5 and len(errors) == 40
    page = " ".join((ROOT / "docs/prediction.md").read_text().split())
    text = off(sorted(map(abs, errors))).replace("%", " %")
    assert f"wall times are {text}" in page
    assert f"{sum(error < 0 for error in errors)} of the 40 are too short" in page
    assert f"{sum(held)} of {len(held)} intervals hold" in page
    assert f"Of the {disjoint[0]} pairs whose steps have intervals apart, none" in page
    assert f"of wall times, {swapped} of the 180 pairs were" in page
    assert f"the choices took at most {max(regrets):.1%}".replace("%", " %") in page


def are_disjoint(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[1] < other[0] or other[1] < one[0]


def test_each_message_is_simulated_once(fitted: Fitted) -> None:
    """Trainings that send as much, in as many messages, share a simulation; so do later plans."""
    messages._sent.cache_clear()
    messages._round_s.cache_clear()
    trainings = planned(fitted, LINKS[0])
    drawn = messages._sent.cache_info().misses
    assert 0 < drawn < len(trainings) and messages._round_s.cache_info().misses == drawn
    planned(fitted, LINKS[0])
    assert messages._sent.cache_info().misses == drawn


def reaching(root: Path, nodes: int, delay_ms: float, seed: int, times: float) -> None:
    """A run over a steady link that reached the target, of steps that take so many times as long as
    a process alone takes.
    """
    link = measured(delay_ms, 200.0, 1.0, nodes=nodes)
    folder = timed(root / f"{delay_ms}", 16, nodes, 1, link=link, seed=seed,
                   step_s=times * planted_s(16), updates=44)  # fmt: skip
    with_epochs(folder, [{"epoch": 1.0, "updates": 44, "accuracy": 0.95, "wall_s": 50.0}])


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two and on four nodes, over three links without loss and jitter."""
    root = tmp_path_factory.mktemp("steady")
    for batch, seed in itertools.product((8, 16, 32), (1, 2)):
        timed(root, batch, seed=seed, step_s=(1.02 - seed / 100) * planted_s(batch))
    for seed, nodes, delay_ms in itertools.product((1, 2), (2, 4), (1.0, 20.0, 80.0)):
        reaching(root, nodes, delay_ms, seed, 2 + delay_ms / 5)
    return root


def answer_of(plan: Verb, records: Path, link: str, nodes: int = 2) -> dict[str, Any]:
    words = ("--nodes", nodes, "--link", link, "--target", "accuracy=0.9", "--json")
    answer: dict[str, Any] = json.loads(plan(records, *words))
    return answer


def test_what_links_without_loss_say_corrects_simulated_steps_too(
    records: Path, plan: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    link, steady = "20ms/200mbit/jitter2ms/loss1%", "20ms/200mbit"
    steps = {
        over: json.loads(
            Verb("predict", capsys)(records, "--setup", "2_1", "--batch", "16", "--exchange",
                                    "backend", "--link", over, "--json")
        )["step_s"]
        for over in (link, steady)
    }  # fmt: skip
    ratio = 6 * planted_s(16) / steps[steady]
    (choice,) = answer_of(plan, records, link)["choices"]
    assert choice["parts_s"][STEPS] == pytest.approx(44 * ratio * steps[link], rel=1e-6)
    assert choice["parts_s"][STEPS] > 1.1 * 44 * 6 * planted_s(16)
    assert (choice["links"], choice["extrapolated"], choice["simulated"]) == (3, False, True)
    (choice,) = answer_of(plan, records, steady)["choices"]
    assert choice["parts_s"][STEPS] == pytest.approx(44 * 6 * planted_s(16), rel=1e-6)
    assert not choice["simulated"]


def test_intervals_hold_how_far_simulations_are_off() -> None:
    """Beside how far recorded links are from each other's; on two nodes alone."""
    links = OverLinks({Wire(ms / 1000, 25e6): log for ms, log in ((1, 0.0), (10, 0.3), (90, 0.1))})
    seeds, parts = (0.02, 2), {STEPS: 30.0}
    share, freedom = links.spread
    assert share is not None
    of_links = ((share * 30.0) ** 2, freedom)
    steady = predict(MODEL, Scenario(Shape(2), 16, FAR))
    assert half_s(steady, links, {}, parts, seeds) == pytest.approx(welch_half(seeds, of_links))
    for wire in (replace(FAR, loss=0.01), replace(FAR, jitter_s=0.005)):
        step = predict(MODEL, Scenario(Shape(2), 16, wire))
        waited_s = 30.0 * step.parts[EXCHANGE] / step.step_s
        simulated = ((SIMULATED_SPREAD * waited_s) ** 2, SIMULATED_FREEDOM)
        wide = half_s(step, links, {}, parts, seeds)
        assert wide == pytest.approx(welch_half(seeds, of_links, simulated))
        three = predict(MODEL, Scenario(Shape(3), 16, wire))
        assert half_s(three, links, {}, parts, seeds) is None


def test_what_is_assumed_is_in_the_answer(records: Path, plan: Verb) -> None:
    lossy, late = (answer_of(plan, records, link) for link in ("wifi", "20ms/200mbit/jitter2ms"))
    for answer in (lossy, late):
        (simulated,) = (each for each in answer["assumed"] if "simulat" in each)
        assert is_of_simulation(simulated) and simulated.endswith("TCP has cubic")
        assert not any(each.startswith(LOSSES) for each in answer["assumed"])  # ddp in full
        assert answer["choices"][0]["wall_low_s"] is not None
    text = plan.in_one_line(RECORDS, *TO_ASK, "--link", "mobile", "--emulated")
    assert f"assumed: {BY_SIMULATION}" in text
    short = "predicted too short: over three links their steps took up to 1.5 times as long"
    assert f"assumed: {LOSSES} {short}, others up to 1.2 times" in text
    over = "120 runs over links with loss or jitter: they count for the epochs to the target, not"
    assert f"{over} for the time of a step" in text
    assert "no run of this machine timed it over any link without loss and jitter" in text
    answer = json.loads(plan(RECORDS, *TO_ASK, "--link", LINKS[2], "--emulated", "--json"))
    assert answer["lossy"] == 120 and not any(each.startswith(LOSSES) for each in answer["assumed"])
    four = answer_of(plan, records, "wifi", nodes=4)
    alone = "trainings over links with loss or jitter were compared on two nodes alone: on more"
    assert f"{alone} there is no interval" in four["assumed"]
    assert four["choices"][0]["wall_low_s"] is None
    steady = answer_of(plan, records, "20ms/200mbit")
    assert not any("simulat" in each for each in steady["assumed"]) and steady["lossy"] == 0


@pytest.mark.parametrize("link", [
    "80ms/50mbit/jitter5ms/loss0.5%", "1ms/200mbit/loss1%", "20ms/loss1%",
    "20ms/400mbit/jitter1ms", "20ms/200mbit/loss0.05%",
])  # fmt: skip
def test_a_link_outside_those_that_were_compared_is_named(
    link: str, records: Path, plan: Verb
) -> None:
    line = f"{plain_link(link)} is outside the links over which simulations were compared ("
    assert any(each.startswith(line) for each in answer_of(plan, records, link)["assumed"])


@pytest.mark.parametrize(("link", "why"), [
    ("20ms/200mbit/loss2%", "a loss of 2 % is above 1 %"),
    ("20ms/200mbit/jitter12ms", "a jitter of 12 ms is above 10 ms"),
    ("500ms/200mbit/loss0.1%", "a delay of 500 ms is above 400 ms"),
    ("20ms/1mbit/jitter1ms", "a rate of 1 Mbit/s is below 2 Mbit/s"),
])  # fmt: skip
def test_a_link_beyond_those_that_were_compared_is_refused(
    link: str, why: str, tmp_path: Path, plan: Verb
) -> None:
    """Before records are read."""
    refused = plan.refused(tmp_path / "none", *TO_ASK, "--link", link)
    assert f"--link {plain_link(link)}: {why}: simulated loss and jitter were compared" in refused
    over = "2 to 40 ms, 20 to 200 Mbit/s, jitter up to 10 ms, losses of 0.1 to 1 %"
    assert f"over {over}: name a link nearer to these, or use predict" in refused


def test_the_links_that_were_compared_are_those_of_the_records() -> None:
    """Of exchanges alone and of trainings."""
    files = sorted((ROOT / "records/lossy").glob("*.json"))
    texts = {link for file in files for link in json.loads(file.read_text())["links"]}
    links: list[Link] = [plain_link(link) for link in (*texts, *LINKS)]
    delays, rates = ([link.delay_ms for link in links], [link.rate_mbit or 0.0 for link in links])
    assert (min(delays), max(delays)) == compared.DELAYS_MS
    assert (min(rates), max(rates)) == compared.RATES_MBIT
    assert max(link.jitter_ms for link in links) == compared.MOST_JITTER_MS
    losses = [link.loss for link in links if link.loss]
    assert (min(losses), max(losses)) == compared.LOSSES
    assert compared.RANGE in " ".join((ROOT / "docs/prediction.md").read_text().split())


def test_how_much_longer_steps_took_where_packets_were_lost() -> None:
    """Than was written down first: of codes and of replicas that train apart, and of others."""
    took_ms: dict[tuple[str, ...], list[float]] = {}
    for run in read_selected(RECORDS, None).runs:
        if (seconds := step_s(run, Overrides())) is not None:
            took_ms.setdefault(key_of(run), []).append(1e3 * seconds)
    longest = {True: 0.0, False: 0.0}
    with (ROOT / "experiments/prediction_lossy.csv").open(newline="") as table:
        rows = [row for row in csv.DictReader(table) if "loss" in row["link"]]
    for row in rows:
        times = statistics.mean(took_ms[tuple(row[n] for n in KEY)]) / float(row["step_ms"])
        kind = row["strategy"] != "ddp" or row["compress"] == "int8"
        longest[kind] = max(longest[kind], times)
    assert [round(longest[kind], 1) for kind in (True, False)] == [
        compared.LONGER,
        compared.LONGER_OTHERS,
    ]
