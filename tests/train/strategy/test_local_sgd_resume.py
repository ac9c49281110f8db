"""Replicas that are broken off anywhere, also between two exchanges, go on exactly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from harness.core.command_line import parse
from harness.core.records import RunFolder, read_json, read_rows
from harness.core.settings import UserError
from harness.train.loop import trainer as trainer_module
from harness.train.manifest import write_manifest
from tests.support import toys
from tests.support.broken_runs import (
    assert_same_training,
    broken_off,
    only_run,
    trained_on_own_disk,
)
from tests.support.ranks import ran, ranks, run_script, script
from tests.support.replicas import Diary
from tests.support.sweeps import untimed_rows

pytestmark = pytest.mark.process

LOCAL = ["--strategy", "local_sgd", "--sync_every", "5"]
DILOCO = ["--strategy", "diloco", "--sync_every", "6"]
STREAMED = [*DILOCO, "--fragments", "3", "--overlap", "5"]
WAYS = [
    LOCAL,
    [*LOCAL, "--compress", "int4"],
    [*DILOCO, "--compress", "bf16"],
    STREAMED,
    [*STREAMED, "--compress", "int8", "--exchange", "direct"],
    [*LOCAL, "--sync_first", "10"],
    [*DILOCO, "--compress", "int8", "--muon"],
    [*STREAMED, "--sync_first", "8", "--compress", "int8", "--exchange", "direct"],
]
# 20 updates in two epochs; saved between two exchanges, with several of them on their way.
SAVED = ["--epochs", "2", "--save", "last", "--save_steps", "7", "--dropout", "0.1"]


def unmeasured(*args: Any) -> None:
    """In place of a link of which nothing here depends: each start would measure for a second."""


def train_once(folder: str, argv: list[str], stop: int | None) -> tuple[Any, Any]:
    trainer_module.link_of_run = unmeasured  # type: ignore[assignment]
    data = toys.Points(40 * int(os.environ["WORLD_SIZE"]))
    diary = Diary()
    calls = [diary, *([toys.BreakOff(stop)] if stop else [])]
    model = toys.Net(dropout=0.3, batchnorm=True)
    trainer, run = toys.ours(folder, model, data, toys.Points(9, 1), *argv, callbacks=calls)
    try:
        run.train(trainer)
    except toys.BrokenOffError:
        return None, None
    state = {name: value.numpy().copy() for name, value in trainer.model.state_dict().items()}
    # What each start measures on the link is its own.
    observed = {k: v for k, v in trainer.observations.observed.items() if k != "exchange_early_s"}
    rows = [
        {k: v for k, v in row.items() if k in ("train_loss", "grad_norm", "eval_loss", "updates")}
        for row in (toys.rows(run) if run.context.is_rank0 else [])
    ]
    return state, (rows, diary.weights[-3:], observed)


def twice(folder: str, ways: list[list[str]], stops: list[int]) -> list[Any]:
    """Each way undisturbed, and broken off after one checkpoint and after another."""
    results = []
    for number, way in enumerate(ways):
        if "--exchange" not in way:  # which a busy machine's link could decide otherwise
            way = [*way, "--exchange", "backend"]
        whole = train_once(f"{folder}/{number}/whole", [*way, *SAVED], None)
        broken = f"{folder}/{number}/broken"
        for stop in stops:  # each time it goes on from the one before
            assert train_once(broken, [*way, *SAVED], stop) == (None, None)
        results.append((whole, train_once(broken, [*way, *SAVED], None)))
    return results


@pytest.mark.parametrize(
    ("count", "ways", "stops"),
    [
        (2, WAYS[-1:], [14]),
        pytest.param(2, WAYS, [7, 14], marks=pytest.mark.slow),
        pytest.param(4, WAYS, [7, 14], marks=pytest.mark.slow),
    ],
    ids=["streamed", "every way", "every way, two nodes of two"],
)
def test_an_interrupted_run_resumes_bit_for_bit(
    count: int, ways: list[list[str]], stops: list[int], tmp_path: Path
) -> None:
    env = {"LOCAL_WORLD_SIZE": "2"}
    if count == 2:
        ways = [[*way, "--sync_scope", "rank"] for way in ways]
    for rank in ranks(count, twice, str(tmp_path), ways, stops, env=env):
        assert len(rank) == len(ways)
        for (whole, more), (resumed, other) in rank:
            assert whole.keys() == resumed.keys()
            for name, value in whole.items():
                assert value.tobytes() == resumed[name].tobytes(), name
            assert [w.tobytes() for w in more[1]] == [w.tobytes() for w in other[1]]
            assert more[0] == other[0] and more[2] == other[2]


def spoil_and_go_on(folder: str) -> list[str]:
    """The errors of a rank that is to go on with another checkpoint than its own."""
    argv = [*LOCAL, "--sync_scope", "rank", *SAVED]
    assert train_once(folder, argv, 7) == (None, None)
    file = next(Path(folder).glob("bert/*/*/checkpoint-7")) / "apart_1.pt"
    content = file.read_bytes()
    messages = []
    for way in ("missing", "torn", "foreign"):
        dist.barrier()
        if os.environ["RANK"] == "0":
            file.unlink(missing_ok=True)
            if way == "torn":
                file.write_bytes(content[:999])
            elif way == "foreign":
                file.write_bytes(content)
                saved = torch.load(file, weights_only=True)
                saved["marks"]["shared"] += 1
                torch.save(saved, file)
            # As where it lies on the disk of another node, of which the manifest knows nothing.
            mark = file.with_name("complete.json")
            facts = read_json(mark) or {}
            write_manifest(mark, {name: facts[name] for name in facts if name != "checksum"})
        dist.barrier()
        try:
            train_once(folder, argv, None)
        except UserError as error:
            messages.append(str(error))
    return messages


def test_what_does_not_belong_to_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """On all ranks, in one line, whichever of them misses it."""
    for messages in ranks(2, spoil_and_go_on, str(tmp_path)):
        reasons = ("is missing", "cannot be read", "not belong")
        for line, reason in zip(messages, reasons, strict=True):
            assert "apart_1.pt, with which node 0 goes on" in line and reason in line
            assert line.endswith("use --rerun to start afresh; the old record is kept")


ARGV = [
    "--tiny", "--train_size", "256", "--test_size", "65", "--epochs", "3", "--b", "16",
    "--full_determinism", "--log_every", "3", "--save_steps", "3", "--sync_scope", "rank",
]  # fmt: skip


def test_killed_between_two_exchanges_it_goes_on(tmp_path: Path) -> None:
    argv = [*ARGV, *STREAMED, "--compress", "int8"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert script("vit", *argv, "--o", str(whole), count=2).code == 0
    broken_off(2, [*argv, "--o", str(broken)], 13, "kill", "vit")
    done = script("vit", *argv, "--o", str(broken), count=2)
    assert done.code == 0 and "resumes from update 12" in done.out, done.err
    one, other = only_run(whole), only_run(broken)
    assert_same_training(other, one)
    seen = [(read_json(folder.environment) or {})["observed"] for folder in (one, other)]
    # A piece each second update and two more at the end, in force for the first time after 7.
    assert seen[0] == seen[1] and (seen[0]["exchanges"], seen[0]["first_exchange_update"]) == (
        *(24 // 2 + 2, 7),
    )
    # Of the checkpoints before nothing is left, and the last one holds what each has of its own.
    (kept,) = other.path.glob("checkpoint-*")
    names = {file.name for file in kept.iterdir()}
    assert {"apart_0.pt", "apart_1.pt"} <= names and "optimizer.pt" not in names


DISKS = [
    "--tiny", "--train_size", "256", "--test_size", "65", "--epochs", "3", "--b", "16",
    "--setup", "2_1", "--output_dir", "out", "--full_determinism", "--save_steps", "3", *STREAMED,
]  # fmt: skip


@pytest.mark.slow
def test_on_disks_of_their_own_each_node_finds_what_it_has_written(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    assert ran(2, trained_on_own_disk, str(whole), DISKS, 0, "").code == 0
    done = ran(2, trained_on_own_disk, str(broken), DISKS, 13, "kill")
    assert done.code == -signal.SIGKILL, done.err
    own = next((broken / "1").glob("out/vit/2_1/*/checkpoint-12/apart_1.pt"))
    assert not (own.parent / "apart_0.pt").exists()
    assert ran(2, trained_on_own_disk, str(broken), DISKS, 0, "").code == 0
    runs = [next(RunFolder(p) for p in f.glob("0/out/vit/2_1/*")) for f in (whole, broken)]
    assert untimed_rows(runs[0]) == untimed_rows(runs[1])
    weights = [load_file(max(r.path.glob("checkpoint-*/model.safetensors"))) for r in runs]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    left = {file.name for file in broken.glob("1/out/vit/2_1/*/checkpoint-*/apart*")}
    assert left == {"apart_1.pt"}  # and only in the last checkpoint
    assert len(list(broken.glob("1/out/vit/2_1/*/checkpoint-*"))) == 1


def best_of(folder: str, argv: list[str]) -> Any:
    """Trained with a validation set: what all ranks are left with."""
    import bert

    kept: list[Any] = []

    class Keeps(bert.ExactTrainer):  # type: ignore[name-defined,misc]
        def test(self) -> None:
            super().test()
            with self.exchange.shared():  # nothing is apart any more
                kept.append({n: v.numpy().copy() for n, v in self.model.state_dict().items()})

    bert.ExactTrainer = Keeps
    assert bert.main(parse("bert", [*argv, "--o", folder])) == 0
    return kept[0]


def test_the_best_weights_are_those_of_all_ranks(tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "256", "--test_size", "65", "--epochs", "3", "--b", "16"]
    argv += [*STREAMED, "--validation_split", "0.2", "--save", "best", "--lr", "0.03"]
    argv += ["--lr_scheduler_type", "constant"]
    results = ranks(2, best_of, str(tmp_path), [*argv, "--sync_scope", "rank"])
    folder = only_run(tmp_path)
    rows, _ = read_rows(folder.epochs)
    best = max(rows, key=lambda row: row["accuracy"])
    saved = load_file(folder.path / f"checkpoint-{best['updates']}" / "model.safetensors")
    for rank in results:
        assert all((rank[name] == weight.numpy()).all() for name, weight in saved.items())
    assert (read_json(folder.summary) or {})["test_epoch"] == best["epoch"]


def test_one_replica_that_diverges_ends_the_run_for_all(tmp_path: Path) -> None:
    for number, way in enumerate((LOCAL, [*STREAMED, "--compress", "int8"])):
        argv = [*ARGV[:10], "--log_every", "2", "--sync_scope", "rank", *way]
        done = ran(2, spoilt, [*argv, "--o", str(tmp_path / str(number))])
        assert done.code == 1
        summary = read_json(only_run(tmp_path / str(number)).summary) or {}
        assert summary["outcome"] == "diverged", (summary, done.err)


def spoilt(argv: list[str]) -> Any:
    """One rank has a weight that is no number, from its third update on."""
    import vit

    class Spoiler(vit.Console):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3 and os.environ["RANK"] == "1":
                next(kwargs["model"].parameters()).data.fill_(float("nan"))

    vit.Console = Spoiler
    return run_script("vit", argv, ".")
