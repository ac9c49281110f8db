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

from harness.read.compare.compare import compare
from harness.read.records.selection import read_group

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


def test_the_words_about_pictures_are_those_of_the_records(root: Path) -> None:
    page = " ".join((root / "docs" / "reading.md").read_text().split())
    one, half, same = (
        read_group("A", f"{root}/outputs/published/sweeps/pictures:{selected}", None)
        for selected in ("setup=1_1", "setup=1_2,per_gpu_batch=32", "setup=1_2,per_gpu_batch=64")
    )
    (time,) = (r for r in compare(one, half).rows if r.measure.name == "epoch_time_s")
    assert time.estimate is not None and time.estimate.paired and time.estimate.n == 3
    value, low, high = time.estimate.value, time.estimate.low, time.estimate.high
    assert f"take {value:.2f} of its training time ({low:.2f} to {high:.2f}), where" in page
    forest = max(json.loads(line)["accuracy"] for line in (root / RESULTS).read_text().splitlines())
    assert "Each of the nine runs is at least 14 points above the forest" in page
    each = [group.values("accuracy") for group in (one, half, same)]
    assert min(map(min, each)) - forest >= 0.14 and "each of the three means 16" in page
    assert min(map(statistics.fmean, each)) - forest >= 0.16
    lower = statistics.fmean(each[0]) - statistics.fmean(each[2])
    assert f"it is {100 * lower:.1f} in the mean of another training" in page


def test_the_page_says_what_the_forest_reached(root: Path) -> None:
    rows = [json.loads(line) for line in (root / RESULTS).read_text().splitlines()]
    assert [row["seed"] for row in rows] == [2, 4, 42] and {row["train"] for row in rows} == {10000}
    mean = statistics.fmean(row["accuracy"] for row in rows)
    page = " ".join((root / "docs" / "reading.md").read_text().split())
    assert f"a random forest on the same pictures (`docs/forest.py`) reaches {mean:.4f}" in page
