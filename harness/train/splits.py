"""Which samples are trained on, validated on and tested on.

Subsets and splits are drawn by data_seed alone: the same on every rank, for every training seed
and for every set-up that is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np

from harness.settings import Settings, UserError, share_of

TEST_SPLITS = ("test", "validation", "valid", "val", "dev")
HELD_OUT = 0.2  # share of the training split to test on where the data have no test split


@dataclass
class Split:
    """The sets, no sample in two of them, and where they come from."""

    train: datasets.Dataset
    test: datasets.Dataset
    test_from: str
    validation: datasets.Dataset | None = None  # without it, each epoch is evaluated on test
    validation_from: str | None = None


def choose(settings: Settings, splits: datasets.DatasetDict, label: str) -> Split:
    """The test set first, then of what is left the validation set and the training set."""
    rest, test, test_from = _test_set(settings, splits, label)
    asked = settings.validation_split
    validation = validation_from = None
    if asked is not None and (share := share_of(asked)) is not None:
        train, validation = _hold_out(rest, share, settings)
        validation_from = f"{share:g} of the training samples"
    else:
        train = _draw(rest, settings.train_size, "train_size", settings.data_seed)
        if asked is not None:
            validation = _named("validation_split", asked, splits, label)
            validation_from = f"split {asked}"
            _check_apart(asked, validation, validation_from == test_from)
    test = _draw(test, settings.test_size, "test_size", settings.data_seed + 1)
    return Split(train, test, test_from, validation, validation_from)


def _test_set(
    settings: Settings, splits: datasets.DatasetDict, label: str
) -> tuple[datasets.Dataset, datasets.Dataset, str]:
    """(what is left for training, test set, where the test set comes from)."""
    train, asked = splits["train"], settings.test_split
    if asked is not None and share_of(asked) is None:
        return train, _named("test_split", asked, splits, label), f"split {asked}"
    if asked is None:
        for name in TEST_SPLITS:
            # The test split of a benchmark may come without its answers, as -1 or null.
            if name in splits and len(splits[name]) and _has_labels(splits[name], label):
                return train, splits[name], f"split {name}"
    share = HELD_OUT if asked is None else float(asked)
    order = np.random.default_rng([settings.data_seed, 2]).permutation(len(train))
    held_out = round(len(train) * share)
    if held_out == 0 or held_out == len(train):
        raise UserError(
            f"--dataset {settings.dataset}: {len(train)} samples are too few to hold out {share:g}"
        )
    return (
        train.select(np.sort(order[held_out:])),
        train.select(np.sort(order[:held_out])),
        f"{share:g} of split train",
    )


def _hold_out(
    data: datasets.Dataset, share: float, settings: Settings
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """(training set, validation set): the second is this share of both together.

    A training set of a given size is the one of a run without validation set: it is drawn from
    the front of an order, and what is held out from its end.
    """
    size, count = settings.train_size, len(data)
    together = count if size == "all" else round(int(size or 0) / (1 - share))
    held_out = round(together * share) if size == "all" else together - int(size or 0)
    if together > count:
        raise UserError(
            f"--train_size {size} and --validation_split {share:g} need {together} samples, the "
            f"data have {count}: use --train_size {int(count * (1 - share))} or all"
        )
    if held_out == 0 or held_out == together:
        raise UserError(
            f"--validation_split {share:g}: {together} training samples are too few to hold it out"
        )
    order = _order(data, settings.data_seed)
    validation = data.select(np.sort(order[count - held_out :]))
    if size == "all":
        return data.select(np.sort(order[: count - held_out])), validation
    return _draw(data, size, "train_size", settings.data_seed), validation


def _check_apart(name: str, validation: datasets.Dataset, is_test: bool) -> None:
    if is_test:
        raise UserError(
            f"--validation_split {name}: that is the test set; name another with --test_split, "
            "or a share such as 0.1 to hold out a part of train"
        )
    if len(validation) == 0:
        raise UserError(f"--validation_split {name}: that split is empty")


def _named(flag: str, name: str, splits: datasets.DatasetDict, label: str) -> datasets.Dataset:
    """A split that was asked for: it is there and has classes, or the answer says what there is."""
    if name not in splits or name == "train":
        raise UserError(
            f"--{flag} {name}: the splits are {', '.join(splits)}; "
            "a share such as 0.2 holds out a part of train"
        )
    if len(splits[name]) and not _has_labels(splits[name], label):
        raise UserError(f"--{flag} {name}: its samples have no class (column {label})")
    return splits[name]


def _has_labels(data: datasets.Dataset, label: str) -> bool:
    if label not in data.column_names:
        return False
    first = data.with_format(None)[label][: min(len(data), 1000)]
    return not all(value is None or value == -1 for value in first)


def _draw(data: datasets.Dataset, size: Any, flag: str, seed: int) -> datasets.Dataset:
    """A subset in an order that the seed alone decides."""
    if len(data) == 0:
        raise UserError(f"the split for --{flag} is empty")
    if size == "all":
        return data
    if size > len(data):
        raise UserError(f"--{flag} {size}: the data have {len(data)} samples; use --{flag} all")
    return data.select(_order(data, seed)[:size])


def _order(data: datasets.Dataset, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 3]).permutation(len(data))
