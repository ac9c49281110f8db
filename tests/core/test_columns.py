"""Columns and empty files are checked by the first line of a script, before torch is loaded."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets.data_files import DataFilesDict, get_data_patterns
from pyarrow import parquet

from harness.core.files.parquet import parquet_head
from harness.core.provenance import check_inputs
from harness.core.settings import Settings, UserError

ROWS: list[dict[str, Any]] = [{"text": f"word {i}", "kind": i % 2} for i in range(9)]


def check(data: Path, script: str = "bert", **columns: str) -> None:
    model = {"bert": "bert-nano", "vit": "vit-nano"}[script]
    check_inputs(Settings(script=script, model=model, dataset=str(data), **columns))


def written(file: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    if file.suffix == ".parquet":
        schema = pa.schema([("text", pa.string()), ("kind", pa.int64())])
        parquet.write_table(pa.Table.from_pylist(rows, schema), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=1))
    elif file.suffix == ".jsonl":
        file.write_text("\n".join(lines) + "\n")
    else:
        file.write_text("text,kind\n" + "".join(f"{r['text']},{r['kind']}\n" for r in rows))
    return file


KINDS = ("parquet", "json", "jsonl", "csv")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["data.{}", "folder/train.{}"])
def test_a_column_that_no_file_has_is_refused(kind: str, place: str, tmp_path: Path) -> None:
    file = written(tmp_path / place.format(kind))
    data = file if file.parent == tmp_path else file.parent
    check(data, label_column="kind", text_column="text")
    for flag, name in (("label_column", "kidn"), ("text_column", "other"), ("text_column", "a,b")):
        with pytest.raises(UserError) as refused:
            check(data, **{flag: name})
        shown = name.split(",")[0]
        assert re.match(rf"--{flag} {shown}: .*the columns are text, kind", str(refused.value))
    with pytest.raises(UserError, match=r"--image_column pixels: .*the columns are text, kind"):
        check(data, "vit", image_column="pixels")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_rows_is_refused(kind: str, tmp_path: Path) -> None:
    file = written(tmp_path / f"data.{kind}", [])
    with pytest.raises(UserError, match=f"--dataset {file} .*empty.*: name a file with samples"):
        check(file)
    if kind in ("parquet", "csv"):
        with pytest.raises(UserError, match=r"it has columns \(text, kind\) and no rows"):
            check(file)
    written(tmp_path / "folder" / f"test.{kind}", [])
    with pytest.raises(UserError, match=f"test.{kind} .*empty"):
        check(tmp_path / "folder")
    written(tmp_path / "folder" / f"train.{kind}")
    check(tmp_path / "folder")  # the splits are looked at when they are loaded


@pytest.mark.parametrize(("empty", "other", "refused"), [
    ("train.csv", "data.csv", True),
    ("training_notes.csv", "data.csv", True),  # datasets reads it alone, as the split train
    ("my train 2.csv", "data.csv", True),
    ("train/a.csv", "train.csv", True),
    ("constraints.csv", "data.csv", False),
    ("trains.csv", "data.csv", False),
    ("Train.csv", "data.csv", False),
    ("train.csv", "train/a.csv", False),
    ("test/train.csv", "b.csv", False),
])  # fmt: skip
def test_files_of_the_split_train_are_those_that_datasets_reads(
    empty: str, other: str, refused: bool, tmp_path: Path
) -> None:
    file = written(tmp_path / empty, [])
    written(tmp_path / other)
    with pytest.raises(UserError, match=f"{file} is empty") if refused else nullcontext():
        check(tmp_path)
    patterns = get_data_patterns(str(tmp_path))
    read = DataFilesDict.from_patterns(patterns, str(tmp_path)).get("train", [])
    assert refused == ([*read] == [str(file)])


def test_a_column_of_later_samples_is_there(tmp_path: Path) -> None:
    many = [{"text": "word " * 9}] * 30_000
    file = written(tmp_path / "data.jsonl", [*many, {"text": "x", "größe": 1}])
    check(file, label_column="größe")
    with pytest.raises(UserError, match=r"--label_column kind: the columns are text"):
        check(file, label_column="kind")


@pytest.mark.parametrize("name", ["README.md", "metadata.csv", "a.png", "other.csv"])
def test_a_folder_that_may_be_read_in_another_way_is_left_to_the_run(
    name: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "train.jsonl")
    (tmp_path / name).write_text("file_name,mine\na.png,1\n")
    check(file.parent, label_column="mine")


@pytest.mark.parametrize("content", [
    b"", b"PAR1", b"PAR1\x15\x02\xff\xff\xff\x7fPAR1", b"x" * 99, b"PAR1" + b"\x1c" * 90
    + (90).to_bytes(4, "little") + b"PAR1", b"\x19" * 90 + (90).to_bytes(4, "little") + b"PAR1",
])  # fmt: skip
def test_a_broken_parquet_file_is_left_to_its_reader(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    file.write_bytes(content)
    assert parquet_head(file) is None
    check(file, label_column="any")


def test_columns_of_nested_values_are_read_from_the_footer(tmp_path: Path) -> None:
    image = {"bytes": b"x", "path": None}
    rows = {"image": [image] * 3, "tags": [[{"a": 1}]] * 3, "größe": [0, 1, 0]}
    file = tmp_path / "data.parquet"
    for version in ("1.0", "2.6"):
        parquet.write_table(pa.table(rows), file, version=version, row_group_size=1)
        assert parquet_head(file) == (["image", "tags", "größe"], 3)


@pytest.mark.parametrize("content", ["[1, 2]", '{"text": ', "\ufeff[]", '{"train": [{"kind": 1}]}'])
def test_other_json_is_left_to_its_reader(content: str, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(content, encoding="utf-8")
    if content.endswith("[]"):
        with pytest.raises(UserError, match="it is empty"):
            check(file)
    else:
        check(file, label_column="kind")
