"""Clocks, random numbers, statistics and checkpoints: the stock stack and this harness.

Each test first shows the trap on the stock Trainer, then that this harness is free of it, refuses
it or says it. docs/traps.md is the account.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import BertConfig, BertForSequenceClassification

from harness.core.command_line import parse
from harness.core.settings import UserError
from harness.train.data import models
from harness.train.data.images import load_images
from harness.train.run.start import start
from tests.support.own_time import keep_own_time
from tests.support.ranks import ROOT, ranks, script
from tests.support.toys import (
    CPU,
    FEATURES,
    BreakOff,
    BrokenOffError,
    Net,
    Points,
    apart,
    argv,
    flat,
    ours,
    rows,
    stock,
    summary,
    trained,
    true_loss,
    weights,
)

EVALUATION_S = 0.8  # four batches of 0.2 s, much longer than two epochs of training


def timed(folder: str) -> dict[str, Any]:
    keep_own_time()
    pauses = {"train_s": 0.01, "eval_s": EVALUATION_S / 4}
    data = Points(16)
    reported = stock(Net(**pauses), data, data, eval_strategy="epoch", num_train_epochs=2).train()
    net = Net()
    nominal = stock(net, Points(13), num_train_epochs=2, dataloader_drop_last=True).train()
    _, run = trained(f"{folder}/timed", Net(**pauses), data, data, "--epochs=2")
    own_net = Net()
    _, uneven_run = trained(f"{folder}/cut", own_net, Points(13), data, "--epochs=2")
    return {
        "reported": reported.metrics,
        "nominal": nominal.metrics,
        "fed": len(flat(net.fed)),
        "rows": rows(run),
        "summary": summary(run),
        "our_fed": len(flat(own_net.fed)),
        "our_rows": rows(uneven_run),
    }


@pytest.mark.process
def test_trap_3_throughput_contains_evaluation(tmp_path: Path) -> None:
    (results,) = ranks(1, timed, str(tmp_path), env=CPU)
    reported, nominal = results["reported"], results["nominal"]
    assert reported["train_runtime"] > 2 * EVALUATION_S
    assert reported["train_samples_per_second"] < 2 * 16 / (2 * EVALUATION_S)
    # 24 samples were fed; the rate is that of 26.
    assert results["fed"] == 24
    counted = nominal["train_samples_per_second"] * nominal["train_runtime"]
    assert counted == pytest.approx(26, rel=0.02)

    # Ours: no step can be faster than its pause, and none holds an evaluation.
    for row in results["rows"]:
        assert row["eval_time_s"] > EVALUATION_S
        assert 4 * 0.01 < row["epoch_time_s"] < EVALUATION_S
        assert row["timed_s"] == pytest.approx(row["timed_samples"] / row["train_samples_per_s"])
    rate = results["summary"]["train_samples_per_s"]
    assert 2 * reported["train_samples_per_second"] < rate < 4 / 0.01
    # The first step of the process is left out, and how many were timed is said.
    assert [row["timed_steps"] for row in results["rows"]] == [3, 4]
    theirs = results["summary"]["trainer_train_samples_per_second"]
    assert theirs < 2 * 16 / (2 * EVALUATION_S)
    assert results["our_fed"] == sum(row["fed_samples"] for row in results["our_rows"]) == 24
    assert sum(row["samples"] for row in results["our_rows"]) == 24


def statistics_of(net: Net) -> np.ndarray:
    return torch.cat([net.norm.running_mean, net.norm.running_var]).double().numpy().copy()


def normalised(folder: str, batch: int) -> dict[str, Any]:
    """BatchNorm is the first layer, so that its statistics depend on the data alone."""
    results: dict[str, Any] = {}
    data, test = Points(24), Points(16, draw=1)
    for what in ("stock", "ours"):
        net = Net(batchnorm=True)
        if what == "stock":
            trainer = stock(
                net, data, test, per_device_train_batch_size=batch, num_train_epochs=2,
                eval_strategy="epoch", save_strategy="epoch", output_dir=f"{folder}/stock",
            )  # fmt: skip
            trainer.train()
            saved = f"{folder}/stock/checkpoint-{trainer.state.global_step}"
        else:
            more = (f"--per_gpu_batch={batch}", "--epochs=2", "--save=last")
            trainer, run = ours(f"{folder}/ours", net, data, test, *more)
            run.train(trainer)
            saved = f"{run.context.folder.path}/checkpoint-{trainer.state.global_step}"
            results["rows"] = rows(run)
        kept = safetensors.torch.load_file(f"{saved}/model.safetensors")
        results[what] = {
            "statistics": statistics_of(net),
            "saved": torch.cat([kept["norm.running_mean"], kept["norm.running_var"]]).numpy(),
            "loss": true_loss(net, test),
            "weights": weights(net),
        }
    return results


@pytest.mark.process
def test_trap_6_batchnorm_statistics_differ_between_ranks(tmp_path: Path) -> None:
    (single,) = ranks(1, normalised, str(tmp_path / "1"), 8, env=CPU)
    first, second = ranks(2, normalised, str(tmp_path / "2"), 4, env=CPU)
    mean = slice(0, 8)
    # Stock: equal weights, unequal statistics, so two models are evaluated as one.
    assert apart(first["stock"]["weights"], second["stock"]["weights"]) == 0
    assert apart(first["stock"]["statistics"], second["stock"]["statistics"]) > 0.01
    assert abs(first["stock"]["loss"] - second["stock"]["loss"]) > 1e-3
    assert apart(first["stock"]["saved"], first["stock"]["statistics"]) < 1e-6  # rank 0's alone
    kept, whole = first["stock"]["statistics"], single["stock"]["statistics"]
    assert apart(kept[mean], whole[mean]) > 0.01  # of half the data
    # Ours: one model, evaluated and saved, whose means are those of all the data.
    for rank in (first, second):
        assert apart(rank["ours"]["statistics"], first["ours"]["saved"]) == 0
        assert rank["ours"]["loss"] == first["ours"]["loss"]
        assert apart(rank["ours"]["statistics"][mean], single["ours"]["statistics"][mean]) < 1e-6
    assert first["rows"][-1]["eval_loss"] == pytest.approx(first["ours"]["loss"], abs=1e-6)
    # What remains, and is said in docs/traps.md: each rank normalises by its own batch.
    for what in ("stock", "ours"):
        assert apart(first[what]["weights"], single[what]["weights"]) > 1e-3
    done = script("vit", *argv(tmp_path, "--batchnorm=sync", "--model=resnet-18",
                               "--dataset=embedded:digits"), env=CPU)  # fmt: skip
    assert done.code == 2 and "needs GPUs" in done.err


class Centred(torch.nn.Module):
    """A layer of a user's own: in evaluation it subtracts a running mean of what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("first", torch.zeros((), dtype=torch.long))  # of each rank its own
        self.register_buffer("turned", torch.zeros(FEATURES, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean += 0.1 * (x.detach().mean(0) - self.mean)
            self.first.fill_(int(1e6 * x[0, 0]) + 2**60)
            self.turned.copy_(torch.complex(self.mean, -self.mean))
            return x - x.mean(0)
        return x - self.mean


def centred(folder: str, batch: int, strategy: str) -> dict[str, Any]:
    data, test, net = Points(24), Points(16, draw=1), Net()
    net.norm = Centred()
    more = [f"--per_gpu_batch={batch}", "--epochs=2", "--save=last", f"--strategy={strategy}"]
    more += ["--sync_every=2", "--sync_scope=rank"] if strategy == "local_sgd" else []
    trainer, run = ours(folder, net, data, test, *more)
    run.train(trainer)
    saved = f"{run.context.folder.path}/checkpoint-{trainer.state.global_step}"
    kept = safetensors.torch.load_file(f"{saved}/model.safetensors")
    return {
        "mean": net.norm.mean.double().numpy().copy(),
        "first": int(net.norm.first),
        "turned": torch.view_as_real(net.norm.turned.detach()).T.double().numpy().copy(),
        "saved": (kept["norm.mean"].numpy(), int(kept["norm.first"])),
        "loss": true_loss(net, test),
        "eval_loss": rows(run)[-1]["eval_loss"],
    }


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["ddp", "local_sgd"])
def test_trap_6_statistics_of_a_layer_of_one_s_own(strategy: str, tmp_path: Path) -> None:
    """One model is evaluated and saved; each rank evaluated with its own statistics."""
    (single,) = ranks(1, centred, str(tmp_path / "1"), 8, "single", env=CPU)
    for rank in (both := ranks(2, centred, str(tmp_path / "2"), 4, strategy, env=CPU)):
        assert apart(rank["mean"], single["mean"]) < 1e-6  # of all the data
        assert apart(rank["mean"], rank["saved"][0]) < 1e-9
        assert rank["first"] == both[0]["saved"][1] > 2**60 - 2**30
        assert apart(rank["turned"], np.stack([single["mean"], -single["mean"]])) < 1e-6
        assert rank["loss"] == pytest.approx(both[0]["eval_loss"], abs=1e-6)


def evaluated_or_not(folder: str) -> dict[str, np.ndarray]:
    results: dict[str, np.ndarray] = {}
    data = Points(16)
    for rate in (0.0, 0.5):
        for strategy in ("no", "epoch"):
            net = Net(dropout=rate)
            stock(net, data, data, eval_strategy=strategy, num_train_epochs=2).train()
            results[f"stock {strategy} {rate}"] = weights(net)
    for strategy in ("no", "epoch"):
        net = Net(dropout=0.5)
        trainer, _ = ours(f"{folder}/{strategy}", net, data, data, "--epochs=2")
        if strategy == "no":
            trainer.evaluate = lambda *args, **kwargs: {}
        trainer.train()
        results[f"ours {strategy}"] = weights(net)
    return results


@pytest.mark.process
def test_trap_12_evaluating_changes_training(tmp_path: Path) -> None:
    (results,) = ranks(1, evaluated_or_not, str(tmp_path), env=CPU)
    assert apart(results["stock no 0.0"], results["stock epoch 0.0"]) == 0
    assert apart(results["stock no 0.5"], results["stock epoch 0.5"]) > 1e-3
    assert apart(results["ours no"], results["ours epoch"]) == 0
    with pytest.raises(UserError, match="after every epoch"):
        parse("bert", argv(tmp_path, "--eval_strategy=no"))


def dropped(folder: str) -> dict[str, list[list[bool]]]:
    net = Net(dropout=0.5)
    stock(net, Points(32), num_train_epochs=2).train()
    results = {"stock": net.masks}
    for masks in ("own", "same"):
        net = Net(dropout=0.5)
        more = ("--epochs=2", f"--rank_dropout={masks}")
        trained(folder, net, Points(32), Points(8), *more)
        results[masks] = net.masks
    return results


@pytest.mark.process
def test_trap_13_all_ranks_drop_the_same(tmp_path: Path) -> None:
    first, second = ranks(2, dropped, str(tmp_path), env=CPU)
    assert len(first["stock"]) == 8
    assert first["stock"] == second["stock"]
    assert first["same"] == second["same"]
    # 16 units at one half: masks agree by chance once in 65,536 steps.
    assert all(a != b for a, b in zip(first["own"], second["own"], strict=True))


def searches(folder: str) -> dict[str, bool]:
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    data = [{"input_ids": torch.arange(1, 7), "labels": torch.tensor(i % 3)} for i in range(8)]
    results = {}
    for checkpointing in (False, True):
        trainer = stock(
            BertForSequenceClassification(config), data, gradient_checkpointing=checkpointing
        )
        trainer.train()
        results[f"stock {checkpointing}"] = trainer.model_wrapped.find_unused_parameters
        more = ["--gradient_checkpointing=true"] if checkpointing else []
        trainer, _ = trained(folder, BertForSequenceClassification(config), data, data, *more)
        results[f"ours {checkpointing}"] = trainer.model_wrapped.find_unused_parameters
    return results


@pytest.mark.process
def test_trap_18_ddp_searches_unused_parameters(tmp_path: Path) -> None:
    for rank in ranks(2, searches, str(tmp_path), env=CPU):
        assert rank == {
            "stock False": True, "stock True": False,  # two things change at once
            "ours False": False, "ours True": False,
        }  # fmt: skip
    with pytest.raises(UserError, match="on where a model leaves parameters unused"):
        parse("bert", argv(tmp_path, "--ddp_find_unused_parameters=true"))


def stock_resumes(folder: str) -> dict[str, Any]:
    """Four epochs of eight updates; saved in the middle of the second and at every epoch's end."""
    keep_own_time()
    results: dict[str, Any] = {}
    for what, noise in (("plain", 0.0), ("augmented", 0.5)):
        data = Points(32, noise=noise)
        sizes = {"num_train_epochs": 4, "save_strategy": "steps", "save_steps": 4}
        more = {**sizes, "output_dir": f"{folder}/{what}", "learning_rate": 0.05}
        net = Net(dropout=0.5)
        whole = stock(net, data, **more).train()
        for update in (16, 12):  # the second one's checkpoints replace those after it
            again = Net(dropout=0.5)
            part = stock(again, data, **more)
            part.train(resume_from_checkpoint=f"{folder}/{what}/checkpoint-{update}")
            results[f"{what} {update}"] = apart(weights(net), weights(again))
        if what == "plain":
            last = f"{folder}/{what}/checkpoint-32"
            done = stock(Net(), data, **more).train(resume_from_checkpoint=last)
            results["finished"] = done.metrics
            net = Net(dropout=0.5)
            late = stock(net, data, **more)
            reported = late.train(resume_from_checkpoint=f"{folder}/{what}/checkpoint-24")
            results["last quarter"] = (reported.training_loss, float(np.mean(net.losses)))
            results["whole"] = whole.training_loss
    return results


def our_resumes(folder: str) -> dict[str, Any]:
    """Two epochs of four updates on two ranks: broken off at 4 (an epoch's end), 3 and 6."""
    results: dict[str, Any] = {}
    data, test = Points(32), Points(12)

    def attempt(name: str, *more: str, **options: Any) -> Any:
        net = Net(dropout=0.5)
        flags = ("--epochs=2", "--save=last", *more)
        trainer, run = ours(f"{folder}/{name}", net, data, test, *flags, **options)
        return net, trainer, run

    net, trainer, run = attempt("whole")
    run.train(trainer)
    results["whole"] = {"weights": weights(net), "rows": rows(run), "fed": net.fed}
    for update, more in ((4, ()), (3, ("--save_steps=3",)), (6, ("--save_steps=3",))):
        name = f"broken {update}"
        _, trainer, run = attempt(name, *more, callbacks=[BreakOff(update)])
        with pytest.raises(BrokenOffError):
            run.train(trainer)
        net, trainer, run = attempt(name, *more)
        assert (
            run.context.checkpoint is not None
            and run.context.checkpoint.name == f"checkpoint-{update}"
        )
        run.train(trainer)
        results[name] = {
            "weights": weights(net),
            "rows": rows(run),
            "summary": summary(run),
            "fed": net.fed,
        }
    return results


def our_finished(folder: str) -> bool:
    """Whether the same command would train again after it has finished."""
    more = ("--epochs=2", "--save=last")
    return start(parse("bert", argv(f"{folder}/whole", *more))) is not None


def our_batches_draw_nothing(folder: str) -> bool:
    """The scripts' batches follow from the sample numbers alone: nothing to resume wrongly."""
    all_of_it = ("--train_size=all", "--test_size=all")
    more = ("--model=vit-nano", "--dataset=embedded:digits", *all_of_it)
    run = start(parse("vit", argv(folder, *more)))
    assert run is not None
    images = load_images(run.context.settings, run.context.data_parallel_size)
    model = models.build(run.context.settings, images.labels)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, again = (images.to_device(images.collate(range(4))) for _ in range(2))
    same = torch.equal(first["pixel_values"], again["pixel_values"])
    untouched = torch.equal(before[0], torch.get_rng_state())
    untouched &= bool((before[1] == np.random.get_state()[1]).all())
    return same and untouched and model is not None


@pytest.mark.process
def test_trap_21_resuming(tmp_path: Path) -> None:
    (theirs,) = ranks(1, stock_resumes, str(tmp_path / "stock"), env=CPU)
    assert theirs["plain 12"] == theirs["plain 16"] == theirs["augmented 16"] == 0
    assert theirs["augmented 12"] > 1e-3  # other augmentations in the middle of an epoch
    assert theirs["finished"]["train_loss"] == 0.0 and theirs["finished"]["train_runtime"] < 0.1
    reported, of_the_part = theirs["last quarter"]
    assert reported == pytest.approx(of_the_part, abs=1e-6)
    assert abs(reported - theirs["whole"]) > 0.01

    results = ranks(2, our_resumes, str(tmp_path / "ours"), env=CPU)
    whole = results[0]["whole"]
    for rank in results:
        for name in ("broken 4", "broken 3", "broken 6"):
            assert apart(rank[name]["weights"], whole["weights"]) == 0, name
            update = int(name.split()[1])
            assert rank[name]["fed"] == rank["whole"]["fed"][update:]
    for name in ("broken 4", "broken 3", "broken 6"):
        again = results[0][name]
        assert again["summary"]["attempts"] == 2
        assert again["summary"]["samples"] == sum(row["samples"] for row in again["rows"]) == 64
        for row, expected in zip(again["rows"], whole["rows"], strict=True):
            for key in ("epoch", "updates", "samples", "fed_samples", "learning_rate"):
                assert row[key] == expected[key], (name, key)
            for key in ("train_loss", "grad_norm", "clipped_share", "eval_loss"):
                assert row[key] == pytest.approx(expected[key], abs=1e-9), (name, key)
    assert ranks(2, our_finished, str(tmp_path / "ours"), env=CPU) == [False, False]
    assert ranks(1, our_batches_draw_nothing, str(tmp_path / "vit"), env=CPU) == [True]


def test_every_trap_is_described_with_its_test() -> None:
    text = (ROOT / "docs" / "traps.md").read_text("utf-8")
    named = set(re.findall(r"`(test_trap_\w+)`", text))
    source = "".join(
        p.read_text("utf-8") for p in (ROOT / "tests" / "traps").glob("test_traps_*.py")
    )
    written = set(re.findall(r"^def (test_trap_\w+)", source, re.MULTILINE))
    assert named == written
    numbers = {int(n) for name in named for n in re.findall(r"(?:trap_|and_)(\d+)_", name)}
    assert numbers == set(range(29))
