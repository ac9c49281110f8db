"""What benchmarks/speed.py trains on a GPU: each case at its smallest, on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks import speed, speed_data
from benchmarks.recipes import task
from benchmarks.speed_cases import GPU_CASES, NANO, Case, arms_of
from benchmarks.speed_cases import task_of as fields_of
from harness.core.tasks import TASKS
from tests.support.calibrated import with_calibration

HEADS = {"num_attention_heads": 2}
SMALL: dict[str, dict[str, Any]] = {
    "bert": {**NANO, **HEADS},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "modernbert": {**NANO, **HEADS, "layer_types": ["full_attention", "sliding_attention"]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "vit": {**NANO, **HEADS},
}
ARMS = ["examples", "loop", "ideal", "ours"]  # no arm for a CPU, and none that compiles


def small(case: Case) -> Case:
    """The kind of model, data and format of a case, with as few weights and samples as it takes."""
    kind = TASKS[task.SCRIPTS[case.kind]].architectures[case.model]["model_type"]
    side = {} if case.image_size is None else {"image_size": min(case.image_size, 64)}
    files = {} if case.jpeg_px is None else {"jpeg_px": 48}
    return replace(
        case, train=32, test=16, batch=16, epochs=2, changed=SMALL[kind], **side, **files
    )  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("name", GPU_CASES)
def test_every_arm_begins_with_the_weights_that_are_prepared(name: str, tmp_path: Path) -> None:
    case = small(GPU_CASES[name])
    facts = speed_data.prepare(case, tmp_path, None)
    assert facts["gflop_per_sample"] > 0
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for arm in ("examples", "loop", "ours"):
        made = task.Task(**fields_of(case, arm, tmp_path, tmp_path / "out", []))
        # Under the names of a file, which are not always those of the layers.
        made.build(task.labels_of(made.load())).save_pretrained(tmp_path / arm)
        built = load_file(tmp_path / arm / "model.safetensors")
        assert built.keys() == saved.keys(), arm
        assert all(built[key].equal(value) for key, value in saved.items()), arm


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_case_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {name: small(case) for name, case in GPU_CASES.items()}
    monkeypatch.setattr(speed, "QUICK_CASES", cases)
    monkeypatch.setattr(speed, "call", with_calibration(speed.call))
    for name in (*speed.OFFLINE, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # and put back afterwards
    argv = ["--quick", "--rounds=1", f"--arms={','.join(ARMS)}", "--out", str(tmp_path)]
    code = speed.main(argv)
    record = json.loads((tmp_path / "speed.json").read_text())
    assert list(record["cases"]) == list(GPU_CASES)
    for name, case in cases.items():
        runs = {run["arm"]: run for run in record["cases"][name]["runs"]}
        assert set(runs) == set(arms_of(case, ARMS))
        for arm, run in runs.items():
            assert run["failed"] is None, (name, arm)
            assert run["fed"]["samples"] == case.train
            assert [epoch["updates"] for epoch in run["epochs"]] == [2, 2]
    assert code == 0, (tmp_path / "speed.md").read_text()
