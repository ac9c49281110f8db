"""Times, rates and energy are those that are declared: a script's own metric is none of them."""

from __future__ import annotations

import json

import pytest

from harness.core.schema.checks import fields
from harness.read.measures import (
    DERIVED,
    FIELDS,
    MEMORY_FIRST,
    TO_TARGET,
    WALL_OF_TRAINING,
    is_timed,
    is_timed_or_memory,
)
from harness.read.records.sweeps import read_sweep
from tests.support.records import Plan, epochs, lines

UNITS = {"s", "ms", "1/s", "Mbit/s", "J", "W", "10^12 operations/s"}


@pytest.mark.parametrize(
    "own",
    [
        "minority_share", "latency_ms", "recall_w", "test_latency_ms", "images_per_s",
        "memory_recall", "joules_per_answer",
    ],
)  # fmt: skip
def test_a_metric_of_one_s_own_is_no_time_whatever_its_name(own: str) -> None:
    assert not is_timed(own) and not is_timed_or_memory(own)


@pytest.mark.parametrize("kind", ["summary", "epochs"])
def test_what_is_declared_in_units_of_time_is_timed(kind: str) -> None:
    of_units = {name for name, field in fields(kind).items() if field.kind.value.unit in UNITS}
    assert len(of_units) > 5 and all(map(is_timed, of_units))
    assert not any(map(is_timed, ("accuracy", "eval_loss", "updates", "samples", "unix")))
    assert all(map(is_timed, ("mfu", "comm_share", "compute_skew", "gpu_utilisation_percent")))


def test_what_is_derived_from_times_is_timed() -> None:
    assert {name for name in DERIVED if is_timed(name)} == {
        *FIELDS, WALL_OF_TRAINING, *TO_TARGET[:2],
    }  # fmt: skip
    assert is_timed_or_memory("peak_memory_gib") and is_timed_or_memory(MEMORY_FIRST)
    assert not is_timed("peak_memory_gib") and is_timed("epoch_time_s")


def test_an_own_metric_counts_in_disturbed_runs_and_once_a_seed(plan: Plan) -> None:
    busy = {"launch": {"cpu_busy_share": 0.9}}
    cases = ((1, 1, 0.25, None), (1, 2, 0.75, None), (2, 1, 0.125, busy), (3, 1, 0.375, None))
    for seed, repeat, share, environment in cases:
        own = {"minority_share": share, "latency_ms": 8 * share}
        folder = plan.run(
            seed=seed, epochs=[row | own for row in epochs(0.5)], environment=environment,
            label={"repeat": repeat}, **own,
        )  # fmt: skip
    # The last ran in a smaller batch than it was asked for.
    (folder / "settings.json").write_text(json.dumps({"schema": 1, "per_gpu_batch": 4}))
    start = {"event": "start", "attempt": 1, "unix": 1.0, "from_update": 0, "per_gpu_batch": 2}
    lines(folder / "attempts.jsonl", [start])
    (group,) = read_sweep(plan.write()).groups
    assert group.values("minority_share") == [0.5, 0.125, 0.375]
    assert group.values("latency_ms") == [4.0, 1.0, 3.0]
    assert group.values("wall_s") == [40.0, 40.0]  # of the quiet runs in the batch asked for
