"""Fixtures of the tests of reading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.records import Plan


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "outputs")
