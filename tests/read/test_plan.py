"""python -m harness plan: planted trainings over recorded links, asked for over others."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.regret import took, wire_over
from harness.core.collectives import GLOO, Shape, Wire, allreduce, wire_of
from harness.core.links import Link
from harness.read.predict.candidates import Candidate
from harness.read.predict.computing import fit_line
from harness.read.predict.exchange import Reduction
from harness.read.predict.model import Model, predict
from harness.read.predict.plan import plan_table, reasons
from harness.read.predict.ratios import STEPS
from harness.read.predict.scenario import Scenario
from harness.read.records.runs import Run, Target
from harness.read.records.selection import read_selected
from tests.support.paired import GRADIENT, Verb, measured, planted_s, timed
from tests.support.records import with_epochs

RATE, UPDATES, EPOCHS, PROBE_S = 200.0, 22, 4, 2.0
NEAR = Wire(0.001, 25e6)
# All-reduces take what the form says, as those that the runs measured.
TABLE = (
    Reduction(GLOO, GRADIENT, allreduce(GLOO, GRADIENT, Shape(4), NEAR).alone_s, Shape(4), NEAR),
)
LINE = fit_line([(batch, planted_s(batch)) for batch in (8, 16, 32)])
MODEL = Model(LINE, 0.1, None, 0.0, GRADIENT, GLOO, table=TABLE)
DELAYS = (1.0, 20.0, 80.0)
# Steps take so much longer than predicted, over every link; an asked link's rows are linear in its
# delay: seconds and delays.
RATIO = {"ddp": 1.25, "diloco": 1.1}
START, EVALUATION, SAVING, END = (0.3, 10), (0.1, 2), (0.05, 4), (0.02, 1)
SLOW = {"ddp": (), "diloco": ("--strategy", "diloco", "--sync_every", "10")}
TO_ASK = ("--nodes", "4", "--link", "40ms/200mbit", "--target", "accuracy=0.9")


def takes_s(phase: tuple[float, float], delay_ms: float) -> float:
    return phase[0] + phase[1] * delay_ms / 1000


def step_s(strategy: str, delay_ms: float) -> float:
    plan = Scenario(Shape(4), 16, wire_of(Link(delay_ms, RATE)), strategy, epoch_updates=UPDATES,
                    updates=UPDATES * EPOCHS)  # fmt: skip
    return RATIO[strategy] * predict(MODEL, plan).step_s


def wall_s(strategy: str, delay_ms: float, epochs: float, measuring: bool = False) -> float:
    """Until the evaluation of the last of so many epochs; with what the record measures or not."""
    once = takes_s(START, delay_ms) + (PROBE_S if measuring else 0.0)
    epoch = UPDATES * step_s(strategy, delay_ms) + takes_s(EVALUATION, delay_ms)
    between = takes_s(SAVING, delay_ms) + takes_s(END, delay_ms)
    return once + epochs * epoch + (epochs - 1) * between


def reaching(
    root: Path, strategy: str, delay_ms: float, needed: int, seed: int = 1, way: str = "backend",
    flags: tuple[str, ...] = (), rate_s: float | None = None,
) -> Path:  # fmt: skip
    """A run of four nodes that reaches 0.9 at the end of this epoch."""
    each_s = step_s(strategy, delay_ms)
    rows: list[dict[str, Any]] = [
        {"epoch": n + 1.0, "updates": UPDATES * (n + 1), "accuracy": 0.9 if n + 1 >= needed else 0,
         "timed_steps": UPDATES, "timed_s": UPDATES * each_s, "epoch_time_s": UPDATES * each_s,
         "eval_time_s": takes_s(EVALUATION, delay_ms), "samples": 1408,
         "wall_s": wall_s(strategy, delay_ms, n + 1, measuring=True)}
        for n in range(EPOCHS)
    ]  # fmt: skip
    link = measured(delay_ms, RATE, 1.0, nodes=4) | {"took_s": PROBE_S}
    folder = timed(
        root / f"{delay_ms}{way}", 16, 4, 1, *SLOW[strategy], "--exchange", way, *flags,
        step_s=rate_s or each_s, link=link, seed=seed,
        eval_time_s=EPOCHS * takes_s(EVALUATION, delay_ms), updates=UPDATES * EPOCHS,
        save_time_s=EPOCHS * takes_s(SAVING, delay_ms), attempts=1,
    )  # fmt: skip
    return with_epochs(folder, rows)


def ended(folder: Path, outcome: str) -> None:
    """What became of a run that was written as a finished one."""
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"outcome": outcome}))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ddp takes two epochs or three, diloco three or four; no test changes them."""
    root = tmp_path_factory.mktemp("planted")
    for batch in (8, 16, 32):
        timed(root, batch)
    timed(root, 16, 1, 2)
    for delay_ms in DELAYS:
        for seed in (1, 2):
            reaching(root, "ddp", delay_ms, 1 + seed, seed)
            reaching(root, "diloco", delay_ms, 2 + seed, seed)
    return root


@pytest.fixture
def records(planted: Path, tmp_path: Path) -> Path:
    """For a test that adds to them."""
    return shutil.copytree(planted, tmp_path / "outputs")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("plan", capsys)


def test_a_planted_link_is_met_between_recorded_ones(planted: Path, plan: Verb) -> None:
    answer = json.loads(plan(planted, *TO_ASK, "--cost_per_gpu_hour", "3.6", "--json"))
    choices = {each["strategy"]: each for each in answer["choices"]}
    assert [each["strategy"] for each in answer["choices"]] == ["diloco", "ddp"]
    for strategy, needed in (("ddp", 2.5), ("diloco", 3.5)):
        each, expected_s = choices[strategy], wall_s(strategy, 40.0, needed)
        assert each["wall_s"] == pytest.approx(expected_s, rel=1e-6), strategy
        assert sum(each["parts_s"].values()) == pytest.approx(each["wall_s"])
        assert each["node_hours"] == pytest.approx(4 * expected_s / 3600)
        assert each["cost"] == pytest.approx(4 * expected_s / 1000)
        assert (each["epochs"], each["links"], each["extrapolated"]) == (needed, 3, False)
        # All links are alike but for their delay: what is left open are the seeds' epochs, of
        # which Student's t of one degree of freedom makes 12.706 x 0.5.
        between_s = takes_s(SAVING, 40.0) + takes_s(END, 40.0)
        epoch_s = wall_s(strategy, 40.0, 2) - wall_s(strategy, 40.0, 1) - between_s
        epoch_s += between_s * (needed - 1) / needed
        assert each["wall_high_s"] - expected_s == pytest.approx(12.706 * 0.5 * epoch_s, rel=1e-3)
        assert each["wall_low_s"] == max(0.0, 2 * each["wall_s"] - each["wall_high_s"])


def test_a_run_that_ended_inside_its_first_epoch(records: Path, plan: Verb) -> None:
    """By --max_steps: its only row has the updates of a part of an epoch."""
    needed = 0.5
    for folder in records.rglob("4_1/*"):
        if folder.is_dir() and (folder / "epochs.jsonl").is_file():
            first = json.loads((folder / "epochs.jsonl").read_text().splitlines()[0])
            part = {"epoch": needed, "updates": UPDATES // 2, "accuracy": 0.95}
            with_epochs(folder, [{**first, **part}])
    answer = json.loads(plan(records, *TO_ASK, "--json"))
    assert answer["choices"]
    for each in answer["choices"]:
        assert each["epochs"] == needed and min(each["parts_s"].values()) >= 0
        steps_s = UPDATES // 2 * step_s(each["strategy"], 40.0)
        assert each["parts_s"]["steps"] == pytest.approx(steps_s, rel=0.1)


def test_the_text_of_a_recommendation(planted: Path, plan: Verb) -> None:
    text = plan.in_one_line(planted, *TO_ASK)
    assert "take diloco h10, batch 16 on 4_1, --exchange backend: " in text
    times = wall_s("ddp", 40.0, 2.5) / wall_s("diloco", 40.0, 3.5)
    assert f"ddp, batch 16 on 4_1 takes {times:.3g} times as long (2.5 epochs instead of" in text
    assert "their intervals overlap" in text and "extrapolated" not in text
    assert "one machine: accuracy at least 0.9 is not known to be reached there in every" in text
    # One delay and two, whatever the ring waits for: of that no run tells.
    direct = Scenario(Shape(4), 16, wire_of(Link(40, RATE)), "diloco", exchange="direct",
                      epoch_updates=UPDATES, updates=UPDATES * EPOCHS)  # fmt: skip
    saved_s = predict(MODEL, replace(direct, exchange="backend")).step_s
    saved_s = RATIO["diloco"] * 3.5 * UPDATES * (saved_s - predict(MODEL, direct).step_s)
    assert f"{wall_s('diloco', 40.0, 3.5) - saved_s:.3g} s with --exchange direct" in text
    far = plan.in_one_line(planted, *TO_ASK, "--link", "200ms/200mbit")
    slow = json.loads(plan(planted, *TO_ASK, "--link", "40ms/100mbit", "--json"))["choices"]
    assert [each["extrapolated"] for each in slow] == [True, True]
    assert "*: extrapolated: no times over links on each side of this one, in delay and rate" in far


# Made together, to the middle of the second epoch; left out of a record's rate.
FIRST, UNTIMED = 30, 8


def parted_s(delay_ms: float) -> list[float]:
    """The updates of a diloco that makes its first ones together."""
    wire = wire_of(Link(delay_ms, RATE))
    together_s = planted_s(16) + allreduce(GLOO, GRADIENT, Shape(4), wire).alone_s
    apart = Scenario(Shape(4), 16, wire, "diloco", epoch_updates=UPDATES,
                     updates=UPDATES * EPOCHS - FIRST)  # fmt: skip
    return [together_s] * FIRST + [predict(MODEL, apart).step_s] * (UPDATES * EPOCHS - FIRST)


def parted(root: Path, delay_ms: float, needed: int, seed: int = 1) -> Path:
    steps = parted_s(delay_ms)
    timed_s = steps[UNTIMED:]
    folder = reaching(root, "diloco", delay_ms, needed, seed, flags=("--sync_first", str(FIRST)),
                      rate_s=sum(timed_s) / len(timed_s))  # fmt: skip
    rows = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    for n, row in enumerate(rows):
        of_row = steps[n * UPDATES + (UNTIMED if n == 0 else 0) : (n + 1) * UPDATES]
        beside_s = wall_s("diloco", delay_ms, n + 1, measuring=True)
        beside_s -= (n + 1) * UPDATES * step_s("diloco", delay_ms)
        row |= {"timed_steps": len(of_row), "timed_s": sum(of_row),
                "wall_s": beside_s + sum(steps[: (n + 1) * UPDATES])}  # fmt: skip
    return with_epochs(folder, rows)


@pytest.mark.parametrize("needed", [(1,), (3, 4)], ids=["before it parts", "after"])
def test_a_start_together_takes_its_time_of_each_target(
    needed: tuple[int, ...], tmp_path: Path, plan: Verb
) -> None:
    """Its updates come first, and a target that is reached early has a larger share of them."""
    for batch in (8, 16, 32):
        timed(tmp_path, batch)
    timed(tmp_path, 16, 1, 2)
    for delay_ms in DELAYS:
        for seed, epoch in enumerate(needed):
            parted(tmp_path, delay_ms, epoch, seed)
    (choice,) = json.loads(plan(tmp_path, *TO_ASK, "--json"))["choices"]
    steps = parted_s(40.0)
    steps_s = sum(sum(steps[: UPDATES * epoch]) for epoch in needed) / len(needed)
    assert choice["parts_s"]["steps"] == pytest.approx(steps_s, rel=1e-6)
    mean = sum(needed) / len(needed)
    beside_s = wall_s("diloco", 40.0, mean) - mean * UPDATES * step_s("diloco", 40.0)
    assert choice["wall_s"] == pytest.approx(steps_s + beside_s, rel=1e-6)
    waiting = 1 - planted_s(16) * UPDATES * mean / steps_s
    text = plan.in_one_line(tmp_path, *TO_ASK)
    assert f"wait for the exchange {waiting:.0%} of their time" in text


def test_deadlines_and_budgets(planted: Path, plan: Verb) -> None:
    hours = wall_s("diloco", 40.0, 3.5) / 3600
    kept = json.loads(plan(planted, *TO_ASK, "--budget", f"{4.01 * hours}", "--json"))["choices"]
    assert [each["strategy"] for each in kept] == ["diloco"]
    only = plan.in_one_line(planted, *TO_ASK, "--deadline", 1.01 * hours)
    assert "nothing else is within the limit" in only and "nothing else reached" not in only
    text = plan.in_one_line(planted, *TO_ASK, "--deadline", f"{0.9 * hours}", code=1)
    assert "nothing is within the limit: the fastest, diloco h10, batch 16 on 4_1" in text
    money = ("--budget", f"{4 * hours}", "--cost_per_gpu_hour", "2", "--json")
    assert json.loads(plan(planted, *TO_ASK, *money, code=1))["choices"] == []


def test_repeats_of_a_seed_are_no_further_seeds(records: Path, plan: Verb) -> None:
    before = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    for seed in (1, 2):
        reaching(records, "diloco", 20.0, 2 + seed, seed, flags=("--repeat", "2"))
    after = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    for one, other in zip(before, after, strict=True):
        ends = ("wall_low_s", "wall_high_s")
        assert [other[end] for end in ends] == pytest.approx([one[end] for end in ends])


def test_runs_without_a_seed_do_not_repeat_each_other(records: Path, plan: Verb) -> None:
    """Each counts by itself, so that their spread gives an interval."""
    before = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    for file in records.rglob("4_1/*/settings.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"seed": None}))
    after = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    for one, other in zip(before, after, strict=True):
        assert other["epochs"] == one["epochs"]
        # Six runs in place of two seeds.
        assert one["wall_low_s"] < other["wall_low_s"] < other["wall_s"] < other["wall_high_s"]


def test_of_one_seed_there_is_no_interval(planted: Path, plan: Verb) -> None:
    """How many epochs another seed needs is not known."""
    text = plan.in_one_line(f"{planted}:seed=1", *TO_ASK)
    assert "95 % interval" not in text.partition("take diloco")[2]
    assert "without an interval of both, this order may be chance" in text
    choices = json.loads(plan(f"{planted}:seed=1", *TO_ASK, "--json"))["choices"]
    assert {each["wall_low_s"] for each in choices} == {None}


def test_a_faster_second_choice_overlaps_only_where_intervals_do() -> None:
    """With a deadline that with the fewest node-hours is first."""

    def choice(nodes: int, wall_s: float, half_s: float) -> Candidate:
        return Candidate(Scenario(Shape(nodes), 16), 64, 3, 2.0, {STEPS: wall_s}, 0.1, half_s,
                         3, True, None, Run({}, None, "finished"))  # fmt: skip

    for faster_s, overlap in ((60.0, False), (85.0, True)):
        both = [choice(2, 100.0, 10.0), choice(4, faster_s, 6.0)]
        text = reasons(both, 2, "accuracy", "link")
        assert ("their intervals overlap" in text) == overlap, faster_s
        assert plan_table(both, None).headings[2:4] == ("batch per GPU", "batch")


def test_what_missed_or_cannot_be_predicted_is_named(records: Path, plan: Verb) -> None:
    reaching(records, "diloco", 5.0, EPOCHS + 1, seed=3)
    timed(records, 16, 4, 1, "--strategy", "hivemind")
    text = plan.in_one_line(records, *TO_ASK)
    missed = "diloco h10, batch 16 on 4_1: reached by 2 of 3 seeds"
    assert f"missed the target in some run: {missed}" in text
    assert "hivemind on 4_1: hivemind is not modelled" in text
    assert "take ddp, batch 16 on 4_1" in text


@pytest.mark.parametrize("outcome", ["diverged", "failed", "oom"])
@pytest.mark.parametrize(("seed", "reached"), [(2, "by 1 of 2 seeds"), (3, "by 2 of 3 seeds")])
def test_a_run_that_failed_missed_the_target(
    outcome: str, seed: int, reached: str, records: Path, plan: Verb
) -> None:
    """Though it reached it before, and whatever its seed did over other links."""
    ended(reaching(records / "again", "diloco", 20.0, 3, seed), outcome)
    missed = f"diloco h10, batch 16 on 4_1: reached {reached}; 1 run: {outcome}"
    for more in ((), ("--effective_batch", "64")):
        answer = json.loads(plan(records, *TO_ASK, *more, "--json"))
        assert [each["strategy"] for each in answer["choices"]] == ["ddp"]
        assert answer["missed"] == [missed]
    assert f"missed the target in some run: {missed}" in plan.in_one_line(records, *TO_ASK)


def test_all_runs_of_a_training_may_fail(records: Path, plan: Verb) -> None:
    for seed in (1, 2):
        ended(reaching(records, "ddp", 20.0, 2, seed, flags=("--lr", "9")), "diverged")
    answer = json.loads(plan(records, *TO_ASK, "--json"))
    (missed,) = answer["missed"]
    assert missed.startswith("ddp, batch 16 on 4_1 (lr 9.0): ") and "2 runs: diverged" in missed
    assert {each["strategy"] for each in answer["choices"]} == {"ddp", "diloco"}


@pytest.mark.parametrize("outcome", ["interrupted", "timeout"])
def test_a_run_stopped_from_outside_says_nothing(outcome: str, records: Path, plan: Verb) -> None:
    before = json.loads(plan(records, *TO_ASK, "--json"))
    ended(reaching(records, "diloco", 20.0, EPOCHS + 1, seed=3), outcome)
    after = json.loads(plan(records, *TO_ASK, "--json"))
    assert after["choices"] == before["choices"] and after["missed"] == []


def test_of_close_choices_without_an_interval_none_is_taken(records: Path, plan: Verb) -> None:
    """Direct sends that were recorded over one link have none."""
    each_s = step_s("diloco", 40.0)
    for seed in (1, 2):
        reaching(records, "diloco", 40.0, 2 + seed, seed, way="all_to_all", rate_s=1.05 * each_s)
    choices = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    close = {each["exchange"]: each for each in choices if each["strategy"] == "diloco"}
    times = sorted(each["wall_s"] for each in close.values())
    assert close["all_to_all"]["wall_low_s"] is None and 1 < times[1] / times[0] < 1.1
    lines = plan(records, *TO_ASK).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("the fastest to "))
    assert lines[start] == (
        "the fastest to accuracy at least 0.9 over 40ms/200mbit is not known: these are "
        f"within {times[1] / times[0] - 1:.1%}, and not all have an interval"
    )
    named = [line.partition(", --exchange ")[2].partition(":")[0] for line in lines[start + 1 :]]
    assert {*named[:2]} == {"backend", "all_to_all"} and not any(named[2:])
    assert lines[start + 3].startswith("measure the first with: torchrun --nnodes=4 --node_rank=")
    assert f"--exchange {named[0]}" in lines[start + 3] and "take " not in "".join(lines)


def test_the_choice_is_measured_by_a_command(records: Path, plan: Verb) -> None:
    """Its own, but for the set-up, the link and the way of exchange."""
    own = "vit.py --tiny --setup 4_1_far --strategy diloco --exchange auto --link 80ms --rerun"
    for file in records.rglob("environment.json"):
        content = json.loads(file.read_text()) | {"threads": 1}
        over = {"command": own} if content["nodes"] == 4 else {}
        file.write_text(json.dumps(content | over))
    text = plan.in_one_line(records, *TO_ASK, "--emulated")
    assert (
        "measure it with: OMP_NUM_THREADS=1 python -m harness nodes 4 --link 40ms/200mbit -- "
        f"torchrun vit.py --tiny --strategy diloco --output_dir {records}/"
    ) in text
    assert "backend --exchange backend" in text.partition("measure it with")[2]
    error = plan.refused(records, *TO_ASK, "--nodes", "8")
    measures = (
        "measure it over any link, emulated nodes will do: for seed in 1 2; do OMP_NUM_THREADS=1 "
        "python -m harness nodes 8 --link 40ms/200mbit -- torchrun vit.py --tiny --strategy "
    )
    assert f"but on 1, 4: {measures}" in error and error.endswith(" --seed $seed; done\n")
    assert "--rerun" not in text + error
    text = plan.in_one_line(records, *TO_ASK, "--nodes", "4,8")
    assert f"not predicted: 8 nodes: quality was not measured: {measures}" in text


def test_nodes_without_a_run_of_the_batch_are_named(records: Path, plan: Verb) -> None:
    timed(records, 8, 2, 1, link=measured(1.0, RATE, 1.0))
    text = plan.in_one_line(records, *TO_ASK, "--nodes", "2,4,8", "--effective_batch", "64")
    assert "not predicted: 2 nodes: no run has --effective_batch 64" in text
    assert "--per_gpu_batch 8; done" in text.replace(" --seed $seed", "")


def test_trainings_of_one_name_are_told_apart_by_their_settings(records: Path, plan: Verb) -> None:
    """Of diloco runs with another outer_lr, none reached the target."""
    assert " settings " not in plan.in_one_line(records, *TO_ASK)
    for seed in (1, 2):
        reaching(records, "diloco", 80.0, EPOCHS + 1, seed, flags=("--outer_lr", "0.3"))
    text = plan.in_one_line(records, *TO_ASK)
    missed = "diloco h10, batch 16 on 4_1 (outer_lr 0.3): reached by 0 of 2 seeds"
    assert f"missed the target in some run: {missed}" in text and "most settings" in text
    assert "diloco h10, batch 16 on 4_1 (outer_lr 0.7)" in text
    choices = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    settings = {each["strategy"]: each["settings"] for each in choices}
    assert settings == {"diloco": "outer_lr 0.7", "ddp": ""}


@pytest.mark.parametrize(("words", "message"), [
    (("--nodes", "3"), "--nodes 3: quality was not measured on as many nodes, but on 1, 4"),
    (("--nodes", "one"), "--nodes one: expected 2 or more, or several of them: 2,4"),
    (("--nodes", "1"), "--nodes 1: expected 2 or more"),
    (("--effective_batch", "128", "--nodes", "4,4"), "_batch 128: runs on 4 nodes have 64"),
    (("--target", "accuracy=0.95"), "reached it in every run; the best epoch has 0.9: measure"),
    (("--nodes", "3", "--target", "f1=0.9"), "--target f1: no epoch of these runs has it: there "
     "are accuracy"),
    (("--link", "900ms/200mbit"), "timed over at most 80 ms and at least 200 Mbit/s, and this"),
    (("--link", "40ms/19mbit"), "and this link is more than 10 times as slow: measure it over"),
])  # fmt: skip
def test_outside_what_runs_support_it_refuses(
    planted: Path, plan: Verb, words: tuple[str, str], message: str
) -> None:
    assert message in plan.refused(planted, *TO_ASK, *words)


def test_each_recorded_way_of_exchange_has_its_steps_and_the_epochs_of_all(
    records: Path, plan: Verb
) -> None:
    """--exchange auto took direct sends over the far link alone, where a third seed ran."""
    reaching(records, "diloco", 80.0, 4, seed=3, way="all_to_all")
    choices = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    by_way = {each["exchange"]: each for each in choices if each["strategy"] == "diloco"}
    assert {way: each["links"] for way, each in by_way.items()} == {"backend": 3, "all_to_all": 1}
    assert [each["epochs"] for each in by_way.values()] == pytest.approx([11 / 3] * 2)
    assert by_way["all_to_all"]["extrapolated"] and not by_way["backend"]["extrapolated"]
    text = plan.in_one_line(records, *TO_ASK)
    assert "diloco h10 all_to_all" in text and "with --exchange direct, of which" in text
    reaching(records, "diloco", 80.0, 4, seed=3, way="direct")
    assert "of which no run tells" not in plan.in_one_line(records, *TO_ASK)


def test_what_it_advises_can_be_typed(records: Path, plan: Verb) -> None:
    """Emulated nodes share a machine: what that costs is not known without runs of several."""
    (pair,) = (records / "vit" / "1_2").iterdir()
    shutil.rmtree(pair)
    error = plan.refused(records, *TO_ASK, "--emulated")
    assert "measure --setup 1_2 as well, or say it with --sharing (0 for nothing)" in error
    text = plan.in_one_line(records, *TO_ASK, "--emulated", "--sharing", "0.1")
    assert "take diloco h10" in text
    assert "assumed: processes of a machine slow each other by 10% each (--sharing)" in text


def test_measured_links_that_differ_by_noise_are_one(records: Path, plan: Verb) -> None:
    for number, file in enumerate(sorted(records.rglob("environment.json"))):
        content = json.loads(file.read_text())
        if link := content["link"]:
            own = {"rtt_min_ms": 2 * link["asked"]["delay_ms"] * (1 + number / 1000),
                   "bandwidth_mbit": 193.0 + number / 10, "asked": None}  # fmt: skip
            file.write_text(json.dumps(content | {"link": link | own}))
    choices = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    assert [each["links"] for each in choices] == [3, 3]


def disturb(folder: Path) -> None:
    file = folder / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"launch": {"cpu_busy_share": 0.9}}))


def test_a_quiet_run_leaves_out_those_of_its_own_set_up_and_link_alone(
    records: Path, plan: Verb
) -> None:
    """All over links are disturbed but one, and the runs on one machine are quiet."""
    quiet = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    for file in sorted(records.rglob("environment.json")):
        if json.loads(file.read_text())["link"]:
            disturb(file.parent)
    answer = json.loads(plan(records, *TO_ASK, "--json"))
    assert answer["choices"] == quiet
    line = "were disturbed (others used more than 25% of the cores), and count as if they had"
    line += " run alone"
    assert answer["assumed"] == [f"12 of 12 runs over links {line}"]
    assert f"assumed: 12 of 12 runs over links {line}" in plan.in_one_line(records, *TO_ASK)
    # Of its link the quiet run counts alone, of the two others the eight disturbed ones.
    reaching(records, "diloco", 80.0, 3, seed=5)
    answer = json.loads(plan(records, *TO_ASK, "--json"))
    assert answer["assumed"] == [f"8 of 9 runs over links {line}"]


def test_what_a_choice_took_where_it_was_measured(records: Path) -> None:
    """The mean of the quiet runs of its way; a run that missed did so on a busy machine too."""
    busy = reaching(records, "ddp", 80.0, 1, seed=3)
    disturb(busy)
    reaching(records, "ddp", 80.0, 1, seed=4, way="all_to_all")

    def seconds(way: str) -> float | None:
        target = Target("accuracy", 0.9)
        runs = read_selected(f"{records}:setup=4_1", target).runs
        choice = Scenario(Shape(4), 16, exchange=way)
        return took([r for r in runs if wire_over(r) == wire_of(Link(80.0, RATE))], choice)

    assert seconds("backend") == pytest.approx((wall_s("ddp", 80, 2) + wall_s("ddp", 80, 3)) / 2)
    assert seconds("all_to_all") == pytest.approx(wall_s("ddp", 80, 1))
    assert seconds("direct") is None
    with_epochs(busy, [{"epoch": n + 1.0, "accuracy": 0.1} for n in range(EPOCHS)])
    assert seconds("backend") == math.inf


def test_runs_without_rows_of_their_updates_are_not_planned_with(
    tmp_path: Path, plan: Verb
) -> None:
    timed(tmp_path, 16)
    folder = timed(tmp_path, 16, 4, 1, link=measured(20.0, RATE, 1.0, nodes=4))
    with_epochs(folder, [{"epoch": 1.0, "accuracy": 0.95}])
    text = plan.refused(tmp_path, *TO_ASK)
    assert "cannot be predicted: ddp on 4_1: updates of an epoch are in no record" in text
    # It reached the target, whatever another strategy missed.
    reaching(tmp_path, "diloco", 20.0, EPOCHS + 1)
    assert f"{text.strip()}; all else missed accuracy at least 0.9" in plan.refused(
        tmp_path, *TO_ASK
    )
