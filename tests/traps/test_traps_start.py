"""What a run starts from: seed, split, checkpoint and processes; the stock stack and this harness.

Each test first shows the trap on the stock Trainer, then that this harness is free of it or
refuses it. docs/traps.md is the account.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import ViTConfig, ViTForImageClassification

from harness.core.command_line import parse
from harness.core.settings import UserError
from harness.train.data import models, sources
from harness.train.run.start import start, training_arguments
from tests.support.ranks import ROOT, ranks
from tests.support.toys import (
    CPU,
    BreakOff,
    BrokenOffError,
    Net,
    Points,
    apart,
    argv,
    flat,
    ours,
    stock,
    true_loss,
    weights,
)

pytestmark = pytest.mark.process


def as_in_a_new_process() -> None:
    """Undo what a forked process inherits: a new one draws its seeds from the system."""
    torch.seed()
    np.random.seed(None)


def stock_unseeded() -> dict[str, Any]:
    as_in_a_new_process()
    net = Net(draw=None)
    data = datasets.Dataset.from_dict({"number": list(range(20))})
    held_out = data.train_test_split(0.25)["test"]["number"]
    head = weights(net.head)
    stock(net, Points(8))
    # For a number that can be asserted: what two ranks may have drawn.
    torch.manual_seed(int(dist.get_rank()))
    net = Net(draw=None)
    reported = stock(net, None, Points(16)).evaluate()["eval_loss"]
    true = true_loss(net, Points(16))
    torch.manual_seed(int(dist.get_rank()))
    trained = Net(draw=None)
    stock(trained, Points(8)).train()
    return {"head": head, "held_out": list(held_out), "reported": reported, "true": true,
            "after": weights(trained)}  # fmt: skip


def our_seeded(folder: str, table: str, *more: str) -> dict[str, Any]:
    as_in_a_new_process()
    all_of_it = (f"--dataset={table}", "--test_split=0.25", "--train_size=all", "--test_size=all")
    run = start(parse("bert", argv(folder, *all_of_it, *more)))
    assert run is not None
    source = sources.load(run.context.settings)
    model = models.build(run.context.settings, source.labels)
    return {
        "head": weights(model),
        "held_out": sorted(source.test["text"]),
        "trained_on": sorted(source.train["text"]),
        "checksum": source.facts["data_checksum"],
    }


def test_trap_9_unseeded_model_and_split(tmp_path: Path) -> None:
    theirs = ranks(2, stock_unseeded, env=CPU)
    assert apart(theirs[0]["head"], theirs[1]["head"]) > 1e-3
    assert theirs[0]["held_out"] != theirs[1]["held_out"]
    errors = [abs(rank["reported"] - rank["true"]) for rank in theirs]
    assert min(errors) > 0.01  # a mix of two models
    assert apart(theirs[0]["after"], theirs[1]["after"]) == 0  # training repairs the ranks

    table = tmp_path / "data.csv"
    table.write_text("text,label\n" + "".join(f"sample {i},{'ab'[i % 2]}\n" for i in range(40)))
    two = ranks(2, our_seeded, str(tmp_path), str(table), env=CPU)
    (one,) = ranks(1, our_seeded, str(tmp_path), str(table), env=CPU)
    (other,) = ranks(1, our_seeded, str(tmp_path), str(table), "--seed=7", env=CPU)
    (drawn,) = ranks(1, our_seeded, str(tmp_path), str(table), "--data_seed=7", env=CPU)
    for rank in two:
        assert apart(rank["head"], one["head"]) == 0
        assert (rank["held_out"], rank["checksum"]) == (one["held_out"], one["checksum"])
    assert len(one["held_out"]) == 10 and not set(one["held_out"]) & set(one["trained_on"])
    # Another seed is another model on the same split; another data_seed another split.
    assert apart(other["head"], one["head"]) > 1e-3 and other["held_out"] == one["held_out"]
    assert drawn["held_out"] != one["held_out"] and apart(drawn["head"], one["head"]) == 0


def stock_saves(folder: str) -> list[list[int]]:
    """What it is fed; the same command once more starts again."""
    net = Net()
    stock(net, Points(32), output_dir=folder, save_strategy="epoch", num_train_epochs=4).train()
    return net.fed


def stock_goes_on(folder: str, batch: int) -> tuple[int, list[list[int]]]:
    net = Net()
    trainer = stock(
        net, Points(32), output_dir=folder, num_train_epochs=4, per_device_train_batch_size=batch
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-8")
    return trainer.state.global_step, net.fed


def saving(batch: int) -> tuple[str, ...]:
    return (f"--per_gpu_batch={batch}", "--epochs=2", "--save=last")


def our_broken_off(folder: str, batch: int) -> str:
    calls = [BreakOff(32 // batch)]
    trainer, run = ours(folder, Net(), Points(32), Points(8), *saving(batch), callbacks=calls)
    with pytest.raises(BrokenOffError):
        run.train(trainer)
    return str(run.context.folder.path)


def our_goes_on(folder: str, batch: int, source: str = "", checksum: str = "points") -> Any:
    """What a new attempt does that finds another run's checkpoints in its folder."""
    if source:
        here = start(parse("bert", argv(folder, *saving(batch)))).context.folder.path
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.copytree(source, here, dirs_exist_ok=True)
        if dist.is_initialized():
            dist.barrier()
    net = Net()
    try:
        trainer, run = ours(folder, net, Points(32), Points(8), *saving(batch), checksum=checksum)
    except UserError as error:
        return str(error)
    checkpoint = run.context.checkpoint
    run.train(trainer)
    return {
        "path": str(run.context.folder.path),
        "fed": net.fed,
        "from": checkpoint and checkpoint.name,
    }


def test_trap_10_resume_with_another_batch_or_world(tmp_path: Path) -> None:
    """Epoch 1 of 4 is done: 96 of 128 samples are to come."""
    ranks(1, stock_saves, str(tmp_path / "stock"), env=CPU)
    ((_, same),) = ranks(1, stock_goes_on, str(tmp_path / "stock"), 4, env=CPU)
    ((_, doubled),) = ranks(1, stock_goes_on, str(tmp_path / "stock"), 8, env=CPU)
    two = ranks(2, stock_goes_on, str(tmp_path / "stock"), 4, env=CPU)
    assert sum(map(len, same)) == 96
    assert sum(map(len, doubled)) == 64
    assert sum(len(batch) for _, fed in two for batch in fed) == 64

    folder = str(tmp_path / "ours")
    (broken,) = ranks(1, our_broken_off, folder, 4, env=CPU)
    # Another batch, other ranks: another run in another folder, which starts at its beginning.
    (afresh,) = ranks(1, our_goes_on, folder, 8, env=CPU)
    assert afresh["path"] != broken and afresh["from"] is None
    assert sum(map(len, afresh["fed"])) == 64
    # Forced on it, the checkpoint is refused.
    (refused,) = ranks(1, our_goes_on, str(tmp_path / "batch"), 8, broken, env=CPU)
    assert "does not fit this run (different settings)" in refused and "--rerun" in refused
    refused = ranks(2, our_goes_on, str(tmp_path / "world"), 4, broken, env=CPU)
    assert all("different settings, world)" in each for each in refused)
    # The same command on other data, as when a file has been changed meanwhile.
    (refused,) = ranks(1, our_goes_on, folder, 4, "", "changed", env=CPU)
    assert "different data)" in refused
    (same,) = ranks(1, our_goes_on, folder, 4, env=CPU)
    assert same["from"] == "checkpoint-8"
    assert sorted(flat(same["fed"])) == list(range(32))


def stock_without_use_cpu(folder: str) -> dict[str, Any]:
    net = Net()
    trainer = stock(net, Points(16), use_cpu=False)
    trainer.train()
    theirs = {
        "world": trainer.args.world_size,
        "group": dist.get_world_size(),
        "fed": flat(net.fed),
        "updates": trainer.state.global_step,
    }
    try:
        training_arguments(parse("bert", argv(folder, "--use_cpu=false")), Path(folder), world=2)
        refused = ""
    except UserError as error:
        refused = str(error)
    net = Net()
    trainer, _ = ours(folder, net, Points(16), Points(8))
    trainer.train()
    own = {
        "world": trainer.args.world_size,
        "fed": flat(net.fed),
        "updates": trainer.state.global_step,
        "observed": trainer.observations.observed,
    }
    return {"stock": theirs, "ours": own, "refused": refused}


def test_trap_22_one_process_trainings_without_a_gpu(tmp_path: Path) -> None:
    results = ranks(2, stock_without_use_cpu, str(tmp_path), env=CPU)
    for rank in results:
        # The processes have found each other, and yet each trains for itself.
        assert rank["stock"]["group"] == 2 and rank["stock"]["world"] == 1
        assert sorted(rank["stock"]["fed"]) == list(range(16))  # all samples, on each rank
        assert rank["stock"]["updates"] == 4
        assert rank["ours"]["world"] == 2 and rank["ours"]["updates"] == 2
        assert rank["ours"]["observed"]["strategy"] == "ddp"
        assert rank["ours"]["observed"]["world"] == 2
        assert "2 processes were started, but the Trainer sees 1" in rank["refused"]
    assert sorted(results[0]["ours"]["fed"] + results[1]["ours"]["fed"]) == list(range(16))


def evaluated_first(folder: str) -> dict[str, Any]:
    net = Net()
    trainer = stock(net, Points(16), Points(16))
    trainer.evaluate()
    trainer.train()
    theirs = {
        "weights": weights(net),
        "wrapped": type(trainer.model_wrapped).__name__,
        "world": trainer.args.world_size,
        "updates": trainer.state.global_step,
    }
    trainer, _ = ours(folder, Net(), Points(16), Points(16), records=False)
    trainer.evaluate()
    try:
        trainer.train()
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {**theirs, "refused": refused}


def test_trap_23_evaluated_before_training_no_gradients_are_exchanged(tmp_path: Path) -> None:
    results = ranks(2, evaluated_first, str(tmp_path), env=CPU)
    for rank in results:
        assert (rank["world"], rank["updates"]) == (2, 2)  # nothing shows it
        assert rank["wrapped"] == "Net"  # and not DistributedDataParallel
        assert "asked for --strategy ddp" in rank["refused"]
        assert "refusing to record one as the other" in rank["refused"]
    assert apart(results[0]["weights"], results[1]["weights"]) > 1e-3


def resumed_vit(folder: str) -> dict[str, Any]:
    """How many tensors of a trained ViT come back when the stock Trainer and ours load it."""
    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                       intermediate_size=16, image_size=8, patch_size=4, num_labels=2)  # fmt: skip
    pictures = [
        {"pixel_values": torch.full((3, 8, 8), float(i % 2)), "labels": torch.tensor(i % 2)}
        for i in range(8)
    ]

    def fresh() -> Any:
        torch.manual_seed(3)
        return ViTForImageClassification(config)

    def equal_tensors(trained: Any, model: Any) -> int:
        state = model.state_dict()
        return sum(torch.equal(state[k], w) for k, w in trained.state_dict().items())

    trained = fresh()
    collate = torch.utils.data.default_collate
    options = {"save_strategy": "epoch", "output_dir": f"{folder}/stock", "collate": collate}
    stock(trained, pictures, **options).train()
    other = fresh()
    began = equal_tensors(trained, other)
    stock(other, pictures, **options)._load_from_checkpoint(f"{folder}/stock/checkpoint-2")
    return {
        "tensors": len(trained.state_dict()),
        "equal before": began,
        "stock": equal_tensors(trained, other),
    }


def test_trap_24_a_resumed_vit_starts_from_its_first_weights(tmp_path: Path) -> None:
    (result,) = ranks(1, resumed_vit, str(tmp_path), env=CPU)
    # Stock: the sixteen tensors of each layer are saved under names that loading does not find.
    assert result["tensors"] == 40
    assert result["equal before"] == 0
    assert result["stock"] == 8
    # Ours: the weights of a broken and resumed ViT equal those of a whole run, bit for bit, in
    # tests/train/run/test_resume.py; loading is strict, so that a missing weight ends the run.


SAY_THREADS = "import os; print('THREADS', os.environ.get('OMP_NUM_THREADS'))"


def test_trap_25_threads_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text(SAY_THREADS)
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    threads = []
    for count in (1, 2):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc_per_node={count}", "say.py"],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        threads.append(set(re.findall(r"THREADS (\w+)", done.stdout)))
    assert threads == [{"None"}, {"1"}]
    # Here the commands of a sweep name it, the same for every set-up.
    file = tmp_path / "threads.yaml"
    file.write_text("script: vit\ngrid: {setup: [1_1, 1_2]}\n")
    done = subprocess.run(
        [sys.executable, "-m", "harness", "sweep", str(file), "--dry_run"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    named = [re.findall(r"OMP_NUM_THREADS=(\d+) ", line) for line in done.stdout.splitlines()]
    assert len(named) == 2 and named[0] == named[1] and named[0]


def test_trap_26_a_restart_is_not_a_resume(tmp_path: Path) -> None:
    """What torchrun does when a process is lost: the same command once more."""
    for _ in range(2):
        (fed,) = ranks(1, stock_saves, str(tmp_path / "stock"), env=CPU)
        assert sum(map(len, fed)) == 128
        assert (tmp_path / "stock" / "checkpoint-32").is_dir()

    folder = str(tmp_path / "ours")
    ranks(1, our_broken_off, folder, 4, env=CPU)
    (again,) = ranks(1, our_goes_on, folder, 4, env=CPU)
    assert again["from"] == "checkpoint-8" and sum(map(len, again["fed"])) == 32
