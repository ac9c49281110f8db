"""Sweeps whose processes are all forked: a runner, a launcher for each node (in the network of that
node), its fork server, and the ranks (warm_python.py says how).

What begins them is tested with start() and sweep() of sweeps.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.ranks import ROOT
from tests.support.sweeps import arguments
from tests.support.warm_python import Python


def start(
    file: Path, out: Path, *flags: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Python:
    return Python([sys.executable, "-m", "harness", *arguments(file, out, *flags)], env, cwd)


def sweep(file: Path, out: Path, *flags: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """A runner to its end."""
    runner = start(file, out, *flags, **more)
    stdout, stderr = runner.communicate(timeout=150)
    return subprocess.CompletedProcess(runner.args, runner.wait(), stdout, stderr)
