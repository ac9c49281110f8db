"""What the tests have measured of the processor, for runs that have a cache of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.core.provenance import cache_root


def copy_calibration(home: Path) -> None:
    """Into a folder that is HF_HOME of runs: each of their ranks would measure it, for a second."""
    cache = home / "harness"
    cache.mkdir(parents=True, exist_ok=True)
    for file in cache_root().glob("processor-*.json"):
        shutil.copy(file, cache)
