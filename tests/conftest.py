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
