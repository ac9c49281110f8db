"""Verbs and flags are completed by bash's own machinery, from the one parser."""

from __future__ import annotations

import shutil
import subprocess

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
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script_of(shell, capsys)
    for verb in VERBS:
        assert verb in text
    assert "latex" in text and text.count("\n") > len(VERBS)
    if shutil.which(shell):
        subprocess.run([shell, "--no-execute", "-c", text], check=True)


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "cmd"]) == 2
    assert "expected one of bash, zsh, fish" in capsys.readouterr().err
