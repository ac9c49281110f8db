"""Fresh processes for the arms of benchmarks/speed.py, forked from one that has loaded everything.

Ten seconds of imports for each run would leave no time to alternate. The process that is forked has
no threads yet and has not touched a GPU. The process that calls this module does not load torch.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness.core.process import end_at_once
from harness.train.run.warm import free_port

LOADED = [
    "bert", "vit", "benchmarks.recipes.seed", "benchmarks.recipes.examples",
    "benchmarks.recipes.loop", "benchmarks.recipes.ours", "benchmarks.speed_data",
    "transformers.models.bert.modeling_bert", "transformers.models.vit.modeling_vit",
]  # fmt: skip


class ArmFailed(RuntimeError):
    """A process of an arm ended without a result; the message says why."""


def call(
    name: str, *args: Any, processes: int = 1, env: Mapping[str, str] | None = None,
    log: Path, timeout_s: float = 600.0,
) -> list[Any]:  # fmt: skip
    """Call module:function with these arguments in new processes; results in order of rank."""
    multiprocessing.set_forkserver_preload(LOADED)
    context = multiprocessing.get_context("forkserver")
    port = str(free_port())
    receivers: dict[Any, int] = {}
    started = []
    for rank in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        of_rank = _environment(rank, processes, port) | dict(env or {})
        process: Any = context.Process(
            target=_enter, args=(sender, name, args, of_rank, str(log)), daemon=False
        )
        process.start()
        sender.close()
        receivers[receiver] = rank
        started.append(process)
    found: dict[int, Any] = {}
    try:
        until_s = time.monotonic() + timeout_s
        while receivers:
            ready = wait(list(receivers), timeout=max(until_s - time.monotonic(), 0))
            if not ready:
                raise ArmFailed(f"{name} took more than {timeout_s:.0f} s")
            for one in ready:
                found[receivers.pop(one)] = _received(one, name)
        for process in started:
            process.join(30)
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
                process.join()
    return [found[rank] for rank in range(processes)]


def _received(receiver: Any, name: str) -> Any:
    try:
        failed, result = receiver.recv()
    except EOFError:
        raise ArmFailed(f"a process of {name} ended without a word") from None
    if failed:
        raise ArmFailed(failed)
    return result


def _environment(rank: int, processes: int, port: str) -> dict[str, str]:
    """The variables that torchrun sets; none for one process, which is started without it."""
    if processes == 1:
        return {}
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": port,
    }  # fmt: skip


def _enter(
    sender: Any, name: str, args: tuple[Any, ...], env: dict[str, str], log: str
) -> None:  # fmt: skip
    """Run the function in the new process. Output goes to a file, instead of a user's terminal."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(variable, None)
    os.environ.update(env)
    # Data-loading workers are forked, as in a script, and not started like this process.
    multiprocessing.set_start_method("fork", force=True)
    try:
        _use(env)
        module, function = name.split(":")
        sender.send((None, getattr(importlib.import_module(module), function)(*args)))
    except SystemExit as error:
        sender.send((f"{name} ended with {error.code}: {_tail(Path(log))}", None))
    except BaseException as error:
        traceback.print_exc()
        sender.send((f"{type(error).__name__}: {error}"[:300], None))
    end_at_once(0)  # remaining threads of gloo may abort a process during its teardown


def _use(env: Mapping[str, str]) -> None:
    """Apply what a new Python would read from these variables when it loads the libraries."""
    import datasets
    import torch

    from harness.train.run.start import quiet

    quiet(bars=False)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if "HF_HOME" in env:
        datasets.config.HF_DATASETS_CACHE = Path(env["HF_HOME"], "datasets")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-200:]
