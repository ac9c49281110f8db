"""How long a --tiny run takes from main() through its first step, imports not counted.

    python -m benchmarks.start_up          each script twice, in fresh processes; target: 2 s

The first run finds an empty cache and prepares the data, the second finds them there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from benchmarks.results import ROOT, markdown

CACHES = ("empty", "filled")
# Code that exits after the first step; it reads the command line before the timing, as a script.
FIRST_STEP = """
import os, sys, time
from harness.core.command_line import command_line
from transformers.trainer_callback import CallbackHandler
import {script}
settings = command_line({script!r}, sys.argv[1:])
began = time.perf_counter()
def stepped(*args, **kwargs):
    print("FIRST", time.perf_counter() - began, flush=True)
    os._exit(0)
CallbackHandler.on_step_end = stepped
{script}.main(settings)
"""


def start_up(script: str, threads: int = 1) -> dict[str, float]:
    """State of the cache -> seconds of the start."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"HF_HOME": folder, "OMP_NUM_THREADS": str(threads)}
        for cache in CACHES:
            flags = ["--tiny", "--save", "none", "--output_dir", f"{folder}/{cache}"]
            command = [sys.executable, "-c", FIRST_STEP.format(script=script), *flags]
            done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True)
            if "FIRST " not in done.stdout:
                raise RuntimeError(f"{script}.py --tiny took no step: {done.stderr[-500:]}")
            found[cache] = float(done.stdout.split("FIRST ")[1])
    return found


def table(took: dict[str, dict[str, float]]) -> str:
    heads = ("--tiny, main() through the first step", *(f"{cache} cache s" for cache in CACHES))
    rows = [(f"{name}.py", *(f"{of[cache]:.2f}" for cache in CACHES)) for name, of in took.items()]
    return markdown("lll", heads, rows)


if __name__ == "__main__":
    print(table({script: start_up(script) for script in ("bert", "vit")}))
