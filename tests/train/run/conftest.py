"""Fixtures of the tests of how runs begin, break off and go on."""

from __future__ import annotations

import pytest

from tests.support.broken_runs import Whole


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp)
