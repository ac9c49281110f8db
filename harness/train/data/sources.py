"""From the name of a data set to sets of samples with known inputs and classes.

Subsets and splits are drawn by data_seed alone: the same on every rank, for every training seed
and for every set-up that is compared.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from harness.core.provenance import DATA_FILES, check_dataset
from harness.core.records.redact import redacted
from harness.core.settings import Settings, UserError, share_of
from harness.core.tasks import task_of
from harness.train.data import embedded
from harness.train.data.cache import cached
from harness.train.data.csv_files import csv_options, is_csv, options_of_folder
from harness.train.data.models import explain

EMBEDDED = {"embedded:english": embedded.english, "embedded:digits": embedded.digits}
LABEL_NAMES = ("label", "labels", "class", "target")
TEXT_NAMES = ("text", "sentence", "content", "review", "document")
USUAL = (*LABEL_NAMES, "category", *TEXT_NAMES)
TEST_SPLITS = ("test", "validation", "valid", "val", "dev")
FEW = 50  # a column of text with no more values is one of classes
WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
HELD_OUT = 0.2  # share of the training split to test on if there is no test split


@dataclass
class Source:
    """The drawn samples, before tokenising or resizing."""

    # Training, test and perhaps validation, in the order in which their samples are numbered. No
    # sample is in two of them. Without validation, each epoch is evaluated on the test set.
    sets: dict[str, datasets.Dataset]
    inputs: list[str]  # the text column (or two), or the image column
    labels: list[str]
    classes: list[np.ndarray]  # of the samples of each set
    facts: dict[str, Any]

    @property
    def train(self) -> datasets.Dataset:
        return self.sets["training"]

    @property
    def test(self) -> datasets.Dataset:
        return self.sets["test"]

    @property
    def sizes(self) -> list[int]:
        return [len(data) for data in self.sets.values()]

    @property
    def all_labels(self) -> np.ndarray:
        return np.concatenate(self.classes)


def load(settings: Settings) -> Source:
    """Load, choose columns and splits, draw the subset."""
    name = str(settings.dataset)
    with explain("dataset", name):
        splits = _read(settings)
    if "train" not in splits:
        first = next(iter(splits))
        if len(splits) > 1:
            raise UserError(
                f"--dataset {name} has no split called train, only {', '.join(splits)}: "
                "name another dataset or configuration"
            )
        splits = datasets.DatasetDict({"train": splits[first]})
    _check_header(settings, splits["train"])
    label = _label_column(settings, splits["train"])
    inputs = _input_columns(settings, splits["train"], label)
    sets, origins = choose(settings, splits, label)
    _check_labels(splits, sets, label)
    labels, classes = _classes(sets, label)
    if task_of(settings.script).input == "text":
        for column in inputs:
            for data in sets.values():
                if missing := _without(data, column):
                    raise _lacking(column, "text", missing, data, splits)
    facts = {
        "dataset": redacted(name),
        "input_columns": inputs,
        "label_column": label,
        "classes": len(labels),
        **({"alike_classes": alike} if (alike := _alike(labels, classes)) else {}),
        **origins,
        "data_checksum": checksum(list(zip(sets.values(), classes, strict=True)), inputs),
    }
    return Source(sets, inputs, labels, classes, facts)


def _read(settings: Settings) -> datasets.DatasetDict:
    check_dataset(settings)
    name = str(settings.dataset)
    if name in EMBEDDED:
        return _embedded(name)
    path = Path(name).expanduser()
    if path.is_file():
        kind = DATA_FILES[path.suffix]
        more = csv_options([path]) if kind == "csv" else {}
        return datasets.load_dataset(kind, data_files=str(path), **more)
    if (path / "dataset_dict.json").is_file():
        return datasets.DatasetDict.load_from_disk(str(path))
    if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        return datasets.DatasetDict({"train": datasets.load_from_disk(str(path))})
    return (
        _folder(path, settings.dataset_config)
        if path.is_dir()
        else datasets.load_dataset(name, settings.dataset_config)
    )


def _folder(path: Path, config: str | None) -> datasets.DatasetDict:
    more = options_of_folder(path, config) if is_csv(str(path)) else {}
    return datasets.load_dataset(str(path), config, **more)


def _check_header(settings: Settings, data: datasets.Dataset) -> None:
    """Of a CSV file without a header the first sample would be taken for the names of columns."""
    if settings.label_column is not None or not is_csv(str(settings.dataset)):
        return  # named by people who know the columns
    for name in data.column_names:
        if _is_number(name) or (name not in USUAL and data[name][:].count(name) > 1):
            raise UserError(
                f"--dataset {settings.dataset}: the first line has {name[:40]!r} where the name of "
                "a column should be: put a line with names, such as text,label, before it"
            )


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and not float(value).is_integer()


def _is_number(text: Any) -> bool:
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError):
        return False


def _embedded(name: str) -> datasets.DatasetDict:
    """Prepared once for each version of its content."""
    texts = hashlib.sha256(embedded.ENGLISH.read_bytes()).hexdigest()
    key = {"embedded": name, "texts": texts, "scikit-learn": metadata.version("scikit-learn")}
    folder = cached(key, lambda draft: EMBEDDED[name]().save_to_disk(draft / "data"))
    return datasets.DatasetDict.load_from_disk(folder / "data")


def _label_column(settings: Settings, data: datasets.Dataset) -> str:
    columns = data.column_names
    if settings.label_column is not None:
        if settings.label_column not in columns:
            raise UserError(
                f"--label_column {settings.label_column}: the columns are {', '.join(columns)}"
            )
        return settings.label_column
    classes = [c for c in columns if isinstance(data.features[c], datasets.ClassLabel)]
    named = [c for c in LABEL_NAMES if c in columns]
    candidates = classes or named or {*_few_valued(settings, data), *({"category"} & {*columns})}
    if not candidates:
        raise UserError(
            f"--dataset {settings.dataset} has no column of classes among {', '.join(columns)}"
            f"{_distinct(data)}: name one with --label_column"
        )
    if len(candidates) > 1:
        raise UserError(
            f"--dataset {settings.dataset} has several columns of classes "
            f"({', '.join(c for c in columns if c in candidates)}): name one with --label_column"
        )
    return str(*candidates)


def _distinct(data: datasets.Dataset) -> str:
    """How many values each column has: it shows which may be one of classes."""
    plain = [c for c, feature in data.features.items() if isinstance(feature, datasets.Value)]
    counts = [f"{c} {len(set(data[c][:]) - {None})}" for c in plain]
    return f" (distinct values: {', '.join(counts)})" if counts else ""


def _few_valued(settings: Settings, data: datasets.Dataset) -> list[str]:
    """The columns of few values: words, such as yes and no, beside other text if that is what is
    read, and small whole numbers, such as 0 and 1 or 1 to 5, but no years, ages or counts.
    """
    texts, most = _texts(data), max(2, min(FEW, len(data) // 10))
    plain = (c for c, feature in data.features.items() if isinstance(feature, datasets.Value))
    few = {c: found for c in plain if 2 <= len(found := set(data[c][:]) - {None}) <= most}
    words = [c for c in texts if c in few]
    if task_of(settings.script).input == "text" and len(words) == len(texts):
        words = []
    numbers = [c for c, found in few.items() if c not in texts and _are_small(found)]
    return [c for c in data.column_names if c in words or c in numbers]


def _are_small(values: set[Any]) -> bool:
    """Whether they can be the numbers of classes or of a rating, and not one of many."""
    if not all(map(_is_number, values)) or any(map(_is_fraction, values)):
        return False
    return len(values) <= 10 and all(-1 <= float(value) <= 10 for value in values)


def _texts(data: datasets.Dataset) -> list[str]:
    """The columns of text; a CSV file also has numbers as text."""
    texts = [c for c, feature in data.features.items() if _is_text(feature)]
    values = {c: set(data[c][:]) - {None} for c in texts}
    return [c for c in texts if not values[c] or not all(map(_is_number, values[c]))]


def _input_columns(settings: Settings, data: datasets.Dataset, label: str) -> list[str]:
    if task_of(settings.script).input == "image":
        flag, kind, chosen = "image_column", "images", settings.image_column
        candidates = [c for c, f in data.features.items() if isinstance(f, datasets.Image)]
        preferred: tuple[str, ...] = ("image", "img")
    else:
        flag, kind, chosen = "text_column", "text", settings.text_column
        candidates = [c for c in _texts(data) if c != label]
        preferred = TEXT_NAMES
    columns = ", ".join(data.column_names)
    if chosen is not None:
        named = chosen.split(",")
        for column in named:
            if column not in candidates:
                raise UserError(
                    f"--{flag} {column}: not a column of {kind}; the columns are {columns}"
                )
        if len(named) > (2 if kind == "text" else 1):
            raise UserError(f"--{flag} {chosen}: too many columns")
        return named
    if not candidates:
        raise UserError(f"--dataset {settings.dataset} has no column of {kind} among {columns}")
    if len(candidates) == 1:
        return candidates
    usual = [c for c in preferred if c in candidates][:1]
    if not usual:
        pair = f", or a pair, as {','.join(candidates[:2])}" if kind == "text" else ""
        raise UserError(
            f"--dataset {settings.dataset} has several columns of {kind} "
            f"({', '.join(candidates)}): name one with --{flag}{pair}"
        )
    return usual


def _is_text(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")


def _classes(sets: dict[str, datasets.Dataset], label: str) -> tuple[list[str], list[np.ndarray]]:
    """(names, classes of each set) from ClassLabel, text, whole numbers or bools."""
    feature = sets["training"].features[label]
    columns = {which: data.with_format(None)[label][:] for which, data in sets.items()}
    for which, values in columns.items():
        if all(isinstance(v, float) and v.is_integer() for v in values):  # pandas' whole numbers
            columns[which] = values = [int(v) for v in values]
        if any(_is_fraction(v) or not isinstance(v, (int, str)) for v in values):
            raise UserError(
                f"column {label} holds {type(values[0]).__name__}, not classes: "
                "name another with --label_column"
            )
    if isinstance(feature, datasets.ClassLabel):
        names = list(feature.names)
        position = {i: i for i in range(len(names))}
    else:
        distinct = set().union(*columns.values())
        if len({isinstance(kind, str) for kind in distinct}) > 1:
            raise UserError(f"column {label} holds numbers in one split and text in another")
        # Numbers in their order, also where they are text; 1 and 01 are two classes.
        numbers = all(WHOLE.fullmatch(str(kind)) for kind in distinct)
        kinds = sorted(distinct, key=lambda kind: (int(kind), str(kind)) if numbers else kind)
        names = [str(kind) for kind in kinds]
        position = {kind: i for i, kind in enumerate(kinds)}
    if len(set(columns["training"])) < 2:
        raise UserError(f"column {label}: all training samples are of one class")
    drawn = min(len(columns["training"]), len(columns["test"]))  # of many classes a few miss most
    if drawn >= 2 * len(names) and not set(columns["training"]) & set(columns["test"]):
        shown = [names[position[columns[which][0]]] for which in ("test", "training")]
        raise UserError(
            f"column {label}: no class of the test set, such as {shown[0]!r}, occurs among the "
            f"training samples, such as {shown[1]!r}: write the classes alike in both"
        )
    return names, [np.array([position[v] for v in c], dtype=np.int64) for c in columns.values()]


def _alike(names: list[str], classes: list[np.ndarray]) -> list[str]:
    """The classes whose names differ in case, blanks or as 1 and 1.0 alone, with their samples."""
    counts = np.bincount(np.concatenate(classes), minlength=len(names))
    same: dict[str | float, list[str]] = {}
    for name, count in zip(names, counts, strict=True):
        key = float(name) if _is_number(name) else "".join(name.split()).casefold()
        same.setdefault(key, []).append(f"{name!r} ({count:,})")
    return [", ".join(each) for each in same.values() if len(each) > 1]


def _check_labels(
    splits: datasets.DatasetDict, sets: dict[str, datasets.Dataset], label: str
) -> None:
    """Classes, and one for each sample. A hidden class is -1."""
    whole = splits["train"]
    if not isinstance(whole.features[label], datasets.ClassLabel):
        values = set(whole.with_format(None)[label][:])
        if len(whole) >= 10 and len(values) > len(whole) // 2:
            kind = "float" if any(map(_is_fraction, values)) else "class"
            raise UserError(
                f"column {label}: {len(values)} values ({kind}) in {len(whole)} samples are no "
                "classes: name another with --label_column"
            )
    for data in sets.values():
        if missing := _without(data, label):
            raise _lacking(label, "class", missing, data, splits)


def _lacking(
    column: str, what: str, missing: list[int], data: datasets.Dataset,
    splits: datasets.DatasetDict,
) -> UserError:  # fmt: skip
    """What samples of a set lack; how many of each split do, and which rows are the first."""
    where = []
    for split, whole in splits.items():
        if column in whole.column_names and (rows := _without(whole, column)):
            shown = ", ".join(str(row + 1) for row in rows[:3])
            more = ", ..." if len(rows) > 3 else ""
            where.append(f"{len(rows)} of {len(whole)} rows of split {split}: {shown}{more}")
    value = data.with_format(None)[column][missing[0]]
    return UserError(
        f"column {column} has no {what} ({'empty' if value is None else f'value {value}'}) in "
        f"{'; '.join(where)} (a header not counted): remove these rows or give them a {what}"
    )


def _without(data: datasets.Dataset, column: str) -> list[int]:
    """The rows without a value, or with one that is no class."""
    feature = data.features[column]
    classes = len(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    values = data.with_format(None)[column][:]
    return [
        row
        for row, value in enumerate(values)
        if value is None or (classes is not None and not 0 <= value < classes)
    ]


def checksum(sets: list[tuple[datasets.Dataset, np.ndarray]], inputs: list[str]) -> str:
    """SHA-256 of the classes and the content of all samples, in order."""
    digest = hashlib.sha256()
    for data, labels in sets:
        digest.update(labels.tobytes())
        content = data.select_columns(inputs)
        for column in inputs:
            if isinstance(content.features[column], datasets.Image):
                # The encoded bytes as stored: decoding would cost as much as preparing.
                content = content.cast_column(column, datasets.Image(decode=False))
        for rows in content.iter(batch_size=1000):
            for sample in zip(*(rows[column] for column in inputs), strict=True):
                for value in sample:
                    digest.update(_bytes(value) + b"\0")
    return digest.hexdigest()[:16]


def _bytes(value: Any) -> bytes:
    if isinstance(value, dict):
        return value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
    return str(value).encode("utf-8")


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
        raise UserError(f"--validation_split {name}: that split is empty")


def _named(flag: str, name: str, splits: datasets.DatasetDict, label: str) -> datasets.Dataset:
    """The split of this name, if it exists and has classes."""
    if name not in splits or name == "train":
        raise UserError(
            f"--{flag} {name}: the splits are {', '.join(splits)}; "
            "a share such as 0.2 holds out a part of train"
        )
    if len(splits[name]) and not _has_labels(splits, name, label):
        raise UserError(f"--{flag} {name}: its samples have no class (column {label})")
    return splits[name]


def _has_labels(splits: datasets.DatasetDict, name: str, label: str) -> bool:
    """The test split of a benchmark may come without its labels: all of them -1 or null."""
    if label not in splits[name].column_names:
        return False
    found, trained = (set(splits[of].with_format(None)[label][:]) for of in (name, "train"))
    return not found <= {None, *({-1, "-1"} - trained)}


def _draw(data: datasets.Dataset, size: Any, flag: str, seed: int) -> datasets.Dataset:
    """A subset, drawn by the seed alone."""
    if len(data) == 0:
        raise UserError(f"the split for --{flag} is empty")
    if size == "all":
        return data
    if size > len(data):
        raise UserError(f"--{flag} {size}: the data have {len(data)} samples; use --{flag} all")
    return data.select(_order(data, seed)[:size])


def _order(data: datasets.Dataset, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 3]).permutation(len(data))
