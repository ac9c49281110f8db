"""Models of timm, by transformers' wrapper: where timm and torchvision are installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import matrix
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(find_spec, ("timm", "torchvision"))), reason="needs timm and torchvision"
    ),
]
NAMES = ("test_resnet", "test_vit")  # timm's own small models for tests


def saved(root: Path, name: str) -> None:
    """A folder as those of timm on the Hub, with random weights."""
    import timm
    import torch
    from timm.models import save_for_hf

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10)
    matrix.spread(model)
    # Whole pictures: a processor that crops is refused.
    config = {"pretrained_cfg": {**model.pretrained_cfg, "crop_pct": 1.0, "tag": None}}
    folder = root / "vit" / name
    save_for_hf(model, folder, model_config=config, safe_serialization=True)
    # The files on the Hub lack it. transformers 5.23 gives the number of classes itself, too.
    written = json.loads((folder / "config.json").read_text())
    del written["model_args"]
    (folder / "config.json").write_text(json.dumps(written))


def alone(root: str) -> Any:
    for name in NAMES:
        saved(Path(root), name)
    return matrix.trained(root, "vit", NAMES, matrix.ALONE)


@pytest.mark.timeout(1200)
def test_models_of_timm_train_like_others(tmp_path: Path) -> None:
    """The same numbers in each way, and from the saved checkpoint with its own processor."""
    (results,) = ranks(1, alone, str(tmp_path))
    (together, _) = ranks(2, matrix.trained, str(tmp_path), "vit", NAMES, matrix.TOGETHER)
    for name in NAMES:
        arms = results[name] | together[name]
        assert matrix.wrong(arms) == (), (name, arms)
