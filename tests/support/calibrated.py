"""What the tests have measured of the processor, for runs that have a cache of their own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.core.provenance import cache_root


def copy_calibration(home: Path) -> None:
    """Into a folder that is HF_HOME of runs: each of their ranks would measure it, for a second."""
    cache = home / "harness"
    cache.mkdir(parents=True, exist_ok=True)
    for file in cache_root().glob("processor-*.json"):
        shutil.copy(file, cache)


def with_calibration(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that starts processes with these variables, which find it in their cache."""

    def calibrated(*given: Any, **more: Any) -> Any:
        if home := (more.get("env") or {}).get("HF_HOME"):
            copy_calibration(Path(home))
        return call(*given, **more)

    return calibrated
