"""python -m harness plan and predict beside the records of what they plan: which runs correct it,
what was measured over this very link, and what never reached the target.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from harness.core.collectives import Shape, wire_of
from harness.core.links import Link
from harness.read.predict.candidates import ratios_of
from harness.read.predict.facts import Overrides
from harness.read.predict.fitting import fit_records
from harness.read.predict.model import predict
from harness.read.predict.scenario import Scenario
from tests.support.paired import Verb, changed, measured, planted_s, timed
from tests.support.records import with_epochs

UPDATES = 44  # of an epoch of 1408 samples, on two nodes with batch 16
RATE = 200.0
DILOCO = ("--strategy", "diloco", "--sync_every", "10")
TO_ASK = ("--nodes", "2", "--link", "20ms/200mbit", "--target", "accuracy=0.9")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Runs on one machine."""
    for batch in (8, 16, 32):
        timed(tmp_path, batch)
    timed(tmp_path, 16, 1, 2)
    return tmp_path


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("plan", capsys)


@pytest.fixture
def predicted(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("predict", capsys)


def over(
    root: Path, delay_ms: float, *flags: str, epochs: int = 1, wall_s: float = 30.0,
    accuracy: float = 0.95, emulated: bool = False, **more: Any,
) -> Path:  # fmt: skip
    """A run of two nodes whose every epoch has this accuracy; wall_s: until the first ends."""
    folder = timed(
        root / f"{delay_ms}_{epochs}", 16, 2, 1, *flags, "--epochs", str(epochs),
        link=measured(delay_ms, RATE, 1.0), updates=UPDATES * epochs, **more,
    )  # fmt: skip
    rows = [{"epoch": n + 1.0, "updates": UPDATES * (n + 1), "accuracy": accuracy,
             "wall_s": (n + 1) * wall_s} for n in range(epochs)]  # fmt: skip
    if emulated:
        changed(folder, launch={"launcher": "netns"})
    return with_epochs(folder, rows)


def test_a_training_of_other_epochs_is_corrected_alike(records: Path, plan: Verb) -> None:
    """This machine timed two epochs alone; another one four as well."""
    for delay_ms in (10.0, 40.0):
        over(records, delay_ms, epochs=2, step_s=0.5 + delay_ms / 100)
    over(records, 20.0, epochs=4, machine="b-cpux2")
    choices = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    assert [(each["links"], each["extrapolated"]) for each in choices] == [(2, False)] * 2
    steps_s = [each["parts_s"]["steps"] for each in choices]
    assert steps_s[0] == pytest.approx(steps_s[1])
    assert UPDATES * 0.6 < steps_s[0] < UPDATES * 0.9
    assert "extrapolated" not in plan(records, *TO_ASK)
    # Nor does a ratio depend on how often runs of other lengths exchange.
    model = fit_records(str(records), Overrides()).model
    for epochs in (1, 3):
        updates = UPDATES * epochs
        scenario = Scenario(Shape(2), 16, wire_of(Link(20.0, RATE)), "diloco", sync_every=10,
                            epoch_updates=UPDATES, updates=updates)  # fmt: skip
        over(records, 20.0, *DILOCO, epochs=epochs, step_s=1.3 * predict(model, scenario).step_s)
    fitted = fit_records(str(records), Overrides())
    apart = [run for run in fitted.selected if run.identity["strategy"] == "diloco"]
    assert [*ratios_of(fitted, apart).by_link.values()] == pytest.approx([math.log(1.3)])


def test_the_recommendation_says_that_it_is_extrapolated(records: Path, plan: Verb) -> None:
    over(records, 20.0, machine="b-cpux2")
    text = plan.in_one_line(records, *TO_ASK)
    assert "over 20ms/200mbit, extrapolated by the model alone; its steps are" in text
    slow = json.loads(plan(records, *TO_ASK, "--json"))["choices"][0]["wall_s"]
    over(records, 10.0, *DILOCO, epochs=2, wall_s=3.0, step_s=planted_s(16))
    text = plan.in_one_line(records, *TO_ASK)
    assert "take diloco h10, batch 16 on 2_1, --exchange backend: " in text
    assert "over 20ms/200mbit, extrapolated; its steps are" in text
    assert "% waiting, extrapolated by the model alone); without" in text
    fast = json.loads(plan(records, *TO_ASK, "--json"))["choices"][0]["wall_s"]
    assert fast < slow / 1.1


def test_what_was_measured_over_the_link_stands_beside_the_plan(records: Path, plan: Verb) -> None:
    """As planned diloco is faster, as measured ddp."""
    for seed, wall_s in ((1, 30.0), (2, 32.0)):
        over(records, 20.0, wall_s=wall_s, seed=seed, step_s=0.5)
    over(records, 20.0, *DILOCO, wall_s=40.0, step_s=0.1)
    choices = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    named = {each["strategy"]: each for each in choices}
    assert [*named] == ["diloco", "ddp"]
    assert sorted(named["ddp"]["measured_wall_s"]) == [30.0, 32.0]
    text = plan.in_one_line(records, *TO_ASK)
    ddp, diloco = (float(f"{named[each]['wall_s']:.3g}") for each in ("ddp", "diloco"))
    assert (
        f"measured over this link: ddp, batch 16 on 2_1: 31 s, mean of 2 runs (planned {ddp:g} s) "
        f"diloco h10, batch 16 on 2_1: 40 s, mean of 1 run (planned {diloco:g} s) by these means "
        "ddp, batch 16 on 2_1 is faster than diloco h10, batch 16 on 2_1 "
    ) in text
    assert "measured over this link" not in plan(records, *TO_ASK, "--link", "30ms/200mbit")
    # Emulated nodes and real ones are not mixed.
    over(records / "emulated", 20.0, wall_s=90.0, emulated=True, seed=3)
    text = plan.in_one_line(records, *TO_ASK)
    assert "ddp, batch 16 on 2_1: 31 s, mean of 2 runs" in text
    compare = "over this link on {} nodes: {} --emulated to compare with them"
    assert f"1 run of these {compare.format('emulated', 'give')}" in text
    text = plan.in_one_line(records, *TO_ASK, "--emulated")
    assert "measured over this link: ddp, batch 16 on 2_1: 1 min 30 s, mean of 1 run" in text
    assert f"3 runs of these {compare.format('real', 'leave out')}" in text


def test_runs_that_a_prediction_is_not_compared_with_are_named(
    records: Path, predicted: Verb
) -> None:
    """Emulated ones, and ones of another exchange, directly below the time; the flags compare."""
    asked = (records, "--setup", "2_1", "--link", "20ms/200mbit", "--batch", "16")
    by_backend = ("--exchange", "backend")
    assert "measured     " not in predicted(*asked)
    for seed, step_s in ((1, 0.2), (2, 0.3)):
        over(records, 20.0, seed=seed, step_s=step_s, emulated=True)
    below = "measured     250 ms, mean of 2 runs"
    flags = "--exchange backend --emulated"
    line = f"  {below} with --exchange backend on emulated nodes: {flags} compares with them"
    for way in (by_backend, ("--exchange", "direct"), ("--exchange", "direct", "--emulated")):
        lines = predicted(*asked, *way, "--sharing", "0.1").splitlines()
        (step,) = [n for n, text in enumerate(lines) if text.startswith("  step time")]
        assert lines[step + 1] == line
    assert f"{below}: the prediction is off by" in predicted(*asked, *by_backend, "--emulated")
    assert "on emulated nodes" not in predicted(*asked, *by_backend, "--emulated")
    over(records, 20.0, seed=3, step_s=0.4)
    assert "measured     400 ms, mean of 1 run: the" in predicted(*asked, *by_backend)


def test_a_real_link_is_named_where_emulated_nodes_are_asked_for(
    records: Path, predicted: Verb
) -> None:
    over(records, 20.0, step_s=0.4)
    asked = (records, "--setup", "2_1", "--link", "20ms/200mbit", "--batch", "16", "--emulated")
    text = predicted(*asked, "--exchange", "backend")
    flags = "--exchange backend without --emulated"
    assert f"400 ms, mean of 1 run with --exchange backend on real nodes: {flags} compares" in text


def test_the_two_times_of_plan_and_predict_are_explained(
    records: Path, plan: Verb, predicted: Verb
) -> None:
    asked = (records, "--setup", "2_1", "--link", "20ms/200mbit")
    alone = "note: these are the model's times; plan multiplies those of steps by measured"
    assert alone not in predicted(*asked)
    over(records, 20.0)
    assert alone in predicted(*asked)
    text = "times of steps are the model's, which predict gives, multiplied by measured / modelled"
    assert text in plan.in_one_line(records, *TO_ASK)


FSDP = ("--strategy", "fsdp")


def test_a_target_that_none_reached_is_the_reason(records: Path, plan: Verb) -> None:
    """Also where one that missed it cannot be predicted either; the best value is named."""
    over(records, 20.0, accuracy=0.91, seed=1)
    over(records, 20.0, "--strategy", "hivemind", accuracy=0.9167, seed=2)
    text = plan.refused(records, *TO_ASK[:-1], "accuracy=0.99")
    assert (
        "error: accuracy at least 0.99: on 2 nodes no strategy and period reached it in every run; "
        "the best epoch has 0.9167: measure more --epochs"
    ) in text
    answer = json.loads(plan(records, *TO_ASK[:-1], "accuracy=0.91", "--json"))
    assert answer["missed"] == []
    assert answer["left_out"] == ["hivemind on 2_1: hivemind is not modelled"]


def test_the_layers_of_a_model_of_ours_are_known(
    records: Path, plan: Verb, predicted: Verb
) -> None:
    """Three of vit-nano; of another model --blocks tells them."""
    over(records, 20.0, *FSDP, step_s=0.7)
    (choice,) = json.loads(plan(records, *TO_ASK, "--json"))["choices"]
    assert (choice["strategy"], choice["links"]) == ("fsdp", 1)
    assert choice["parts_s"]["steps"] == pytest.approx(UPDATES * 0.7)
    asked = (records, "--setup", "2_1", "--link", "20ms/200mbit", "--batch", "16", *FSDP)
    text = predicted(*asked)
    assert "measured     700 ms, mean of 1 run: " in text
    assert text == predicted(*asked, "--blocks", "3") != predicted(*asked, "--blocks", "6")
    for file in records.rglob("settings.json"):
        file.write_text(file.read_text().replace("vit-nano", "someone/vit"))
    unknown = "gathers layer by layer, and how many there are is in no record: "
    assert f"{unknown}predict and plan take --blocks" in plan.refused(records, *TO_ASK)
    assert f"{unknown}give --blocks" in predicted.refused(*asked)
    (same,) = json.loads(plan(records, *TO_ASK, "--blocks", "3", "--json"))["choices"]
    assert same["parts_s"] == choice["parts_s"]


def test_how_sure_the_head_of_a_prediction_is(tmp_path: Path, predicted: Verb) -> None:
    """The cost of sharing a machine has its runs, disturbed ones and interval."""
    busy = {"launch": {"cpu_busy_share": 0.9}}
    timed(tmp_path, 16)
    changed(timed(tmp_path, 16, seed=2), **busy)
    changed(timed(tmp_path, 16, 1, 2, step_s=1.9 * planted_s(16)), **busy)
    asked = (tmp_path, "--setup", "1_1")
    text = predicted.in_one_line(*asked)
    assert "fitted on 2 runs on one machine (1 disturbed left out)" in text
    assert "residuals: none, as no run is repeated" in text
    slower = "each additional process on a machine makes all of them"
    assert f"{slower} 90 % slower (of 1 run, 1 disturbed, which may have slowed them more)" in text
    assert (
        "assumed: 1 of 2 runs were disturbed (others used more than 25% of the cores), and count "
        "as if they had run alone: no run of their set-up and batch is quiet"
    ) in text
    given = predicted.in_one_line(*asked, "--sharing", "0.1")
    assert f"{slower} 10 % slower gradient" in given
    timed(tmp_path, 16, seed=3, step_s=1.02 * planted_s(16))
    for seed, times in ((2, 1.1), (3, 1.3)):
        timed(tmp_path, 16, 1, 2, seed=seed, step_s=times * 1.01 * planted_s(16))
    text = predicted.in_one_line(*asked)
    assert "residuals by batch, of single runs: 16: -1.0%, 16: +1.0%" in text
    # Student's t of one degree of freedom makes 12.706 x 0.1 of a mean of 0.2.
    assert f"{slower} 20 % slower (of 2 runs, 95 % interval 0 to 147 %)" in text
