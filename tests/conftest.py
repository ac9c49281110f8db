"""What all tests share: a quiet, offline environment, set before torch is loaded."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# One thread a process: several ranks share few cores, and sums come out in one order.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Prepared data are kept for the session, away from the user's own cache.
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="harness-test-cache-"))

import pytest


@pytest.fixture
def root() -> Path:
    return Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need what this machine lacks are left out, and the report says why."""
    import torch

    gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: none is visible")
    root = pytest.mark.skip(reason="needs root")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(gpu)
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(root)
