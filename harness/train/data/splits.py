"""Which samples train, validate and test: drawn by data_seed alone."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np

from harness.core.settings import Settings, UserError, share_of

TEST_SPLITS = ("test", "validation", "valid", "val", "dev")
HELD_OUT = 0.2  # share of the training split to test on if there is no test split


def choose(
    settings: Settings, splits: datasets.DatasetDict, label: str
) -> tuple[dict[str, datasets.Dataset], dict[str, Any]]:
    """The sets, and where they come from: the test set first, the others from the rest."""
    rest, test, test_from, unused = _test_set(settings, splits, label)
    split = settings.validation_split
    validation = None
    facts: dict[str, Any] = {"test_from": test_from}
    if unused:
        facts["unused_test_splits"] = unused
    if empty := [name for name in unused if len(splits[name]) == 0]:
        facts["empty_test_splits"] = empty
    if split is not None and (share := share_of(split)) is not None:
        train, validation = _hold_out(rest, share, settings)
        facts["validation_from"] = f"{share:g} of the training samples"
    else:
        train = _draw(rest, settings.train_size, "train_size", settings.data_seed)
        if split is not None:
            validation = _named("validation_split", split, splits, label)
            facts["validation_from"] = f"split {split}"
            _check_validation(split, validation, facts["validation_from"] == test_from)
    test = _draw(test, settings.test_size, "test_size", settings.data_seed + 1)
    facts["test_samples"] = len(test)
    sets = {"training": train, "test": test}
    if validation is not None:
        facts["validation_samples"] = len(validation)
        sets["validation"] = validation
    return sets, facts


def _test_set(
    settings: Settings, splits: datasets.DatasetDict, label: str
) -> tuple[datasets.Dataset, datasets.Dataset, str, list[str]]:
    """(the rest, for training; the test set; where it comes from; splits passed over for it)."""
    train, split = splits["train"], settings.test_split
    unused: list[str] = []
    if split is not None and share_of(split) is None:
        return train, _named("test_split", split, splits, label), f"split {split}", unused
    for name in TEST_SPLITS if split is None else ():
        if name in splits:
            if len(splits[name]) and _has_labels(splits, name, label):
                return train, splits[name], f"split {name}", unused
            unused.append(name)
    share = HELD_OUT if split is None else float(split)
    order = np.random.default_rng([settings.data_seed, 2]).permutation(len(train))
    held_out = round(len(train) * share)
    if held_out == 0 or held_out == len(train):
        raise UserError(
            f"--dataset {settings.dataset}: {len(train)} samples are too few to hold out {share:g}"
            ": give it a test split, or another share with --test_split"
        )
    return (
        train.select(np.sort(order[held_out:])),
        train.select(np.sort(order[:held_out])),
        f"{share:g} of split train",
        unused,
    )


def _hold_out(
    data: datasets.Dataset, share: float, settings: Settings
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """(training set, validation set): the second is this share of both together.

    A training set of a given size is the same as without a validation set: it is drawn from the
    front of an order, and the validation set from its end.
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
            ": name another share, or train on more"
        )
    order = _order(data, settings.data_seed)
    validation = data.select(np.sort(order[count - held_out :]))
    if size == "all":
        return data.select(np.sort(order[: count - held_out])), validation
    return _draw(data, size, "train_size", settings.data_seed), validation


def _check_validation(name: str, validation: datasets.Dataset, is_test: bool) -> None:
    if is_test:
        raise UserError(
            f"--validation_split {name}: that is the test set; name another with --test_split, "
            "or a share such as 0.1 to hold out a part of train"
        )
    if len(validation) == 0:
        raise UserError(f"--validation_split {name}: that split is empty: name another, or a share")


def _named(flag: str, name: str, splits: datasets.DatasetDict, label: str) -> datasets.Dataset:
    """The split of this name, if it exists and has classes."""
    if name not in splits or name == "train":
        raise UserError(
            f"--{flag} {name}: the splits are {', '.join(splits)}; "
            "a share such as 0.2 holds out a part of train"
        )
    if len(splits[name]) and not _has_labels(splits, name, label):
        raise UserError(
            f"--{flag} {name}: its samples have no class (column {label}): name another split, or "
            "a share such as 0.2 of train"
        )
    return splits[name]


def _has_labels(splits: datasets.DatasetDict, name: str, label: str) -> bool:
    """The test split of a benchmark may come without its labels: all of them -1 or null."""
    if label not in splits[name].column_names:
        return False
    labels, trained = (set(splits[of].with_format(None)[label][:]) for of in (name, "train"))
    return not labels <= {None, *({-1, "-1"} - trained)}


def _draw(data: datasets.Dataset, size: Any, flag: str, seed: int) -> datasets.Dataset:
    """A subset, drawn by the seed alone."""
    if len(data) == 0:
        raise UserError(f"the split for --{flag} is empty: look into the file or folder")
    if size == "all":
        return data
    if size > len(data):
        raise UserError(f"--{flag} {size}: the data have {len(data)} samples; use --{flag} all")
    return data.select(_order(data, seed)[:size])


def _order(data: datasets.Dataset, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 3]).permutation(len(data))
