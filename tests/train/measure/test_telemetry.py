"""What is read of devices and nodes, and how it is added up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from harness.core.provenance import RELAY
from harness.core.topology import World
from harness.train.measure import sampler as sensors
from harness.train.measure import telemetry
from harness.train.measure.processors import Processors
from harness.train.measure.sampler import READINGS, SLICE, Gpus, NodeSensors, Sampler, summarise
from harness.train.measure.telemetry import SamplerClient, merge_nodes

# ---- adding up ----


def test_what_grows_is_what_it_grew_and_all_else_is_mean_p95_and_max() -> None:
    readings = [
        {"power_w": 900.0, "energy_j": 10.0, "throttled": ["heat"]},  # where it begins
        *({"power_w": float(w), "energy_j": 10.0 + w, "throttled": []} for w in range(1, 20)),
        {"power_w": 100.0, "energy_j": 110.0, "throttled": ["power_cap"]},
    ]
    reading = summarise(readings)
    assert reading["energy_j"] == 100
    assert reading["power_w"] == {"mean": (sum(range(1, 20)) + 100) / 20, "p95": 19, "max": 100}
    assert reading["throttled"] == {"power_cap": 1 / 20}


def test_what_is_not_known_is_none() -> None:
    reading = summarise([
        {"power_w": None, "energy_j": None, "throttled": None},
        {"power_w": None, "energy_j": 5.0, "throttled": None},
    ])  # fmt: skip
    assert reading == {"power_w": None, "energy_j": None, "throttled": None}
    some = summarise([{"power_w": 1.0}, {"power_w": None}, {"power_w": 3.0}, {"power_w": 5.0}])
    assert some["power_w"] == {"mean": 4, "p95": 5, "max": 5}
    # A counter that began again from nothing: how much it grew is lost.
    assert summarise([{"energy_j": 7.0}, {"energy_j": 3.0}])["energy_j"] is None


# ---- devices ----


class Driver:
    """Two cards; the second is cut into slices, one of which is used, and tells no utilisation."""

    NVMLError, NVMLError_NotSupported = pynvml.NVMLError, pynvml.NVMLError_NotSupported
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    energy_mj = 5_000_000
    flaky = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlClocksThrottleReason"):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-one", "MIG-part"):
            raise pynvml.NVMLError_NotFound
        return uuid

    def nvmlDeviceGetUtilizationRates(self, device: str) -> Any:
        if device == "MIG-part":
            raise pynvml.NVMLError_NotSupported
        if self.flaky:
            raise pynvml.NVMLError_Unknown
        return SimpleNamespace(gpu=73)

    def nvmlDeviceGetMemoryInfo(self, device: str) -> Any:
        return SimpleNamespace(used=3 * 2**30)

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:
        return 412_500

    def nvmlDeviceGetTemperature(self, device: str, which: int) -> int:
        return 61

    def nvmlDeviceGetClockInfo(self, device: str, which: int) -> int:
        return {1: 1980, 2: 3201}[which]

    def nvmlDeviceGetTotalEnergyConsumption(self, device: str) -> int:
        self.energy_mj += 1500
        return self.energy_mj

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: str) -> int:
        return int(
            pynvml.nvmlClocksThrottleReasonSwPowerCap | pynvml.nvmlClocksThrottleReasonGpuIdle
        )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    reading = Driver()
    monkeypatch.setattr(sensors, "nvml", lambda: reading)
    return reading


def test_a_device_in_the_units_that_its_names_say(driver: Driver) -> None:
    gpus = Gpus(["GPU-one"])
    (reading,) = gpus.read()
    assert reading == {
        "utilisation_percent": 73, "memory_gib": 3, "power_w": 412.5, "temperature_c": 61,
        "sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "energy_j": 5001.5,
        "throttled": ["power_cap"],  # being idle is no throttling
    }  # fmt: skip
    assert gpus.missing == {} and reading.keys() == READINGS.keys()


def test_what_now_fails_is_asked_again(driver: Driver) -> None:
    gpus = Gpus(["one"])  # as CUDA names it
    driver.flaky = True
    assert gpus.read()[0]["utilisation_percent"] is None and gpus.missing == {}
    driver.flaky = False
    assert gpus.read()[0]["utilisation_percent"] == 73


def test_a_slice_of_a_card_has_memory_and_nothing_else(driver: Driver) -> None:
    gpus = Gpus(["part"])
    (reading,) = gpus.read()
    assert {name for name, value in reading.items() if value is not None} == {"memory_gib"}
    assert gpus.missing["energy_j"] == gpus.missing["power_w"] == SLICE
    assert "Not Supported" in gpus.missing["utilisation_percent"]


def test_no_driver_and_an_unknown_device_are_said(driver: Driver) -> None:
    unknown = Gpus(["GPU-other"])
    assert unknown.read() == [] and "Not Found" in unknown.missing["power_w"]
    assert Gpus([]).missing == {"gpu": "training uses no NVIDIA device"}


# ---- the node ----


def rapl(folder: Path, *counters: int) -> Path:
    for number, now in enumerate(counters):
        domain = folder / f"intel-rapl:{number}"
        (domain / "intel-rapl:0:0").mkdir(parents=True, exist_ok=True)
        (domain / "name").write_text(f"package-{number}\n")
        (domain / "max_energy_range_uj").write_text("1000000\n")
        (domain / "energy_uj").write_text(f"{now}\n")
    return folder


def test_energy_of_processors_goes_on_where_their_counters_begin_again(tmp_path: Path) -> None:
    node = NodeSensors(rapl=rapl(tmp_path, 900_000, 100_000))
    first = node.read()["cpu_energy_j"]
    rapl(tmp_path, 100_000, 300_000)
    second = node.read()["cpu_energy_j"]
    rapl(tmp_path, 50_000, 300_000)
    assert second - first == pytest.approx(0.2 + 0.2)
    assert node.read()["cpu_energy_j"] - second == pytest.approx(0.95)


def test_the_energy_of_a_whole_machine_has_that_of_its_processor_in_it(tmp_path: Path) -> None:
    (rapl(tmp_path, 2_000_000, 9_000_000) / "intel-rapl:1" / "name").write_text("psys\n")
    assert NodeSensors(rapl=tmp_path).read()["cpu_energy_j"] == 2.0


def test_what_a_node_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeSensors(interface="nowhere0", rapl=tmp_path)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    monkeypatch.setattr(sensors, "LEAST_CPU_S", 0.0)
    reading = node.read()
    unknown = {name for name, value in reading.items() if value is None}
    assert unknown == node.missing.keys() == {
        "cpu_energy_j", "disk_read_bytes", "disk_written_bytes", "network_sent_bytes",
        "network_received_bytes",
    }  # fmt: skip
    assert "nowhere0" in node.missing["network_sent_bytes"]
    node = NodeSensors(rapl=rapl(tmp_path, 5))
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("nonsense")
    assert node.read()["cpu_energy_j"] is None and "energy_uj" in node.missing["cpu_energy_j"]


def test_the_loopback_is_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {n: SimpleNamespace(bytes_sent=s, bytes_recv=2 * s)
                for n, s in (("lo", 7), ("eth0", 10), ("eth1", 100))}  # fmt: skip
    monkeypatch.setattr(sensors.psutil, "net_io_counters", lambda pernic: dict(counters))
    assert NodeSensors()._network() == (110, 220)
    assert NodeSensors(interface="eth1")._network() == (100, 200)
    assert NodeSensors(interface="lo")._network() == (7, 14)  # where training uses it


def test_what_passes_another_interface_is_counted_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("lo", "bond0", "bond0.7", "eth0", "eth1")
    counters = {name: SimpleNamespace(bytes_sent=10, bytes_recv=10) for name in names}
    for upper, lower in (("bond0", "eth0"), ("bond0", "eth1"), ("bond0.7", "bond0")):
        (tmp_path / upper / f"lower_{lower}").mkdir(parents=True)
    monkeypatch.setattr(sensors, "NET", tmp_path)
    monkeypatch.setattr(sensors.psutil, "net_io_counters", lambda pernic: dict(counters))
    assert NodeSensors()._network() == (20, 20)
    assert NodeSensors(interface="bond0")._network() == (10, 10)


# ---- the process ----


def test_an_edge_is_about_what_was_since_the_last(driver: Driver, tmp_path: Path) -> None:
    file = tmp_path / "node_0.jsonl"
    sampler = Sampler(Gpus(["one"]), NodeSensors(rapl=tmp_path), Processors([os.getpid()]))
    sampler.sample()
    sampler.keep(file)
    first = sampler.edge()
    assert first["lowest_power_w"] == 412.5
    assert first["readings"] == 2 and first["gpus"][0]["energy_j"] == 3.0
    second = sampler.edge()
    assert second["readings"] == 1 and second["gpus"][0]["energy_j"] == 1.5
    assert second["node"]["cpu_energy_j"] is None
    assert "cpu_energy_j" in second["missing"]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["gpus"][0]["power_w"] == 412.5


def burn(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_cores_are_read_over_a_time_that_the_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a millisecond psutil gives 0, which would be recorded as idle cores."""
    clock = iter([10.0, 10.001, 10.5, 10.51])
    monkeypatch.setattr(sensors.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sensors.psutil, "cpu_percent", lambda interval: 80.0)
    node = NodeSensors()
    assert [node.read()["cpu_percent"] for _ in range(3)] == [None, 80.0, None]


@pytest.mark.process
def test_what_carries_packets_of_emulated_nodes_is_no_load_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relay = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    monkeypatch.setenv(RELAY, str(relay.pid))
    # It reads at the edges alone: its own time does not grow with that of the relay.
    with_relay = SamplerClient([], 60.0)
    monkeypatch.delenv(RELAY)
    without = SamplerClient([], 60.0, pids=[with_relay.process.pid])
    try:
        for client in (with_relay, without):
            assert client.edge() is not None
        began_s = psutil.Process(relay.pid).cpu_times().user
        while psutil.Process(relay.pid).cpu_times().user < began_s + 0.3:
            time.sleep(0.1)  # on a busy machine it gets less than a core
        own = [(client.edge() or {})["processors"]["own_s"] for client in (with_relay, without)]
        assert own[0] > 0.1 > own[1]
    finally:
        relay.kill()
        relay.wait()
        for client in (with_relay, without):
            client.close()


@pytest.mark.process
def test_a_real_sampler_sees_what_this_machine_does(tmp_path: Path) -> None:
    watch = SamplerClient([], 0.05)
    assert not any(tmp_path.iterdir())
    watch.keep(tmp_path / "telemetry" / "node_0.jsonl")
    try:
        assert watch.edge() is not None
        burn(1.0)
        reading = watch.edge()
        assert reading is not None and reading["gpus"] == [] and reading["lowest_power_w"] is None
        assert reading["seconds"] >= 1 and reading["readings"] >= 5
        share = 100 / (psutil.cpu_count() or 1)
        assert reading["node"]["cpu_percent"]["mean"] > 0.5 * share
        assert 0 < reading["node"]["memory_gib"]["max"] < psutil.virtual_memory().total / 2**30
    finally:
        watch.close()
    assert watch.process.poll() == 0
    assert len((tmp_path / "telemetry" / "node_0.jsonl").read_text().splitlines()) > 5


@pytest.mark.parametrize(
    "peer", [World(rank=0), World(rank=1), World(rank=1, local_rank=1, launched=True)]
)
def test_a_peer_of_any_number_samples_its_own_device(
    peer: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "SamplerClient", lambda *options: options)
    started: Any = telemetry.start_sampler(2.0, peer, [(["GPU-one"], os.getpid())])
    assert started == (["GPU-one"], 0.5, None, [os.getpid()], None)


@pytest.mark.process
def test_a_sampler_that_is_gone_stops_nothing() -> None:
    watch = SamplerClient([], 1.0)
    assert watch.edge() is not None
    watch.process.kill()
    watch.process.wait()
    assert watch.edge() is None and "gone" in str(watch.lost)
    assert watch.edge() is None


@pytest.mark.process
def test_a_sampler_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        watch = SamplerClient([], 1.0)
        watch.edge()
        os.write(write_end, str(watch.process.pid).encode())
        time.sleep(60)
        os._exit(0)
    sampler = psutil.Process(int(os.read(read_end, 32)))
    assert sampler.is_running() and sys.executable
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    sampler.wait(5)


# ---- all nodes together ----


def node_row(power: float, energy: float | None, sent: int) -> dict[str, Any]:
    spread = {"mean": power, "p95": 2 * power, "max": 3 * power}
    card = {"power_w": spread, "energy_j": energy, "throttled": {"heat": power / 1000}}
    node = {"cpu_percent": None, "network_sent_bytes": sent}
    times = {"core_s": 20.0, "busy_s": 9.0, "own_s": float(sent), "seconds": 10.0}
    processors = {"machine": f"{sent}", "network": f"{sent}", **times}
    return {"gpus": [card], "node": node, "energy_j": energy, "processors": processors}


def test_devices_of_all_nodes_make_one_row() -> None:
    reading = merge_nodes([node_row(100, 5.0, 7), node_row(300, 6.0, 8)])
    assert reading == {
        "gpu": {
            "power_w": {"mean": 200, "p95": 600, "max": 900},
            "throttled": {"heat": 0.3},
        },
        "node": {"cpu_percent": None, "network_sent_bytes": 15},
        "others_cpu_share": 0.1,
        "energy_j": 11.0,
    }


def test_a_part_is_never_taken_for_the_whole() -> None:
    assert merge_nodes([node_row(100, 5.0, 7), node_row(300, None, 8)])["energy_j"] is None
    nothing = dict.fromkeys(["gpu", "node", "others_cpu_share", "energy_j"])
    assert merge_nodes([node_row(100, 5.0, 7), None]) == nothing == merge_nodes([None])
    on_cpu = merge_nodes([node_row(100, None, 7) | {"gpus": []}])
    assert on_cpu["gpu"] is on_cpu["energy_j"] is None and on_cpu["node"] is not None


def counting(machine: str, network: str, seconds: float, grown: float | None) -> dict[str, Any]:
    """A node with the network of that name, where all that is counted has grown by so much."""
    times = {"core_s": 2 * seconds, "busy_s": 9.0, "own_s": 1.0, "seconds": seconds}
    node = {"cpu_percent": None, **dict.fromkeys(sensors.COUNTED_BY, grown)}
    processors = {"machine": machine, "network": network, **times}
    return {"gpus": [], "node": node, "energy_j": None, "processors": processors}


def test_what_a_machine_counts_counts_once_for_all_nodes_on_it() -> None:
    emulated = [counting("a", "a0", 10.5, 10.0), counting("a", "a1", 10.0, 9.0)]
    other = counting("b", "b0", 10.0, 4.0)
    one, both = (merge_nodes(nodes)["node"] for nodes in (emulated, [*emulated, other]))
    assert [one[name] for name in sensors.COUNTED_BY] == [10.0, 10.0, 10.0, 19.0, 19.0]
    assert [both[name] for name in sensors.COUNTED_BY] == [14.0, 14.0, 14.0, 23.0, 23.0]
    peers = merge_nodes([counting("a", "a0", 10.0, 9.0), counting("a", "a0", 10.5, 10.0)])["node"]
    assert [peers[name] for name in sensors.COUNTED_BY] == [10.0] * 5
    unknown = merge_nodes([*emulated, counting("b", "b0", 10.0, None)])["node"]
    assert [unknown[name] for name in sensors.COUNTED_BY] == [None] * 5
