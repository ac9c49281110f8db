"""Benchmarks run as a user types them, in a warm process that forks those it starts, and the tables
that they print.
"""

from __future__ import annotations

from typing import Any

from tests.support.ranks import Done, ran
from tests.support.warm_python import fork_pythons


def run_benchmark(name: str, argv: list[str]) -> int:
    module: Any = __import__(f"benchmarks.{name}", fromlist=["main"])
    return int(module.main(argv))


def run_warm(name: str, argv: list[str], skipped: str) -> int:
    """In a process of its own, which may lack a function of the benchmark."""
    fork_pythons()
    module: Any = __import__(f"benchmarks.{name}", fromlist=["main"])
    if skipped:
        assert callable(getattr(module, skipped))
        setattr(module, skipped, lambda *given: None)
    return run_benchmark(name, argv)


def benchmark(name: str, *argv: str, without: str = "") -> Done:
    """without: a function that takes its time, and of which the result does not depend."""
    done = ran(1, run_warm, name, list(argv), without, env={"OMP_NUM_THREADS": "1"})
    assert done.code == 0, done.err
    return done


def cells(text: str, first: str) -> list[str]:
    """The cells of the table row that begins with this one."""
    (line,) = [t for t in text.splitlines() if t.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]
