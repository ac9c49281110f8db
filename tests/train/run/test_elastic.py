"""Processes come and go, and the training stays the one that was asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.core.records import read_rows
from tests.support.broken_runs import alone, attempts_of, elastic, only_run, stop_at, weights_of
from tests.support.ranks import Done, ran, run_script, script
from tests.support.sweeps import untimed_rows

pytestmark = pytest.mark.process

SMALL = [
    "--tiny", "--test_size", "65", "--epochs", "2", "--b", "16", "--dropout", "0", "--log_every",
    "3", "--full_determinism", "--save_steps", "1",
    # Adam makes whole steps of rounding errors where a gradient is zero, as of a key's bias.
    "--adam_epsilon", "1e-3",
]  # fmt: skip


def writing_down(name: str, argv: list[str], cwd: str, log: str, stop: int | None) -> Any:
    """The script; each rank writes down the sample numbers of each batch that it is fed."""
    module = __import__(name)
    load_data = module.load_data
    file = Path(f"{log}_{os.environ.get('RANK', 0)}")

    def load(run: Any) -> Any:
        data = load_data(run)
        collate = data.collate

        def noted(numbers: Any) -> Any:
            with file.open("a") as out:
                out.write(json.dumps([int(n) for n in numbers]) + "\n")
            return collate(numbers)

        data.collate = noted
        return data

    module.load_data = load
    return run_script(name, argv, cwd) if stop is None else stop_at(name, argv, cwd, stop, "kill")


def go(count: int, argv: list[str], log: Path, stop: int | None = None) -> Done:
    env = elastic() if count > 1 else alone()
    done = ran(count, writing_down, "vit", argv, ".", str(log), stop, env=env)
    assert (done.code == 0) is (stop is None), done.err
    return done


def fed(log: Path, count: int, batches: int, train_samples: int) -> list[list[int]]:
    """For each of the first passes, the samples that all ranks had together. The first samples in
    their order are tried before training, and on a quiet machine measured.
    """
    of_ranks = [
        [batch for line in Path(f"{log}_{r}").read_text().splitlines()
         if max(batch := json.loads(line)) < train_samples
         and batch != [*range(len(batch))]][:batches]
        for r in range(count)
    ]  # fmt: skip
    return [[n for batch in passes for n in batch] for passes in zip(*of_ranks, strict=True)]


@pytest.mark.slow
def test_held_it_is_the_training_of_the_whole_set_up(tmp_path: Path) -> None:
    """Eight updates an epoch; killed at the 11th, it goes on from the 10th with half the nodes.

    With fsdp, whose weights and optimizer are split over the processes.
    """
    argv = [*SMALL, "--train_size", "256", "--setup", "2_1", "--strategy", "fsdp"]
    argv[argv.index("--save_steps") + 1] = "5"
    whole = script("vit", *argv, "--o", str(tmp_path / "w"), count=2, env={"LOCAL_WORLD_SIZE": "1"})
    assert whole.code == 0, whole.err
    argv += ["--o", str(tmp_path / "e")]
    go(2, argv, tmp_path / "first", stop=11)
    assert "16 x 2 accumulation x 1" in go(1, argv, tmp_path / "second").out

    undisturbed, folder = only_run(tmp_path / "w"), only_run(tmp_path / "e")
    assert folder.path.relative_to(tmp_path / "e") == undisturbed.path.relative_to(tmp_path / "w")
    for row, expected in zip(untimed_rows(folder), untimed_rows(undisturbed), strict=True):
        # What fsdp sends is not counted; one process sends nothing.
        sent = 0 if row["epoch"] == 3 else None
        assert (row.pop("payload_bytes"), expected.pop("payload_bytes")) == (sent, None)
        assert row == pytest.approx(expected, rel=1e-5)
    expected_weights = weights_of(undisturbed)
    for key, weight in weights_of(folder).items():
        torch.testing.assert_close(weight, expected_weights[key], rtol=1e-4, atol=2e-6)

    # Of the 2nd epoch, two updates of the first attempt count, and all of the second.
    passes = fed(tmp_path / "first", 2, 10, 256)[8:] + fed(tmp_path / "second", 1, 12, 256)
    assert sorted(n for samples in passes for n in samples) == list(range(256))
    starts, ends = attempts_of(folder)
    assert [s["processes"] for s in starts] == [2, 1]
    assert [s["effective_batch"] for s in starts] == [32, 32]
    assert [s["redone_updates"] for s in starts] == [None, 1]
    assert ends[-1]["update"] == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "size", "stop", "updates", "batches"),
    [
        (2, 128, 12, [8, 3 + 2], [8, 3, 2 * 2]),  # 3 x 16 of 128 samples: 2 x 32 follow, 16 are cut
        (2, 128, 11, [8, 2 + 3], [8, 2, 2 * 3]),  # 2 x 16: 3 x 32 follow
        (3, 96, 6, [5 + 0, 3], [5, 0, 2 * 3]),  # 5 x 16 of 96: what is left is no update
    ],
)
def test_a_scaled_batch_resumes_by_samples(
    nodes: int, size: int, stop: int, updates: list[int], batches: list[int], tmp_path: Path
) -> None:
    """One process, then two."""
    argv = [*SMALL, "--train_size", str(size), "--elastic_batch", "scale", "--o", str(tmp_path)]
    argv += ["--setup", f"{nodes}_1"]
    go(1, argv, tmp_path / "first", stop)
    go(2, argv, tmp_path / "second")
    folder = only_run(tmp_path)
    rows = read_rows(folder.epochs)[0]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert [row["updates"] for row in rows] == [updates[0], sum(updates)]

    starts, _ = attempts_of(folder)
    assert [s["effective_batch"] for s in starts] == [16, 32]
    first = fed(tmp_path / "first", 1, batches[0] + batches[1], size)
    second = fed(tmp_path / "second", 2, batches[2] // 2, size)
    counted = first + second
    of_epochs = [counted[: updates[0]], counted[updates[0] :]]
    for row, passes in zip(rows, of_epochs, strict=True):
        samples = [n for numbers in passes for n in numbers]
        assert len(set(samples)) == len(samples) == row["samples"]  # none twice
        assert size - len(samples) < 32  # what fills no update is left out
    # Linear, from 0.0015 to 0: by the samples before the last update.
    done = (2 * size - (size - rows[1]["samples"]) - 32) / (16 * nodes)
    of_all = 2 * size / (16 * nodes)
    if rows[0]["samples"] == size:
        assert rows[1]["learning_rate"] == pytest.approx(0.0015 * (1 - done / of_all))


def crash(name: str, argv: list[str], cwd: str) -> Any:
    return stop_at(name, argv, cwd, 2, "crash")


@pytest.mark.slow
@pytest.mark.parametrize(("used", "outcome"), [("0", None), ("3", "failed")])
def test_only_the_last_restart_leaves_an_outcome(
    used: str, outcome: str | None, tmp_path: Path
) -> None:
    argv = [*SMALL, "--train_size", "128", "--setup", "2_1", "--o", str(tmp_path)]
    env = {**alone(), "TORCHELASTIC_RESTART_COUNT": used}
    done = ran(1, crash, "vit", argv, ".", env=env)
    assert done.code != 0 and ("torchrun may start it again" in done.err) is (outcome is None)
    folder = only_run(tmp_path)
    assert folder.outcome() == outcome
    _, (end,) = attempts_of(folder)
    assert (end["outcome"], end["update"]) == ("failed", 2)
    assert "planted" in end["reason"]
