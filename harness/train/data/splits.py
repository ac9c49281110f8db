"""Which samples train, validate and test, drawn by data_seed alone; and their classes."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import datasets
import numpy as np

from harness.core.schema.environment import DataRecord
from harness.core.settings import Settings, UserError, share_of
from harness.core.tasks import task_of

TEST_SPLITS = ("test", "validation", "valid", "val", "dev")
WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
DATE = re.compile(  # of ISO 8601, perhaps with a time
    r"\s*[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
    r"([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.,][0-9]+)?)?\s?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?\s*"
)
RARE_SHARE = 1 / 50  # of the mean number of samples of a class
HELD_OUT = 0.2  # share of the training split to test on if there is no test split


def choose(
    settings: Settings, splits: datasets.DatasetDict, label: str
) -> tuple[dict[str, datasets.Dataset], DataRecord]:
    """The sets, and where they come from: the test set first, the others from the rest."""
    rest, test, test_from, unused = _test_set(settings, splits, label)
    split = settings.validation_split
    validation = None
    facts: DataRecord = {"test_from": test_from}
    if unused:
        facts["unused_test_splits"] = unused
    if empty := [name for name in unused if len(splits[name]) == 0]:
        facts["empty_test_splits"] = empty
    if split is not None and (share := share_of(split)) is not None:
        train, validation = _hold_out(rest, share, settings)
        facts["validation_from"] = f"{share:g} of the training samples"
    else:
        train = _draw(rest, settings, "train_size", settings.train_size, settings.data_seed)
        if split is not None:
            validation = _named("validation_split", split, splits, label)
            facts["validation_from"] = f"split {split}"
            _check_validation(split, validation, facts["validation_from"] == test_from)
    test = _draw(test, settings, "test_size", settings.test_size, settings.data_seed + 1)
    facts["test_samples"] = len(test)
    available = len(rest) - (len(validation or ()) if share_of(split or "") is not None else 0)
    if settings.train_size != "all" and available > len(train):
        facts["available_samples"] = available
    sets = {"training": train, "test": test}
    if validation is not None:
        facts["validation_samples"] = len(validation)
        sets["validation"] = validation
    return sets, facts


def _test_set(
    settings: Settings, splits: datasets.DatasetDict, label: str
) -> tuple[datasets.Dataset, datasets.Dataset, str, list[str]]:
    """(the rest, for training; the test set; its origin; splits that could not be the test set)."""
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
    data: datasets.Dataset, fraction: float, settings: Settings
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """(training set, validation set): the second is this fraction of both together.

    A training set of a given size is the same as without a validation set: it is drawn from the
    front of an order, and the validation set from its end.
    """
    size, count = settings.train_size, len(data)
    needed = count if size == "all" else round(int(size or 0) / (1 - fraction))
    held_out = round(needed * fraction) if size == "all" else needed - int(size or 0)
    if needed > count:
        raise UserError(
            f"--train_size {size} and --validation_split {fraction:g} need {needed} samples, the "
            f"data have {count}: use --train_size {int(count * (1 - fraction))} or all"
        )
    if held_out == 0 or held_out == needed:
        raise UserError(
            f"--validation_split {fraction:g}: {needed} training samples are too few to hold it out"
            ": name another share, or train on more"
        )
    order = _order(data, settings.data_seed)
    validation = data.select(np.sort(order[count - held_out :]))
    if size == "all":
        return data.select(np.sort(order[: count - held_out])), validation
    return _draw(data, settings, "train_size", size, settings.data_seed), validation


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
    """Whether a split has classes: in a benchmark's test split they may all be -1 or null."""
    if label not in splits[name].column_names:
        return False
    labels, trained = (set(splits[of].with_format(None)[label][:]) for of in (name, "train"))
    return not labels <= {None, *({-1, "-1"} - trained)}


def _draw(
    data: datasets.Dataset, settings: Settings, flag: str, size: Any, seed: int
) -> datasets.Dataset:
    """A subset of the size that a flag gives, drawn by the seed alone."""
    if len(data) == 0:
        raise UserError(f"the split for --{flag} is empty: look into the file or folder")
    if size == "all":
        return data
    if size > len(data):
        task = task_of(settings.script)
        usual = (task.tiny if settings.tiny else task.defaults).get(flag)
        usual = " (the default)" if size == usual else ""
        raise UserError(
            f"--{flag} {size}{usual}: the data have {len(data)} samples; use --{flag} all"
        )
    return data.select(_order(data, seed)[:size])


def _order(data: datasets.Dataset, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 3]).permutation(len(data))


def classes_of(sets: dict[str, datasets.Dataset], label: str) -> tuple[list[str], list[np.ndarray]]:
    """(names, classes of each set) from ClassLabel, text, whole numbers or bools."""
    columns = {which: data.with_format(None)[label][:] for which, data in sets.items()}
    for which, values in columns.items():
        # Whole numbers of pandas, and of data bases.
        if all(isinstance(v, (float, Decimal)) and float(v).is_integer() for v in values):
            columns[which] = values = [int(v) for v in values]
        wrong = [v for v in values if is_fraction(v) or not isinstance(v, (int, str))]
        if wrong:
            first = next((v for v in wrong if not is_number(v) or is_fraction(v)), wrong[0])
            shown = first if isinstance(first, float) or is_number(first) else type(first).__name__
            raise UserError(
                f"column {label} holds {shown}, which is no class (a word or a whole number): "
                "name another with --label_column"
            )
    declared = _take_declared_names(sets, label, columns)
    if declared is not None:
        names, position = declared, {i: i for i in range(len(declared))}
    else:
        distinct = set().union(*columns.values())
        if len({isinstance(kind, str) for kind in distinct}) > 1:
            raise UserError(
                f"column {label} holds numbers in one split and text in another: write its classes "
                "alike, or name another with --label_column"
            )
        # Numbers in their order, also where they are text; 1 and 01 are two classes.
        numbers = all(WHOLE.fullmatch(str(kind)) for kind in distinct)
        kinds = sorted(distinct, key=lambda kind: (int(kind), str(kind)) if numbers else kind)
        names = [str(kind) for kind in kinds]
        position = {kind: i for i, kind in enumerate(kinds)}
    if len(set(columns["training"])) < 2:
        raise UserError(
            f"column {label}: all training samples are of one class, "
            f"{names[position[columns['training'][0]]]}: "
            "take more of the data (--train_size all), or name another with --label_column"
        )
    drawn = min(len(columns["training"]), len(columns["test"]))  # few samples miss many classes
    if drawn >= 2 * len(names) and not set(columns["training"]) & set(columns["test"]):
        shown = [names[position[columns[which][0]]] for which in ("test", "training")]
        raise UserError(
            f"column {label}: no class of the test set, such as {shown[0]!r}, occurs among the "
            f"training samples, such as {shown[1]!r}: write the classes alike in both"
        )
    return names, [np.array([position[v] for v in c], dtype=np.int64) for c in columns.values()]


def _take_declared_names(
    sets: dict[str, datasets.Dataset], label: str, columns: dict[str, list[Any]]
) -> list[str] | None:
    """The names of the classes if the training set declares them (ClassLabel); the columns become
    their numbers. Each set numbers its own names; whole numbers of a set that declares none are
    those of the training set. Without them, declared classes become words if the training set has
    words.
    """
    features = {which: data.features[label] for which, data in sets.items()}
    own = {w: f.names for w, f in features.items() if isinstance(f, datasets.ClassLabel)}
    if "training" not in own and not any(isinstance(v, str) for v in columns["training"]):
        return None
    for which, names in own.items():
        columns[which] = [names[v] if 0 <= v < len(names) else v for v in columns[which]]
    if "training" not in own:
        return None
    known = [*own["training"]]
    for which in own:
        known += sorted({*columns[which]} & {*own[which]} - {*known}, key=own[which].index)
    # Names that are numbers themselves are meant; else the places of the training set's names.
    are_numbers = all(WHOLE.fullmatch(name) for name in known)
    numbers = {int(n): p for p, n in enumerate(known)} if are_numbers else {
        number: number for number in range(len(own["training"]))
    }  # fmt: skip
    for which, values in columns.items():
        position: dict[Any, int] = {name: number for number, name in enumerate(known)}
        if which not in own:
            position |= numbers
        if (other := next((v for v in values if v not in position), None)) is not None:
            raise UserError(
                f"column {label} of the {which} set holds {other!r}, which is none of the classes "
                f"that the training set declares ({', '.join(known[:8])}): write the classes alike"
            )
        columns[which] = [position[v] for v in values]
    return known


def alike_classes(names: list[str], classes: list[np.ndarray]) -> list[str]:
    """The classes whose names differ in case, blanks or as 1 and 1.0 only, with their samples."""
    counts = np.bincount(np.concatenate(classes), minlength=len(names))
    same: dict[str | float, list[str]] = {}
    for name, count in zip(names, counts, strict=True):
        key = float(name) if is_number(name) else "".join(name.split()).casefold()
        same.setdefault(key, []).append(f"{name!r} ({count:,})")
    return [", ".join(each) for each in same.values() if len(each) > 1]


def rare_classes(names: list[str], classes: list[np.ndarray]) -> list[str]:
    """The classes with so few samples that their names may be typing errors; samples of each."""
    counts = np.bincount(np.concatenate(classes), minlength=len(names))
    least = RARE_SHARE * counts.mean()
    return [f"{name!r} ({n:,})" for name, n in zip(names, counts, strict=True) if 0 < n < least]


def untrained_classes(names: list[str], classes: list[np.ndarray]) -> list[str]:
    """The classes that have no training sample; how many samples each has in the other sets."""
    trained, *others = (np.bincount(of, minlength=len(names)) for of in classes)
    counts = zip(names, trained, np.sum(others, axis=0), strict=True)
    return [f"{name!r} ({count:,})" for name, train, count in counts if count and not train]


def majority_share(classes: np.ndarray) -> float:
    """The share of the largest class: the accuracy of naming it for every sample."""
    return float(np.bincount(classes).max() / len(classes))


def is_fraction(value: Any) -> bool:
    return is_number(value) and not float(value).is_integer()


def is_number(text: Any) -> bool:
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError):
        return False


def is_date(text: Any) -> bool:
    return DATE.fullmatch(str(text)) is not None
