"""What happens to records afterwards. Needs no torch.

harness.read.load("outputs") gives every epoch of every run below a folder as a pandas DataFrame.
"""

from harness.read.loading import load, load_runs

__all__ = ["load", "load_runs"]
