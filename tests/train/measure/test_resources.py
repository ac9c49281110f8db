"""Processor time of all ranks and attempts, and peak memory by device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.core import attempts
from harness.core.attempts import write_summary
from harness.core.provenance import SHARED_GPUS
from harness.core.records import RunFolder, read_json, read_rows
from harness.core.topology import World
from harness.train.measure.environment import _recorded_launch, environment, processes_per_gpu
from harness.train.measure.resources import (
    CpuTime,
    Memory,
    counts_network,
    peak_memory_gib,
    reset_peak_memory,
)
from harness.train.measure.sampler import GIB
from tests.support.ranks import ranks
from tests.support.recorded import two_ranks
from tests.support.toys import CPU

BUSY = "import time\nwhile time.process_time() < {s}: pass"


def total(cpu: CpuTime) -> float:
    return sum(cpu.own().values())


@pytest.mark.process
def test_it_is_the_work_of_this_process_and_of_its_ended_children() -> None:
    busy = BUSY.format(s=time.process_time() + 0.2)
    cpu = CpuTime()
    began = time.process_time()
    exec(busy)
    assert total(cpu) == pytest.approx(time.process_time() - began, abs=0.03)
    time.sleep(0.2)  # waiting is no work
    assert total(cpu) == pytest.approx(time.process_time() - began, abs=0.03)
    before = total(cpu)
    child = subprocess.Popen([sys.executable, "-c", BUSY.format(s=0.3)])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # done, but not yet waited for
    assert total(cpu) - before < 0.15
    child.wait()
    assert total(cpu) - before > 0.25
    cpu.restart()
    assert total(cpu) < 0.1


def test_of_other_ranks_it_is_what_they_told_last() -> None:
    alone, many = CpuTime(is_single=True), CpuTime(is_single=False)
    assert alone.per_rank() == {f"{kind}_per_rank": [v] for kind, v in alone.own().items()}
    assert many.per_rank() == {"user_s_per_rank": None, "system_s_per_rank": None}
    many.report([{"user_s": 3.0, "system_s": 0.5, "rank": 0}, {"user_s": 4.0, "system_s": 1.0}])
    assert many.per_rank() == {"user_s_per_rank": [3.0, 4.0], "system_s_per_rank": [0.5, 1.0]}


def reported(user_s: list[float]) -> dict[str, list[float] | None]:
    return {"user_s_per_rank": user_s, "system_s_per_rank": [0.25] * len(user_s)}


def test_attempts_are_added_up_as_far_as_they_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert attempts.total_cpu_time(attempts.believed(folder)) == dict.fromkeys(
        ("user_s", "user_s_per_rank", "system_s", "system_s_per_rank")
    )
    attempts.begin(folder, update=0, processes=2)
    attempts.write_progress(folder, {"attempt": 1, "wall_s": 7.5, **reported([1.0, 2.0])})
    attempts.begin(folder, update=4, processes=2)  # the first was killed: what it told counts
    attempts.begin(folder, update=4, processes=2)  # so was the second, which had told nothing
    attempts.end(folder, "failed", "planted", 2.0, reported([10.0, 20.0]))
    attempts.begin(folder, update=4, processes=2)
    attempts.end(folder, "oom", "without a word of it", 2.0)
    result = {"user_s": 33.0, "user_s_per_rank": [11.0, 22.0], "system_s": 1.0}
    assert attempts.total_cpu_time(attempts.believed(folder)) == {
        **result,
        "system_s_per_rank": [0.5, 0.5],
    }
    write_summary(folder, "oom", "without a word of it")
    summary = read_json(folder.summary) or {}
    assert {name: summary[name] for name in result} == result
    attempts.begin(folder, update=4, processes=1)
    attempts.end(folder, "finished", None, 2.0, reported([5.0]))
    mixed = attempts.total_cpu_time(attempts.believed(folder))
    assert (mixed["user_s"], mixed["user_s_per_rank"]) == (38.0, None)


@pytest.mark.process
def test_processor_time_is_recorded_by_rank(tmp_path: Path) -> None:
    """LogCallback alone, on two ranks."""
    began = time.perf_counter()
    ranks(2, two_ranks, str(tmp_path / "record"), env=CPU)
    took_s = time.perf_counter() - began
    folder = RunFolder(tmp_path / "record")
    summary = read_json(folder.summary) or {}
    for kind in ("user_s", "system_s"):
        of_ranks = summary[f"{kind}_per_rank"]
        assert len(of_ranks) == 2 and summary[kind] == pytest.approx(sum(of_ranks))
        for rank, whole in enumerate(of_ranks):
            rows, _ = read_rows(folder.rank(rank))
            assert 0 <= rows[0][kind] <= rows[1][kind] <= whole
            assert "eval_accuracy" not in rows[0]  # that takes ExactTrainer
    assert 0 < summary["user_s"] + summary["system_s"] < 2 * took_s * (os.cpu_count() or 1)


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
    result = memory.run_fields(ranks, {})
    assert result["peak_memory_gib_per_rank"] == ([3.0] if devices == 1 else [0, 0, 3.0, 0])
    assert result["reserved_memory_gib_per_rank"] == ([6.0] if devices == 1 else [0, 0, 6.0, 0])
    memory.epoch_begins()
    assert memory.rank_fields(0) == {"peak_memory_gib": 0.0, "reserved_memory_gib": 0.0}


@pytest.mark.parametrize(
    ("launched", "nodes", "local_rank", "counts"),
    [
        (None, 2, 0, True), ('{"launcher": "netns"}', 2, 0, True), (None, 2, 1, False),
        (None, 1, 0, False), ('{"launcher": "local"}', 2, 0, False),
    ],
)  # fmt: skip
def test_one_process_of_a_node_reads_its_counter_where_it_has_one(
    launched: str | None, nodes: int, local_rank: int, counts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("HARNESS_LAUNCH", raising=False)
    if launched is not None:
        monkeypatch.setenv("HARNESS_LAUNCH", launched)
    world = World(nodes=nodes, per_node=2, local_rank=local_rank)
    assert counts_network(nodes, world) is counts


def test_what_harness_nodes_cannot_know_is_added_by_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How many processes share the cores: its command may start any number of them."""
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("WORLD_SIZE", str(3 * cores))
    for sweep, expected in ((None, 3.0), ("mine", None)):
        facts = {"sweep": sweep, "launcher": "netns", "processes_per_core": None}
        monkeypatch.setenv("HARNESS_LAUNCH", json.dumps(facts))
        assert environment()["launch"] == facts | {"processes_per_core": expected}


def test_nodes_that_share_a_gpu_are_told_to_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert processes_per_gpu() is None
    monkeypatch.setenv(SHARED_GPUS, "2")
    assert processes_per_gpu() == 1.5
    monkeypatch.setenv("HARNESS_LAUNCH", json.dumps({"sweep": None}))
    assert (_recorded_launch(1) or {})["processes_per_gpu"] == 1.5
    assert "processes_per_gpu" not in (_recorded_launch(0) or {})  # on the CPU


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
