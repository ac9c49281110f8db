"""Measures what distribution buys when fine-tuning Hugging Face models: `python -m harness`.

harness.load("outputs") gives the records below a folder as a pandas DataFrame, a row an epoch.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """load() and its like, which harness.read defines: imported with their first use."""
    if name not in ("load", "load_runs", "load_sweep", "load_sweep_runs"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("harness.read"), name)
