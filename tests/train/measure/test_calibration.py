"""What the processor can do, measured every few hours, and what bf16 brings, tried beforehand."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.core.command_line import parse
from harness.train.measure import calibration
from harness.train.measure.calibration import bf16_gain
from harness.train.measure.flops import peak_of

KNOWN = {"fp32_tflops": 0.1, "bf16_tflops": 0.3, "memory_gb_per_s": 9.0, "threads": 1}


def test_a_machine_is_measured_once_in_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "SECONDS", 0.01)
    monkeypatch.setattr(calibration, "OWN_SHARE", 0)
    first = calibration.calibration()
    assert all(first[name] > 0 for name in KNOWN) and first["threads"] == torch.get_num_threads()
    assert time.time() - 60 < first["unix"] <= time.time()
    assert calibration.calibration() == first  # with the time of that measurement
    (file,) = tmp_path.glob("harness/*.json")
    written = json.loads(file.read_text())
    edited = {**written, "fp32_tflops": 90 * first["fp32_tflops"]}
    for damaged in ("{", "[]", json.dumps(first), json.dumps(edited)):
        file.write_text(damaged)
        assert 0 < calibration.calibration()["fp32_tflops"] < 45 * first["fp32_tflops"]
        assert set(json.loads(file.read_text())) == {*first, "checksum"}
    old_s = time.time() - calibration.FRESH_S
    os.utime(file, (old_s + 60, old_s + 60))
    known = json.loads(file.read_text())
    assert calibration.calibration() == {n: known[n] for n in known if n != "checksum"}
    os.utime(file, (old_s - 60, old_s - 60))  # another session
    calibration.calibration()
    assert file.stat().st_mtime > old_s + 60
    ahead_s = time.time() + calibration.FRESH_S + 60  # before the clock was set back
    os.utime(file, (ahead_s, ahead_s))
    calibration.calibration()
    assert file.stat().st_mtime < ahead_s - 60
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no folder")  # nothing can be cached
    assert calibration.calibration()["fp32_tflops"] > 0


def test_what_was_measured_beside_other_programs_is_unknown_and_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine is half as fast as it is alone: of two seconds its threads have one."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    walls, used, threads = iter(range(10**6)), [0.0], torch.get_num_threads()

    def process_time() -> float:
        used[0] += share * threads
        return used[0]

    clock = SimpleNamespace(
        perf_counter=lambda: float(next(walls)), process_time=process_time, time=time.time
    )
    monkeypatch.setattr(calibration, "time", clock)
    monkeypatch.setattr(calibration.torch, "mm", lambda *_: None)
    monkeypatch.setattr(calibration, "SLOW_S", 2)  # each product takes one second of this clock
    share = 0.5
    busy = calibration.calibration()
    assert busy["fp32_tflops"] is None is busy["bf16_tflops"] and busy["memory_gb_per_s"] > 0
    assert not list(tmp_path.rglob("*.json"))
    assert bf16_gain(nn.Linear(1, 1), dict, busy) is None
    share = 1.0
    alone = calibration.calibration()
    assert alone["fp32_tflops"] == pytest.approx(2 * 1024**3 / 1e12)
    assert alone == calibration.calibration() and list(tmp_path.rglob("*.json"))
    # A processor without a unit for a format would take seconds for a large product.
    monkeypatch.setattr(calibration, "SLOW_S", 1)
    assert calibration._measured()["bf16_tflops"] == pytest.approx(2 * 256**3 / 1e12)


def test_the_peak_of_a_processor_is_that_of_its_calibration() -> None:
    for precision, peak in (("fp32", 0.1), ("bf16", 0.3)):
        settings = parse("bert", ["--precision", precision], {})
        assert peak_of(settings, [KNOWN]) == (peak, "calibration")
    assert peak_of(parse("bert", ["--peak_tflops", "2"], {}), [KNOWN]) == (2, "flag")
    faster, busy = {**KNOWN, "fp32_tflops": 0.3}, {**KNOWN, "fp32_tflops": None}
    assert peak_of(parse("bert", [], {}), [KNOWN, faster])[0] == pytest.approx(0.2)
    assert peak_of(parse("bert", [], {}), [KNOWN, busy]) == (None, None)


class Passes(nn.Module):
    """As slow as it is told to be."""

    half_s = 0.1

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.passes = 0
        self.weight, self.clock, self.others_s = nn.Parameter(torch.ones(1)), clock, 0.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        in_half = torch.is_autocast_enabled("cpu")
        self.passes += 1
        self.clock[0] += self.half_s if in_half else 0.2 + self.others_s
        self.clock[1] += self.half_s if in_half else 0.2
        return {"loss": (self.weight * x).sum()}


def test_bf16_is_tried_where_the_processor_is_faster_in_it(monkeypatch: Any) -> None:
    clock = [0.0, 0.0]  # of the wall, and of the processor
    clocks = SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: clock[1])
    monkeypatch.setattr(calibration, "time", clocks)
    monkeypatch.setattr(calibration.probes, "twin", lambda model: model)
    model = Passes(clock)
    assert bf16_gain(model, lambda: {"x": torch.ones(1)}, KNOWN) == pytest.approx(2.0)
    assert model.weight.grad is None
    assert bf16_gain(model, lambda: {"y": torch.ones(1)}, KNOWN) is None  # it fails
    # Others took a third of the time of one of the two.
    model.others_s = 0.06
    assert bf16_gain(model, lambda: {"x": torch.ones(1)}, KNOWN) is None
    model.others_s = 0.0
    # The passes gain more than the products: others slowed one of the two.
    less = {**KNOWN, "bf16_tflops": 0.18}
    assert bf16_gain(model, lambda: {"x": torch.ones(1)}, less) is None
    slow = {**KNOWN, "bf16_tflops": 0.12}
    assert bf16_gain(model, lambda: {"x": torch.ones(1)}, slow) is None
    # It is clearly slower: two passes of each tell as much as four.
    model.passes, model.half_s = 0, 0.4
    assert bf16_gain(model, lambda: {"x": torch.ones(1)}, KNOWN) == pytest.approx(0.5)
    assert model.passes == 4
    model.passes, model.half_s = 0, 0.2
    assert bf16_gain(model, lambda: {"x": torch.ones(1)}, KNOWN) == pytest.approx(1.0)
    assert model.passes == 8
