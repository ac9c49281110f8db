"""The rows of an epoch: the measures that fill them, the sums, and that each is written once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar, cast

from harness.core.process import warn
from harness.core.records import plain, read_rows, total
from harness.core.records.checksums import vouched
from harness.core.records.summary import QUALITY_FIELDS, TIMING
from harness.core.schema.checks import fields
from harness.core.schema.environment import MeasuredRecord
from harness.core.schema.rows import EpochRow, RankRow
from harness.core.topology import batch_of_trainer, per_gpu_batch_of_trainer
from harness.train.measure.sampler import quantile

# What an evaluation gives: fields of a row that are named as its metrics.
QUALITY = (*QUALITY_FIELDS, "eval_samples", "eval_time_s", "eval_samples_per_s")
ELSEWHERE = ("epoch", "samples")  # metrics of an evaluation that are fields of the row

Row = TypeVar("Row", EpochRow, RankRow)
Step = tuple[float | None, float]  # samples, None where unknown, and seconds


class EpochMeans(TypedDict, total=False):
    """Exact means over an epoch, with the samples that they are over."""

    train_loss: float
    train_samples: float
    grad_norm: float
    clipped_share: float
    skipped_updates: int


class EpochMeasure:
    """A measure on one rank, by epoch. In a step it must wait for no device and no other rank."""

    name = ""  # of its state in a checkpoint, if it has any
    clock: Any = None  # the StepClock; None if nobody records the training

    def begin(self, clock: Any) -> None:
        """A training is about to begin or to go on."""
        self.clock = clock

    def epoch_begins(self) -> None:
        """Called before the epoch's time begins."""

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the time spent inside from this measure."""
        yield

    def rank_fields(self, untimed: int) -> dict[str, Any]:
        """This rank's row of the epoch that has ended; its first `untimed` updates are warm-up."""
        return {}

    def run_fields(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        """Fields of the run's row, from the rows of all ranks and the row so far; on rank 0."""
        return {}

    def facts(self) -> MeasuredRecord:
        """For the record of the environment; on rank 0."""
        return {}

    def state(self) -> Any:
        """What a checkpoint inside an epoch has to keep of that epoch."""
        return None


@contextmanager
def excluded(clock: Any, measures: Sequence[EpochMeasure]) -> Iterator[None]:
    """Inside an epoch, after a step: time spent here is excluded from all measures."""
    with ExitStack() as stack:
        stack.enter_context(clock.paused())
        for measure in measures:
            stack.enter_context(measure.excluded())
        yield


def merged(fields: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The fields of all measures as one row."""
    return {name: value for of_measure in fields for name, value in of_measure.items()}


def facts_of(measures: Iterable[EpochMeasure]) -> MeasuredRecord:
    """What all measures tell for the record of the environment."""
    facts: MeasuredRecord = {}
    for measure in measures:
        facts = {**facts, **measure.facts()}
    return facts


class Pending(Generic[Row]):
    """The row of an epoch that has ended; it waits for the evaluation and is written once. Its
    fields come from the record, the measures and the strategy; merged, they are a Row.
    """

    def __init__(self, file: Path, append: Callable[[Row], None]) -> None:
        """append: the writer of RunFolder for this file."""
        self.file = file
        self.append: Callable[[Row], None] = append
        self.row: dict[str, Any] | None = None
        self.recorded: set[float] = set()

    def begin(self, resumes: bool = True) -> None:
        """Rows that an earlier attempt has written are not written again."""
        self.row = None
        rows, _ = read_rows(self.file) if resumes else ([], 0)
        epochs = (row.get("epoch") for row in rows)
        self.recorded = {epoch for epoch in epochs if isinstance(epoch, (int, float))}

    def write(self, quality: dict[str, Any], more: dict[str, Any]) -> Row | None:
        """Write the row with these fields and return it; None if there is none to write."""
        row, self.row = self.row, None
        if row is None or row["epoch"] in self.recorded:
            return None
        self.recorded.add(row["epoch"])
        # If a metric of the user has the name of a field of ours, both are kept.
        ours = row.keys() | more.keys() | (fields("epochs").keys() - QUALITY)
        row |= {f"eval_{k}" if k in ours else k: v for k, v in quality.items()}
        whole = cast(Row, vouched(plain(row | more)))
        self.append(whole)
        return whole


def rank_row(
    epoch: float, rank: int, train_s: float, timed: Sequence[Step], data_wait_s: float
) -> dict[str, Any]:
    """What differs between ranks, in the form of ranks/rank_<r>.jsonl."""
    seconds = [s for _, s in timed]
    return {
        "epoch": epoch,
        "rank": rank,
        "epoch_time_s": train_s,
        "step_time_median_s": statistics.median(seconds) if seconds else None,
        "step_time_p95_s": quantile(seconds, 0.95),
        "data_wait_s": data_wait_s,
    }


def epoch_sums(exact: EpochMeans, fed: int | None) -> dict[str, Any]:
    """Sums and means over the epoch, as far as the trainer has computed any."""
    return {
        "fed_samples": int(exact["train_samples"]) if "train_samples" in exact else fed,
        "train_loss": exact.get("train_loss"),
        **{name: exact.get(name) for name in ("grad_norm", "clipped_share", "skipped_updates")},
    }


def rates(timed: Sequence[Step], devices: int) -> dict[str, Any]:
    """The sums over (samples, seconds) of the timed steps, and samples per second."""
    samples = total([n for n, _ in timed]) if timed else 0
    seconds = sum(s for _, s in timed)
    rate = samples / seconds if seconds and samples is not None else None
    return {
        "train_samples_per_s": rate,
        "train_samples_per_s_per_gpu": rate / devices if rate else None,
        "timed_steps": len(timed),
        "timed_samples": samples,
        "timed_s": seconds,
    }


def steps(timed: list[tuple[int, float]], counted: int | None, missing: float) -> list[Step]:
    """(samples, seconds) of each step, with the samples that it really had.

    Samples that the strategy has counted itself are divided equally over the steps.
    """
    steps = [(counted / len(timed) if counted else n, seconds) for n, seconds in timed]
    if steps and counted is None and missing >= steps[-1][0]:
        return [(None, seconds) for _, seconds in timed]  # not the batches that were expected
    if steps and missing > 0:
        # The last batch was not full, or was filled up with samples that had been fed before.
        steps[-1] = (steps[-1][0] - int(missing), steps[-1][1])
    return [*steps]


def steps_of_stream(timed: list[Step], batches_vary: bool) -> list[Step]:
    """The steps whose batches were full: the last one of a stream may be short. Where any batch may
    be, nobody knows the samples of any step.
    """
    return [(None, seconds) for _, seconds in timed] if batches_vary else timed[:-1]


def are_unknown(fed: int, drawn: int | None, batch: int) -> bool:
    """Whether the samples of an epoch are: batches of a stream may be short, and a sampler that
    gives more batches than its length has may repeat any sample.
    """
    return drawn is None or fed - drawn >= batch


def quality_of(metrics: dict[str, Any], samples: int | None, eval_s: float) -> dict[str, Any]:
    """The quality in the metrics of an evaluation (without prefix), named as in a row."""
    quality = {
        "eval_loss" if name == "loss" else name: value
        for name, value in metrics.items()
        if name not in ELSEWHERE and not name.endswith(TIMING) and isinstance(value, (int, float))
    }
    return quality | {
        "eval_samples": samples,
        "eval_time_s": eval_s,
        "eval_samples_per_s": samples / eval_s if samples else None,
    }


def with_losses_of_trainer(metrics: dict[str, Any]) -> dict[str, Any]:
    """The losses of an evaluation, of each of several sets too, as those of the Trainer."""
    names = {"loss": "trainer_eval_loss"}
    sets = [name.removesuffix("runtime") for name in metrics if name.endswith("_runtime")]
    names |= {f"{of_set}loss": f"trainer_{of_set}loss" for of_set in sets}
    return {names.get(name, name): value for name, value in metrics.items()}


def no_numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation that no row can hold."""
    return {name: value for name, value in metrics.items() if not isinstance(value, (int, float))}


class NoNumbers:
    """Names the metrics of a script that are no numbers, each once."""

    def __init__(self) -> None:
        self.named: dict[str, str] = {}  # the metric and its type

    def name(self, metrics: dict[str, Any], aloud: bool) -> None:
        kinds = {name: type(value).__name__ for name, value in metrics.items()}
        new = [f"{name} ({kind})" for name, kind in kinds.items() if name not in self.named]
        self.named |= kinds
        if new and aloud:
            warn(f"metrics that are no numbers are not recorded: {', '.join(new)}")


class AtEpochEnds:
    """The evaluations after an epoch: as many, of the same sets, are expected after the next."""

    def __init__(self) -> None:
        self.before: list[str] | None = None
        self.after: list[str] = []

    def begin(self) -> None:
        self.before, self.after = None, []

    def epoch_ends(self) -> None:
        self.before, self.after = self.after, []

    def is_last(self, of_set: str) -> bool:
        """Whether this evaluation is the last one; False if that is not known."""
        self.after.append(of_set)
        return self.after == self.before


def over_sets(sets: Collection[tuple[int | None, float]]) -> tuple[int | None, float]:
    """Samples and seconds of several test sets together."""
    return total([samples for samples, _ in sets]), math.fsum(seconds for _, seconds in sets)


def stock_rate(history: list[dict[str, Any]]) -> float | None:
    """The Trainer's own figure, which includes evaluation, saving and warm-up."""
    stock = [log["train_samples_per_second"] for log in history if "train_runtime" in log]
    return stock[-1] if stock else None


class LoggedLoss:
    """The training loss of an epoch as far as the Trainer's log knows it: each logged loss is the
    mean over the updates since the previous one.
    """

    def __init__(self) -> None:
        self.logged: list[tuple[int, float]] = []  # of the epoch, by update
        self.last_update = self.previous = 0

    def begin(self, update: int) -> None:
        """The Trainer counts from this update, after which a training begins or goes on."""
        self.last_update = update

    def epoch_begins(self) -> None:
        self.logged, self.previous = [], self.last_update

    def add(self, update: int, loss: float) -> None:
        self.logged.append((update, loss))
        self.last_update = update

    def mean(self, first: int, last: int) -> float | None:
        """The mean over the updates of an epoch; None where a logged mean reaches beyond it."""
        if self.previous != first or self.last_update != last or not self.logged:
            return None
        starts = [first, *(update for update, _ in self.logged)]
        pairs = zip(starts, self.logged, strict=False)
        total = sum((update - before) * loss for before, (update, loss) in pairs)
        return total / (last - first)


def batches_of_trainer(args: Any, state: Any, loader: Any) -> tuple[int, int]:
    """The effective batch of the stock Trainer, and the samples of one device in a forward pass: of
    the training's loader, which may be the script's own; by the arguments if that has no batch.
    """
    if (taken := batch_of(loader, args.world_size)) is None:
        fitting = state.train_batch_size if args.auto_find_batch_size else None
        return batch_of_trainer(args, fitting), per_gpu_batch_of_trainer(args, fitting)
    together, own = taken
    return together * args.gradient_accumulation_steps, max(own // max(args.n_gpu, 1), 1)


def batch_of(loader: Any, processes: int) -> tuple[int, int] | None:
    """The samples that all processes, and that one, take from a loader at a time; None where a
    script's own batch sampler makes batches of any size.
    """
    batches = getattr(loader, "batch_sampler", None)
    size = getattr(batches, "batch_size", None) or getattr(loader, "batch_size", None)
    if not isinstance(size, int):
        return None
    sharing: int = getattr(batches, "num_processes", processes)
    if getattr(batches, "split_batches", False) or getattr(loader, "split_batches", False):
        return size, size // sharing
    return size * sharing, size


def size_of(loader: Any, of_dataset: bool = False, processes: int = 1) -> int | None:
    """The number of samples that a loader gives to all processes; None for a stream, and where a
    script's own batch sampler makes batches of any size. of_dataset: each of the dataset, once.
    """
    try:
        samples: int = len(loader.dataset)
    except (AttributeError, TypeError):
        return None
    if not of_dataset:
        if (sampler := _sampler_of(loader)) is None:
            return None
        with suppress(TypeError, NotImplementedError):  # of a dataset that is read in order
            samples = len(sampler)
    if getattr(loader.batch_sampler, "drop_last", False):
        taken = batch_of(loader, processes)
        return min(samples, len(loader) * taken[0]) if taken else None
    return samples


def updates_of(epoch: float, updates: int, passes: int, loader: Any) -> int:
    """The updates in the part of an epoch at which a training resumes: of its batches, as the last
    update of an epoch may have fewer; of a stream by the epochs and updates until there.
    """
    part = epoch % 1
    with suppress(TypeError, NotImplementedError):
        return round(part * len(loader) / passes)
    return round(updates * part / epoch)


def is_dispatched(loader: Any) -> bool:
    """Whether one process reads the batches of all, and fills up the last one to equal shares."""
    from accelerate.data_loader import DataLoaderDispatcher  # `harness link` needs none

    return isinstance(loader, DataLoaderDispatcher)


def batches_vary(loader: Any) -> bool:
    """Whether any batch may be short: each worker that reads a stream has a last batch."""
    return getattr(loader, "num_workers", 0) > 0 or _sampler_of(loader) is None


def _sampler_of(loader: Any) -> Any:
    """What draws the samples, below the samplers of batches; None where there is none."""
    batches = getattr(loader, "batch_sampler", None)
    while (inner := getattr(batches, "batch_sampler", None)) is not None:
        batches = inner
    return getattr(batches, "sampler", None)
