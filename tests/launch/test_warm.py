"""The launcher that stays, where something goes wrong around it; and what it finds of GPUs."""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.launcher.api as launcher
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from harness.core.process import OutOfMemory, is_stopped
from harness.core.provenance import Driver
from harness.launch import places
from harness.launch.places import Local, Machine, Options
from harness.launch.plan import script_of
from harness.train import rendezvous
from harness.train.run import warm
from tests.support.sweeps import jobs_of

REQUEST = {
    "id": "1", "processes": 1, "nodes": 1, "node": 0, "address": "127.0.0.1",
    "rendezvous": "127.0.0.1:1", "rendezvous_config": {"rank": 0}, "min_nodes": 1,
    "max_restarts": 0, "exit_barrier_s": None, "hang_after_s": 0,
}  # fmt: skip


def server(hang_after_s: float = 0.0) -> warm.Server:
    made = warm.Server(io.StringIO())
    made.hang_after_s = hang_after_s
    return made


def fails_first(error: Exception) -> Callable[..., Any]:
    """An elastic_launch that raises once."""
    calls: list[object] = []

    def launch(config: Any, function: Any) -> Callable[..., Any]:
        def run(*args: Any) -> dict[int, None]:
            calls.append(config)
            if len(calls) == 1:
                raise error
            return {}

        return run

    return launch


def test_a_free_port_is_none_that_a_connection_may_take(tmp_path: Path) -> None:
    range_of = tmp_path / "range"
    range_of.write_text("10002\t60999\n")
    with socket.socket() as taken:
        taken.bind(("", 10000))
        taken.listen()
        assert warm.free_port(range_of) == 10001
        range_of.write_text("10001\t60999\n")  # the one below it is taken: the system picks
        assert warm.free_port(range_of) not in (0, 10000)
    range_of.write_text("1024\t65535\n")
    assert warm.free_port(range_of) > 0
    assert warm.free_port(tmp_path / "none") > 0


def test_a_port_that_was_taken_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = DistNetworkError("The server socket has failed to listen")
    monkeypatch.setattr(launcher, "elastic_launch", fails_first(taken))
    result = server().run(REQUEST)
    assert result["code"] == 1
    assert result["error"] == "DistNetworkError: The server socket has failed to listen"


def test_a_first_node_that_cannot_be_reached() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        result = rendezvous.unreachable("127.0.0.1", port, within_s=0.1)
        assert result is not None
        assert "cannot be reached from here (Connection refused)" in result
        probe.listen()
        assert rendezvous.unreachable("127.0.0.1", port, within_s=0.1) is None


def test_a_killed_fork_server_is_reported_as_a_killed_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (EOFError("unexpected EOF"), ConnectionRefusedError(111, "refused")):
        monkeypatch.setattr(launcher, "elastic_launch", fails_first(error))
        result = server().run(REQUEST)
        assert result["code"] == 1 and result["failures"][0]["exit_code"] == 255


@pytest.mark.parametrize("kills", [0, 1])
def test_what_the_kernel_killed_for_lack_of_memory_is_told_where_it_did(
    kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the node of the rank, which may be another machine than the runner's."""
    counts = iter([5, 5 + kills])
    monkeypatch.setattr(warm.OutOfMemory, "now", lambda: OutOfMemory(next(counts), 0, 0))
    lost = ChildFailedError("vit", {1: ProcessFailure(0, 7, -9, "none")})
    monkeypatch.setattr(launcher, "elastic_launch", fails_first(lost))
    result = server().run(REQUEST)
    (failure,) = result["failures"]
    assert result["code"] == 1 and (failure["rank"], failure["exit_code"]) == (1, -9)
    assert failure["no_memory"] == ("the machine or a control group" if kills else None)


def test_any_other_error_is_reported_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "elastic_launch", fails_first(KeyError("what")))
    assert server().run(REQUEST)["error"] == "KeyError: 'what'"


def test_a_stop_that_comes_before_a_run_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was dropped, and the run went on until it was killed."""
    began: list[object] = []
    monkeypatch.setattr(
        launcher, "elastic_launch", lambda config, main: lambda request: began.append(request)
    )
    monkeypatch.setattr(warm.shutil, "rmtree", lambda *args, **kwargs: None)
    monkeypatch.setattr(warm.os, "_exit", lambda code: None)
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    one = server()

    def receive(*messages: dict[str, Any]) -> dict[str, Any]:
        lines = "".join(json.dumps(message) + "\n" for message in messages)
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        one.receive(requests)
        return requests.get_nowait()

    result = one.run(receive({"do": "run", **REQUEST}, {"do": "stop"}))
    assert (result["code"], result["failures"], began) == (128 + signal.SIGTERM, [], [])
    # One that comes when a run has ended is not for the next.
    assert one.run(receive({"do": "stop"}, {"do": "run", **REQUEST}))["code"] == 0
    assert len(began) == 1


def test_a_server_that_cannot_be_started_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: Any) -> None:
        raise EOFError

    monkeypatch.setattr(warm, "ProcessPoolExecutor", killed)
    monkeypatch.setattr(warm.time, "sleep", lambda _: None)
    with pytest.raises(RuntimeError, match="ended 5 times while it was loading"):
        warm._in_fresh_process(warm.inspect, [])


class FakeDriver:
    """Four GPUs; process 7 is on the second."""

    NVMLError = RuntimeError

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return str(index)

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return "1"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        process = type("Process", (), {"pid": 7})
        return [process] if handle == "1" else []


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, ("0", "1", "2", "3")), ("2, 0", ("2", "0")), ("", ()), ("-1", ()),
                          ("GPU-5a", ("GPU-5a",))]
)  # fmt: skip
def test_the_gpus_that_are_visible(
    visible: str | None, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(4, "580", (13, 0), (9, 0))
    monkeypatch.setattr(places, "nvidia_driver", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert places.this_machine().gpus == gpus


def test_gpus_without_a_driver_of_nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, units in enumerate((0, 304, 304)):  # a CPU and two GPUs of AMD
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"cpu_cores 8\nsimd_count {units}\n")
    assert places.amd_gpus(tmp_path) == 2 and places.amd_gpus(tmp_path / "none") == 0
    monkeypatch.setattr(places, "nvidia_driver", lambda: None)
    monkeypatch.setattr(places, "amd_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        places, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "x"))
    )
    # Only a build for them trains on them: with another the cores are the devices.
    for hip, gpus in (("'6.4.43482'", ("0", "1")), ("None", ())):
        (tmp_path / "version.py").write_text(f"cuda = None\nhip: Optional[str] = {hip}\n")
        assert places.this_machine().gpus == gpus
    (tmp_path / "version.py").unlink()
    assert places.this_machine().gpus == ()


def test_a_run_for_the_cpu_needs_no_gpu(tmp_path: Path) -> None:
    here = Local(Options(), Machine(("0",), (0, 1)))
    text = "script: vit\ngrid: {setup: [1_2], use_cpu: [false, true]}\nsettings: {model: vit-nano}"
    on_gpu, on_cpu = jobs_of(tmp_path, text)
    assert here.why_not(on_gpu) == "needs 2 devices: this machine has 1 GPU(s)"
    assert here.why_not(on_cpu) is None and here.free(on_cpu, set()) == (("core 0", "core 1"),)
    assert "CUDA" not in here.plan(on_cpu, "")[0]
    assert here.facts(on_cpu)["processes_per_core"] == 1


def test_processes_on_the_gpus_that_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeDriver())

    def count(*gpus: str) -> int:
        return int(places.others(Machine(gpus, (0,)), interval_s=0.01)["gpu_processes"])

    assert count("0") == 0 and count("1") == 1 and count("0", "1") == 1
    assert count("GPU-5a") == 1 and count() == 0

    def unsupported(self: FakeDriver, handle: str) -> list[Any]:
        raise FakeDriver.NVMLError("Not Supported")

    # As under WSL 2: not known, and no reason to end a sweep.
    monkeypatch.setattr(FakeDriver, "nvmlDeviceGetComputeRunningProcesses", unsupported)
    unknown = places.others(Machine(("0",), (0,)), interval_s=0.01)
    assert unknown["gpu_processes"] is None
    assert places.disturbed_by({**unknown, "cpu_busy_share": 0.0}) is None


@pytest.mark.process
def test_a_stopped_fork_server_is_ended_so_that_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Closed(Exception):
        """The end of the test."""

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 6:
            raise Closed

    fork_server = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(warm.time, "sleep", sleep)
    monkeypatch.setattr(warm.multiprocessing.forkserver, "_forkserver", SimpleNamespace(
        _forkserver_pid=fork_server.pid))  # fmt: skip
    one = server(hang_after_s=3.0)
    with pytest.raises(Closed):
        one.beat()
    assert one.events.getvalue() == '{"event": "alive"}\n' * 6 and fork_server.poll() is None
    slept.clear()
    fork_server.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(fork_server.pid, os.WUNTRACED)[1]) and is_stopped(
        fork_server.pid
    )
    with pytest.raises(Closed):
        one.beat()
    monkeypatch.undo()
    assert fork_server.wait(10) == -signal.SIGKILL


def test_a_run_for_the_cpu_takes_no_gpu_of_a_packed_one(tmp_path: Path) -> None:
    here = Local(Options(), Machine(("0", "1"), (0, 1)))
    text = "script: vit\ngrid: {use_cpu: [false, true]}\nsettings: {setup: 1_1, model: vit-nano}"
    on_gpu, on_cpu = jobs_of(tmp_path, text)
    taken = {name for node in here.free(on_gpu, set()) or () for name in node}
    assert taken == {"0"} and here.free(on_cpu, taken) == (("core 0",),)


def test_commands_name_the_script_that_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of(tmp_path, "script: vit")
    monkeypatch.chdir(tmp_path)
    assert script_of(job, "/stock/").startswith("/stock/vit.py ")
    (tmp_path / "vit.py").touch()
    assert script_of(job, "/stock/").startswith("vit.py ")
