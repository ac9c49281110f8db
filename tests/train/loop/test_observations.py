"""What the record asks ExactTrainer for, and where the answers are kept."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.train.loop.observations import TrainerObservations
from harness.train.run.recorder import Observations


def trainer_of(**parts: Any) -> Any:
    known = {
        "context": SimpleNamespace(recorded_world=SimpleNamespace(size=4)),
        "exchange": SimpleNamespace(observed={}, devices=None),
        "utilisation": 1, "exposure": 2, "comm_probe": 3, "built": {}, "compiled": None,
        "number_format": SimpleNamespace(observed={}),
    }  # fmt: skip
    return SimpleNamespace(**known | parts)


def test_all_parts_are_joined_in_the_order_in_which_they_become_known() -> None:
    trainer = trainer_of(built={"strategy": "diloco", "world": 4, "exchange": "backend"})
    trainer.compiled = SimpleNamespace(observed={"compiled_graphs": 1})
    trainer.number_format.observed = {"dtype": "float32"}
    trainer.exchange.observed = {"exchanges": 3}
    observations = TrainerObservations(trainer)
    assert list(observations.observed.items()) == [
        ("strategy", "diloco"), ("world", 4), ("exchange", "backend"), ("dtype", "float32"),
        ("compiled_graphs", 1), ("exchanges", 3),
    ]  # fmt: skip
    assert "exchanges" not in trainer.built  # what is asked for changes nothing
    trainer.exchange.observed = {"exchanges": 4}
    assert observations.observed["exchanges"] == 4


def test_devices_are_those_of_the_exchange_or_of_the_model_or_all_processes() -> None:
    trainer = trainer_of()
    observations = TrainerObservations(trainer)
    assert observations.devices == 4
    trainer.built = {"devices": 2}
    assert observations.devices == 2
    trainer.exchange.devices = 3  # of those that trained in the last epoch
    assert observations.devices == 3


def test_nothing_is_known_with_the_stock_trainer() -> None:
    observations = Observations(2)
    assert observations.link is None and observations.payload_bytes() is None
    assert observations.devices == 2
    assert observations.gather({"rank": 0}) == [{"rank": 0}]  # a single process gathers itself


def test_nobody_writes_into_the_observations(root: Path) -> None:
    """Each part stands where it is found, and is returned when asked for."""
    written = [
        f"{file.relative_to(root)}:{node.lineno}"
        for file in (*(root / "harness").rglob("*.py"), root / "logcallback.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if ast.unparse(node.value).endswith("observations")
    ]
    assert written == []
