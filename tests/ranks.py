"""Start ranks as torchrun does, from a warm server: 0.3 s instead of 10 s of imports each.

Every call gets fresh processes; they differ from those of torchrun only in being forked from a
process that has already imported torch and transformers (and has started no thread or group).
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = ["bert", "vit", "tests.ranks"]

multiprocessing.set_forkserver_preload(PRELOAD)
SERVER = multiprocessing.get_context("forkserver")


@dataclass
class Done:
    """What a script left: exit code, what rank 0 printed, what it complained of."""

    code: int
    out: str
    err: str


def ranks(
    count: int, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None
) -> list[Any]:
    """function(*args) on `count` ranks, or in one plain process; the results, in order of rank.

    function must be importable (defined at a module's top level).
    """
    if count == 1:
        receiver, sender = SERVER.Pipe(duplex=False)
        process = SERVER.Process(target=_alone, args=(sender, env or {}, function, args))
        process.start()
        sender.close()
        try:
            ok, result = receiver.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"the process ended with code {process.exitcode}") from None
        process.join()
        if not ok:
            raise RuntimeError(result)
        return [result]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="test",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    found = elastic_launch(config, _one_rank)(env or {}, function, args)
    return [found[rank] for rank in sorted(found)]


def script(
    name: str, *argv: str, count: int = 1, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> Done:
    """bert.py or vit.py with this command line on `count` ranks; the code is that of rank 0."""
    try:
        return ranks(count, _main, name, list(argv), str(cwd), env=env)[0]
    except ChildFailedError as error:
        failure = error.failures[min(error.failures)]
        return Done(failure.exitcode, "", failure.message or "")


def _main(name: str, argv: list[str], cwd: str) -> Done:
    os.chdir(cwd)
    sys.argv = [f"{name}.py", *argv]
    module = __import__(name)
    from harness.flags import command_line

    out, err = io.StringIO(), io.StringIO()
    code: Any
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = module.main(command_line(name, argv))
        except SystemExit as error:
            code = error.code or 0
        except Exception:
            traceback.print_exc()
            code = 1
    return Done(int(code), out.getvalue(), err.getvalue())


def _one_rank(env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(env)
    return function(*args)


def _alone(
    sender: Any, env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(env)
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
