"""From the name of a data set to sets of samples with known inputs and classes.

Subsets and splits are drawn by data_seed alone: the same on every rank, for every training seed
and for every set-up that is compared.
"""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import xxhash

from harness.core.files.columns import not_one_of
from harness.core.files.json_files import naming_broken_lines, refuse_null_first
from harness.core.provenance import check_dataset
from harness.core.records.redact import redacted
from harness.core.schema.environment import DataRecord
from harness.core.settings import Settings, UserError
from harness.core.tasks import DATA_FILES, task_of
from harness.train.data import embedded
from harness.train.data.cache import cached
from harness.train.data.csv_files import csv_options, is_csv, options_of_folder
from harness.train.data.models import explain
from harness.train.data.splits import (
    alike_classes,
    choose,
    classes_of,
    is_date,
    is_fraction,
    is_number,
    majority_share,
    rare_classes,
    untrained_classes,
)

EMBEDDED = {"embedded:english": embedded.english, "embedded:digits": embedded.digits}
LABEL_NAMES = ("label", "labels", "class", "target")
TEXT_NAMES = ("text", "sentence", "content", "review", "document")
USUAL = (*LABEL_NAMES, "category", *TEXT_NAMES)
BYTES = ("binary", "large_binary")
TEXT_TYPES = ("string", "large_string", "string_view")
MOST_ROWS = 10  # named at most, of rows that lack something
NOT_A_NUMBER = "nan"  # among numbers, of programs that write no empty value
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff")
FEW = 50  # a column of text with at most so many values is one of classes


@dataclass
class Source:
    """The drawn samples, before tokenising or resizing."""

    # Training, test and perhaps validation, in the order in which their samples are numbered. No
    # sample is in two of them. Without validation, each epoch is evaluated on the test set.
    sets: dict[str, datasets.Dataset]
    inputs: list[str]  # the text column (or two), or the image column
    labels: list[str]
    classes: list[np.ndarray]  # of the samples of each set
    facts: DataRecord

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
    with naming_broken_lines(Path(str(settings.dataset)).expanduser()):
        return _load(settings)


def _load(settings: Settings) -> Source:
    name = str(settings.dataset)
    with explain("dataset", name), naming_broken_lines(Path(name).expanduser()):
        splits = _read(settings)
    if "train" not in splits:
        first = next(iter(splits))
        if len(splits) > 1:
            raise UserError(
                f"--dataset {name} has no split called train, only {', '.join(splits)}: "
                "name another dataset or configuration"
            )
        splits = datasets.DatasetDict({"train": splits[first]})
    if task_of(settings.script).input == "image":
        splits = _with_images(settings, splits)
    _check_header(settings, splits["train"])
    label = _label_column(settings, splits["train"])
    _check_single(splits["train"], label)
    inputs = _input_columns(settings, splits["train"], label)
    sets, origins = choose(settings, splits, label)
    _check_kind(splits["train"], label)
    texts = inputs if task_of(settings.script).input == "text" else []
    _check_complete(splits, sets, label, texts)
    labels, classes = classes_of(sets, label)
    digest, counts = checksum(list(zip(sets.values(), classes, strict=True)), inputs)
    repeated = dict(zip(sets, counts, strict=True))
    evaluated = "validation" if "validation" in sets else "test"
    facts: DataRecord = {
        "dataset": redacted(name),
        "input_columns": inputs,
        "label_column": label,
        "classes": len(labels),
        "majority_share": majority_share(classes[[*sets].index(evaluated)]),
    }
    if alike := alike_classes(labels, classes):
        facts["alike_classes"] = alike
    if rare := rare_classes(labels, classes):
        facts["rare_classes"] = rare
    if new := untrained_classes(labels, classes):
        facts["untrained_classes"] = new
    if blank := _blank(splits, sets, texts):
        facts["blank_texts"] = blank
    facts |= origins
    facts["test_samples_in_training"] = repeated["test"]
    if "validation" in repeated:
        facts["validation_samples_in_training"] = repeated["validation"]
    facts["data_checksum"] = digest
    return Source(sets, inputs, labels, classes, facts)


def _with_images(settings: Settings, splits: datasets.DatasetDict) -> datasets.DatasetDict:
    """Bytes of images, with a path or alone, as parquet files of other programs hold them. Beside
    images, or bytes with a path, other bytes are none, unless --image_column names them.
    """
    features = splits["train"].features
    images = [c for c, feature in features.items() if isinstance(feature, datasets.Image)]
    with_path = [
        c for c, f in features.items() if isinstance(f, dict) and {*f} == {"bytes", "path"}
    ]
    alone = [c for c, feature in features.items() if getattr(feature, "dtype", "") in BYTES]
    asked = settings.image_column
    chosen = asked.split(",") if asked is not None else images or with_path or alone
    for column in [c for c in (*with_path, *alone) if c in chosen]:
        splits = splits.cast_column(column, datasets.Image())
    return splits


def _read(settings: Settings) -> datasets.DatasetDict:
    check_dataset(settings)
    name = str(settings.dataset)
    if name in EMBEDDED:
        return _embedded(name)
    path = Path(name).expanduser()
    refuse_null_first(path)
    if path.is_file():
        kind = DATA_FILES[path.suffix]
        more = csv_options([path]) if kind == "csv" else {}
        return datasets.load_dataset(kind, data_files=str(path), **more)
    if (path / "dataset_dict.json").is_file():
        return datasets.DatasetDict.load_from_disk(str(path))
    if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        return datasets.DatasetDict({"train": datasets.load_from_disk(str(path))})
    if path.is_dir():
        more = options_of_folder(path, settings.dataset_config) if is_csv(name) else {}
        return datasets.load_dataset(str(path), settings.dataset_config, **more)
    return datasets.load_dataset(name, settings.dataset_config)


def _check_header(settings: Settings, data: datasets.Dataset) -> None:
    """Refuse a CSV file without a header: its first sample would give the names of columns."""
    if settings.label_column is not None or not is_csv(str(settings.dataset)):
        return  # named by people who know the columns
    for name in data.column_names:
        is_text = name in _plain(data) and name not in USUAL  # others may be pictures
        if is_number(name) or (is_text and data[name][:].count(name) > 1):
            raise UserError(
                f"--dataset {settings.dataset}: the first line has {name[:40]!r} where the name of "
                "a column should be: put a line with names, such as text,label, before it"
            )


def _embedded(name: str) -> datasets.DatasetDict:
    """The embedded data set, prepared once for each version of its content."""
    texts = hashlib.sha256(embedded.ENGLISH.read_bytes()).hexdigest()
    key = {"embedded": name, "texts": texts, "scikit-learn": metadata.version("scikit-learn")}
    folder = cached(key, lambda draft: EMBEDDED[name]().save_to_disk(draft / "data"))
    return datasets.DatasetDict.load_from_disk(folder / "data")


def _label_column(settings: Settings, data: datasets.Dataset) -> str:
    columns = data.column_names
    if (asked := settings.label_column) is not None:
        if asked not in columns:
            known = not_one_of(asked, columns, Path(str(settings.dataset)))
            raise UserError(f"--label_column {asked}: {known}")
        return asked
    classes = [c for c in columns if isinstance(data.features[c], datasets.ClassLabel)]
    named = [c for c in LABEL_NAMES if c in columns]
    candidates = classes or named or {*_few_valued(settings, data), *({"category"} & {*columns})}
    if not candidates and columns == ["image"]:
        _refuse_beside_classes(settings)
        raise UserError(
            f"--dataset {settings.dataset}: its pictures have no classes: name the folder above, "
            "with a folder of pictures for each class, or add a metadata.csv"
        )
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


def _refuse_beside_classes(settings: Settings) -> None:
    """Refuse a picture beside folders of pictures: with it, datasets takes none for a class."""
    path = Path(str(settings.dataset)).expanduser()
    pictures = [p.relative_to(path) for p in path.rglob("*") if p.suffix.lower() in PICTURES]
    depths = Counter(len(picture.parts) for picture in pictures)
    if len(depths) > 1:
        usual = depths.most_common(1)[0][0]
        other = min(picture for picture in pictures if len(picture.parts) != usual)
        raise UserError(
            f"--dataset {settings.dataset}: {other} is in no folder of a class, as the other "
            "pictures are: move it into that of its class, or remove it"
        )


def _distinct(data: datasets.Dataset) -> str:
    """The number of distinct values of each column: it shows which columns may hold classes."""
    counts = [f"{column} {len(_values(data, column))}" for column in _plain(data)]
    return f" (distinct values: {', '.join(counts)})" if counts else ""


def _plain(data: datasets.Dataset) -> list[str]:
    """The columns of texts or numbers."""
    return [c for c, feature in data.features.items() if isinstance(feature, datasets.Value)]


def _values(data: datasets.Dataset, column: str) -> set[Any]:
    return set(data[column][:]) - {None}


def _few_valued(settings: Settings, data: datasets.Dataset) -> list[str]:
    """The columns of few values that may be classes: words, such as yes and no (beside other text
    if the task reads text), and small whole numbers, such as 0 and 1 or 1 to 5, but no years, ages
    or counts.
    """
    texts, most = _texts(data), max(2, min(FEW, len(data) // 10))
    few = {c: values for c in _plain(data) if 2 <= len(values := _values(data, c)) <= most}
    named = [c for c in texts if c in few]
    if task_of(settings.script).input == "text" and len(named) == len(texts):
        named = []
    numbered = [c for c, values in few.items() if c not in texts and _are_small(values)]
    return [c for c in data.column_names if c in named or c in numbered]


def _are_small(values: set[Any]) -> bool:
    """Whether the values are few small numbers, as of classes or ratings."""
    if not all(map(is_number, values)) or any(map(is_fraction, values)):
        return False
    return len(values) <= 10 and all(-1 <= float(value) <= 10 for value in values)


def _texts(
    data: datasets.Dataset, unless: tuple[Callable[[Any], bool], ...] = (is_number, is_date)
) -> list[str]:
    """The columns of text, unless all their values are numbers or dates, as a CSV file has them."""
    texts = {c: _values(data, c) for c, feature in data.features.items() if _is_text(feature)}
    return [c for c, values in texts.items() if not any(_are_all(values, kind) for kind in unless)]


def _are_all(values: set[Any], kind: Callable[[Any], bool]) -> bool:
    return bool(values) and all(map(kind, values))


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
        file = Path(str(settings.dataset))
        return _named_columns(flag, kind, chosen, candidates, data, label, file)
    if not candidates:
        raise UserError(
            f"--dataset {settings.dataset} has no column of {kind} among {columns}, where {label} "
            "is taken for the classes: if another has them, name it with --label_column"
            f"{_other_script(kind, data, label)}"
        )
    if len(candidates) == 1:
        return candidates
    usual = [c for c in preferred if c in candidates][:1]
    if not usual:
        pair = f", or a pair, as {shlex.quote(','.join(candidates[:2]))}" if kind == "text" else ""
        raise UserError(
            f"--dataset {settings.dataset} has several columns of {kind} "
            f"({', '.join(candidates)}): name one with --{flag}{pair}"
        )
    return usual


def _named_columns(
    flag: str, kind: str, chosen: str, candidates: list[str], data: datasets.Dataset, label: str,
    file: Path,
) -> list[str]:  # fmt: skip
    """The columns that a flag names, which may be columns of dates."""
    dated = _texts(data, unless=(is_number,)) if kind == "text" else []
    named = chosen.split(",")
    for column in named:
        if column not in candidates and (column not in dated or column == label):
            unlike = _unlike(data, column, label, kind)
            known = not_one_of(column, data.column_names, file)
            raise UserError(f"--{flag} {column}: {unlike}{known}")
    if len(named) > (2 if kind == "text" else 1):
        most = "one, or a pair" if kind == "text" else "one"
        raise UserError(f"--{flag} {chosen}: too many columns: name {most}")
    return named


def _unlike(data: datasets.Dataset, column: str, label: str, kind: str) -> str:
    """Why an existing column cannot be the input."""
    if column not in data.column_names:
        return ""
    if column == label:
        return "it is taken for the classes: name another column of them with --label_column; "
    if column in _plain(data) and _are_all(_values(data, column), is_number):
        return "it holds only numbers; "
    return f"not a column of {kind}; "


def _other_script(kind: str, data: datasets.Dataset, label: str) -> str:
    texts = [column for column in _texts(data) if column != label]
    return f"; {texts[0]} is text, for bert.py" if kind == "images" and texts else ""


def _is_text(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype in TEXT_TYPES


def _check_single(data: datasets.Dataset, label: str) -> None:
    feature = data.features[label]
    if not isinstance(feature, (datasets.Value, datasets.ClassLabel)):
        several = isinstance(feature, (list, datasets.List, datasets.LargeList))
        kind = "lists (several classes for a sample)" if several else type(feature).__name__
        if kind == "Json":
            kind = "values of several kinds, such as numbers and texts"
        raise UserError(
            f"column {label} holds {kind}, not one class for each sample: name another with "
            "--label_column"
        )


def _check_kind(train: datasets.Dataset, label: str) -> None:
    """Refuse a column whose values are no classes."""
    if not isinstance(train.features[label], datasets.ClassLabel):
        values = set(train.with_format(None)[label][:])
        if len(train) >= 10 and len(values) > len(train) // 2:
            kind = "float" if any(map(is_fraction, values)) else "class"
            raise UserError(
                f"column {label}: {len(values)} values ({kind}) in {len(train)} samples are no "
                "classes: name another with --label_column"
            )


def _check_complete(
    splits: datasets.DatasetDict, sets: dict[str, datasets.Dataset], label: str, texts: list[str]
) -> None:
    """Refuse samples without a class or a text; one error lists everything that is missing."""
    problems, needed = list[str](), list[str]()
    for column, what in ((label, "class"), *((column, "text") for column in texts)):
        for data in sets.values():
            if missing := _without(data, column, what):
                value = data.with_format(None)[column][missing[0]]
                why = f"value {value}" if value is not None and str(value).strip() else "empty"
                where = _where(splits, column, what)
                problems.append(f"column {column} has no {what} ({why}) in {where}")
                needed.append(f"a {what}")
                break
    if problems:
        raise UserError(
            f"{'; '.join(problems)} (a header not counted): remove these rows or give them "
            f"{' and '.join(dict.fromkeys(needed))}"
        )


def _where(splits: datasets.DatasetDict, column: str, what: str) -> str:
    """How many rows of each split have no value, and which are the first."""
    rows = {name: _without(split, column, what) for name, split in splits.items()
            if column in split.column_names}  # fmt: skip
    return "; ".join(_numbered(name, splits[name], of) for name, of in rows.items() if of)


def _numbered(name: str, split: datasets.Dataset, rows: list[int]) -> str:
    shown = ", ".join(str(row + 1) for row in rows[:MOST_ROWS])
    more = ", ..." if len(rows) > MOST_ROWS else ""
    return f"{len(rows)} of {len(split)} rows of split {name}: {shown}{more}"


def _blank(
    splits: datasets.DatasetDict, sets: dict[str, datasets.Dataset], texts: list[str]
) -> list[str]:
    """The rows of each split whose text is only blanks. Published data sets have some, and
    count them as samples.
    """

    def rows_of(data: datasets.Dataset) -> list[int]:
        columns = (data.with_format(None)[column][:] for column in texts)
        return [row for row, values in enumerate(zip(*columns, strict=True))
                if not any(v is not None and str(v).strip() for v in values)]  # fmt: skip

    if not any(map(rows_of, sets.values())):
        return []
    full = {name: split for name, split in splits.items() if {*texts} <= {*split.column_names}}
    return [_numbered(name, split, of) for name, split in full.items() if (of := rows_of(split))]


def _without(data: datasets.Dataset, column: str, what: str) -> list[int]:
    """The rows without a value (what: a text or a class), or with one that is no class."""
    feature, values = data.features[column], data.with_format(None)[column][:]
    if what == "text":
        return [row for row, value in enumerate(values) if value is None]
    if isinstance(feature, datasets.ClassLabel):
        known = range(len(feature.names))
        return [row for row, value in enumerate(values) if value not in known]
    gaps = {None, *_gaps({value for value in values if isinstance(value, str)})}
    return [row for row, value in enumerate(values) if value in gaps or value != value]


def _gaps(texts: set[str]) -> set[str]:
    """Those that name no class: blanks, and among numbers nan."""
    blank = {text for text in texts if not text.strip()}
    named = {text for text in texts if text.strip().lower() == NOT_A_NUMBER}
    others = texts - blank - named
    return blank | named if others and all(map(is_number, others)) else blank


def checksum(
    sets: list[tuple[datasets.Dataset, np.ndarray]], inputs: list[str]
) -> tuple[str, list[int]]:
    """SHA-256 of the classes and the contents of all samples, in order; and for each set, how many
    of its samples have a content that is in the first set, too.
    """
    digest, first, repeated = hashlib.sha256(), set[int](), [0] * len(sets)
    for number, (data, labels) in enumerate(sets):
        digest.update(labels.tobytes())
        for contents in _contents(data, inputs):
            digest.update(b"".join(contents))
            short = [*map(xxhash.xxh3_64_intdigest, contents)]
            if number == 0:
                first.update(short)
            else:
                repeated[number] += sum(map(first.__contains__, short))
    return digest.hexdigest()[:16], repeated


def _contents(data: datasets.Dataset, inputs: list[str]) -> Iterator[list[bytes]]:
    """The bytes of each sample, 1,000 samples at a time."""
    content = data.select_columns(inputs)
    for column in inputs:
        if isinstance(content.features[column], datasets.Image):
            # The encoded bytes as stored: decoding would cost as much as preparing.
            content = content.cast_column(column, datasets.Image(decode=False))
    for rows in content.iter(batch_size=1000):
        samples = zip(*(map(_bytes, rows[column]) for column in inputs), strict=True)
        yield [b"".join(value + b"\0" for value in sample) for sample in samples]


def _bytes(value: Any) -> bytes:
    if isinstance(value, dict):
        try:
            if value["bytes"] is None and value["path"]:
                return Path(value["path"]).read_bytes()
        except OSError as error:
            raise UserError(f"image {value['path']} cannot be read: {error.strerror}") from None
        return value["bytes"] or b""
    return str(value).encode("utf-8")
