"""Every command in README and docs/ runs, in the order in which a reader meets it, in a clone.

Commands that read run here. Those that train run in the slow walk, with everything else of their
page, those of README as a shell runs them. What would need a GPU, a cluster, the Hub or hours is
parsed and planned in test_readme.py, and PARSED says why.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import VERBS, main
from harness.core.command_line import command_line
from tests.support.pages import SHELL, commands_of, pages
from tests.support.ranks import script

PARSED = {
    r"--launcher (ssh|slurm)(?!.*--dry_run)": "a cluster",
    r"^python bert\.py( settings\.yaml.*| --dataset reviews\.csv.*)?$": "the Hub",
    r"--nproc_per_node=4": "four GPUs",
    r"--nnodes=": "several machines",
    r"-m harness store|--strategy hivemind": "other machines that join",
    r"(slow_links|propagation|prediction)\.yaml --tiny --launcher": "8 minutes to 5 hours",
    r"docs\.generate": "has a test of its own",
    r"^python script\.py|\.\.\.": "names no command of ours, or only the start of one",
    r"\b(FOLDER|FILES?|NAME|[AB])\b": "has no real name",
    r"-m harness [a-z]+$(?<!doctor)(?<!env)|torchrun$": "names a verb",
}
PAGES = pages(Path(__file__).resolve().parents[2])
SCRIPT = re.compile(r"^(python|torchrun --standalone --nproc_per_node=2) \w+\.py ")
TRAINS = ("sweep", "nodes", "link", "store")
# Half a minute of drawing; tests/read draws of smaller records.
LATER = re.compile(r"-m harness report|--all|outputs/own|outputs/vit/2_1")


def parsed_only(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in PARSED)


def only_reads(command: str) -> bool:
    words = shlex.split(command)
    if SHELL.match(command):
        return True
    if "-m harness" not in command:
        return bool({"--help", "--print_settings", "--list_models"} & {*words})
    return not {*TRAINS} & {*words} or "--dry_run" in words


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git has, and the files of their own that pages name."""
    root, folder = Path(__file__).resolve().parents[2], tmp_path_factory.mktemp("clone")
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


def test_every_command_reads_or_trains_or_has_a_reason_to_be_parsed_only(root: Path) -> None:
    found = {page.name: commands_of(page) for page in pages(root)}
    assert set(found) >= {"README.md", *(page.name for page in root.glob("docs/*.md"))}
    everything = [command for page in found.values() for command in page]
    for pattern in PARSED:
        assert any(re.search(pattern, command) for command in everything), f"none has {pattern}"
    kinds = [(parsed_only(command), only_reads(command)) for command in everything]
    assert kinds.count((False, True)) >= 25 and kinds.count((False, False)) >= 18


@pytest.mark.process  # doctor asks git, ssh and others
def test_commands_that_read_run_in_a_fresh_clone(
    root: Path, clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`outputs` holds two runs of vit and bert, as after the first commands of README."""
    monkeypatch.chdir(clone)
    assert main(["unpack", "outputs/published/demo-tiny.jsonl.gz", "--out", "outputs"]) == 0
    variables: dict[str, str] = {}
    seen: set[str] = set()
    ran: set[str] = set()
    for page in pages(root):
        for command in commands_of(page):
            name, equals, value = command.partition("=")
            if SHELL.match(command):
                variables |= {name: value} if equals else {}
            if parsed_only(command) or not only_reads(command) or SHELL.match(command):
                continue
            if LATER.search(command) or command in ran:
                continue
            ran.add(command)
            words = shlex.split(string.Template(command).substitute(variables))
            if "harness" in words:
                argv = words[words.index("harness") + 1 :]
                assert main(argv) == 0 or argv == ["doctor"], f"{page.name}: {command}"
                seen |= {*argv[:1]}
            else:
                with pytest.raises(SystemExit) as stopped:
                    command_line(Path(words[1]).stem, words[2:])
                assert stopped.value.code == 0, f"{page.name}: {command}"
            assert "error:" not in capsys.readouterr().err, command
    # The last four stand in the pages by name alone.
    apart = {*TRAINS, "report", "pack", "push", "pull", "completion"}
    assert seen >= {*VERBS} - apart


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_reader_types_every_command_of_readme(clone: Path, root: Path) -> None:
    """As a shell runs them, each with processes of its own."""
    lines = [
        command if SHELL.match(command) else f"{command} >>out.log 2>err.log"
        for command in to_run(root / "README.md")
    ]
    shell(lines, clone)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [page.name for page in PAGES[1:] if commands_of(page)])
def test_a_reader_types_every_command_of_a_page(
    name: str, clone: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page after page: what one page left is there for the next.

    What reads runs in this process and scripts run in warm ones, which saves imports.
    """
    variables: dict[str, str] = {}
    for command in to_run(root / "docs" / name):
        variable, equals, value = command.partition("=")
        if SHELL.match(command) and equals:
            variables[variable] = value
            continue
        words = shlex.split(string.Template(command).safe_substitute(variables))
        if "harness" in words and not {*TRAINS} & {*words}:
            argv = words[words.index("harness") + 1 :]
            with monkeypatch.context() as there:  # warm processes begin elsewhere
                there.chdir(clone)
                assert main(argv) == 0 or argv == ["doctor"], command
        elif SCRIPT.match(command):
            at = next(number for number, word in enumerate(words) if word.endswith(".py"))
            count = 2 if "--nproc_per_node=2" in words[:at] else 1
            done = script(Path(words[at]).stem, *words[at + 1 :], count=count, cwd=clone)
            assert done.code == 0, f"{command}\n{done.err}"
        else:
            shell([f"{command} >>out.log 2>err.log"], clone)


def to_run(page: Path) -> list[str]:
    found = [command for command in commands_of(page) if not parsed_only(command)]
    if os.geteuid() == 0:
        return found
    # Emulated nodes need root, or user namespaces with /dev/net/tun.
    return [c for c in found if "harness nodes" not in c and "outputs/vit/2_1" not in c]


def shell(lines: list[str], clone: Path) -> None:
    done = subprocess.run(
        ["bash", "-exc", "\n".join(lines)], cwd=clone, stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    told = (clone / "err.log").read_text() if (clone / "err.log").exists() else ""
    assert done.returncode == 0, f"{done.stderr.splitlines()[-1]}\n{told[-2000:]}"
