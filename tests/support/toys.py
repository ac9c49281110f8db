"""Small models and data that write down what training does with them, on the stock stack and ours.

Everything here runs inside ranks that ranks.py starts: importable functions and plain values.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    PrinterCallback,
    ResNetConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
)

from harness.core.command_line import parse
from harness.core.records import read_json, read_rows
from harness.train.data.samples import cut_tail
from harness.train.loop.trainer import ExactTrainer
from harness.train.measure.metrics import BatchMetrics
from harness.train.run.lifecycle import Lifecycle
from harness.train.run.start import start
from logcallback import LogCallback

FEATURES, CLASSES, WIDTH = 8, 3, 16
# The traps are those of a machine without GPU; where there is one, it is hidden from the ranks.
CPU = {"CUDA_VISIBLE_DEVICES": ""}


class Points(Dataset):
    """The same labelled points in every process, each with its number."""

    def __init__(self, count: int, draw: int = 0, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(draw)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = self.x[i]
        if self.noise:  # an augmentation: other values each time that the sample is read
            x = x + self.noise * torch.randn(FEATURES)
        return {"x": x, "labels": self.labels[i], "index": torch.tensor(i)}


class Poisoned(Points):
    """One sample in the middle of the epoch makes the loss NaN, and from then on the weights."""

    def __init__(self, count: int, value: float = math.nan) -> None:
        super().__init__(count)
        self.x[count // 2] = value


class Net(nn.Module):
    """A classifier that keeps a diary: samples, losses and dropout masks of its training steps."""

    def __init__(
        self,
        dropout: float = 0.0,
        batchnorm: bool = False,
        train_s: float = 0.0,
        eval_s: float = 0.0,
        draw: int | None = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(enabled=draw is not None):
            if draw is not None:
                torch.manual_seed(draw)
            self.norm = nn.BatchNorm1d(FEATURES) if batchnorm else nn.Identity()
            self.first = nn.Linear(FEATURES, WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)
        self.dropout = nn.Dropout(dropout)
        self.pause_s = {True: train_s, False: eval_s}
        self.fed: list[list[int]] = []
        self.losses: list[float] = []
        self.masks: list[list[bool]] = []

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        time.sleep(self.pause_s[self.training])
        hidden = torch.relu(self.first(self.norm(x.to(self.first.weight.dtype))))
        mask = self.dropout(torch.ones_like(hidden))
        logits = self.head(hidden * mask)
        loss = nn.functional.cross_entropy(logits, labels)
        if self.training:
            self.fed.append(index.tolist())
            self.losses.append(loss.item())
            self.masks.append((mask[0] > 0).tolist())
        return {"loss": loss, "logits": logits}


class Sentences(Dataset):
    """Token sequences of very unequal lengths."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(2, 40, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": [i + 1] * self.lengths[i], "labels": i % CLASSES, "index": i}

    @staticmethod
    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(s["input_ids"]) for s in samples)
        padded = [s["input_ids"] + [0] * (longest - len(s["input_ids"])) for s in samples]
        return {
            "input_ids": torch.tensor(padded),
            "labels": torch.tensor([s["labels"] for s in samples]),
            "index": torch.tensor([s["index"] for s in samples]),
        }


class Bag(nn.Module):
    """Mean of token vectors with dropout before it: longer batches draw more random numbers."""

    def __init__(self, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary + 1, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.fed: list[list[int]] = []

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        if self.training:
            self.fed.append(index.tolist())
        logits = self.head(self.dropout(self.embedding(input_ids)).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class BrokenOffError(Exception):
    """Stands for the end of a job whose time is up."""


class BreakOff(TrainerCallback):
    """End the training right after a checkpoint has been written."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.update:
            raise BrokenOffError


def flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return [item for each in lists for item in each]


def weights(model: nn.Module) -> np.ndarray:
    """All parameters in one row; numpy, because tensors travel between processes by file."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy().copy()


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(np.asarray(one) - np.asarray(other)).max())


def true_loss(model: nn.Module, data: Points) -> float:
    """Mean over the samples, each once, by the model as it stands."""
    model.eval()
    with torch.no_grad():
        return float(model(data.x, data.labels, torch.arange(len(data)))["loss"])


def accuracy(prediction: Any) -> dict[str, float]:
    """compute_metrics for the stock Trainer."""
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "n": len(right)}


def stock(
    model: nn.Module,
    train: Dataset | None,
    test: Any = None,
    callbacks: Iterable[TrainerCallback] = (),
    kind: type[Trainer] = Trainer,
    collate: Any = None,
    **more: Any,
) -> Trainer:
    """The Trainer as it comes; only what would write or print is turned off."""
    chosen: dict[str, Any] = {
        "output_dir": f"{tempfile.gettempdir()}/harness-test-stock",  # nothing is saved there
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
    }
    args = TrainingArguments(**{**chosen, **more})
    trainer = kind(
        model, args, train_dataset=train, eval_dataset=test, compute_metrics=accuracy,
        callbacks=list(callbacks), data_collator=collate,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def argv(folder: str | Path, *more: str) -> list[str]:
    """A command line with toy sizes; what is named in more wins. Diaries are of training alone."""
    chosen = {
        "model": "bert-nano", "dataset": "embedded:english", "output_dir": str(folder),
        "per_gpu_batch": "4", "eval_batch": "4", "epochs": "1", "lr": "0.01", "save": "none",
        "comm_probe": "off",
    }  # fmt: skip
    named = {word[2:].partition("=")[0] for word in more}
    return [f"--{k}={v}" for k, v in chosen.items() if k not in named] + list(more)


def started(folder: str | Path, *more: str) -> Lifecycle:
    """A run of toy sizes, as bert.py starts it."""
    run = start(parse("bert", argv(folder, *more)))
    assert run is not None
    return run


def trainer_of(
    run: Lifecycle,
    model: nn.Module,
    train: Any,
    test: Any,
    callbacks: Iterable[Any] = (),
    collate: Any = None,
    records: bool = True,
    checksum: str = "points",
) -> ExactTrainer:
    """An ExactTrainer with records, put together as bert.py does it."""
    used = cut_tail(run.context.settings, len(train), run.context.data_parallel_size)
    left_out = len(train) - used
    context = run.resume(
        {
            "dataset": "points",
            "classes": CLASSES,
            "data_checksum": checksum,
            "train_samples": used,
            "left_out_samples": left_out,
            "test_samples": len(test),
        }
    )
    return ExactTrainer(
        context=context,
        model=model,
        args=context.args,
        train_dataset=torch.utils.data.Subset(train, range(used)),
        eval_dataset=test,
        to_device=lambda inputs: inputs,
        compute_metrics=BatchMetrics(CLASSES),
        callbacks=[*([LogCallback(context)] if records else []), *callbacks],
        **({"data_collator": collate} if collate else {}),
    )


def ours(
    folder: str | Path, model: nn.Module, train: Any, test: Any, *more: str, **options: Any
) -> tuple[ExactTrainer, Lifecycle]:
    """Both, for a run that nothing ends before its time."""
    run = started(folder, *more)
    return trainer_of(run, model, train, test, **options), run


def trained(*args: Any, **options: Any) -> tuple[ExactTrainer, Lifecycle]:
    """An ExactTrainer as ours() makes it, after its training."""
    trainer, run = ours(*args, **options)
    trainer.train()
    return trainer, run


def rows(run: Lifecycle) -> list[dict[str, Any]]:
    return read_rows(run.context.folder.epochs)[0]


def summary(run: Lifecycle) -> dict[str, Any]:
    return read_json(run.context.folder.summary) or {}


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(
        vocab_size=50, intermediate_size=32, num_labels=3, pad_token_id=0, **SMALL, **NO_DROPOUT
    ),
    "distilbert": DistilBertConfig(
        vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=32, num_labels=3,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    ),
    "resnet": ResNetConfig(
        embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=3
    ),
    "vit": ViTConfig(
        intermediate_size=32, image_size=8, patch_size=4, num_labels=3, **SMALL, **NO_DROPOUT
    ),
}  # fmt: skip


def head(name: str) -> Any:
    torch.manual_seed(0)
    text = name in ("bert", "distilbert")
    auto = AutoModelForSequenceClassification if text else AutoModelForImageClassification
    return auto.from_config(CONFIGS[name])


def sixteen(name: str) -> list[dict[str, torch.Tensor]]:
    """Inputs for these heads. All images are one image: BatchNorm then sees the same statistics
    in every micro-batch, and only the factor in question is left."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (16,), generator=generator)
    if name in ("bert", "distilbert"):
        inputs = {"input_ids": torch.randint(1, 50, (16, 6), generator=generator)}
    else:
        image = torch.randn(1, 3, 8, 8, generator=generator)
        inputs = {"pixel_values": image.expand(16, -1, -1, -1)}
    key, values = next(iter(inputs.items()))
    return [{key: values[i], "labels": labels[i]} for i in range(16)]
