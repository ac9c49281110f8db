"""Fixtures of the tests of reading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paired import Verb
from tests.support.records import Plan


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "outputs")


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("table", capsys)


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("figures", capsys)
