"""harness doctor: each line says what is there, and what to do where it is not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from harness.cli import main
from harness.core.provenance import PACKAGES, PEFT, ROOT, Driver, installing, nvidia_driver
from harness.core.settings import UserError
from harness.launch import doctor
from harness.launch.doctor import LIMITED, OK, PROBLEM, Check
from harness.launch.places import Machine

FACTS: dict[str, Any] = {
    "python": "3.11.7",
    "versions": dict.fromkeys(PACKAGES, "1.0"),
    "gpus": [],
    "cuda": None,
    "memory_gib": 16.0,
}


ROWS = ["packages", "devices", "load", "cache", "outputs", "hub", "ports", "nodes", "ssh",
        "sbatch", "hivemind", "peft"]  # fmt: skip


class Answers(BaseHTTPRequestHandler):
    code = 200

    def do_HEAD(self) -> None:
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answers]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield Answers
    server.shutdown()


@pytest.mark.process
def test_all_lines_of_this_machine(
    hub: type[Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert list(checks) == ROWS
    assert checks["packages"]["state"] == OK and "torch 2" in checks["packages"]["finding"]
    assert checks["hub"]["state"] == OK
    assert "cores" in checks["devices"]["finding"]


def test_a_problem_is_an_exit_code_and_its_advice_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("one", OK, "fine"), Check("two", PROBLEM, "broken", "mend it")]
    monkeypatch.setattr(doctor, "examine", lambda: checks)
    assert main(["doctor"]) == 1
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["ok", "one", "fine"], ["problem", "two", "broken"], ["->", "mend", "it"],
    ]  # fmt: skip


def test_torch_and_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._packages("ImportError: libcudart").state == PROBLEM
    assert "libcudart" in doctor._packages("ImportError: libcudart").finding
    assert doctor._devices("ImportError", None).state == PROBLEM
    advice = "run make in the checkout again, or pip install"
    assert doctor._packages("ImportError").advice == advice
    lacking = {"evaluate": "evaluate>=0.4.6,<1", "xxhash": "xxhash>=3.5,<5"}
    monkeypatch.setattr(doctor, "missing_packages", lambda: lacking)
    for facts in (FACTS, "no package evaluate"):
        assert doctor._packages(facts) == Check(
            "packages", PROBLEM, "not installed: evaluate, xxhash", installing()
        )


@pytest.mark.process
def test_it_starts_with_the_standard_library_alone() -> None:
    """A half-made environment is where it is wanted: -S leaves all packages out."""
    command = [sys.executable, "-S", "-m", "harness", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == ""
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert list(checks) == ROWS
    lacking = checks["packages"]["finding"].removeprefix("not installed: ").split(", ")
    assert {"torch", "psutil", "nvidia-ml-py", "PyYAML", "rich", "pandas"} <= {*lacking}
    assert checks["packages"]["state"] == PROBLEM and checks["packages"]["advice"]
    for name, package in (("load", "pynvml"), ("ports", "psutil")):
        assert checks[name]["finding"] == f"not checked: package {package} is missing"
    assert checks["cache"]["state"] == checks["outputs"]["state"] == OK
    assert checks["hivemind"]["state"] == LIMITED


@pytest.mark.parametrize(
    ("facts", "visible", "state", "part"),
    [
        ({}, ("0", "1"), PROBLEM, "it is built without CUDA, and the driver 535 runs CUDA up to"),
        ({"cuda": "13.0"}, ("0", "1"), PROBLEM, "it is built for CUDA 13.0, and the driver 535"),
        ({}, (), LIMITED, "CUDA_VISIBLE_DEVICES hides 2 GPU(s)"),
        ({"gpus": ["H", "H"]}, ("0", "1"), OK, "H, H; driver 535; 2 cores"),
    ],
)
def test_gpus_that_torch_cannot_use(
    facts: dict[str, Any], visible: tuple[str, ...], state: str, part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine(visible, (0, 1)))
    check = doctor._devices({**FACTS, **facts}, Driver(2, "535", (12, 2), (8, 0)))
    assert check.state == state and part in check.finding
    advice = "install the cu126 build of torch (make install TORCH=cu126), or a driver"
    assert (advice in check.advice) == (state == PROBLEM)


def test_a_machine_without_gpus_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine((), (0, 1)))
    for amd, state, part in ((0, OK, "no NVIDIA GPU; training uses 2 cores"),
                             (1, LIMITED, "1 GPU(s) of AMD that torch does not use")):  # fmt: skip
        monkeypatch.setattr(doctor, "amd_gpus", lambda count=amd: count)
        check = doctor._devices(FACTS, None)
        assert check.state == state and part in check.finding
        assert ("ROCm" in check.advice) == (state == LIMITED)


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion", lambda: 12020)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: b"535.1")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: number)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetCudaComputeCapability", lambda number: [8 - number, 0]
    )
    assert nvidia_driver() == Driver(2, "535.1", (12, 2), (7, 0))

    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert nvidia_driver() is None

    def updated() -> None:
        raise pynvml.NVMLError_LibRmVersionMismatch

    monkeypatch.setattr(pynvml, "nvmlInit", updated)
    driver = nvidia_driver()
    assert driver is not None and driver.gpus == 0 and "mismatch" in str(driver.problem)
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine((), (0, 1)))
    check = doctor._devices(FACTS, driver)
    assert check.state == PROBLEM and "driver does not answer: " in check.finding

    def lost(number: int) -> None:
        raise pynvml.NVMLError_GpuIsLost

    def one_is_lost(number: int) -> list[int]:
        return [8, 0] if number else lost(number)  # type: ignore[func-returns-value, return-value]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", one_is_lost)
    # No machine without GPUs: runs would train on them all the same.
    assert nvidia_driver() == Driver(2, "535.1", (12, 2), (8, 0))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lost)
    driver = nvidia_driver()
    assert driver is not None and (driver.gpus, driver.version) == (0, "535.1")
    check = doctor._devices({**FACTS, "gpus": ["H"]}, driver)
    assert check.state == PROBLEM and str(driver.problem) in check.finding


@pytest.mark.parametrize(
    ("cuda", "oldest", "words"),
    [
        ((13, 0), (9, 0), "install the cu130 build of torch (make install TORCH=cu130)"),
        (
            (12, 2),
            (9, 0),
            "install the cu126 build of torch (make install TORCH=cu126), or a driver of version "
            "580 or newer",
        ),
        ((13, 0), (7, 0), "install the cu126 build of torch (make install TORCH=cu126)"),
        (
            (11, 8),
            (6, 1),
            "the cu126 build of torch (make install TORCH=cu126) and a driver of version 560 or "
            "newer",
        ),
        ((11, 8), (8, 0), "install a driver of version 580 or newer"),
    ],
)
def test_which_build_of_torch_is_right(
    cuda: tuple[int, int], oldest: tuple[int, int], words: str
) -> None:
    assert Driver(1, "1", cuda, oldest).advice.endswith(words)


def test_the_hub_and_what_stands_in_its_way(
    hub: type[Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "code", 404)  # it answers
    assert doctor._hub().state == OK
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert doctor._hub().state == LIMITED and "does not answer" in doctor._hub().finding
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1/a b")
    assert doctor._hub().state == LIMITED
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc/passwd")
    assert doctor._hub().state == PROBLEM
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in doctor._hub().finding


def test_what_torchrun_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    home, outer = (SimpleNamespace(family=2, address=a) for a in ("127.0.0.1", "10.0.0.9"))
    six, own = (SimpleNamespace(family=10, address=a) for a in ("fe80::1%eth0", "::1"))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [home, own]})
    assert doctor._ports().state == OK
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [own], "eth0": [six]})
    assert "who can reach fe80::1%eth0 can" in doctor._ports().finding
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [home], "eth0": [outer]})
    assert doctor._ports().finding == (
        "plain torchrun does not authenticate: anyone who can reach 10.0.0.9 can run code here"
    )
    assert "harness.train.torchrun" in doctor._ports().advice


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = tmp_path / "not" / "yet"
    assert doctor._folder("outputs", new).state == OK and not new.exists()
    monkeypatch.setattr(doctor, "ENOUGH_GIB", 1e9)
    assert doctor._folder("outputs", new).state == LIMITED
    refused = doctor._folder("cache", Path("/proc/cache"))
    assert refused.state == PROBLEM and refused.advice == "set HF_HOME to a folder of yours"


def test_others_nodes_and_tools_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"cpu_busy_share": 0.9, "gpu_processes": 0}
    monkeypatch.setattr(doctor, "others", lambda *args, **more: busy)
    assert doctor._load().state == LIMITED and "90%" in doctor._load().finding

    def refuse(*args: Any) -> None:
        raise UserError("nsenter is missing: install util-linux")

    monkeypatch.setattr(doctor.EmulatedNodes, "open", refuse)
    assert "nsenter is missing" in doctor._nodes().finding
    monkeypatch.setenv("PATH", "")
    assert doctor._tool("ssh", "x", "y") == Check("ssh", LIMITED, "not found; x needs it", "y")
    monkeypatch.setattr("harness.core.provenance.find_spec", lambda name: None)
    missing = Check("peft", LIMITED, "not installed; --lora needs it", PEFT.install)
    assert doctor._package(PEFT) == missing


@pytest.mark.process
def test_a_torch_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert doctor._environment() == "no message"
    monkeypatch.setattr(doctor, "LOAD_S", 0.0)
    assert "did not load within" in (said := str(doctor._environment()))
    assert said.endswith("s: the driver hangs, or the machine is busy")


@pytest.mark.process
def test_sbatch_without_a_cluster_that_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine may have the commands of SLURM and no cluster behind them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._slurm().finding == "not found; sweep --launcher slurm needs it"
    for name in ("sbatch", "sinfo"):
        (tmp_path / name).write_text("#!/bin/sh\necho gpu; echo cpu; echo gpu\n")
        (tmp_path / name).chmod(0o755)
    assert doctor._slurm() == Check("sbatch", OK, f"{tmp_path}/sbatch; partitions: cpu, gpu")
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho no configuration >&2; exit 1\n")
    found = doctor._slurm()
    assert found.state == LIMITED and found.finding.endswith("answers: no configuration")
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\necho 'sinfo: error: fetch_config: DNS SRV lookup failed' >&2\n"
        "echo 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1\n"
    )
    said = f"{tmp_path}/sbatch, but no cluster answers: Could not establish a configuration source"
    assert doctor._slurm().finding == said
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 3\n")
    assert doctor._slurm().finding.endswith("answers: sinfo ended with exit code 3")
