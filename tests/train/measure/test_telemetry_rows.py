"""Telemetry in the records of real runs; devices are those of a stand-in for the driver."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core.records import RunFolder, read_rows
from harness.core.topology import World
from harness.train.measure import telemetry
from harness.train.measure.telemetry import Telemetry
from tests.support.broken_runs import only_run
from tests.support.ranks import ranks
from tests.support.recorded import environment_of, rows_of, summary_of, trainer_for
from tests.support.sweeps import untimed_rows
from tests.support.toys import CPU, Net, Points, ours

WATTS = 250
# In the place of NVML, for the process that looks: one card that takes 250 W all the time.
DRIVER = f"""
import time
class NVMLError(Exception): ...
class NVMLError_NotSupported(NVMLError): ...
NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_CLOCK_MEM = 0
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetHandleByUUID = lambda uuid: uuid
nvmlDeviceGetPowerUsage = lambda device: {WATTS} * 1000
nvmlDeviceGetTotalEnergyConsumption = lambda device: time.monotonic() * {WATTS} * 1000
nvmlDeviceGetTemperature = lambda device, which: 50
nvmlDeviceGetClockInfo = lambda device, which: 1000
nvmlDeviceGetCurrentClocksThrottleReasons = lambda device: 0
nvmlClocksThrottleReasonSwPowerCap = nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 1
nvmlClocksThrottleReasonHwSlowdown = nvmlClocksThrottleReasonHwThermalSlowdown = 2
nvmlClocksThrottleReasonSwThermalSlowdown = 4
def nvmlDeviceGetUtilizationRates(device):
    raise NVMLError_NotSupported("not supported")
class nvmlDeviceGetMemoryInfo:
    used = 2**30
    def __init__(self, device): ...
"""


def trained_with_a_card(folder: str, lost: bool = False) -> None:
    """A script of anybody's that trains on one card, as far as its recorder knows."""
    telemetry.uuids = lambda devices: ["GPU-one"]  # type: ignore[assignment]
    trainer = trainer_for(folder)
    recorder = trainer.callback_handler.callbacks[-1]
    if lost:
        begin = recorder.on_epoch_begin

        def without(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begin(args, state, control, **kwargs)
            if state.epoch >= 1:
                recorder.telemetry.sampler.process.kill()

        recorder.on_epoch_begin = without
    trainer.train()
    assert recorder.telemetry.sampler.process.poll() is not None


@pytest.fixture
def with_driver(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "pynvml.py").write_text(DRIVER)
    return {"PYTHONPATH": str(tmp_path / "driver"), **CPU}


@pytest.mark.process
def test_energy_is_what_the_counter_grew_between_the_edges_of_an_epoch(
    tmp_path: Path, with_driver: dict[str, str]
) -> None:
    folder = tmp_path / "record"
    ranks(1, trained_with_a_card, str(folder), env=with_driver)
    rows = rows_of(folder)
    raw = [json.loads(line) for line in (folder / "telemetry" / "node_0.jsonl").open()]
    energy = [reading["gpus"][0]["energy_j"] for reading in raw]
    assert energy == sorted(energy)
    for row in rows:
        # The edges lie around the epoch's time, and there is nothing else in between.
        assert WATTS * row["epoch_time_s"] <= row["energy_j"] < energy[-1] - energy[0]
        assert any(
            row["energy_j"] == pytest.approx(b - a, abs=1e-6) for a in energy for b in energy
        )
        assert row["gpu"]["power_w"] == {"mean": WATTS, "p95": WATTS, "max": WATTS}
        assert row["gpu"]["memory_gib"]["max"] == 1 and row["gpu"]["utilisation_percent"] is None
    summary = summary_of(folder)
    assert summary["energy_j"] == pytest.approx(sum(row["energy_j"] for row in rows))
    assert summary["joules_per_sample"] == pytest.approx(summary["energy_j"] / 32)
    environment = environment_of(folder)
    assert environment["idle_power_w"] == WATTS
    assert environment["telemetry_missing"]["utilisation_percent"] == "NVML: not supported"


@pytest.mark.process
def test_a_run_goes_on_without_the_process_that_looks(
    tmp_path: Path, with_driver: dict[str, str]
) -> None:
    folder = tmp_path / "record"
    ranks(1, trained_with_a_card, str(folder), True, env=with_driver)
    first, second = rows_of(folder)
    assert first["energy_j"] > 0
    assert second["energy_j"] is second["gpu"] is second["node"] is None
    summary = summary_of(folder)
    assert summary["outcome"] == "finished" and summary["energy_j"] is None


def with_and_without_telemetry(folder: str) -> None:
    for hz in ("0", "20"):
        net, test = Net(dropout=0.3, train_s=0.02), Points(9, draw=1)
        flags = ["--epochs=2", f"--telemetry_hz={hz}"]
        trainer, run = ours(f"{folder}/{hz}", net, Points(64), test, *flags)
        run.train(trainer)


@pytest.mark.process
def test_telemetry_does_not_change_results(tmp_path: Path) -> None:
    ranks(2, with_and_without_telemetry, str(tmp_path), env=CPU)
    result = {hz: only_run(tmp_path / hz) for hz in ("0", "20")}
    assert untimed_rows(result["0"]) == untimed_rows(result["20"])
    on, off = (rows_of(result[hz].path) for hz in ("20", "0"))
    for row in on:
        assert row["gpu"] is None and row["node"]["memory_gib"]["mean"] > 0
        assert row["node"]["cpu_percent"]["max"] > 0
    assert all(row["node"] is None for row in off)
    by_rank = [read_rows(result["20"].rank(rank))[0][0] for rank in range(2)]
    assert ["telemetry" in row for row in by_rank] == [True, False]  # one looks on each node
    assert result["20"].telemetry(0).is_file() and not result["0"].telemetry(0).exists()
    without, sampled = (environment_of(result[hz].path) for hz in ("0", "20"))
    assert without["telemetry_missing"] == {"all": telemetry.OFF}
    assert sampled["telemetry_hz"] == 20 and "gpu" in sampled["telemetry_missing"]
    assert result["0"].path.name == result["20"].path.name  # the same experiment


def resumes(rank: int, measured: list[Any] | None, other: bool = False) -> Telemetry:
    """A recorder's part of a run that goes on inside an epoch; two nodes of one process."""
    epoch = {"samples": 8, "measured": measured}
    run: Any = SimpleNamespace(
        sampler=None, settings=SimpleNamespace(telemetry_hz=1.0), epoch_so_far=epoch,
        world=World(nodes=2, rank=rank), is_rank0=rank == 0,
        other_processes=other,
    )  # fmt: skip
    return Telemetry(run, run.world, 1)


@pytest.mark.parametrize(
    ("measured", "other", "before"),
    [
        ([{"energy_j": 5.0}, {"energy_j": 7.0}], False, [5.0, 7.0]),
        ([{"energy_j": 5.0}, {"energy_j": None}], False, [5.0, None]),
        ([{"energy_j": 5.0}, {"energy_j": 7.0}], True, [12.0, 0.0]),
        ([None, None], True, [None, 0.0]),
        (None, False, [None, None]),
    ],
)
def test_energy_before_a_checkpoint_counts_once(
    measured: list[Any] | None, other: bool, before: list[float | None]
) -> None:
    assert [resumes(rank, measured, other).before for rank in range(2)] == before


def test_a_broken_off_epoch_has_the_energy_of_both_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one: Any = resumes(0, [{"energy_j": 5.0}, None])
    seen = {"gpus": [{"energy_j": 2.0}], "node": {}, "processors": {}}
    one.sampler = SimpleNamespace(uuids=["a"], edge=lambda: seen, peek=lambda: seen)
    assert one.state() == 7.0
    assert one.rank_fields(0)["telemetry"]["energy_j"] == 7.0
    assert one.rank_fields(0)["telemetry"]["energy_j"] == 2.0  # the next epoch is whole
    one.sampler = SimpleNamespace(edge=lambda: None, peek=lambda: None)
    assert one.state() is None and one.rank_fields(0) == {"telemetry": None}


def test_a_device_of_several_emulated_nodes_counts_once() -> None:
    nodes: list[Any] = [resumes(rank, [{"energy_j": 1.0}, {"energy_j": 0.0}]) for rank in (0, 1)]
    seen = {"missing": {}, "lowest_power_w": 50.0, "node": {}, "processors": {}}
    devices: list[dict[str, Any]] = [{"a": 2.0}, {"a": 2.0, "b": 4.0}]
    rows: list[dict[str, Any]] = []
    for rank, (node, own) in enumerate(zip(nodes, devices, strict=True)):
        summary = {**seen, "gpus": [{"energy_j": joules} for joules in own.values()]}
        node.sampler = SimpleNamespace(
            uuids=[*own], keep=lambda file: None,
            edge=lambda summary=summary: summary, peek=lambda summary=summary: summary,
        )  # fmt: skip
        rows.append({"missing": {}, "idle_power_w": 50.0, "uuids": [*own]})
        node.gather = lambda row: [*rows, {}][:2]
        node.open(RunFolder(Path(f"run{rank}")))
    assert [node.state() for node in nodes] == [3.0, 4.0]
    told = [node.rank_fields(0)["telemetry"]["energy_j"] for node in nodes]
    assert told == [3.0, 4.0]
    nodes[1].shared = frozenset("ab")
    assert nodes[1].state() == 0.0  # all of its devices count elsewhere
    rows[1]["uuids"] = ["a"]
    assert nodes[1].facts()["idle_power_w"] == 50.0


@pytest.mark.parametrize(
    ("number", "kept"), [(0, ["node_0.jsonl"]), (1, []), (2, ["node_1.jsonl"])]
)
def test_of_peers_on_a_node_one_writes_its_file_and_none_knows_the_power_of_all(
    number: int, kept: list[str]
) -> None:
    files: list[str] = []
    summary = {"missing": {}, "lowest_power_w": 50.0}
    context: Any = SimpleNamespace(
        sampler=SimpleNamespace(
            uuids=["a"], keep=lambda file: files.append(file.name), edge=lambda: summary
        ),
        settings=SimpleNamespace(telemetry_hz=1.0), epoch_so_far={},
    )  # fmt: skip
    peer = Telemetry(context, World(nodes=2, per_node=2, rank=number), 1, lambda row: [row])
    peer.open(RunFolder(Path("run")))
    assert files == kept and peer.facts()["idle_power_w"] is None
