"""What a model does is found out on a copy of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    Dinov2Config,
)

from harness.train.data import probes
from tests.support.broken_runs import only_run
from tests.support.ranks import script

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "vocab_size": 100, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
PATCHES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
SPECIAL = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
# Whether the scores of a text depend on how far it is padded.
READS_PADDING: dict[str, tuple[bool, dict[str, Any]]] = {
    "Albert": (False, {"embedding_size": 16}),
    "BigBird": (False, {}),
    "Canine": (True, {}),
    "ConvBert": (True, {"embedding_size": 32}),
    "DebertaV2": (False, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "FNet": (True, {}),
    "Gemma2": (False, {"num_key_value_heads": 4, "head_dim": 8}),
    "GPT2": (False, {"eos_token_id": 3, "bos_token_id": 2}),
    "Llama": (False, {"num_key_value_heads": 4}),
    "ModernBert": (False, SPECIAL),
    "MPNet": (False, {}),
    "Mpt": (False, {"max_seq_len": 64}),
    "Nystromformer": (True, {"segment_means_seq_len": 64}),
}


def texts(kind: str) -> Any:
    more = READS_PADDING[kind][1]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    return AutoModelForSequenceClassification.from_config(config)


def batch(padded_to: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(1, padded_to, dtype=torch.long)
    ids[0, :6] = torch.from_numpy(np.random.default_rng(0).integers(5, 100, 6))
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.mark.parametrize("kind", READS_PADDING)
def test_padding_that_is_read_is_found(kind: str) -> None:
    model = texts(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = dict(model.base_model.__dict__)
    assert probes.reads_padding(model, batch(6), batch(48)) == READS_PADDING[kind][0]
    assert model.training and all(p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # BigBird attends otherwise, for good, once it has read a short text.
    assert model.base_model.__dict__.get("attention_type") == state.get("attention_type")


def images(kind: str) -> Any:
    torch.manual_seed(0)
    configs = {"vision_config": PATCHES, "text_config": {**SIZES, "num_hidden_layers": 1}}
    parts = kind in ("CLIP", "Siglip")
    config = getattr(transformers, f"{kind}Config")(**(configs if parts else PATCHES))
    return AutoModelForImageClassification.from_config(config)


@pytest.mark.parametrize(("kind", "unused"), [
    ("Dinov2", True), ("CLIP", True), ("Siglip", True), ("ViT", False), ("Beit", False),
    ("BigBird", True), ("Canine", True), ("Albert", False), ("GPT2", False),
])  # fmt: skip
def test_unused_parameters_are_those_without_a_gradient(kind: str, unused: bool) -> None:
    model = texts(kind) if kind in READS_PADDING else images(kind)
    pixels = {"pixel_values": torch.randn(2, 3, 8, 8)}
    inputs = {**(batch(6) if kind in READS_PADDING else pixels)}
    inputs["labels"] = torch.zeros(len(next(iter(inputs.values()))), dtype=torch.long)
    found = probes.unused_parameters(model, inputs)
    assert all(p.grad is None for p in model.parameters()) and model.training
    model.eval()(**inputs).loss.backward()
    assert found == [name for name, p in model.named_parameters() if p.grad is None]
    assert bool(found) == unused


@pytest.mark.process
def test_ddp_trains_a_model_that_leaves_parameters_unused(tmp_path: Path) -> None:
    Dinov2Config(**PATCHES).save_pretrained(tmp_path / "model")
    argv = ["--model", str(tmp_path / "model"), "--from_scratch", "--image_size", "8"]
    argv += [
        "--dataset",
        "embedded:digits",
        "--train_size",
        "64",
        "--test_size",
        "32",
        "--lr",
        "0.1",
    ]
    argv += ["--optim", "sgd", "--epochs", "2", "--rank_dropout", "same", "--telemetry_hz", "0"]
    rows = []
    for count in (1, 2):
        out = str(tmp_path / str(count))
        done = script("vit", *argv, "--b", str(16 // count), "--o", out, count=count)
        assert done.code == 0, done.err
        folder = only_run(tmp_path / str(count))
        rows.append(folder.read_epochs()[0][-1])
        observed = (folder.read_environment() or {})["observed"]
        assert observed.get("find_unused_parameters") == (None if count == 1 else True)
    for field in ("train_loss", "eval_loss", "grad_norm"):
        assert rows[0][field] == pytest.approx(rows[1][field], rel=1e-5)
