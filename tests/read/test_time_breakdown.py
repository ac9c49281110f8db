"""The parts of a run add up to it, whatever its ranks and other programs have done."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from harness.core.settings import UserError
from harness.read.explain.causes import _outside, seconds
from harness.read.explain.context import run_context
from harness.read.explain.explain import explain
from harness.read.explain.time_breakdown import (
    COMMUNICATION,
    COMPUTE,
    DATA,
    IN_STEP,
    STRAGGLERS,
    UNSEPARATED,
    TimeBreakdown,
    _from_ranks,
    time_breakdown,
)
from harness.read.records.selection import read_group
from tests.support.explained import TIMES, written
from tests.support.records import with_ranks


def test_parts_of_a_disturbed_rank_add_up() -> None:
    """An epoch in which another rank was busy for longer than the first one's steps took."""
    ranks = [
        {"compute_s": 0.6, "comm_exposed_s": 0.34, "comm_wait_s": 0.1, "data_wait_s": 0.009},
        {"compute_s": 0.57, "comm_exposed_s": 0.497, "comm_wait_s": 0.25, "data_wait_s": 0.0},
    ]
    parts, slowest = _from_ranks(ranks, 0.949, 1.0)
    assert parts[DATA] == 0 and parts[COMPUTE] == pytest.approx(0.949 * 0.570 / 1.067)
    assert parts[STRAGGLERS] == pytest.approx(0.949 * 0.25 / 1.067)
    assert sum(value or 0.0 for value in parts.values()) == pytest.approx(0.949, rel=1e-12)
    assert slowest is not None and slowest.rank == 0
    # A rank whose own steps were shorter did not wait for data in the rest.
    ranks[1] = {"compute_s": 0.5, "comm_exposed_s": 0.3, "comm_wait_s": 0.2, "data_wait_s": 0.0}
    parts, _ = _from_ranks(ranks, 0.949, 1.0)
    assert parts == {
        COMPUTE: pytest.approx(0.949 * 5 / 8), DATA: pytest.approx(0, abs=1e-12),
        COMMUNICATION: pytest.approx(0.949 / 8), STRAGGLERS: pytest.approx(0.949 * 2 / 8),
    }  # fmt: skip


def test_a_delay_is_no_waiting_for_slower_ranks(tmp_path: Path) -> None:
    """Two nodes that send directly over 80 ms, in records with and without what that explains."""
    took = {"compute_s": 0.04, "comm_exposed_s": 0.6, "data_wait_s": 0.02}
    row = {"timed_s": 0.66, "epoch_time_s": 0.9}
    for way, observed, told in (
        ("direct", {}, False), ("all_to_all", {}, False), ("backend", {}, True),
        ("direct", {"exchange_early_s": 0.16}, True),
    ):  # fmt: skip
        facts = {"nodes": 2, "observed": {"device": "cpu", **observed}}
        folder = tmp_path / f"{way}{told}"
        path = written(folder, "--exchange", way, row=row, environment=facts)
        with_ranks(path, *({**took, "comm_wait_s": waited} for waited in (0.31, 0.3)))
        run = read_group("RUN", str(path), None)
        parts = time_breakdown(run.runs[0]).parts
        assert parts[UNSEPARATED] == 0.0
        assert sum(parts[name] or 0.0 for name in IN_STEP) == pytest.approx(0.165)
        assert (parts[STRAGGLERS] is not None) == told
        assert parts[COMMUNICATION] == pytest.approx(0.0725 if told else 0.15)
        text = " ".join(explain(run).sentences)
        assert "waiting for slower ranks takes" not in text or told
        said = "Not known from this record: waiting for slower ranks, which may be part of comm"
        assert (said in text) != told
        assert ("communication that overlaps no computing takes 150 ms" in text) != told


def test_the_steps_of_a_stream_have_unknown_samples(tmp_path: Path) -> None:
    """It was told to measure a longer run."""
    (run,) = read_group("x", str(written(tmp_path, row={"timed_samples": None})), None).runs
    with pytest.raises(UserError, match="does not know the samples of its steps"):
        time_breakdown(run)


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_any_ranks_add_up_to_the_run(seed: int, tmp_path: Path) -> None:
    """Also where no rank tells its parts, and where the timed steps were the slowest."""
    draw = random.Random(seed)
    train_s = draw.uniform(9, 11)
    row = {  # four of five updates are timed
        "timed_s": train_s * draw.choice([0.4, 0.75, 0.85, 0.95]), "epoch_time_s": train_s,
        "data_wait_share": draw.random(),
    }  # fmt: skip
    startup_s = draw.choice([0.0, 0.1, 5.0])
    wall_s = train_s + TIMES["eval_time_s"] + TIMES["save_time_s"] + startup_s
    path = written(tmp_path, row=row, wall_s=wall_s, comm_share=draw.random())
    _check_sum(time_breakdown(read_group("x", str(path), None).runs[0]), wall_s)
    ranks = []
    for _ in range(2):
        compute_s, exposed_s = draw.uniform(0.1, 6), draw.uniform(0, 6)
        more = {"data_wait_s": draw.choice([0.0, draw.uniform(0, 6)])}
        waited_s = draw.choice([0.0, 1.0, draw.random()]) * exposed_s
        ranks.append(more | {"compute_s": compute_s, "comm_exposed_s": exposed_s,
                             "comm_wait_s": waited_s})  # fmt: skip
    with_ranks(path, *ranks)
    group = read_group("x", str(path), None)
    result = time_breakdown(group.runs[0])
    assert result.parts[UNSEPARATED] == 0
    _check_sum(result, wall_s)
    text, _ = _outside(result, None, run_context(group, None))
    assert text.endswith(f"beside {seconds(train_s)} of training")


def _check_sum(result: TimeBreakdown, wall_s: float) -> None:
    known = {name: value for name, value in result.parts.items() if value is not None}
    assert min(known.values()) >= 0
    step_s = math.fsum(known.get(name, 0.0) for name in IN_STEP)
    assert step_s == pytest.approx(result.step_s, rel=1e-12)
    assert result.updates * math.fsum(known.values()) == pytest.approx(wall_s, rel=1e-12)
