"""Verbs and flags are completed by each shell's own machinery, from the one parser."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from harness.cli import VERBS, main

ASK = """
COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) COMPREPLY=()
$(complete -p harness | sed 's/.*-F \\([^ ]*\\).*/\\1/') harness "${{COMP_WORDS[COMP_CWORD]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def script_of(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "some", "other"),
    [
        ("harness ''", {*VERBS}, {"--tiny"}),
        ("harness ta", {"table"}, {"sweep"}),
        ("harness sweep --", {"--tiny", "--launcher", "--dry_run"}, {"--latex", "table"}),
        ("harness table --l", {"--latex"}, {"--columns"}),
        ("harness table outp", {""}, {"outputs"}),  # files are the shell's
        ("harness nothing --", {""}, {"--tiny"}),
    ],
)
def test_bash(
    words: str, some: set[str], other: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = script_of("bash", capsys) + ASK.format(words=words)
    done = subprocess.run(
        ["bash", "--norc", "-uc", text], capture_output=True, text=True, check=True
    )
    found = {*done.stdout.split("\n")[:-1]}
    assert some <= found and not other & found and not done.stderr


def test_files_are_completed_where_no_word_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert "complete -o default -F _harness harness" in script_of("bash", capsys)


@pytest.mark.process
@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["harness ta", "harness sweep --t", "harness table x --latex --co", "harness no --"]
    text = script_of("fish", capsys) + "".join(f"\ncomplete -C '{w}'; echo end" for w in asked)
    done = subprocess.run(
        ["fish", "--no-config", "-c", text], capture_output=True, text=True, check=True
    )
    found = [
        {line.split("\t")[0] for line in part.splitlines()} for part in done.stdout.split("end\n")
    ]
    assert found == [{"table"}, {"--timeout", "--tiny"}, {"--columns"}, set(), set()]
    assert VERBS["table"].summary in done.stdout and not done.stderr


@pytest.mark.process
@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Typed at a terminal, as its completion works nowhere else."""
    (tmp_path / "harness.zsh").write_text(script_of("zsh", capsys))
    (tmp_path / "outputs").touch()
    setup = "autoload -Uz compinit; compinit -u -D; source ./harness.zsh; harness() {print got $@}"
    asked = ["ta", "sweep --time", "table outp", "table x --latex --co"]
    typed = "\n".join([setup, *(f"harness {words}\t" for words in asked), "exit", ""])
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["zsh", "-f", "-i"], cwd=tmp_path, env=os.environ | {"TERM": "dumb"},
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    ):  # fmt: skip
        os.close(theirs)
        os.write(ours, typed.encode())
        shown = b""
        with suppress(OSError):  # the terminal is gone with its shell
            while piece := os.read(ours, 4096):
                shown += piece
    os.close(ours)
    said = re.findall(r"^got (.*?)\s*$", shown.decode(), re.MULTILINE)
    assert said == ["table", "sweep --timeout", "table outputs", "table x --latex --columns"], shown


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "cmd"]) == 2
    assert "expected one of bash, zsh, fish" in capsys.readouterr().err
