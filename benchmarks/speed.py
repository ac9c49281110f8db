"""How fast the harness is against what a user would run instead.

    python -m benchmarks.speed --out OUT                       small models on a CPU
    python -m benchmarks.speed --out OUT --cases text --processes 1,2 --data FOLDER
    python -m benchmarks.speed --out OUT --gpu                 real models on a GPU, bf16
    python -m benchmarks.speed --out OUT --dry_run             what would run, and run nothing

The arms (benchmarks/recipes) take turns, round after round, each in fresh processes: the same
model, first weights, samples, order, precision, batch, optimizer, schedule and updates; no dropout;
accuracy, precision, recall, f1 and loss of the same test set after every epoch. Two ratios come out
of it, of a whole epoch (training, evaluation and saving, as each recipe does them) and of training
alone. FOLDER holds ag_news and cifar10; without it the embedded data are used. OUT/speed.json has
the raw numbers, OUT/speed.md the tables; cases that another call has measured stay in both.

Exit code: 0, 1 if an arm failed or arms did unequal work, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import parser_of
from benchmarks.speed_cases import (
    ARMS,
    CPU_CASES,
    GPU_CASES,
    QUICK_CASES,
    Case,
    arms_of,
    task_of,
)
from benchmarks.speed_start import ArmFailed, call
from benchmarks.speed_table import complaints, table
from harness.core.records import read_json, write_json

OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "TOKENIZERS_NO_FORK_WARNING": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One run of one arm."""

    round: int
    case: str
    arm: str
    processes: int


def plan(cases: dict[str, Case], arms: list[str], processes: list[int], rounds: int) -> list[Turn]:
    """The turns: every arm once per round; each round begins with another arm."""
    found = []
    for number in range(rounds):
        for name, case in cases.items():
            there = arms_of(case, arms)
            first = number % len(there)
            for arm in there[first:] + there[:first]:
                found += [Turn(number + 1, name, arm, count) for count in processes]
    return found


def command(turn: Turn) -> str:
    """The command that a user would type for a turn, with the file that is written for it."""
    words = ["-m", f"benchmarks.recipes.{ARMS[turn.arm].recipe}", f"{turn.case}-{turn.arm}.json"]
    if turn.processes > 1:
        return shlex.join(
            ["torchrun", "--standalone", f"--nproc_per_node={turn.processes}", *words]
        )
    return shlex.join(["python", *words])


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    turns = plan(options.cases, options.arms, options.processes, options.rounds)
    if options.dry_run:
        print("\n".join(command(turn) for turn in turns))
        return 0
    began_s = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.update({"OMP_NUM_THREADS": str(options.threads), **OFFLINE})
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        record = _open(options)
        prepared = _prepare(options, work)
        for turn in turns:
            if options.limit_s and time.monotonic() - began_s > options.limit_s:
                record["not_begun"] = len(turns) - turns.index(turn)
                break
            if turn.case not in prepared:
                continue
            found = _measure(turn, options, work)
            record["cases"][turn.case] = prepared[turn.case]
            prepared[turn.case]["runs"].append(found)
            _write(record, options.out)
            outcome = found["failed"] or ", ".join(f"{e['train_s']:.2f}" for e in found["epochs"])
            print(f"{turn.round} {turn.case} {turn.arm} x{turn.processes}: {outcome}", flush=True)
    _write(record, options.out)
    print("\n" + (options.out / "speed.md").read_text())
    is_whole = len(prepared) == len(options.cases)
    return 0 if is_whole and not any(complaints(record["cases"])) else 1


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of("speed", __doc__, out=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of speed.json and speed.md")
    parser.add_argument("--gpu", action="store_true", help="real models, bf16")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: does it run?")
    parser.add_argument("--cases", help="some of them, with commas (all)")
    usual = [name for name in ARMS if name != "compiled"]  # it takes minutes to compile
    parser.add_argument("--arms", default=",".join(usual),
                        help=f"of {', '.join(ARMS)} (all but compiled)")  # fmt: skip
    parser.add_argument("--processes", default="1", help="1, 2 or 1,2, a device each (1)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arm (3)")
    parser.add_argument("--threads", type=int, default=1, help="torch's, a process (1)")
    parser.add_argument("--data", type=Path, help="folder with ag_news and cifar10")
    parser.add_argument("--limit_s", type=float, help="begin no run after so many seconds")
    parser.add_argument("--seed", type=int, default=42, help="of the order of samples (42)")
    parser.add_argument("--flags", default="", help="more flags for ours and bf16, as one word")
    parser.add_argument("--size", action="append", default=[], metavar="CASE.FIELD=NUMBER",
                        help="another size, such as text.train=1024")  # fmt: skip
    parser.add_argument("--dry_run", action="store_true", help="print the commands")
    options = parser.parse_args(argv)
    every = QUICK_CASES if options.quick else GPU_CASES if options.gpu else CPU_CASES
    options.cases = {name: every[name] for name in _some(parser, "cases", options.cases, every)}
    options.arms = _some(parser, "arms", options.arms, ARMS)
    counts = options.processes.split(",")
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        parser.error(f"--processes {options.processes}: whole numbers with commas, such as 1,2")
    options.processes = [int(count) for count in counts]
    for size in options.size:
        _resize(parser, options.cases, size)
    for name, case in options.cases.items():
        whole = case.batch * max(options.processes)
        if case.train % whole or case.epochs < 2:
            parser.error(f"case {name}: {case.train} training samples are no whole batches of "
                         f"{whole}, or {case.epochs} epochs leave none to be timed")  # fmt: skip
    return options


def _some(parser: argparse.ArgumentParser, flag: str, text: str | None, of: Any) -> list[str]:
    names = text.split(",") if text else list(of)
    for name in names:
        if name not in of:
            parser.error(f"--{flag} {name}: expected some of {', '.join(of)}")
    return names


def _resize(parser: argparse.ArgumentParser, cases: dict[str, Case], size: str) -> None:
    name, _, rest = size.partition(".")
    which, _, number = rest.partition("=")
    fields = ("train", "test", "batch", "epochs", "image_size", "jpeg_px")
    if name not in cases or which not in fields or not number.isdecimal():
        parser.error(f"--size {size}: expected CASE.FIELD=NUMBER, FIELD of {', '.join(fields)}")
    cases[name] = Case(**{**asdict(cases[name]), which: int(number)})


def _open(options: argparse.Namespace) -> dict[str, Any]:
    """The record so far: what other calls have measured on this machine."""
    log = options.out / "log.txt"
    log.unlink(missing_ok=True)
    (environment,) = call("benchmarks.speed_data:environment_of", log=log)
    before = read_json(options.out / "speed.json") or {}
    same = before.get("environment", {}).get("machine") == environment["machine"]
    return {"environment": environment, "cases": before.get("cases", {}) if same else {}}


def _prepare(options: argparse.Namespace, work: Path) -> dict[str, dict[str, Any]]:
    """Write samples and first weights of all cases; return the facts about them."""
    log, env = options.out / "log.txt", {"HF_HOME": str(work / "prepared")}

    def facts_of(name: str) -> Any:
        place = (options.cases[name], work / name, options.data)
        try:
            return call("benchmarks.speed_data:prepare", *place, env=env, log=log)[0]
        except ArmFailed as error:
            print(f"{name} cannot be prepared: {error}", file=sys.stderr)
            return None

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        facts = dict(zip(options.cases, pool.map(facts_of, options.cases), strict=True))
    # The roofline is measured alone, when nothing else is running.
    limits = {
        precision: call("benchmarks.roofline:roofline", precision, options.quick, log=log)[0]
        for precision in sorted({case.precision for case in options.cases.values()})
    }
    return {
        name: {
            "case": asdict(case), "facts": facts[name], "threads": options.threads,
            "roofline": limits[case.precision], "arms": options.arms,
            "processes": options.processes, "flags": options.flags, "seed": options.seed,
            "runs": [],
        }
        for name, case in options.cases.items()
        if facts[name]
    }  # fmt: skip


def _measure(turn: Turn, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run one arm, with a cache of its own: from round 2 on it finds what it prepared before."""
    out = work / "out"
    case, label = options.cases[turn.case], f"{turn.arm}-{turn.processes}"
    flags = shlex.split(options.flags)
    task = task_of(case, turn.arm, work / turn.case, out, flags) | {"seed": options.seed}
    env = {"HF_HOME": str(work / "cache" / turn.case / label)}
    found: dict[str, Any] = {**asdict(turn), "failed": None}
    recipe = f"benchmarks.recipes.{ARMS[turn.arm].recipe}"
    try:
        ranks = call(
            "benchmarks.recipes.task:start", recipe, task, processes=turn.processes, env=env,
            log=options.out / "log.txt",
        )  # fmt: skip
    except ArmFailed as error:
        return found | {"failed": str(error)}
    finally:
        shutil.rmtree(out, ignore_errors=True)
    fed = {name: sum(rank["fed"][name] for rank in ranks) for name in ranks[0]["fed"]}
    return {**found, **ranks[0], "fed": fed}


def _write(record: dict[str, Any], out: Path) -> None:
    write_json(out / "speed.json", record)
    (out / "speed.md").write_text(table(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
