"""Two nodes that share no disk: each rank has a folder of its own here."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerState

from harness.core.records import COMPLETE, RunFolder, read_rows
from harness.train.manifest import write_manifest
from harness.train.run.checkpoints import (
    Written,
    agree_to_save,
    complete,
    follow_rank0,
    hand_out,
    on_own_disk,
    usable_checkpoint,
)
from tests.support.broken_runs import own_node, trained_on_own_disk
from tests.support.damage import plant
from tests.support.manifests import facts_of
from tests.support.ranks import Done, ran, ranks
from tests.support.sweeps import untimed_rows

pytestmark = pytest.mark.process

ARGV = [
    "--tiny", "--train_size", "256", "--test_size", "65", "--epochs", "3", "--b", "16",
    "--setup", "2_1", "--output_dir", "out", "--dropout", "0.1", "--full_determinism",
]  # fmt: skip


def hand_around(folder: str) -> tuple[dict[str, str], list[bool], bool]:
    world = own_node(folder)
    dist.init_process_group("gloo")
    run, checkpoint = RunFolder(Path("run")), Path("run/checkpoint-4")
    if world.rank == 1:
        run.path.mkdir()
        (run.path / "old").write_text("of a run that rank 0 does not have")
    follow_rank0(run, world, gone=True)
    aside = Path("run.earlier-1/old").is_file()
    dist.barrier()
    checkpoint.mkdir(parents=True)
    if world.rank == 0:
        (checkpoint / "inner").mkdir()
        (checkpoint / "inner" / "weights").write_text("w" * 100)
        write_manifest(checkpoint / COMPLETE, facts_of())
    own = [on_own_disk(checkpoint / COMPLETE, world)]
    follow_rank0(run, world, gone=False)  # it is there: nothing is set aside
    for _ in range(2):  # the second time all is there
        hand_out([checkpoint], world)
    if world.rank == 1:
        (checkpoint / COMPLETE).write_text("else")  # as long, but of another run
        os.utime(checkpoint / COMPLETE, (1, 1))
    hand_out([checkpoint], world)
    own.append(on_own_disk(checkpoint / COMPLETE, world))
    files = {str(f.relative_to(checkpoint)): f.read_text() for f in checkpoint.rglob("*")
             if f.is_file()}  # fmt: skip
    dist.destroy_process_group()
    return files, own, aside


def test_what_rank_0_has_the_other_node_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"inner/weights": "w" * 100}
    first, second = ranks(2, hand_around, str(tmp_path))
    assert first[1:] == ([False, False], False)
    assert second[1:] == ([True, False], True)
    assert first[0] == second[0] and first[0].items() > whole.items()


def unsound(folder: str) -> tuple[bool, list[str]]:
    world = own_node(folder)
    dist.init_process_group("gloo")
    if world.rank == 0:
        Path("run").mkdir()
    sound, _ = agree_to_save(Path("run/checkpoint-4"), world, world.rank == 0, nn.Linear(1, 1))
    left = sorted(str(path) for path in Path().rglob("*"))
    dist.destroy_process_group()
    return sound, left


def test_one_rank_with_unsound_weights_ends_the_save_of_all(tmp_path: Path) -> None:
    assert ranks(2, unsound, str(tmp_path)) == [(False, ["run"]), (False, [])]


def go_on(folder: str, kind: str) -> Any:
    """The checkpoint that a rank goes on from, whose part on its own disk was damaged, and what of
    the checkpoints is left there.
    """
    world = own_node(folder)
    dist.init_process_group("gloo")
    run = Path("run")
    run.mkdir()
    context: Any = SimpleNamespace(
        args=SimpleNamespace(world_size=2, should_save=world.rank == 0), world=world, fingerprint={}
    )
    for update in (3, 6):
        checkpoint = run / f"checkpoint-{update}"
        sound, own_disk = agree_to_save(checkpoint, world, True, nn.Linear(1, 1))
        assert sound and own_disk == (world.rank == 1)
        checkpoint.mkdir(parents=True, exist_ok=True)
        for name in (f"rng_state_{world.rank}.pth", f"apart_{world.rank}.pt"):
            (checkpoint / name).write_text(f"of {world.rank}, at {update}")
        own = Written((checkpoint / f"apart_{world.rank}.pt",), own_disk)
        complete(checkpoint, context, TrainerState(global_step=update), {}, own)
        if world.rank == 0:  # small files of the others lie there too, and nothing else is left
            names = ["apart_0.pt", "complete.json", "rng_state_0.pth", "rng_state_1.pth"]
            assert sorted(os.listdir(checkpoint)) == names
            assert (checkpoint / names[-1]).read_text() == f"of 1, at {update}"
    if world.rank == 1:
        plant(kind, run / "checkpoint-6" / "apart_1.pt")
    last = usable_checkpoint(run, world)
    left = sorted(path.name for path in run.glob("*"))
    dist.destroy_process_group()
    return None if last is None else last.name, left


@pytest.mark.parametrize("kind", ["one bit", "truncated", "missing"])
def test_what_lies_on_the_disk_of_another_node_is_checked_too(kind: str, tmp_path: Path) -> None:
    done = ("checkpoint-3", ["checkpoint-3"])
    if kind == "missing":  # the strategy says whether it can do without
        done = ("checkpoint-6", ["checkpoint-3", "checkpoint-6"])
    assert ranks(2, go_on, str(tmp_path), kind) == [done, done]


def train(folder: Path, *more: str, update: int = -1, how: str = "term") -> Done:
    folder.mkdir(exist_ok=True)
    return ran(2, trained_on_own_disk, str(folder), [*ARGV, *more], update, how)


def checkpoints(folder: Path, rank: int) -> list[str]:
    return sorted(p.name for p in (folder / str(rank)).rglob("checkpoint-*"))


@pytest.mark.slow
def test_a_run_over_two_disks_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(whole, "--save", "best").code == 0
    # Each disk keeps the last checkpoint (and the best), the second node's its own small part.
    assert checkpoints(whole, 0) == checkpoints(whole, 1)
    assert len(checkpoints(whole, 0)) <= 2
    assert train(broken, "--save", "best", update=12).code != 0
    for file in (broken / "1").rglob("checkpoint-*/*"):
        file.unlink()  # even its own part: another machine has taken its place
    assert train(broken, "--save", "best").code == 0
    runs = [next(RunFolder(p) for p in f.glob("0/out/vit/2_1/*")) for f in (whole, broken)]
    assert untimed_rows(runs[0]) == untimed_rows(runs[1])
    weights = [load_file(max(r.path.glob("checkpoint-*/model.safetensors"))) for r in runs]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


@pytest.mark.slow
def test_measured_again_both_disks_begin_anew(tmp_path: Path) -> None:
    for more in ([], ["--rerun"]):
        assert train(tmp_path, *more).code == 0
    (run,) = (tmp_path / "1").glob("out/vit/2_1/*[!1]")
    rows, _ = read_rows(RunFolder(run).rank(1))
    (before,) = (tmp_path / "1").glob("out/vit/2_1/*.earlier-1")
    earlier, _ = read_rows(RunFolder(before).rank(1))
    assert len(rows) == len(earlier) == 3 and rows != earlier
