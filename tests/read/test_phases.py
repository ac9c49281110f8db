"""What a run takes beside its steps: planted times and delays are found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.collectives import Shape, Wire
from harness.core.records import RunFolder
from harness.read.predict.lossy.tcp import CUBIC
from harness.read.predict.phases import (
    EPOCH_END,
    EVALUATION,
    SAVING,
    START,
    fit_phases,
)
from harness.read.records.runs import Run

STEP_S, UPDATES, EPOCHS = 0.5, 44, 3
# fixed seconds and delays
PLANTED = {START: (0.3, 40), EVALUATION: (0.1, 24), SAVING: (0.05, 18), EPOCH_END: (0.02, 4)}


def run_of(delay_s: float, factor: float = 1.0, **measures: float) -> Run:
    """Three epochs as planted; the first eight steps are not timed, and as long as the others."""
    takes = {name: factor * (fixed + n * delay_s) for name, (fixed, n) in PLANTED.items()}
    probe_s = 9.7 if delay_s else 0.0
    rows: list[Any] = []
    wall_s = takes[START] + probe_s
    for epoch in range(EPOCHS):
        if epoch:
            wall_s += takes[SAVING] + takes[EPOCH_END]
        wall_s += STEP_S * UPDATES + takes[EVALUATION]
        timed = UPDATES - (0 if epoch else 8)
        rows.append({"updates": (epoch + 1) * UPDATES, "timed_steps": timed, "wall_s": wall_s,
                     "timed_s": timed * STEP_S, "eval_time_s": takes[EVALUATION]})  # fmt: skip
    found = {"epochs_done": EPOCHS, "eval_time_s": EPOCHS * takes[EVALUATION],
             "save_time_s": EPOCHS * takes[SAVING], "attempts": 1, **measures}  # fmt: skip
    link = {"took_s": probe_s} if delay_s else None
    return Run({}, None, "finished", None, RunFolder.at(Path("none")), environment={"link": link},
               measures=found, epochs=tuple(rows))  # fmt: skip


def test_planted_phases_are_found() -> None:
    two = Shape(2)
    runs = [(two, Wire(delay_s), run_of(delay_s)) for delay_s in (0.001, 0.02, 0.08)]
    phases = fit_phases(runs)
    for name, (fixed_s, delays) in PLANTED.items():
        found = phases.of[two][name]
        assert (found.fixed_s, found.delays) == pytest.approx((fixed_s, delays)), name
        assert found.spread == pytest.approx(0, abs=1e-6) and found.freedom == 1
    over = phases.at(two, Wire(0.04), CUBIC)
    assert over[EVALUATION].fixed_s == pytest.approx(0.1 + 24 * 0.04)
    assert over[START].fixed_s == pytest.approx(0.3 + 40 * 0.04)  # without measuring
    # Of four nodes nothing was recorded: what two took is the nearest, but they share the test set.
    assert phases.recorded(Shape(4)) == two
    four = phases.at(Shape(4), Wire(0.04), CUBIC)
    assert four[EVALUATION].fixed_s == pytest.approx(0.1 / 2 + 24 * 0.04)
    assert {**four, EVALUATION: over[EVALUATION]} == over


def test_an_epoch_without_an_evaluation_has_none_to_subtract() -> None:
    """LogCallback alone records what its script evaluates."""
    whole = run_of(0.02)
    rows: tuple[Any, ...] = tuple(
        {name: value for name, value in row.items() if name != "eval_time_s"}
        for row in whole.epochs
    )
    run = replace(whole, epochs=rows, measures={**whole.measures, "eval_time_s": 0.0})
    found = fit_phases([(Shape(2), Wire(0.02), run)]).of[Shape(2)]
    assert EVALUATION not in found
    evaluation_s = 0.1 + 24 * 0.02
    assert found[START].fixed_s == pytest.approx(0.3 + 40 * 0.02 + evaluation_s)


def test_repeats_over_a_measured_link_are_one_link() -> None:
    noise = (0.98, 1.0, 1.02)
    runs = [(Shape(2), Wire(delay_s * n, 25e6 * n), run_of(delay_s, n))
            for delay_s in (0.001, 0.02, 0.08) for n in noise]  # fmt: skip
    phases = fit_phases(runs)
    assert {each.freedom for each in phases.of[Shape(2)].values()} == {1}


def test_one_link_is_joined_with_one_machine() -> None:
    # One process evaluates the whole test set, each of two the half of it.
    runs = [(Shape(1), None, run_of(0.0, 2.0)), (Shape(2), Wire(0.02), run_of(0.02))]
    found = fit_phases(runs).of[Shape(2)][EVALUATION]
    assert (found.fixed_s, found.delays) == pytest.approx((0.1, 24)) and found.spread is None
    alone = fit_phases(runs[1:]).of[Shape(2)][EVALUATION]
    assert (alone.fixed_s, alone.delays) == (pytest.approx(0.1 + 24 * 0.02), 0)
    # Of this time nobody knows what the link has taken.
    four = fit_phases(runs[1:]).at(Shape(4), Wire(0.02), CUBIC)[EVALUATION]
    assert four.fixed_s == pytest.approx(0.1 + 24 * 0.02)
    runs[0] = (Shape(1), None, run_of(0.0))  # what is not shared is the same on one machine
    found = fit_phases(runs).of[Shape(2)][SAVING]
    assert (found.fixed_s, found.delays) == pytest.approx((0.05, 18))


def test_without_a_link_messages_of_this_version_count() -> None:
    """An evaluation is one round trip, a save two messages; the test set is shared by all."""
    phases = fit_phases([(Shape(1), None, run_of(0.0)), (Shape(2), None, run_of(0.02))])
    assert phases.recorded(Shape(4)) is None
    found = phases.at(Shape(4), Wire(0.02), CUBIC)
    assert found[EVALUATION].fixed_s == pytest.approx(0.1 / 4 + 2 * 0.02)
    assert found[SAVING].fixed_s == pytest.approx(0.05 + 2 * 0.02)
    assert found[START].fixed_s == pytest.approx(0.3)
    assert phases.at(Shape(1, 2), Wire(), CUBIC)[EVALUATION].fixed_s == pytest.approx(0.05)


def test_a_restarted_run_has_no_start_of_its_own() -> None:
    phases = fit_phases([(Shape(2), Wire(0.02), run_of(0.02, attempts=2))])
    assert set(phases.of[Shape(2)]) == {EVALUATION}
    # One median a link, whatever a disturbed run took.
    runs = [(Shape(2), Wire(0.02), run_of(0.02, factor)) for factor in (1.0, 1.0, 9.0)]
    assert fit_phases(runs).of[Shape(2)][SAVING].fixed_s == pytest.approx(0.05 + 18 * 0.02)


def test_quiet_runs_are_preferred_over_each_link_alone() -> None:
    """Nothing that one link's quiet run says is known of the other links or of one machine."""
    busy = {"launch": {"cpu_busy_share": 0.9}}
    near, far = Wire(0.001), Wire(0.08)
    runs = [(Shape(1), None, run_of(0.0)), (Shape(2), far, run_of(0.08))]
    for wire, factor in ((near, 1.0), (far, 7.0)):
        slow = run_of(wire.delay_s, factor)
        runs += [(Shape(2), wire, replace(slow, environment=slow.environment | busy))] * 2
    phases = fit_phases(runs)
    found = phases.of[Shape(2)][START]
    assert (found.fixed_s, found.delays) == pytest.approx(PLANTED[START])
    assert [run.is_beside_others for run in phases.over_links].count(True) == 2
    assert len(phases.over_links) == 3
