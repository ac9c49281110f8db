"""What all tests share: a quiet, offline environment, set before torch is loaded."""

from __future__ import annotations

import gc
import math
import multiprocessing.process
import os
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

gc.disable()  # until all tests are imported
# One thread a process: several ranks share few cores, and sums come out in one order.
os.environ["OMP_NUM_THREADS"] = "1"
# With nohup, or in the background, children would inherit that these are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(ignored, signal.SIG_DFL)
# Each of many processes would compile our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Prepared data are kept for the session, away from the user's own cache. Workers share it.
OWN_CACHE = None if "HF_HOME" in os.environ else tempfile.mkdtemp(prefix="harness-test-cache-")
os.environ.setdefault("HF_HOME", OWN_CACHE or "")

import pytest


@pytest.fixture
def root() -> Path:
    return Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need what this machine lacks are left out, and the report says why."""
    if hasattr(config, "workerinput"):
        long_files_first(items)
    import torch

    gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: none is visible")
    root = pytest.mark.skip(reason="needs root")
    standin = pytest.mark.skip(reason="needs the stand-in for CUDA: make test-gpu")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(gpu)
        if item.get_closest_marker("standin") and "FAKE_GPU" not in os.environ:
            item.add_marker(standin)
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(root)


def pytest_unconfigure() -> None:
    if OWN_CACHE is not None:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is loaded stays: no collection looks at it again
    gc.enable()


def long_files_first(items: list[pytest.Item]) -> None:
    """Files that start many processes come first: the last ones are short, and no worker idles."""
    weights: dict[Path, float] = defaultdict(float)
    for item in items:
        slow, process, limit = map(item.get_closest_marker, ("slow", "process", "timeout"))
        # Milliseconds, roughly; a limit of a test's own is some six times as long as it takes.
        long = limit.args[0] * 1000 / 6 if slow and limit else 30_000
        weights[item.path] += long if slow else 2_000 if process else 20
    items.sort(key=lambda item: -weights[item.path])


class ProcessWatch:
    """Sees every process that a test starts, by whatever means, so that none lacks its mark."""

    # Read-only commands of milliseconds, with which a record notes its commit and its machine, and
    # matplotlib finds the fonts, once on each machine.
    BRIEF = ("git", "ip", "nvidia-smi", "fc-list")

    def __init__(self) -> None:
        self.started: list[str] = []
        start = multiprocessing.process.BaseProcess.start

        def watched(process: multiprocessing.process.BaseProcess) -> None:
            self.started.append(f"multiprocessing: {process.name}")
            start(process)

        multiprocessing.process.BaseProcess.start = watched  # type: ignore[method-assign]
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            command = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            if Path(os.fsdecode(command[0])).name not in self.BRIEF:
                self.started.append(" ".join(os.fsdecode(word) for word in command)[:100])
        elif event in ("os.fork", "os.forkpty", "os.posix_spawn"):
            self.started.append(event)


WATCH = ProcessWatch()


@pytest.fixture(autouse=True)
def only_marked_tests_start_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """-m "not process and not slow" is the suite for the time between two edits."""
    yield
    if not any(map(request.node.get_closest_marker, ("process", "slow", "gpu", "root", "standin"))):
        assert WATCH.started == [], "mark the test with pytest.mark.process"


@pytest.fixture(scope="session")
def calibrated() -> None:
    """Measure the processor once for all tests, however busy it is: what was measured beside other
    programs is not cached, and each training would measure it again, for seconds.
    """
    from harness.train.measure import calibration

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "OWN_SHARE", 0)
        patch.setattr(calibration, "FRESH_S", 3600)  # it stays fresh while the tests run
        calibration.calibration()


@pytest.fixture(autouse=True)
def trainings_find_a_calibration(request: pytest.FixtureRequest) -> None:
    if any(map(request.node.get_closest_marker, ("process", "slow"))):
        request.getfixturevalue("calibrated")


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that the test makes and compares count as undisturbed, however busy this machine is."""
    monkeypatch.setattr("harness.core.records.summary.DISTURBING_SHARE", math.inf)


@pytest.fixture(autouse=True)
def no_runner_outlives_its_test() -> Iterator[None]:
    """One that a failed test leaves would slow down those after it until they fail, too."""
    yield
    for runner in getattr(sys.modules.get("tests.support.sweeps"), "STARTED", ()):
        runner.kill()  # what it has started ends with it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    WATCH.started.clear()
