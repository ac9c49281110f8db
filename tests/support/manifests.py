"""What a checkpoint's manifest holds, for checkpoints that a test makes by hand."""

from __future__ import annotations

from typing import Any, cast

from harness.core.records.manifests import CHECKPOINT_FORMAT, CheckpointFacts


def facts_of(update: int = 0, **known: Any) -> CheckpointFacts:
    facts: CheckpointFacts = {
        "fingerprint": {"format": CHECKPOINT_FORMAT},
        "processes": 1,
        "best": None,
        "position": {"update": update, "epoch": 0, "samples": 0},
        "epoch": {},
    }
    return cast(CheckpointFacts, {**facts, **known})
