"""The metrics of a distributed, batch-wise evaluation are those of the whole test set at once."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.metrics import recall_score
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoModelForImageClassification, EvalPrediction, TrainerCallback

from harness.core.command_line import parse
from harness.core.records import find_runs, read_rows
from harness.train.data.images import load_images
from harness.train.loop.evaluation import eval_batch
from harness.train.measure.metrics import BatchMetrics
from tests.support.quality import expected
from tests.support.ranks import ranks, script
from tests.support.toys import CPU, Net, Points, ours

SIZES = [(13, 4), (50, 8), (101, 8), (3, 4)]  # samples, batch of each rank
CLASSES = (2, 5, 6, 9)
NEVER = 1  # a class that some samples have and no prediction says


def logits_of(samples: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """The answers of a model that is right more often than not, and never says one class."""
    draw = np.random.default_rng([samples, classes])
    labels = draw.integers(classes, size=samples)
    labels[0] = NEVER
    logits = draw.normal(size=(samples, classes))
    logits[np.arange(samples), labels] += 1.0
    logits[:, NEVER] = logits.min() - 1.0
    return logits.astype(np.float32), labels


def test_a_model_with_more_outputs_than_classes_is_counted_as_it_answers() -> None:
    """Class 14 of 10 was taken for a hit in another class."""
    scores = np.full((4, 20), -5.0, np.float32)
    labels = np.array([3, 3, 4, 9])
    scores[range(4), [14, 3, 4, 19]] = 5.0
    metrics = BatchMetrics(10)
    quality = metrics(EvalPrediction(scores, labels))
    assert quality["accuracy"] == metrics.hits[:, 0].mean() == 0.5
    assert quality["recall"] == pytest.approx(
        recall_score(labels, scores.argmax(1), average="weighted", zero_division=0)
    )


class Numbered(Dataset):
    """Samples that are no more than their number and their class."""

    def __init__(self, labels: np.ndarray) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"number": i, "labels": int(self.labels[i])}


class Table(nn.Module):
    """Answers each sample with its row of a table."""

    def __init__(self, logits: np.ndarray) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.table = torch.from_numpy(logits)

    def forward(self, number: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.table[number] * self.scale
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Listing(Table):
    """Also records which samples it is fed, batch by batch."""

    def __init__(self, logits: np.ndarray) -> None:
        super().__init__(logits)
        self.fed: list[list[int]] = []

    def forward(self, number: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.fed.append(number.tolist())
        return super().forward(number, labels)


def evaluations(folder: str) -> dict[tuple[int, int], dict[str, Any]]:
    """By number of samples and of classes: two evaluations, and this rank's part of the first."""
    results = {}
    for samples, batch in SIZES:
        for classes in CLASSES:
            logits, labels = logits_of(samples, classes)
            model = Listing(logits)
            trainer, _ = ours(
                f"{folder}/{samples}_{classes}", model, Points(24), Numbered(labels),
                f"--eval_batch={batch}", records=False,
            )  # fmt: skip
            trainer.compute_metrics = BatchMetrics(classes)
            first, fed = trainer.evaluate(), list(model.fed)
            own = trainer.observations.rank_metrics(trainer.args)
            # Twice: nothing of one evaluation may be left for the next.
            both = [first, trainer.evaluate()]
            results[samples, classes] = {"both": both, "own": own, "fed": fed}
    return results


# 3 samples on 3 ranks: each has one, and 2 ranks fill up with one that is not counted.
@pytest.fixture(scope="module", params=[1, 2, 3])
def on_ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks(request.param, evaluations, str(tmp_path_factory.mktemp("metrics")), env=CPU)


EVALUATIONS = [(samples, classes) for samples, _ in SIZES for classes in CLASSES]


@pytest.mark.process
def test_metrics_are_those_of_the_whole_set(on_ranks: list[Any]) -> None:
    for samples, classes in EVALUATIONS:
        reference = expected(*logits_of(samples, classes))
        for of_rank in on_ranks:
            for metrics in of_rank[samples, classes]["both"]:
                assert metrics["eval_samples"] == samples
                quality = {k.removeprefix("eval_"): v for k, v in metrics.items()}
                assert ("top5_accuracy" in quality) == (classes > 5)
                for name, value in reference.items():
                    case = (samples, classes, name)
                    assert quality[name] == pytest.approx(value, abs=1e-9, rel=0), case


@pytest.mark.process
def test_each_rank_answers_for_its_own_samples(on_ranks: list[Any]) -> None:
    for samples, classes in EVALUATIONS:
        logits, labels = logits_of(samples, classes)
        ranked = (-logits).argsort(1)
        cases = [of_rank[samples, classes] for of_rank in on_ranks]
        seen: set[int] = set()
        own: list[list[int]] = [[] for _ in cases]
        # What fills up a batch has been fed before, or at the same time to an earlier rank.
        for step in zip(*(case["fed"] for case in cases), strict=True):
            for rank, numbers in enumerate(step):
                own[rank] += [n for n in dict.fromkeys(numbers) if n not in seen]
                seen |= set(numbers)
        assert len(seen) == samples
        right = 0.0
        for case, numbers in zip(cases, own, strict=True):
            quality = case["own"]
            assert quality["eval_samples"] == len(numbers)
            if not numbers:
                assert quality["eval_accuracy"] is None  # unknown, not zero
                continue
            right += quality["eval_samples"] * quality["eval_accuracy"]
            hits = [int(labels[n] == ranked[n, 0]) for n in numbers]
            assert quality["eval_accuracy"] == pytest.approx(np.mean(hits), abs=1e-12)
            assert ("eval_top5_accuracy" in quality) == (classes > 5)
            if classes > 5:
                near = [int(labels[n] in ranked[n, :5]) for n in numbers]
                assert quality["eval_top5_accuracy"] == pytest.approx(np.mean(near), abs=1e-12)
        whole = cases[0]["both"][0]["eval_accuracy"]
        assert right / samples == pytest.approx(whole, abs=1e-12)


def test_a_class_that_is_never_predicted_counts() -> None:
    logits, labels = logits_of(101, 6)
    assert NEVER in labels and NEVER not in logits.argmax(1)
    required = expected(logits, labels)
    metrics = BatchMetrics(6)
    for start in range(0, 101, 7):
        part = slice(start, start + 7)
        outcome = metrics(EvalPrediction(logits[part], labels[part]), start + 7 >= 101)
    assert {k: v for k, v in outcome.items() if k != "samples"} == pytest.approx(required, abs=1e-9)
    # It is a zero in the mean over classes, not a class left out of it.
    others = [i for i in range(6) if i != NEVER]
    left_out = recall_score(labels, logits.argmax(1), average="macro", labels=others)
    assert outcome["recall_macro"] == pytest.approx(left_out * 5 / 6, abs=1e-9)


@pytest.mark.parametrize("form", ["numpy", "torch", "half", "tuple"])
def test_logits_of_all_forms(form: str) -> None:
    logits, labels = logits_of(40, 7)
    logits = logits.astype(np.float16).astype(np.float32)  # the same in all forms
    options: Any = {
        "numpy": logits,
        "torch": torch.from_numpy(logits),
        "half": torch.from_numpy(logits).half(),
        "tuple": (logits, np.zeros((40, 3))),  # hidden states, say
    }[form]
    answer = BatchMetrics(7)(EvalPrediction(options, labels), True)
    assert answer.pop("samples") == 40
    assert answer == pytest.approx(expected(logits, labels), abs=1e-9)


def test_of_equal_scores_the_lowest_class_comes_first() -> None:
    """Of ten equal ones five are hits, not all; the prediction is the first."""
    metrics = BatchMetrics(10)
    metrics.add(torch.zeros(10, 10), torch.arange(10))
    quality = metrics.result()
    assert (quality["accuracy"], quality["top5_accuracy"]) == (0.1, 0.5)


def test_five_classes_that_score_as_high_are_no_hit() -> None:
    """A place is the number of higher scores: a sixth place is none of the first five."""
    logits = np.arange(8, dtype=np.float32)[None].repeat(8, axis=0)
    outcome = BatchMetrics(8)(EvalPrediction(logits, np.arange(8)), True)
    assert outcome["top5_accuracy"] == 5 / 8
    assert outcome["accuracy"] == 1 / 8


class Watched(BatchMetrics):
    """Writes down what is alive of the logits that it is given, and how much it keeps."""

    def __init__(self, num_labels: int) -> None:
        super().__init__(num_labels)
        self.seen: list[Any] = []
        self.alive: list[int] = []
        self.kept_bytes = 0

    def add(self, logits: Any, labels: Any) -> None:
        self.seen.append(weakref.ref(logits))
        self.alive.append(sum(one() is not None for one in self.seen))
        super().add(logits, labels)

    def result(self, *args: Any) -> dict[str, float]:
        self.kept_bytes = sum(rows.nbytes for rows in self.batches)
        return super().result(*args)


COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "isend", "reduce", "scatter",
)  # fmt: skip


def _noted(calls: list[str], call: Any, *args: Any, **kwargs: Any) -> Any:
    calls.append(call.__name__)
    return call(*args, **kwargs)


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """The names of what is called meanwhile to tell other ranks something."""
    calls: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            call = getattr(torch.distributed, name)
            spy = functools.partial(_noted, calls, call)
            stack.enter_context(mock.patch.object(torch.distributed, name, spy))
        yield calls


def kept(folder: str) -> dict[str, Any]:
    """What an evaluation with many classes holds on to while it goes, and says to other ranks."""
    logits, labels = logits_of(250, 1000)
    trainer, run = ours(
        folder, Table(logits), Points(24), Numbered(labels), "--eval_batch=8", records=False
    )
    metrics = trainer.compute_metrics = Watched(1000)
    trainer.evaluate()  # the first prepares the model
    metrics.seen, metrics.alive = [], []
    with said() as calls:
        trainer.evaluate()
    return {
        "batches": len(metrics.seen), "alive": max(metrics.alive), "said": calls,
        "bytes": metrics.kept_bytes / (250 / run.context.world.size),
    }  # fmt: skip


@pytest.mark.process
def test_metrics_keep_no_logits_and_use_one_collective(tmp_path: Path) -> None:
    for count in (1, 2):
        for outcome in ranks(count, kept, str(tmp_path / str(count)), env=CPU):
            assert outcome["batches"] == 256 // 8 // count
            assert outcome["alive"] <= 2  # this batch, and the one before where it is not yet freed
            assert outcome["bytes"] <= 4 * 8 * 256 / 250  # four numbers, not a thousand logits
            assert outcome["said"] == ["isend"] * (count - 1)  # to each of the others


def in_an_epoch(folder: str, save: str) -> list[str]:
    more = ("--epochs=3", f"--save={save}", "--comm_probe=off")
    trainer, run = ours(folder, Net(), Points(32), Points(16), *more)
    ends: list[int] = []
    with said() as calls, run:
        trainer.add_callback(Noted(lambda: ends.append(len(calls))))
        trainer.train()
        told = calls[ends[0] : ends[1]]
    return told


class Noted(TrainerCallback):
    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.note()


@pytest.mark.process
def test_what_ranks_tell_each_other_in_an_epoch(tmp_path: Path) -> None:
    """Sums, exposed communication, rows, evaluation; of a save: may we, and what was written."""
    for save, messages in (("none", 4), ("last", 6)):
        outcome = ranks(2, in_an_epoch, str(tmp_path / save), save, env=CPU)
        assert outcome == [["isend"] * messages] * 2


def to_the_bit(folder: str) -> dict[str, Any]:
    """Of a set whose last batches are uneven: by our loop, and in the Trainer's two ways."""
    logits, labels = logits_of(101, 9)
    test = Numbered(labels)
    trainer, _ = ours(folder, Table(logits), Points(24), test, "--eval_batch=8", records=False)
    trainer.compute_metrics = BatchMetrics(9)
    ways = [trainer.evaluate(), trainer.predict(test, metric_key_prefix="eval").metrics]
    # Anything but BatchMetrics itself takes the Trainer's own way.
    trainer.args.batch_eval_metrics, metrics = True, BatchMetrics(9)
    trainer.compute_metrics = lambda batch, compute_result: metrics(batch, compute_result)
    ways.append(trainer.evaluate())
    names = [name for name in ways[0] if name.removeprefix("eval_") in expected(logits, labels)]
    assert len(names) == 9
    return {name: [way[name] for way in ways] for name in names}


@pytest.mark.process
def test_metrics_are_the_same_to_the_bit_on_any_number_of_ranks(tmp_path: Path) -> None:
    of_one = ranks(1, to_the_bit, str(tmp_path / "1"), env=CPU)[0]
    for values in of_one.values():
        assert len(set(values)) == 1
    for count in (2, 3):
        for outcome in ranks(count, to_the_bit, str(tmp_path / str(count)), env=CPU):
            assert outcome == of_one


def test_an_evaluation_that_broke_off_leaves_nothing() -> None:
    logits, labels = logits_of(40, 6)
    metrics = BatchMetrics(6)
    metrics.add(logits[:8], labels[:8])
    metrics.begin()
    metrics.add(logits, labels)
    assert metrics.result()["samples"] == 40


def test_a_gpu_takes_large_batches_but_no_more_than_its_share() -> None:
    assert eval_batch(0, samples=2000, ranks=1) == 64
    assert eval_batch(80 * 2**30, samples=2000, ranks=1) == 512
    assert eval_batch(80 * 2**30, samples=2000, ranks=4) == 500
    assert eval_batch(80 * 2**30, samples=3, ranks=4) == 1
    assert eval_batch(8 * 2**30, samples=2000, ranks=1) == 192  # its activations fit, too
    assert eval_batch(2**30, samples=2000, ranks=1) == 64


def again(root: str, argv: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and classes of the test set, from the model that a run has saved."""
    settings = parse("vit", argv)
    (folder,) = find_runs(Path(root))
    (checkpoint,) = folder.path.glob("checkpoint-*")
    model = AutoModelForImageClassification.from_pretrained(checkpoint).eval()
    images = load_images(settings, 1)
    test: Any = images.test
    batch = images.to_device(images.collate(test.__getitems__(list(range(len(test))))))
    labels = batch.pop("labels")
    with torch.no_grad():
        return model(**batch).logits.numpy(), labels.numpy()


@pytest.mark.process
def test_a_row_is_what_the_saved_model_does(tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "192", "--test_size", "101", "--eval_batch", "7"]
    argv += ["--epochs", "2", "--save", "last", "--o", str(tmp_path)]
    done = script("vit", *argv, count=2)
    assert done.code == 0, done.err
    (folder,) = find_runs(tmp_path)
    *_, row = read_rows(folder.epochs)[0]
    ((logits, labels),) = ranks(1, again, str(tmp_path), argv)
    assert row["eval_samples"] == len(labels) == 101
    required = expected(logits, labels)
    # Other batches, other rounding: the loss is compared as single precision allows.
    assert row["eval_loss"] == pytest.approx(required.pop("loss"), abs=1e-5)
    assert {name: row[name] for name in required} == pytest.approx(required, abs=1e-9)
