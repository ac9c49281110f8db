"""Start ranks as torchrun does, from a warm server: 0.3 s instead of 10 s of imports each.

Every call gets fresh processes; they differ from those of torchrun only in being forked from a
process that has already imported torch and transformers (and has started no thread or group).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = ["bert", "vit", "tests.support.ranks", "tests.support.warm_python",
           "tests.support.frozen"]  # fmt: skip

multiprocessing.set_forkserver_preload(PRELOAD)
SERVER = multiprocessing.get_context("forkserver")


def _name_of_caller(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name


# For its log lines. torch's own looks for the source of every frame among all modules, 18 times a
# start: below pytest's frames that is 0.7 s of computing.
dynamic_rendezvous.get_method_name = _name_of_caller


@dataclass
class Done:
    """What a script left: exit code, what rank 0 printed, what it complained of; and the ranks that
    neither recorded nor failed first.
    """

    code: int
    out: str
    err: str
    others: str = ""

    def loaded(self, **scope: Any) -> dict[str, Any]:
        """The names there are once the line that loads the trained model has been typed."""
        (line,) = re.findall(r"\n  load it: (.*)\n", self.out)
        exec(line, scope)
        return scope


class Ended(RuntimeError):
    """The process ended before it gave a result."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with code {code}")
        self.code = code


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
            code = process.exitcode or 0
            raise Ended(code if code >= 0 else 128 - code) from None
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
    results = elastic_launch(config, _one_rank)(env or {}, function, args)
    return [results[rank] for rank in sorted(results)]


def script(
    name: str, *argv: str, count: int = 1, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> Done:
    """bert.py or vit.py with this command line on `count` ranks.

    The code is that of the first rank that failed, or 0; out and err are those of rank 0, err also
    that of the rank that failed.
    """
    return ran(count, run_script, name, list(argv), str(cwd), env=env)


def ran(
    count: int, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None
) -> Done:
    """Like ranks(), for a function that may end its process: what it printed, and its code."""
    with tempfile.TemporaryDirectory() as folder:
        code = failed = 0
        try:
            ranks(count, _printing_to, folder, function, args, env=env)
        except Ended as ended:
            code = ended.code
        except ChildFailedError as error:
            failed, failure = error.get_first_failure()
            code = failure.exitcode
        names = ["out_0", "err_0", *([f"err_{failed}"] if failed else [])]
        for name in names:
            Path(folder, name).touch()  # a rank ended because of another may not have started yet
        out, *errors = (Path(folder, name).read_text(errors="replace") for name in names)
        others = (file for file in Path(folder).glob("err_*") if file.name not in names)
        silent = "".join(file.read_text(errors="replace") for file in others)
        return Done(code, out, "".join(errors), silent)


def _printing_to(folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Files rather than pipes: what was printed stays when the process is killed."""
    rank = os.environ.get("RANK", "0")
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, f"{name}_{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    faulthandler.enable()  # an abort in native code shows where each thread was
    code = 1
    try:
        code = function(*args) or 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


def run_script(name: str, argv: list[str], cwd: str) -> int:
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv = [f"{name}.py", *argv]
    module = __import__(name)
    from harness.core.command_line import command_line

    return int(module.main(command_line(name, argv)))


@record  # so that what failed stands in ChildFailedError, not only among what the rank printed
def _one_rank(env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _like_torchrun(env)
    return function(*args)


def _like_torchrun(env: dict[str, str]) -> None:
    """Variables, and how workers start: those of a fork server's child would load all anew."""
    os.environ.update(env)
    multiprocessing.set_start_method("fork", force=True)


def _alone(
    sender: Any, env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    _like_torchrun(env)
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
