"""From a name to sets of samples with a known input column and classes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from harness.core.provenance import without_home
from harness.core.settings import Settings, UserError, share_of
from harness.core.tasks import TASKS
from harness.train.data import embedded
from harness.train.data.cache import cached
from harness.train.data.models import explain

EMBEDDED = {"embedded:english": embedded.english, "embedded:digits": embedded.digits}


EMBEDDED_FROM = {
    "embedded:english": tuple(embedded.SOURCES),
    "embedded:digits": ("scikit-learn",),
}


FILES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}


LABEL_NAMES = ("label", "labels", "class", "category", "target")


TEXT_NAMES = ("text", "sentence", "content", "review", "document")


CHECKED_SAMPLES = 2000  # of each set whose content goes into the checksum


@dataclass
class Source:
    """The drawn samples, before tokenising or resizing."""

    train: datasets.Dataset
    test: datasets.Dataset
    validation: datasets.Dataset | None
    inputs: list[str]  # the text column (or two), or the image column
    train_labels: np.ndarray
    test_labels: np.ndarray
    validation_labels: np.ndarray
    labels: list[str]
    facts: dict[str, Any]

    @property
    def sets(self) -> list[datasets.Dataset]:
        """All of them, in the order in which their samples are numbered."""
        return [self.train, self.test, *([] if self.validation is None else [self.validation])]

    @property
    def sizes(self) -> list[int]:
        return [len(data) for data in self.sets]

    @property
    def all_labels(self) -> np.ndarray:
        return np.concatenate([self.train_labels, self.test_labels, self.validation_labels])


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
    whole = splits["train"]
    label = _label_column(settings, whole)
    inputs = _input_columns(settings, whole, label)
    split = choose(settings, splits, label)
    sets = {"training": split.train, "test": split.test}
    if split.validation is not None:
        sets["validation"] = split.validation
    labels, of_sets = _classes(sets, label)
    if TASKS[settings.script].input == "text":
        for column in inputs:
            if any(text is None for data in sets.values() for text in data[column]):
                raise UserError(f"column {column}: some samples have no text")
    none = np.empty(0, dtype=np.int64)
    return Source(
        split.train, split.test, split.validation, inputs,
        of_sets["training"], of_sets["test"], of_sets.get("validation", none), labels,
        {
            "dataset": without_home(name),
            "input_columns": inputs,
            "label_column": label,
            "classes": len(labels),
            **_facts(split),
            "data_checksum": checksum([(data, of_sets[n]) for n, data in sets.items()], inputs),
        },
    )  # fmt: skip


def _facts(split: Split) -> dict[str, Any]:
    facts = {"test_from": split.test_from, "test_samples": len(split.test)}
    if split.validation is not None:
        facts["validation_from"] = split.validation_from
        facts["validation_samples"] = len(split.validation)
    return facts


def _read(settings: Settings) -> datasets.DatasetDict:
    name = str(settings.dataset)
    if name.startswith("embedded:"):
        if name not in EMBEDDED:
            raise UserError(f"--dataset {name}: expected one of {', '.join(EMBEDDED)}")
        if settings.dataset_config is not None:
            raise UserError(
                f"--dataset_config {settings.dataset_config}: {name} has no configurations"
            )
        return _embedded(name)
    path = Path(name).expanduser()
    if settings.dataset_config is not None and path.is_file():
        raise UserError(
            f"--dataset_config {settings.dataset_config}: {path.name} is a file and has none"
        )
    if path.is_file():
        if path.suffix not in FILES:
            raise UserError(
                f"--dataset {name}: expected a folder or a file that ends in {', '.join(FILES)}"
            )
        more: dict[str, Any] = {"sep": "\t"} if path.suffix == ".tsv" else {}
        return datasets.load_dataset(FILES[path.suffix], data_files=str(path), **more)
    if (path / "dataset_dict.json").is_file():
        return datasets.DatasetDict.load_from_disk(str(path))
    if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        return datasets.DatasetDict({"train": datasets.load_from_disk(str(path))})
    if name.startswith((".", "/", "~")) and not path.exists():
        raise UserError(f"--dataset {name}: there is no such folder or file")
    return datasets.load_dataset(
        str(path) if path.is_dir() else name,
        settings.dataset_config,
    )


def _embedded(name: str) -> datasets.DatasetDict:
    """Made once for the versions of the packages whose files it comes from."""
    made_of = {package: metadata.version(package) for package in EMBEDDED_FROM[name]}
    folder = cached(
        {"embedded": name, "made_of": made_of},
        lambda draft: EMBEDDED[name]().save_to_disk(draft / "data"),
    )
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
    found = classes or [c for c in LABEL_NAMES if c in columns]
    if not found:
        raise UserError(
            f"--dataset {settings.dataset} has no column of classes among {', '.join(columns)}: "
            "name one with --label_column"
        )
    if len(found) > 1:
        raise UserError(
            f"--dataset {settings.dataset} has several columns of classes ({', '.join(found)}): "
            "name one with --label_column"
        )
    return found[0]


def _input_columns(settings: Settings, data: datasets.Dataset, label: str) -> list[str]:
    if TASKS[settings.script].input == "image":
        flag, kind, asked = "image_column", "images", settings.image_column
        found = [c for c, f in data.features.items() if isinstance(f, datasets.Image)]
        preferred: tuple[str, ...] = ("image", "img")
    else:
        flag, kind, asked = "text_column", "text", settings.text_column
        found = [c for c, f in data.features.items() if _is_text(f) and c != label]
        preferred = TEXT_NAMES
    columns = ", ".join(data.column_names)
    if asked is not None:
        wanted = asked.split(",")
        for column in wanted:
            if column not in found:
                raise UserError(
                    f"--{flag} {column}: not a column of {kind}; the columns are {columns}"
                )
        if len(wanted) > (2 if kind == "text" else 1):
            raise UserError(f"--{flag} {asked}: too many columns")
        return wanted
    if not found:
        raise UserError(f"--dataset {settings.dataset} has no column of {kind} among {columns}")
    if len(found) > 1:
        found = [c for c in preferred if c in found][:1]
        if not found:
            raise UserError(
                f"--dataset {settings.dataset} has several columns of {kind} ({columns}): "
                f"name one with --{flag}"
            )
    return found


def _is_text(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")


def _classes(
    sets: dict[str, datasets.Dataset], label: str
) -> tuple[list[str], dict[str, np.ndarray]]:
    """(names, classes of each set) from ClassLabel, text, whole numbers or bools."""
    feature = sets["training"].features[label]
    columns = {which: data.with_format(None)[label][:] for which, data in sets.items()}
    for which, values in columns.items():
        if any(v is None for v in values):
            raise UserError(f"column {label}: some {which} samples have no class")
    for values in columns.values():
        if any(isinstance(v, float) or not isinstance(v, (int, str)) for v in values[:1000]):
            raise UserError(
                f"column {label} holds {type(values[0]).__name__}, not classes: "
                "name another with --label_column"
            )
    if isinstance(feature, datasets.ClassLabel):
        names = list(feature.names)
        position = {i: i for i in range(len(names))}
    else:
        kinds = sorted(set().union(*columns.values()))
        names = [str(kind) for kind in kinds]
        position = {kind: i for i, kind in enumerate(kinds)}
    outside = {v for values in columns.values() for v in values} - set(position)
    if outside:
        raise UserError(f"column {label}: some samples have no class (value {sorted(outside)[0]})")
    if len(set(columns["training"])) < 2:
        raise UserError(f"column {label}: all training samples are of one class")
    return names, {
        which: np.array([position[v] for v in values], dtype=np.int64)
        for which, values in columns.items()
    }


def checksum(sets: list[tuple[datasets.Dataset, np.ndarray]], inputs: list[str]) -> str:
    """SHA-256 over the classes of all samples and the content of evenly spaced ones, in order."""
    digest = hashlib.sha256()
    for data, labels in sets:
        digest.update(labels.tobytes())
        step = max(1, len(data) // CHECKED_SAMPLES)
        some = data.select(range(0, len(data), step)).select_columns(inputs)
        for column in inputs:
            if isinstance(some.features[column], datasets.Image):
                # The encoded bytes as stored: decoding would cost as much as preparing.
                some = some.cast_column(column, datasets.Image(decode=False))
        for row in some:
            for column in inputs:
                digest.update(_bytes(row[column]) + b"\0")
    return digest.hexdigest()[:16]


def _bytes(value: Any) -> bytes:
    if isinstance(value, dict):
        return value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
    return str(value).encode("utf-8")


# ----
# Which samples are trained on, validated on and tested on.
#
# Subsets and splits are drawn by data_seed alone: the same on every rank, for every training seed
# and for every set-up that is compared.

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
