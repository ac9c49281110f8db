"""What must not depend on how a batch is split, and on which strategy carries it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.core.command_line import parse
from harness.core.tasks import TASKS
from harness.train.data import models
from harness.train.data.cache import in_turn
from harness.train.data.images import load_images
from harness.train.data.samples import Indices
from harness.train.loop.trainer import ExactTrainer
from harness.train.measure.metrics import BatchMetrics
from harness.train.run.start import start
from harness.train.strategy import verify
from tests.support.broken_runs import only_run, weights_of
from tests.support.ranks import ranks, script

pytestmark = pytest.mark.process

SAMPLES = 16
CLASSES = 3
# (ranks, per_gpu_batch, grad_acc): the same sixteen samples, split in four ways.
SPLITS = [(1, 16, 1), (1, 4, 4), (2, 8, 1), (2, 4, 2)]
# Small enough for two cores, the same classes of model with the same heads.
SHRUNK = {
    "bert": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 32,
    },
    "distilbert": {
        "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 100,
        "max_position_embeddings": 32,
    },
    "modernbert": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1,
        "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "vit": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "image_size": 64,
    },
    "resnet": {"embedding_size": 8},
}  # fmt: skip


def shrunk(entry: dict[str, Any]) -> dict[str, Any]:
    small = {**entry, **SHRUNK[entry["model_type"]]}
    if entry["model_type"] == "resnet":
        widths = [w // 8 for w in entry["hidden_sizes"]]
        small |= {"hidden_sizes": widths, "depths": [1] * len(widths)}
    return small


class Toys:
    """Sixteen samples of noise with classes; batches by sample number, as the real ones are."""

    def __init__(self, name: str, side: int) -> None:
        random = np.random.default_rng(5)
        self.labels = torch.from_numpy(random.integers(0, CLASSES, SAMPLES))
        if name == "bert":
            self.inputs = {"input_ids": torch.from_numpy(random.integers(5, 100, (SAMPLES, 12)))}
        else:
            pixels = random.standard_normal((SAMPLES, 3, side, side)).astype(np.float32)
            self.inputs = {"pixel_values": torch.from_numpy(pixels)}

    def __call__(self, numbers: Any) -> dict[str, torch.Tensor]:
        numbers = torch.as_tensor(np.asarray(numbers))
        return {**{k: v[numbers] for k, v in self.inputs.items()}, "labels": self.labels[numbers]}


def loss_and_norm(folder: str, split: tuple[int, int, int]) -> dict[str, tuple[float, float]]:
    """Loss and gradient norm of one update for every architecture of the table."""
    _, batch, acc = split
    measured: dict[str, tuple[float, float]] = {}
    for name, task in [*TASKS.items()]:
        trained: dict[str, str] = {}  # shrunk, several of one family are the same
        for model_name, entry in task.architectures.items():
            small = shrunk(entry)
            twin = trained.setdefault(json.dumps(small, sort_keys=True), model_name)
            if twin != model_name:
                measured[model_name] = measured[twin]
                continue
            TASKS[name] = replace(task, architectures={model_name: small})
            argv = ["--tiny", "--model", model_name, "--b", str(batch), "--grad_acc", str(acc)]
            argv += ["--epochs", "1", "--dropout", "0", "--save", "none", "--o", folder]
            argv += ["--telemetry_hz", "0", "--comm_probe", "off"]
            run = start(parse(name, argv))
            assert run is not None
            model = models.build(run.context.settings, [str(c) for c in range(CLASSES)])
            for module in model.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    # Statistics of the batch depend on the split by design: --batchnorm.
                    module.eval()
                    module.train = lambda mode=True, module=module: module
            toys = Toys(name, getattr(model.config, "image_size", 0))
            trainer = ExactTrainer(
                context=run.context, model=model, args=run.context.args,
                train_dataset=Indices(SAMPLES),
                eval_dataset=Indices(SAMPLES), data_collator=toys, to_device=lambda x: x,
                compute_metrics=BatchMetrics(CLASSES),
            )  # fmt: skip
            trainer.train()
            log = next(entry for entry in trainer.state.log_history if "epoch_train_loss" in entry)
            measured[model_name] = (log["epoch_train_loss"], log["epoch_grad_norm"])
            TASKS[name] = task
    return measured


def of_each(folder: str, splits: list[tuple[int, int, int]]) -> list[Any]:
    return [loss_and_norm(folder, split) for split in splits]


def test_loss_and_gradient_do_not_depend_on_how_a_batch_is_split(tmp_path: Path) -> None:
    results: list[Any] = []  # of each split, what each rank has measured
    for count in (1, 2):  # one after the other in the same processes
        splits = [split for split in SPLITS if split[0] == count]
        results += zip(*ranks(count, of_each, str(tmp_path), splits), strict=True)
    whole = results[0][0]
    assert set(whole) == {name for task in TASKS.values() for name in task.architectures}
    for split, of_ranks in zip(SPLITS, results, strict=True):
        for name, (loss, norm) in of_ranks[0].items():
            assert loss == pytest.approx(whole[name][0], rel=1e-5), (name, split)
            assert norm == pytest.approx(whole[name][1], rel=1e-5), (name, split)
        assert all(measured == of_ranks[0] for measured in of_ranks)


COMMON = [
    "--tiny", "--train_size", "640", "--test_size", "101", "--epochs", "1", "--dropout", "0",
    "--rank_dropout", "same", "--optim", "sgd", "--lr", "0.05",
]  # fmt: skip
ARMS = {
    "single 2b": (1, ["--b", "32"]),
    "single b, accumulation 2": (1, ["--b", "16", "--grad_acc", "2"]),
    "ddp": (2, ["--b", "16"]),
    "fsdp": (2, ["--b", "16", "--strategy", "fsdp"]),
    "fsdp, gradients and optimizer": (
        2, ["--b", "16", "--strategy", "fsdp", "--fsdp_shard", "grads"]
    ),
    "ddp, shares 3 to 1": (2, ["--b", "8", "--grad_acc", "2", "--balance", "3,1"]),
    "fsdp, shares 3 to 1": (2, ["--b", "16", "--strategy", "fsdp", "--balance", "3,1"]),
    "fsdp, accumulation 2": (2, ["--b", "8", "--grad_acc", "2", "--strategy", "fsdp"]),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.slow), "vit"])
def test_every_strategy_takes_the_same_twenty_steps(name: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    for arm, (count, more) in ARMS.items():
        done = script(name, *COMMON, *more, "--o", str(tmp_path / arm), count=count)
        assert done.code == 0, done.err
        folder = only_run(tmp_path / arm)
        ((row,), _) = folder.read_epochs()
        assert row["updates"] == 20
        seen[arm] = (row, weights_of(folder), folder.read_environment())
    row, reference, _ = seen["single 2b"]
    start_to_end = max(float(w.abs().max()) for w in reference.values())
    assert start_to_end > 0
    for arm, (other_row, other, environment) in seen.items():
        assert environment["observed"]["strategy"] == arm.split()[0].rstrip(",")
        shares = environment["observed"].get("shares")
        assert shares == {"ddp, shares 3 to 1": [12, 4], "fsdp, shares 3 to 1": [24, 8]}.get(arm)
        assert other.keys() == reference.keys()
        for key, weight in reference.items():
            torch.testing.assert_close(other[key], weight, rtol=1e-4, atol=2e-6, msg=f"{arm} {key}")
        for field in ("train_loss", "eval_loss", "accuracy", "grad_norm", "effective_batch"):
            assert other_row[field] == pytest.approx(row[field], rel=1e-5), (arm, field)


def test_fsdp_is_really_sharded(tmp_path: Path) -> None:
    """accelerate would run DDP on a CPU and say nothing."""
    argv = ["--tiny", "--train_size", "64", "--test_size", "32", "--epochs", "1"]
    done = script("vit", *argv, "--strategy", "fsdp", "--o", str(tmp_path), count=2)
    assert done.code == 0, done.err
    observed = (only_run(tmp_path).read_environment() or {})["observed"]
    assert observed["strategy"] == "fsdp"
    assert observed["sharded_parameters"] == observed["parameters"] > 0
    assert observed["parameter_bytes_per_rank"] == pytest.approx(
        observed["parameter_bytes"] / 2, rel=0.02
    )


def refusal(folder: str) -> str:
    """Ask for one strategy and let another run."""
    run = start(parse("vit", ["--tiny", "--o", folder]))
    assert run is not None
    model = models.build(run.context.settings, ["a", "b"])
    other = replace(run.context.settings, strategy="fsdp")
    try:
        verify.observe(model, other, run.context.world)
    except RuntimeError as error:
        return str(error)
    return ""


def test_another_strategy_than_asked_for_is_not_recorded(tmp_path: Path) -> None:
    (text,) = ranks(1, refusal, str(tmp_path))
    assert "asked for --strategy fsdp" in text
    assert "'strategy': 'single'" in text


def fed(folder: str, tail: str) -> tuple[dict[str, Any], list[list[int]]]:
    """The data's facts and the sample numbers of two epochs, as this rank is fed them."""
    argv = ["--tiny", "--tail", tail, "--train_size", "100", "--b", "16", "--o", folder]
    run = start(parse("vit", argv))
    assert run is not None
    with in_turn(run.context.world):
        images = load_images(run.context.settings, run.context.data_parallel_size)
    trainer = ExactTrainer(
        context=run.context, args=run.context.args,
        model=models.build(run.context.settings, images.labels),
        train_dataset=images.train, eval_dataset=images.test,
        data_collator=lambda x: {"n": torch.as_tensor(x)},
        to_device=lambda x: x, compute_metrics=BatchMetrics(10),
    )  # fmt: skip
    loader = trainer.get_train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([int(n) for batch in loader for n in batch["n"]])
    return images.facts, epochs


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_epoch_is_the_training_set_each_sample_once(count: int, tmp_path: Path) -> None:
    results = ranks(count, fed, str(tmp_path), "cut")
    facts = results[0][0]
    assert all(other == facts for other, _ in results)
    assert facts["train_samples"] == 100 - 100 % (16 * count)
    for epoch in range(2):
        samples = [n for _, epochs in results for n in epochs[epoch]]
        assert sorted(samples) == list(range(facts["train_samples"]))
    assert results[0][1][0] != results[0][1][1]  # another order in the next epoch


def test_pad_feeds_all_samples_and_some_twice(tmp_path: Path) -> None:
    results = ranks(2, fed, str(tmp_path), "pad")
    samples = [n for _, epochs in results for n in epochs[0]]
    assert set(samples) == set(range(100))
    assert len(samples) == 128


@pytest.mark.gpu
def test_dp_on_one_gpu_equals_single(tmp_path: Path) -> None:
    rows = []
    for strategy in ("single", "dp"):
        argv = [*COMMON, "--strategy", strategy, "--o", str(tmp_path / strategy)]
        done = script("vit", *argv, env={"CUDA_VISIBLE_DEVICES": "0"})
        assert done.code == 0, done.err
        rows += only_run(tmp_path / strategy).read_epochs()[0]
    assert rows[0]["train_loss"] == pytest.approx(rows[1]["train_loss"], rel=1e-4)


def other_precision(folder: str) -> str:
    """Ask for bf16 and let the Trainer compute in fp32."""
    argv = ["--tiny", "--train_size", "32", "--test_size", "32", "--save", "none", "--o", folder]
    run = start(parse("vit", argv))
    assert run is not None
    context = replace(run.context, settings=replace(run.context.settings, precision="bf16"))
    images = load_images(context.settings, context.data_parallel_size)
    trainer = ExactTrainer(
        context=context, args=context.args, model=models.build(context.settings, images.labels),
        train_dataset=images.train, eval_dataset=images.test, data_collator=images.collate,
        to_device=images.to_device, compute_metrics=BatchMetrics(10),
    )  # fmt: skip
    try:
        trainer.train()
    except RuntimeError as error:
        return str(error)
    return ""


def test_another_precision_than_asked_for_is_not_recorded(tmp_path: Path) -> None:
    (text,) = ranks(1, other_precision, str(tmp_path))
    assert "asked for --precision bf16, but the first layer computes in float32" in text
