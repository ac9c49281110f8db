"""Scripts that are made to stop in the middle, and what is compared of the runs they leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from harness.core.records import COMPLETE, RunFolder, read_rows
from harness.core.topology import World, world_of
from harness.train.run.warm import free_port
from tests.support.ranks import Done, ran, run_script, script
from tests.support.sweeps import untimed_rows

# Dropout is on: the random state has to be restored, not only weights and optimizer.
COMMON = [
    "--tiny", "--test_size", "65", "--epochs", "3", "--b", "16", "--full_determinism",
    "--log_every", "3",
]  # fmt: skip
ARGV = [*COMMON, "--train_size", "256"]
SHORT = [*COMMON, "--train_size", "128"]


def stop_at(name: str, argv: list[str], cwd: str, update: int, how: str) -> Any:
    """The script, with its last rank made to stop at this update, or after the row of an epoch."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    module = __import__(name)

    class Stopper(module.Console):  # type: ignore[name-defined,misc]
        def stop(self, reached: bool) -> None:
            if reached and self.context.world.rank == self.context.world.size - 1:
                self.wait_for_checkpoint()
                if how == "crash":
                    raise RuntimeError("planted")
                if how.startswith("oom over"):
                    args = self.context.args
                    if args.per_device_train_batch_size <= int(how.split()[-1]):
                        return
                if how.startswith("oom"):
                    raise MemoryError("planted: cannot allocate")
                number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT,
                          "hup": signal.SIGHUP}  # fmt: skip
                if "all" in how:  # to its group, as timeout and batch systems send it
                    at_once = (signal.SIGTERM, signal.SIGCHLD)
                    signal.pthread_sigmask(signal.SIG_BLOCK, at_once)
                    children = psutil.Process().children()
                    for child in children:
                        child.terminate()
                    psutil.wait_procs(children, 20)
                os.kill(os.getpid(), number[how.split()[0]])
                if "all" in how:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, at_once)

        def wait_for_checkpoint(self) -> None:
            """A rank that trains apart may be ahead of rank 0, which marks it as whole: on its own
            disk, where each has one (trained_on_own_disk).
            """
            every, until_s = int(self.context.args.save_steps), time.monotonic() + 60
            marked = f"checkpoint-{(update - 1) // every * every}"
            whole = self.context.folder.path / marked / COMPLETE
            apart = self.context.settings.strategy in ("local_sgd", "diloco") and every < update
            while apart and not (whole.exists() or Path("..", "0", whole).exists()):
                assert time.monotonic() < until_s, whole
                time.sleep(0.01)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            inside = how.split()[1:2] in ([], ["all"], ["over"])
            self.stop(inside and state.global_step == update)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_evaluate(args, state, control, **kwargs)
            self.stop("row" in how and state.global_step == update)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.stop("evaluating" in how and state.global_step == update)

    module.Console = Stopper
    return run_script(name, argv, cwd)


def broken_off(count: int, argv: list[str], update: int, how: str, name: str = "bert") -> Done:
    """Run a script until it is made to stop; it must not end well."""
    done = ran(count, stop_at, name, argv, ".", update, how)
    assert done.code != 0
    return done


def only_run(root: Path) -> RunFolder:
    (folder,) = [p.parent for p in root.glob("*/*/*/settings.json")]
    return RunFolder(folder)


class Whole:
    """Undisturbed runs to compare with, each made once and never changed."""

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        self.new_folder = new_folder
        self.runs: dict[tuple[str, ...], RunFolder] = {}

    def __call__(self, name: str, count: int, argv: list[str]) -> RunFolder:
        key = (name, str(count), *argv)
        if key not in self.runs:
            root = self.new_folder("whole")
            done = script(name, *argv, "--o", str(root), count=count)
            assert done.code == 0, done.err
            self.runs[key] = only_run(root)
        return self.runs[key]


def weights_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Of its only checkpoint."""
    (checkpoint,) = folder.path.glob("checkpoint-*")
    return load_file(checkpoint / "model.safetensors")


def assert_same_weights(folder: RunFolder, other: RunFolder) -> None:
    """To the bit."""
    one, expected = weights_of(folder), weights_of(other)
    assert one.keys() == expected.keys()
    for name, weight in one.items():
        assert torch.equal(weight, expected[name]), name


def assert_same_training(folder: RunFolder, other: RunFolder) -> None:
    """Rows and weights to the bit, whatever time they took."""
    for row, expected in zip(untimed_rows(folder), untimed_rows(other), strict=True):
        assert row == expected
    assert_same_weights(folder, other)


def attempts_of(folder: RunFolder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Their beginnings and their ends."""
    rows, broken = read_rows(folder.attempts)
    assert broken == 0
    starts, ends = ([r for r in rows if r["event"] == event] for event in ("start", "end"))
    return starts, ends


def elastic(**more: str) -> dict[str, str]:
    """What torchrun --max_restarts=3 tells a process, each on a node of its own."""
    return {"TORCHELASTIC_MAX_RESTARTS": "3", "LOCAL_WORLD_SIZE": "1", **more}


def alone() -> dict[str, str]:
    """The only process that is left."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return elastic(**rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


def own_node(folder: str) -> World:
    """This rank is a node, and its folder its disk."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    disk = Path(folder, os.environ["RANK"])
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    return world_of(os.environ)


def trained_on_own_disk(folder: str, argv: list[str], update: int, how: str) -> Any:
    """vit.py, made to stop at this update if there is such a one."""
    own_node(folder)
    return stop_at("vit", argv, ".", update, how)
