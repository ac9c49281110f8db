"""Every command in README and docs/ runs, in the order in which a reader meets it, in a clone.

Commands that read what is there run here. The slow walk types those that train, and those that read
what was trained: the verbs of README in a shell, scripts in warm processes; test_readme.py starts
one cold. What would need a GPU, a cluster, the Hub or hours is parsed and planned in
test_readme.py, and PARSED says why. README and the guide share a clone; the pages behind them have
one of their own (test_commands_of_pages.py).
"""

from __future__ import annotations

import re
import shlex
import string
from pathlib import Path

import pytest

from harness.cli import VERBS, main
from harness.core.command_line import command_line
from harness.core.records import RunFolder
from harness.launch.outcome import was_disturbed
from tests.support.pages import SHELL, commands_of, pages
from tests.support.typed import (
    PARSED,
    TRAINS,
    VERB,
    clone_in,
    only_reads,
    parsed_only,
    reads_what_is_there,
    to_run,
    to_type,
    type_all,
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return clone_in(tmp_path)


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
            if parsed_only(command) or not reads_what_is_there(command) or command in ran:
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
@pytest.mark.timeout(1200)
def test_a_reader_types_every_command_of_readme_and_guide(clone: Path, root: Path) -> None:
    """The verbs of README as a shell runs them, each with processes of its own."""
    readme = [command for command, _ in to_run(root / "README.md")]
    type_all(readme, clone, in_a_shell=VERB)
    if any("outputs/vit/2_1" in command for command in readme):  # both had as many threads
        # Other tests run meanwhile: a run beside them is compared with no quiet one.
        runs = ("2_1/*", "1_1/vit-nano_single_b32_*_e2_*")
        (far,), (one,) = (
            list((clone / "outputs/vit").glob(f"{name}/epochs.jsonl")) for name in runs
        )
        sides = [was_disturbed(RunFolder.at(file.parent)) for file in (far, one)]
        expected = {
            (True, False): "It ran beside other programs, so its times are not compared with quiet",
            (False, True): "No comparable run on one process was found beside it",
        }.get((sides[0], sides[1]), "times its samples/s on 2x the devices")
        assert expected in (clone / "out.log").read_text(), sides
    guide = to_type(root / "docs" / "guide.md")
    type_all([command for command in guide if command not in readme], clone)
