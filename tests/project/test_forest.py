"""docs/forest.py, what pixels alone say, and what the pages say of it."""

from __future__ import annotations

import io
import json
import runpy
import statistics
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

RESULTS = Path("experiments/pictures_forest.jsonl")


def pictures(file: Path, each: int, seed: int) -> None:
    """Of two classes, dark and bright, with noise."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(2 * each):
        points = random.integers(0, 100, (4, 4, 3)) + 150 * (number % 2)
        Image.fromarray(points.astype(np.uint8)).save(buffer := io.BytesIO(), "PNG")
        rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "label": number % 2})
    parquet.write_table(pa.Table.from_pylist(rows), file)


def test_a_forest_tells_dark_from_bright(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pictures(tmp_path / "train.parquet", 10, 1)
    pictures(tmp_path / "test.parquet", 5, 2)
    monkeypatch.setattr("sys.argv", ["forest.py", str(tmp_path), "--seeds", "1,2"])
    runpy.run_path(str(root / "docs" / "forest.py"), run_name="__main__")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["seed"], row["train"], row["test"], row["accuracy"]) for row in rows] == [
        (1, 20, 10, 1.0),
        (2, 20, 10, 1.0),
    ]


def test_the_page_says_what_the_forest_reached(root: Path) -> None:
    rows = [json.loads(line) for line in (root / RESULTS).read_text().splitlines()]
    assert [row["seed"] for row in rows] == [2, 4, 42] and {row["train"] for row in rows} == {10000}
    mean = statistics.fmean(row["accuracy"] for row in rows)
    page = " ".join((root / "docs" / "reading.md").read_text().split())
    assert f"a random forest on the same pictures (`docs/forest.py`) reaches {mean:.4f}" in page
