"""Reading, comparing and plotting records. Needs no torch.

harness.read.load("outputs") gives every epoch of every run below a folder as a pandas DataFrame,
harness.read.load_sweep("outputs/sweeps/NAME") every group of a sweep's runs.
"""

from harness.read.records.baseline import load_sweep, load_sweep_runs
from harness.read.records.frames import load, load_runs

__all__ = ["load", "load_runs", "load_sweep", "load_sweep_runs"]
