"""Signals at chosen moments of a run: nothing is lost, doubled or falsified.

A moment is the number of a write: to an entry of the cache, a checkpoint, rows, the record. A trial
is its number: random.Random(number) draws ranks, moments and signals.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from harness.core.attempts import only_follows
from harness.core.locks import Lock
from harness.core.provenance import cache_root
from harness.core.records import FINISHED, RunFolder, find_runs
from harness.read.records.recorded import recorded
from tests.support.broken_runs import assert_same_training, attempts_of, only_run
from tests.support.killed import NEVER, train
from tests.support.mutants import amount
from tests.support.ranks import Done, ran
from tests.support.toys import CPU

pytestmark = pytest.mark.process

SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
PARTS = 2  # beside one another, where there are cores


def start(root: Path, count: int, rank: int = 0, at: int = NEVER, *how: str | float) -> Done:
    env = CPU | {"HF_HOME": str(root / "cache")}
    return ran(count, train, str(root), rank, at, *(how or ("SIGKILL", 0.0)), env=env)


def folder_of(root: Path) -> RunFolder | None:
    runs = find_runs(root / "out") if (root / "out").exists() else []
    return runs[0] if runs else None


class Healthy:
    """Runs that nothing disturbs, by the number of their ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[int, RunFolder] = {}
        self.writes: dict[int, list[int]] = {}  # of each rank

    def add(self, count: int) -> None:
        root = self.root(str(count))
        done = start(root, count)
        assert done.code == 0, done.err
        self.runs[count] = only_run(root / "out")
        told = [root.with_name(f"{root.name}.{rank}") for rank in range(count)]
        self.writes[count] = [int(file.read_text()) for file in told]

    def root(self, name: str) -> Path:
        """With the calibration of the processor, which takes a second."""
        cache = self.folder / name / "cache" / "harness"
        cache.mkdir(parents=True)
        for file in cache_root().glob("processor-*.json"):
            shutil.copy(file, cache)
        return self.folder / name


def strikes(draw: random.Random, writes: Sequence[int]) -> Iterator[tuple[int, int, str, float]]:
    for _ in range(draw.randrange(1, 4)):
        rank = draw.randrange(len(writes))
        after_s = draw.choice([0.0, draw.uniform(1e-4, 0.02)])
        how = "SIGALRM" if after_s else draw.choice(SIGNALS)
        yield rank, draw.randrange(1, writes[rank] + 1), how, after_s


def codes(how: str) -> set[int]:
    """Of a process alone that meets it, or has ended before."""
    return {0, 128 + getattr(signal, how)}


def check_reasons(folder: RunFolder, count: int, met: Sequence[str]) -> None:
    """Each attempt has ended as what it met says; a rank that misses another says that."""
    silent = sum(how in ("SIGKILL", "SIGALRM") for how in met)
    possible = Counter({**Counter(met), "the process was killed": silent})
    told = Counter(end["reason"] for end in attempts_of(folder)[1] if end["outcome"] != FINISHED)
    for reason in told:
        if count == 1:
            assert told[reason] <= possible[reason], told
        else:  # whom its launcher stops says SIGTERM
            assert reason in ({*possible, "SIGTERM"}) or only_follows(reason), told


def trial(number: int, healthy: Healthy) -> None:
    """Started until it has ended well."""
    draw = random.Random(number)
    count = draw.choice([1, 1, 1, 2])
    root = healthy.root(f"trial-{number}")
    met: list[str] = []
    try:
        for strike in strikes(draw, healthy.writes[count]):
            met.append(strike[2])
            done = start(root, count, *strike)
            if count == 1:
                assert done.code in codes(strike[2]) and done.err.count("\n") <= 1, done
            if (found := folder_of(root)) is not None:
                assert recorded(found).problem is None, recorded(found).line
                if found.outcome() == FINISHED:
                    # Killed before it gave its lock back: what is left goes with the next lock.
                    lock = Lock(found.lock("run"))
                    assert lock.take()
                    lock.release()
                    break
        else:
            done = start(root, count)
            assert done.code == 0, done
        folder = only_run(root / "out")
        assert_same_training(folder, healthy.runs[count])
        check_reasons(folder, count, met)
        left = [path.name for path in (root / "cache" / "harness").glob("*")]
        assert sum(name.endswith(".lock") for name in left) == 0, left
        assert not (folder.path.parent / ".locks").exists()
    except BaseException:
        print(f"trial {number} on {count} ranks met {met}")
        raise
    shutil.rmtree(root)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_run_that_is_killed_at_any_write(part: int, tmp_path: Path) -> None:
    healthy = Healthy(tmp_path)
    for count in (1, 2):
        healthy.add(count)
    for number in range(part, amount(4, 1000), PARTS):
        trial(number, healthy)
