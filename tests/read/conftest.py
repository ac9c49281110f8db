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


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures, for tests that look at their text alone."""
    monkeypatch.setattr("harness.read.report.report.draw_all", lambda *_: ({}, {}))
