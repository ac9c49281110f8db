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
from collections.abc import Iterable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

from harness.cli import main
from harness.core.tasks import TASKS
from tests.support.pages import SHELL, commands_of
from tests.support.ranks import ran, run_script
from tests.support.warm_python import Python

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
# Half a minute of drawing; tests/read draws of smaller records.
LATER = re.compile(r"-m harness report|--all|outputs/own|outputs/vit/2_1")
OWN = re.compile(r" outputs( |$)")  # reads what a reader has measured
SCRIPT = re.compile(r"^([A-Z_]+=\S+ )*(python|torchrun --standalone --nproc_per_node=2) \w+\.py ")
VERB, NODES = re.compile("-m harness "), re.compile("-m harness nodes ")
NONE = re.compile("(?!)")
TRAINS = ("sweep", "nodes", "link", "store")
# Epochs of a tiny training in the clone, by script: unlike those that pages name for the same
# settings, so that no command finds its run finished by another.
EPOCHS = {"bert": 2, "vit": 1}
TEXTS = 1664  # of bert: more updates than the warm-up steps that a page asks for
THIN = {"hidden_sizes": [8, 16, 32, 64], "embedding_size": 8}  # test_readme.py trains it whole
SHORTER = [  # in the clone: file, what stands there, what runs fewer and shorter trainings
    *(
        ("harness/core/tasks.py", f'"epochs": {TASKS[name].tiny["epochs"]},', f'"epochs": {few},')
        for name, few in EPOCHS.items()
    ),
    ("harness/core/tasks.py", 'english", "train_size": "all"', f'english", "train_size": {TEXTS}'),
    ("experiments/batch_size.yaml", "vit: {epochs: 4}", "vit: {epochs: 1}"),
    ("experiments/batch_size.yaml", "[2, 4, 42]", "[2]"),
    ("experiments/learning_rate.yaml", "[2, 4, 42]", "[2]"),
]


def parsed_only(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in PARSED)


def only_reads(command: str) -> bool:
    words = shlex.split(command)
    if SHELL.match(command):
        return True
    if "-m harness" not in command:
        return bool({"--help", "--print_settings", "--list_models"} & {*words})
    return not {*TRAINS} & {*words} or "--dry_run" in words


def reads_what_is_there(command: str) -> bool:
    """In a fresh clone: it runs in every session, in a second."""
    return only_reads(command) and not LATER.search(command) and not SHELL.match(command)


def clone_in(folder: Path) -> Path:
    """What git has, with shorter trainings, and the files of their own that pages name."""
    root = Path(__file__).resolve().parents[2]
    names = subprocess.run(
        ["git", "ls-files", "-z", "--", ":!tests"], cwd=root, capture_output=True, check=True
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / name)
    for name, whole, less in SHORTER:
        text = (folder / name).read_text()
        assert text.count(whole) == 1, (name, whole)
        (folder / name).write_text(text.replace(whole, less))
    theirs = folder / "theirs" / "bert" / "2_1_2e-05_16_P100far.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("f1=[0.90,0.91]\n")
    state = folder / "checkpoint-500" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text('{"log_history": [{"epoch": 1.0, "step": 500, "eval_accuracy": 0.9}]}')
    return folder


def to_type(page: Path) -> list[str]:
    """What a walk types of a page, in order, with the values of variables: what trains, and what
    reads what was trained. Variables that stand before python stay.
    """
    variables: dict[str, str] = {}
    found: list[str] = []
    for command, bare in to_run(page):
        variable, equals, value = command.partition("=")
        if SHELL.match(command) and equals:
            variables[variable] = value
        elif OWN.search(bare) or not reads_what_is_there(bare):
            found.append(string.Template(command).safe_substitute(variables))
    return list(dict.fromkeys(found))


def type_all(commands: Iterable[str], clone: Path, in_a_shell: re.Pattern[str] = NONE) -> None:
    """One after the other.

    Verbs run in this process, scripts and emulated nodes in warm ones, which saves imports; in a
    shell only what this pattern finds, and what is not ours.
    """
    for command in commands:
        print(f"{time.strftime('%X')} {command}")
        words = shlex.split(command)
        if SCRIPT.match(command):
            at = next(number for number, word in enumerate(words) if word.endswith(".py"))
            count = 2 if "--nproc_per_node=2" in words[:at] else 1
            env = dict(word.split("=", 1) for word in words[:at] if re.match("[A-Z_]+=", word))
            given = Path(words[at]).stem, words[at + 1 :], str(clone)
            done = ran(count, run_shorter, *given, env=env)
            assert done.code == 0, f"{command}\n{done.err}"
        elif VERB.search(command) and not in_a_shell.search(command):
            argv = words[words.index("harness") + 1 :]
            if NODES.search(command):
                process = Python([sys.executable, "-m", "harness", *argv], cwd=clone)
                said = process.communicate(timeout=150)
                assert process.returncode == 0, (command, said)
            else:
                with chdir(clone):  # warm processes begin elsewhere
                    assert main(argv) == 0, command
        else:
            shell([f"{command} >>out.log 2>err.log"], clone)
            if NODES.search(command):
                ended_quietly(clone)


def ended_quietly(clone: Path) -> None:
    """Emulated nodes print nothing of torch's, and beside what the ranks print only warnings."""
    out, errors = ((clone / name).read_text() for name in ("out.log", "err.log"))
    assert "Traceback" not in out and "exit barrier" not in out, out
    assert [line for line in errors.splitlines() if "warning: " not in line] == []


def run_shorter(name: str, argv: list[str], cwd: str) -> int:
    """A script, with the defaults that the clone has; in a process of its own."""
    for task, epochs in EPOCHS.items():
        texts = {"train_size": TEXTS} if task == "bert" else {}
        TASKS[task] = replace(TASKS[task], tiny={**TASKS[task].tiny, "epochs": epochs, **texts})
    vit = TASKS["vit"]
    thin = {"resnet-18-cifar": {**vit.architectures["resnet-18-cifar"], **THIN}}
    TASKS["vit"] = replace(vit, architectures={**vit.architectures, **thin})
    return run_script(name, argv, cwd)


def to_run(page: Path) -> list[tuple[str, str]]:
    """The commands that can run here: with what stands before python to set variables, and bare."""
    both = zip(commands_of(page, with_variables=True), commands_of(page), strict=True)
    found = [(typed, bare) for typed, bare in both if not parsed_only(bare)]
    if os.geteuid() == 0:
        return found
    # Emulated nodes need root, or user namespaces with /dev/net/tun.
    missing = re.compile("harness nodes|outputs/vit/2_1")
    return [(typed, bare) for typed, bare in found if not missing.search(typed)]


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
