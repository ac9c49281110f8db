"""What pixels alone say: a random forest on the pictures of experiments/pictures.yaml.

    python docs/forest.py FOLDER --seeds 2,4,42 > experiments/pictures_forest.jsonl

FOLDER has train.parquet and test.parquet, as for --dataset of vit.py.
"""

import argparse
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
from PIL import Image
from sklearn.ensemble import RandomForestClassifier

TREES = 500


def pictures(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """All points of each picture in a row, and the labels."""
    rows = parquet.read_table(file).to_pylist()
    points = [np.asarray(Image.open(io.BytesIO(row["image"]["bytes"]))).ravel() for row in rows]
    return np.stack(points), np.array([row["label"] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", default="2,4,42")
    args = parser.parse_args()
    train, labels = pictures(args.folder / "train.parquet")
    test, truth = pictures(args.folder / "test.parquet")
    for seed in map(int, args.seeds.split(",")):
        forest = RandomForestClassifier(TREES, random_state=seed, n_jobs=-1).fit(train, labels)
        row = {"seed": seed, "trees": TREES, "train": len(train), "test": len(test),
               "accuracy": forest.score(test, truth)}  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
