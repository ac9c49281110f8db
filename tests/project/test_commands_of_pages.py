"""The commands of the pages behind README and the guide: see test_commands.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import pages
from tests.support.sweeps import one_launcher
from tests.support.typed import clone_in, to_run, to_type, type_all

README, GUIDE, *OTHERS = pages(Path(__file__).resolve().parents[2])
# What two pages show is typed where a reader meets it first, with what follows from it.
BEFORE = [*(command for command, _ in to_run(README)), *to_type(GUIDE)]
LEFT: dict[Path, list[str]] = {}
for page in OTHERS:
    LEFT[page] = [command for command in to_type(page) if command not in BEFORE]
    BEFORE += LEFT[page]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone_in(tmp_path_factory.mktemp("clone"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in OTHERS if LEFT[page]], ids=lambda p: p.name)
def test_a_reader_types_every_command_of_a_page(page: Path, clone: Path) -> None:
    """Page after page. The sweeps of a page are planned in this process and share one launcher."""
    with one_launcher():
        type_all(LEFT[page], clone)


def test_the_guide_is_the_page_after_readme() -> None:
    assert (README.name, GUIDE.name) == ("README.md", "guide.md")
