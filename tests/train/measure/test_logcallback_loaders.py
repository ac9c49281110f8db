"""LogCallback alone: samples and batches of loaders that scripts make themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from transformers import Trainer

import logcallback
from harness.core.records import RunFolder, read_rows
from harness.read.records.recorded import recorded
from tests.support.recorded import rows_of, settings_of, trainer_for, without_telemetry
from tests.support.toys import Net, Points


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logcallback, "Telemetry", without_telemetry)


class OwnTrain(Trainer):
    drops = False

    def get_train_dataloader(self) -> DataLoader:
        assert self.train_dataset is not None
        return DataLoader(self.train_dataset, batch_size=16, drop_last=self.drops)  # type: ignore[arg-type]


class OwnDropping(OwnTrain):
    drops = True


class OwnEval(Trainer):
    def get_eval_dataloader(self, *args: Any) -> DataLoader:
        return DataLoader(self.eval_dataset, batch_size=16, drop_last=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "samples"), [(OwnTrain, 105), (OwnDropping, 96)])
def test_the_batch_is_that_of_the_loader(kind: type[Trainer], samples: int, tmp_path: Path) -> None:
    """The training ended for want of total_batch_size, or had the batch of the arguments."""
    net = Net()
    trainer_for(tmp_path / "record", net, Points(105), kind=kind).train()
    assert sum(map(len, net.fed)) == 2 * samples
    for row in rows_of(tmp_path / "record"):
        assert (row["effective_batch"], row["samples"], row["fed_samples"]) == (16, *[samples] * 2)
    assert rows_of(tmp_path / "record")[1]["timed_samples"] == samples
    assert settings_of(tmp_path / "record")["per_gpu_batch"] == 16
    assert recorded(RunFolder(tmp_path / "record")).problem is None


def test_an_evaluation_by_an_own_loader_that_drops_samples(tmp_path: Path) -> None:
    test = Points(40, draw=1)
    more = {"kind": OwnEval, "eval_strategy": "epoch"}
    trainer_for(tmp_path / "record", train=Points(8), test=test, **more).train()
    assert [row["eval_samples"] for row in rows_of(tmp_path / "record")] == [32, 32]


class Large(Net):
    """Out of memory in batches of more than four."""

    def forward(self, x: Any, labels: Any, index: Any) -> dict[str, Any]:
        if self.training and len(x) > 4:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(x, labels, index)


def test_the_batch_is_the_one_that_fits(tmp_path: Path) -> None:
    """It was the one asked for, which did not."""
    more = {"auto_find_batch_size": True, "per_device_train_batch_size": 8}
    trainer_for(tmp_path / "record", Large(), **more).train()
    for row in rows_of(tmp_path / "record"):
        assert (row["effective_batch"], row["samples"], row["fed_samples"]) == (4, 16, 16)
        assert row["train_samples_per_s"] > 0
    attempts, _ = read_rows(RunFolder(tmp_path / "record").attempts)
    assert [row["per_gpu_batch"] for row in attempts] == [4, 4]
    assert attempts[0]["effective_batch"] == settings_of(tmp_path / "record")["per_gpu_batch"] == 4
