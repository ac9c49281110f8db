"""Files of data that cannot be read are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.settings import UserError
from harness.train.data.sources import load
from tests.support.samples import settings

NULL = "its first sample is null: remove it"
EMPTY = "it is empty"
CUT_GZIP = b"\x1f\x8b\x08garbage"
# Of each kind of file; parquet files end with what they hold.
BROKEN = {
    "binary.csv": (bytes(range(128, 256)), "save it as UTF-8"),
    "cut.csv": (CUT_GZIP, "Compressed file ended before the end-of-stream marker was reached"),
    "empty.csv": (b"", EMPTY),
    "quote.csv": (b'text,label\n"a,0\nb,1\n', "EOF inside string"),
    "ragged.csv": (b"text,label\na,0\nb,1,2\n", "line 3 has 3 values and the header 2"),
    "binary.json": (bytes(range(128, 256)), "save it as UTF-8"),
    "broken.json": (b'{"text": "a", "label": 0}\n{"text": ', "Trailing data"),
    "cut.json": (CUT_GZIP, "Compressed file ended before the end-of-stream marker was reached"),
    "empty.json": (b"", EMPTY),
    "empty.jsonl": (b"", EMPTY),
    "null.json": (b"null", NULL),
    "nulls.json": (b'[ null, {"text": "a", "label": 0}]', NULL),
    "null.jsonl": (b'\xef\xbb\xbfnull\n{"text": "a", "label": 0}\n', NULL),
    "words.json": (b"hello world", "Expected object or value"),
    "binary.parquet": (bytes(range(128, 256)), "Parquet magic bytes not found in footer"),
    "cut.parquet": (b"PAR1garbagegarbagePAR1", "smaller than the size reported by footer"),
    "empty.parquet": (b"", "Parquet file size is 0 bytes"),
    "short.parquet": (b"PAR1", "Parquet"),
    "text.parquet": (b"text,label\na,0\n" * 10, "Parquet magic bytes not found in footer"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    content, words = BROKEN[name]
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError) as raised:
        load(settings(file))
    told = str(raised.value)
    assert told.startswith(f"--dataset {file} cannot be read: ") and "\n" not in told
    assert words in told


def test_a_folder_with_a_file_whose_first_sample_is_null_is_refused(tmp_path: Path) -> None:
    part = tmp_path / "train" / "0.jsonl"
    part.parent.mkdir()
    part.write_text('null\n{"text": "a", "label": 0}\n')
    with pytest.raises(UserError, match=f"^--dataset {part} cannot be read: {NULL}$"):
        load(settings(tmp_path))
