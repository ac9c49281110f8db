"""The commands of the pages behind README and the guide: see test_commands.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import commands_of, pages
from tests.support.typed import clone_in, type_all

README, GUIDE, *OTHERS = pages(Path(__file__).resolve().parents[2])


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone_in(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def typed() -> set[str]:
    return set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [each for each in OTHERS if commands_of(each)], ids=lambda p: p.name
)
def test_a_reader_types_every_command_of_a_page(page: Path, clone: Path, typed: set[str]) -> None:
    """Page after page."""
    type_all(page, clone, typed)


def test_the_guide_is_the_page_after_readme() -> None:
    assert (README.name, GUIDE.name) == ("README.md", "guide.md")
