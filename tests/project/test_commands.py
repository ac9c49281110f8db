"""Every command in README and docs/ runs, in the order in which a reader meets it, in a clone.

Commands that read run here. Those that train run in the slow walk, with everything else of their
page, those of README as a shell runs them. What would need a GPU, a cluster, the Hub or hours is
parsed and planned in test_readme.py, and PARSED says why. README and the guide share a clone; the
pages behind them have one of their own (test_commands_of_pages.py).
"""

from __future__ import annotations

import re
import shlex
import string
from pathlib import Path

import pytest

from harness.cli import VERBS, main
from harness.core.command_line import command_line
from tests.support.pages import SHELL, commands_of, pages
from tests.support.typed import (
    PARSED,
    TRAINS,
    clone_in,
    only_reads,
    parsed_only,
    shell,
    to_run,
    type_all,
)

# Half a minute of drawing; tests/read draws of smaller records.
LATER = re.compile(r"-m harness report|--all|outputs/own|outputs/vit/2_1")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In which the runs of README's sweep are fewer and shorter, of each set-up and batch."""
    folder = clone_in(tmp_path_factory.mktemp("clone"))
    sweep = folder / "experiments" / "batch_size.yaml"
    text = sweep.read_text()
    for whole, less in (("vit: {epochs: 4}", "vit: {epochs: 2}"), ("[2, 4, 42]", "[2, 4]")):
        assert text.count(whole) == 1
        text = text.replace(whole, less)
    sweep.write_text(text)
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
@pytest.mark.timeout(1800)
def test_a_reader_types_every_command_of_readme_and_guide(clone: Path, root: Path) -> None:
    """Those of README as a shell runs them, each with processes of its own."""
    readme = to_run(root / "README.md")
    shell([c if SHELL.match(c) else f"{c} >>out.log 2>err.log" for c in readme], clone)
    if any("outputs/vit/2_1" in command for command in readme):  # both had as many threads
        assert "times its samples/s on 2x the devices" in (clone / "out.log").read_text()
    type_all(root / "docs" / "guide.md", clone, typed={*readme})
