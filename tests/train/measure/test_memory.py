"""Peak memory by device: the first GPU of DataParallel holds more than the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.train.measure.resources import GIB, Memory, peak_memory_gib, reset_peak_memory


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Four GPUs with what each has held; number 2 is the current one."""
    held = {0: 7.5, 1: 3.0, 2: 3.25, 3: 3.0}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda n: held[n] * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda n: held[n] * 2 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda n: held.update({n: 0.0}))
    return held


def test_a_process_with_one_gpu_has_one_figure(gpus: dict[int, float]) -> None:
    assert peak_memory_gib(cuda=True) == [3.25]
    reset_peak_memory(1)
    assert gpus == {0: 7.5, 1: 3.0, 2: 0.0, 3: 3.0}


def test_a_process_with_several_gpus_has_one_for_each(gpus: dict[int, float]) -> None:
    assert peak_memory_gib(cuda=True, devices=4) == [7.5, 3.0, 3.25, 3.0]
    reset_peak_memory(4)
    assert set(gpus.values()) == {0.0}


def test_a_row_lists_ranks_or_the_devices_of_the_one_rank() -> None:
    memory = Memory(cuda=True, devices=1)
    memory.own = [[2.0], None]
    ranks: list[dict[str, Any]] = [{"peak_memory_gib": 2.0}, {"peak_memory_gib": 3.0}]
    assert memory.run_fields(ranks, {})["peak_memory_gib_per_rank"] == [2.0, 3.0]
    memory.own = [[7.5, 3.0], None]
    several = memory.run_fields([{"peak_memory_gib": 7.5}], {})
    assert several["peak_memory_gib_per_rank"] == [7.5, 3.0]


@pytest.mark.parametrize("devices", [1, 4])
def test_the_peaks_of_an_epoch_are_without_what_does_not_count(
    gpus: dict[int, float], devices: int
) -> None:
    """Reserved is twice of what was allocated."""
    memory = Memory(cuda=True, devices=devices)
    memory.epoch_begins()
    gpus[2] = 3.0
    with memory.excluded():
        gpus[2] = 9.0
    gpus[2] = 2.0
    assert memory.rank_fields(0) == {"peak_memory_gib": 3.0, "reserved_memory_gib": 6.0}
    ranks = [{"peak_memory_gib": 3.0, "reserved_memory_gib": 6.0}]
    found = memory.run_fields(ranks, {})
    assert found["peak_memory_gib_per_rank"] == ([3.0] if devices == 1 else [0, 0, 3.0, 0])
    assert found["reserved_memory_gib_per_rank"] == ([6.0] if devices == 1 else [0, 0, 6.0, 0])
    memory.epoch_begins()
    assert memory.rank_fields(0) == {"peak_memory_gib": 0.0, "reserved_memory_gib": 0.0}


def test_a_cpu_reserves_nothing() -> None:
    memory = Memory(cuda=False, devices=1)
    memory.epoch_begins()
    with memory.excluded():
        pass
    row = memory.rank_fields(0)
    assert row["peak_memory_gib"] > 0 and row["reserved_memory_gib"] is None
    assert memory.run_fields([row, row], {}) == {
        "peak_memory_gib_per_rank": [row["peak_memory_gib"]] * 2,
        "reserved_memory_gib_per_rank": None,
    }


def test_without_gpu_it_is_the_memory_of_the_process() -> None:
    (before,) = peak_memory_gib(cuda=False)
    filled = bytearray(b"x" * (256 * 2**20))
    (after,) = peak_memory_gib(cuda=False)
    assert 0 < before <= after < before + 1 and len(filled) == 2**28
