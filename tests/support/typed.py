"""Commands of README and docs/ as a reader types them, in a clone."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

from harness.cli import main
from tests.support.pages import SHELL, commands_of
from tests.support.ranks import script

PARSED = {
    r"--launcher (ssh|slurm)(?!.*--dry_run)": "a cluster",
    r"^python bert\.py( settings\.yaml.*| --dataset reviews\.csv.*)?$": "the Hub",
    r"--nproc_per_node=4": "four GPUs",
    r"--nnodes=": "several machines",
    r"-m harness store|--strategy hivemind": "other machines that join",
    r"(slow_links|propagation|prediction)\.yaml --tiny --launcher": "8 minutes to 5 hours",
    r"sweep experiments/demo\.yaml --tiny$": "make demo runs it",
    r"^python script\.py|\.\.\.": "names no command of ours, or only the start of one",
    r"\b(FOLDER|FILES?|NAME|[AB])\b": "has no real name",
    r"-m harness [a-z]+$(?<!doctor)(?<!env)|torchrun$": "names a verb",
}
SCRIPT = re.compile(r"^(python|torchrun --standalone --nproc_per_node=2) \w+\.py ")
TRAINS = ("sweep", "nodes", "link", "store")


def parsed_only(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in PARSED)


def only_reads(command: str) -> bool:
    words = shlex.split(command)
    if SHELL.match(command):
        return True
    if "-m harness" not in command:
        return bool({"--help", "--print_settings", "--list_models"} & {*words})
    return not {*TRAINS} & {*words} or "--dry_run" in words


def clone_in(folder: Path) -> Path:
    """What git has, and the files of their own that pages name."""
    root = Path(__file__).resolve().parents[2]
    names = subprocess.run(
        ["git", "ls-files", "-z", "--", ":!tests"], cwd=root, capture_output=True, check=True
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / name)
    theirs = folder / "theirs" / "bert" / "2_1_2e-05_16_P100far.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("f1=[0.90,0.91]\n")
    state = folder / "checkpoint-500" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text('{"log_history": [{"epoch": 1.0, "step": 500, "eval_accuracy": 0.9}]}')
    return folder


def type_all(page: Path, clone: Path, typed: set[str]) -> None:
    """What is not typed yet. What one page left is there for the next.

    What reads runs in this process and scripts run in warm ones, which saves imports.
    """
    variables: dict[str, str] = {}
    for command in to_run(page):
        variable, equals, value = command.partition("=")
        if SHELL.match(command) and equals:
            variables[variable] = value
            continue
        full = string.Template(command).safe_substitute(variables)
        if full in typed:
            continue
        typed.add(full)
        print(f"{time.strftime('%X')} {full}")
        words = shlex.split(full)
        if "harness" in words and not {*TRAINS} & {*words}:
            argv = words[words.index("harness") + 1 :]
            with chdir(clone):  # warm processes begin elsewhere
                assert main(argv) == 0 or argv == ["doctor"], command
        elif SCRIPT.match(command):
            at = next(number for number, word in enumerate(words) if word.endswith(".py"))
            count = 2 if "--nproc_per_node=2" in words[:at] else 1
            done = script(Path(words[at]).stem, *words[at + 1 :], count=count, cwd=clone)
            assert done.code == 0, f"{command}\n{done.err}"
        else:
            shell([f"{command} >>out.log 2>err.log"], clone)


def to_run(page: Path) -> list[str]:
    both = zip(commands_of(page, with_variables=True), commands_of(page), strict=True)
    found = [typed for typed, bare in both if not parsed_only(bare)]
    if os.geteuid() == 0:
        return found
    # Emulated nodes need root, or user namespaces with /dev/net/tun.
    return [c for c in found if "harness nodes" not in c and "outputs/vit/2_1" not in c]


def shell(lines: list[str], clone: Path) -> None:
    done = subprocess.run(
        ["bash", "-exc", "\n".join(lines)], cwd=clone, stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
             "PS4": r"\t "},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    print(done.stderr)  # when each began
    told = (clone / "err.log").read_text() if (clone / "err.log").exists() else ""
    assert done.returncode == 0, f"{done.stderr.splitlines()[-1]}\n{told[-2000:]}"
