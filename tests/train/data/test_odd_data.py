"""Odd data either train as they are meant, or are refused in one line that names the fix."""

from __future__ import annotations

import datetime
import gzip
import io
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from harness.core.provenance import check_inputs
from harness.core.settings import Settings, UserError
from harness.train.data.images import _resizer
from harness.train.data.sources import load
from tests.support.samples import settings

COUNT = 24
ROWS = range(COUNT)


def of_labels(folder: Path, labels: list[Any], kind: str) -> Path:
    file = folder / f"data.{kind}"
    texts = [f"text {i}" for i in range(len(labels))]
    if kind == "parquet":
        parquet.write_table(pa.table({"text": texts, "label": pa.array(labels)}), file)
    elif kind == "csv":
        lines = [f"{text},{label}" for text, label in zip(texts, labels, strict=True)]
        file.write_text("\n".join(["text,label", *lines]) + "\n")
    else:
        pairs = zip(texts, labels, strict=True)
        file.write_text("".join(json.dumps({"text": t, "label": v}) + "\n" for t, v in pairs))
    return file


NO_CLASS = r"column label has no class \({}\) in {} of 24 rows of split train: {}"


@pytest.mark.parametrize(("kind", "values", "message"), [
    ("csv", ["1.0", "nan", "0.0"], NO_CLASS.format("value nan", 8, "2, 5, 8")),
    ("csv", ["1", "NaN", "0"], NO_CLASS.format("value NaN", 8, "2, 5, 8")),
    ("parquet", [1.0, float("nan"), 0.0], NO_CLASS.format("value nan", 8, "2, 5, 8")),
    ("parquet", [1.0, float("inf"), 0.0], "column label holds inf, which is no class"),
    ("parquet", [Decimal("1.0"), Decimal("0.5")], r"column label holds 0\.5, which is no class"),
    ("parquet", [datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)], "holds date, which is no"),
    ("jsonl", ["a", ""], NO_CLASS.format("empty", 12, "2, 4, 6")),
    ("jsonl", ["a", " \t"], NO_CLASS.format("empty", 12, "2, 4, 6")),
])  # fmt: skip
def test_what_names_no_class_is_refused(
    kind: str, values: list[Any], message: str, tmp_path: Path
) -> None:
    file = of_labels(tmp_path, [values[i % len(values)] for i in ROWS], kind)
    with pytest.raises(UserError, match=message) as refused:
        load(settings(file))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("kind", "values", "classes"), [
    ("parquet", [Decimal(1), Decimal("0.0")], ["0", "1"]),
    ("jsonl", [1.0, 0.0], ["0", "1"]), ("jsonl", [True, False], ["False", "True"]),
    ("jsonl", [-1, 1], ["-1", "1"]), ("jsonl", ["very good ", "bad"], ["bad", "very good "]),
    ("csv", ["nan", "EU"], ["EU", "nan"]), ("csv", ["NA", "1", "2"], ["1", "2", "NA"]),
])  # fmt: skip
def test_classes_of_many_forms(
    kind: str, values: list[Any], classes: list[str], tmp_path: Path
) -> None:
    file = of_labels(tmp_path, [values[i % len(values)] for i in ROWS], kind)
    assert load(settings(file)).labels == classes


def test_a_compressed_csv_file_is_read_as_the_text_that_it_holds(tmp_path: Path) -> None:
    lines = [f"text {i};{('01', '1', 'NA')[i % 3]}" for i in ROWS]
    file = tmp_path / "train.csv.gz"
    file.write_bytes(gzip.compress(("\ufefftext;label\n" + "\n".join(lines)).encode()))
    assert load(settings(tmp_path)).labels == ["01", "1", "NA"]
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(UserError, match=r"train\.csv\.gz cannot be read: gzip: Compressed file"):
        load(settings(tmp_path))


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize(("line", "reason"), [
    (b'{"text": "a", "label": 1, "label": 1}', "has the name label twice: remove one of them"),
    (b'{"text": "\\ud83d", "label": 1}', r"holds half a character \(\\ud83d\): write the whole"),
    (b'{"text": "gr\xfcn", "label": 1}', "is not UTF-8: save it as UTF-8"),
    (b'{"text": ', "is not JSON: Expecting value"),
])  # fmt: skip
def test_a_broken_line_of_json_is_named(
    line: bytes, reason: str, folder: bool, tmp_path: Path
) -> None:
    file = of_labels(tmp_path, [i % 2 for i in ROWS], "jsonl")
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(UserError, match=f"^--dataset {file} cannot be read: line 3 {reason}"):
        load(settings(tmp_path if folder else file))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_texts_that_are_not_utf8_are_refused(kind: str, tmp_path: Path) -> None:
    file = of_labels(tmp_path, [i % 2 for i in ROWS], "jsonl").rename(tmp_path / f"data.{kind}")
    if kind == "json":
        file.write_bytes(file.read_bytes().replace(b"text 5", b"gr\xfcn"))
    else:
        texts = pa.array([b"gr\xfcn"] * COUNT).view(pa.string())
        parquet.write_table(pa.table({"text": texts, "label": [i % 2 for i in ROWS]}), file)
    with pytest.raises(UserError, match=f"^--dataset {file} cannot be read: .*: save it as UTF-8$"):
        load(settings(file))


def test_two_columns_of_one_name_are_refused_in_parquet_files(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    arrays = [pa.array(["a"]), pa.array([0]), pa.array([1])]
    parquet.write_table(pa.Table.from_arrays(arrays, names=["text", "label", "label"]), file)
    with pytest.raises(UserError, match=f"{file} has several columns named label: rename all"):
        check_inputs(Settings(script="bert", model="bert-nano", dataset=str(file)))


def test_an_empty_training_file_beside_a_test_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n")
    (tmp_path / "test.csv").write_text("text,label\na,0\nb,1\n")
    with pytest.raises(UserError, match=r"train\.csv is empty: it has columns \(text, label\)"):
        check_inputs(Settings(script="bert", model="bert-nano", dataset=str(tmp_path)))


def test_files_of_several_formats_are_no_data_set(tmp_path: Path) -> None:
    of_labels(tmp_path, [i % 2 for i in ROWS], "csv").rename(tmp_path / "train.csv")
    of_labels(tmp_path, [i % 2 for i in ROWS], "jsonl").rename(tmp_path / "test.jsonl")
    with pytest.raises(UserError, match=f"^--dataset {tmp_path} has files of several formats"):
        load(settings(tmp_path))


def test_texts_of_any_type_of_arrow_are_texts(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in ROWS]
    for kind in (
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), "str"),
    ):
        table = pa.table({"text": pa.array(texts).cast(kind), "label": [i % 2 for i in ROWS]})
        parquet.write_table(table, tmp_path / "data.parquet")
        source = load(settings(tmp_path / "data.parquet"))
        assert sorted([*source.train["text"], *source.test["text"]]) == sorted(texts)


# ---- images ----


def png(number: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (4, 4, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def of_images(folder: Path, images: list[Any], kind: Any = None) -> Path:
    file = folder / "images.parquet"
    labels = [i % 2 for i in range(len(images))]
    parquet.write_table(pa.table({"image": pa.array(images, kind), "label": labels}), file)
    return file


def pictures(dataset: Path) -> Settings:
    return settings(dataset, script="vit", model="vit-nano", image_size=4)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), None])
def test_bytes_of_images_of_other_programs_are_images(kind: Any, tmp_path: Path) -> None:
    contents = [png(i) for i in ROWS]
    stored = contents if kind else [{"bytes": each, "path": None} for each in contents]
    source = load(pictures(of_images(tmp_path, stored, kind)))
    assert source.inputs == ["image"] and source.train[0]["image"].size == (4, 4)


@pytest.mark.parametrize("kind", ["an image", "with a path", "bytes"])
def test_bytes_beside_images_are_images_only_where_they_are_chosen(
    kind: str, tmp_path: Path
) -> None:
    alone, file = [png(i) for i in ROWS], tmp_path / "images.parquet"
    with_path = [{"bytes": each, "path": None} for each in alone]
    labels = [i % 2 for i in ROWS]
    table = {"picture": alone if kind == "bytes" else with_path, "embedding": alone}
    if kind == "an image":
        features = datasets.Features(
            picture=datasets.Image(), embedding=datasets.Value("binary"),
            label=datasets.Value("int64"),
        )  # fmt: skip
        datasets.Dataset.from_dict({**table, "label": labels}, features).to_parquet(file)
    else:
        parquet.write_table(pa.table({**table, "label": labels}), file)
    for chosen in ("picture", "embedding"):
        source = load(replace(pictures(file), image_column=chosen))
        assert source.inputs == [chosen] and source.train[0][chosen].size == (4, 4)
    if kind == "bytes":
        with pytest.raises(UserError, match=r"several columns of images \(picture, embedding\): "):
            load(pictures(file))
    else:
        assert load(pictures(file)).inputs == ["picture"]


@pytest.mark.parametrize(
    "broken", [None, {"bytes": b"", "path": None}, {"bytes": None, "path": None}]
)
def test_an_empty_image_is_refused(broken: Any, tmp_path: Path) -> None:
    stored = [{"bytes": png(i), "path": None} for i in ROWS]
    source = load(pictures(of_images(tmp_path, [*stored, broken])))  # counted, not yet decoded
    assert sum(source.sizes) == COUNT + 1
    with pytest.raises(
        UserError, match=r"^image without a name cannot be read: it is empty: remove"
    ):
        _resizer(pictures(tmp_path))(broken)


def test_an_image_that_is_not_there_is_refused(tmp_path: Path) -> None:
    gone = tmp_path / "gone.png"
    stored = [{"bytes": None, "path": str(gone)} for _ in ROWS]
    with pytest.raises(UserError, match=f"^image {gone} cannot be read: No such file"):
        load(pictures(of_images(tmp_path, stored)))


def test_a_picture_beside_the_folders_of_classes_is_named(tmp_path: Path) -> None:
    for number in ROWS:
        file = tmp_path / "train" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(number))
    assert load(pictures(tmp_path)).labels == ["a", "b"]
    (tmp_path / "train" / "cover.png").write_bytes(png(99))
    with pytest.raises(UserError, match=r"train/cover\.png is in no folder of a class, as the oth"):
        load(pictures(tmp_path))
