"""What a model does is found out on a copy of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from accelerate.utils import DistributedDataParallelKwargs
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    Dinov2Config,
)

from harness.core.settings import Settings, UserError
from harness.train.data import embedded, models, probes
from harness.train.strategy import sharding, verify, weights
from tests.support import architectures
from tests.support.broken_runs import only_run
from tests.support.ranks import ranks, script
from tests.support.toys import CPU, Net, Points, ours

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
    pairs = [(batch(6), batch(48))]
    assert probes.reads_padding(model, pairs) == READS_PADDING[kind][0]
    if kind != "ConvBert":  # with such small weights it changes scores by no more than rounding
        assert probes.reads_padding(model, pairs, exact=False) == READS_PADDING[kind][0]
    assert model.training and all(p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # BigBird attends otherwise, for good, once it has read a short text.
    assert model.base_model.__dict__.get("attention_type") == state.get("attention_type")


class Some(torch.nn.Module):
    """Reads no text of fewer than 4 tokens; counts padding in texts of more than 5."""

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        tokens = int(attention_mask.sum())
        if input_ids.shape[1] < 4:
            raise RuntimeError("too short")
        return {"logits": torch.ones(1, 2) * (input_ids.shape[1] if tokens > 5 else tokens)}


def test_padding_is_tried_with_texts_of_several_lengths() -> None:
    def pair(tokens: int) -> probes.Pair:
        padded = batch(9)
        padded["attention_mask"] = (torch.arange(9) < tokens)[None].long()
        return {name: value[:, :tokens] for name, value in padded.items()}, padded

    short, middle, long = pair(3), pair(5), pair(7)
    assert not probes.reads_padding(Some(), [middle])
    assert probes.reads_padding(Some(), [short, middle, long])
    with pytest.raises(RuntimeError, match="too short"):
        probes.reads_padding(Some(), [short, middle])
    assert probes.fails_alone(Some(), [short, middle])
    assert not probes.fails_alone(Some(), [middle, long])


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
def test_processes_train_a_model_that_leaves_parameters_unused(tmp_path: Path) -> None:
    Dinov2Config(**PATCHES).save_pretrained(tmp_path / "model")
    argv = ["--model", str(tmp_path / "model"), "--from_scratch", "--image_size", "8"]
    argv += ["--dataset", "embedded:digits", "--train_size", "64", "--test_size", "32"]
    argv += ["--optim", "sgd", "--epochs", "2", "--rank_dropout", "same", "--telemetry_hz", "0"]
    argv += ["--lr", "0.1", "--max_grad_norm", "1000"]
    # With SGD and without clipping, to average the weights of an update is to average gradients.
    apart = ["--strategy", "local_sgd", "--sync_every", "1", "--sync_scope", "rank"]
    rows = {}
    for name, count, more, searches in (
        ("single", 1, [], None), ("ddp", 2, [], True), ("apart", 2, apart, None)
    ):  # fmt: skip
        out = str(tmp_path / name)
        done = script("vit", *argv, *more, "--b", str(16 // count), "--o", out, count=count)
        assert done.code == 0, done.err
        folder = only_run(tmp_path / name)
        rows[name] = folder.read_epochs()[0][-1]
        observed = (folder.read_environment() or {})["observed"]
        assert observed.get("find_unused_parameters") is searches
        frozen = observed["parameter_bytes"] - observed["trained_bytes"]
        assert (frozen > 0) == (name == "apart")
    for field in ("train_loss", "eval_loss"):
        assert rows["single"][field] == pytest.approx(rows["ddp"][field], rel=1e-5)
        assert rows["single"][field] == pytest.approx(rows["apart"][field], rel=1e-5)
    assert rows["single"]["grad_norm"] == pytest.approx(rows["ddp"]["grad_norm"], rel=1e-5)


OPT = {
    "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "word_embed_proj_dim": 16, "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0,
    "layerdrop": 0.5,
}  # fmt: skip


def test_layers_that_training_skips_may_be_unused() -> None:
    model = AutoModelForSequenceClassification.from_config(transformers.OPTConfig(**OPT))
    inputs = {**batch(6), "labels": torch.zeros(1, dtype=torch.long)}
    assert probes.unused_parameters(model, inputs) == []
    names = probes.unused_parameters(model, inputs, skipping=True)
    layers = [n for n, _ in model.named_parameters() if ".layers." in n]
    assert layers and names == layers and model.training
    arguments = DistributedDataParallelKwargs()
    assert weights.settle_unused(arguments, model, inputs, Settings(script="bert", strategy="ddp"))
    assert arguments.find_unused_parameters
    for strategy in ("fsdp", "diloco"):
        why = rf"--strategy {strategy}: OPTFor.* skips layers at random.* add --dropout 0"
        with pytest.raises(UserError, match=why):
            sharding.refuse_skipped_layers(
                model, inputs, Settings(script="bert", strategy=strategy)
            )
    with pytest.raises(UserError, match="--strategy diloco: OPTFor"):
        weights.settle_unused(arguments, model, inputs, Settings(script="bert", strategy="diloco"))
    model.config.layerdrop = model.model.decoder.layerdrop = 0.0
    sharding.refuse_skipped_layers(model, inputs, Settings(script="bert", strategy="fsdp"))
    assert not weights.settle_unused(
        arguments, model, inputs, Settings(script="bert", strategy="ddp")
    )
    assert not arguments.find_unused_parameters


@pytest.mark.process
def test_ddp_trains_a_model_that_skips_layers(tmp_path: Path) -> None:
    transformers.OPTConfig(**{**OPT, "vocab_size": 4000}).save_pretrained(tmp_path / "model")
    letters = ["a text of words, by letters: quick foxes jump over lazy dogs; vexing"] * 9
    tokenizer = embedded.train_tokenizer(letters, tmp_path / "model", 60)
    assert len(tokenizer) <= 4000
    argv = ["--model", str(tmp_path / "model"), "--from_scratch", "--dataset", "embedded:english"]
    argv += ["--train_size", "64", "--test_size", "16", "--b", "4", "--epochs", "1"]
    argv += ["--save", "none", "--telemetry_hz", "0", "--max_length", "16"]
    done = script("bert", *argv, "--o", str(tmp_path / "runs"), count=2)
    assert done.code == 0, done.err
    observed = (only_run(tmp_path / "runs").read_environment() or {})["observed"]
    assert observed["find_unused_parameters"] is True


class Computing(Net):
    """Writes down the number format in which it computes."""

    formats: ClassVar[list[str]] = []

    def forward(self, x: Any, labels: Any, index: Any) -> Any:
        logits = self.head(self.first(x))
        if not x.is_meta:  # of shapes alone nothing is computed
            self.formats.append(str(logits.dtype))
        return {"loss": torch.nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def formats(folder: str, strategy: str) -> list[str]:
    data = Points(16)
    flags = ["--strategy", strategy, "--precision", "bf16"]
    trainer, run = ours(folder, Computing(), data, data, *flags)
    run.train(trainer)
    return Computing.formats


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_is_tried_in_the_format_of_the_run(strategy: str, tmp_path: Path) -> None:
    # A kernel for packed texts takes no other one.
    for seen in ranks(2, formats, str(tmp_path), strategy, env=CPU):
        assert len(seen) > 4 and set(seen) == {"torch.bfloat16"}


def test_dropout_0_leaves_nothing_to_chance() -> None:
    for name in ("flaubert", "swin", "cvt", "gpt2", "clip", "mpt"):
        config = architectures.small(name)
        models._set_dropout(config, 0.0)
        torch.manual_seed(0)
        auto = AutoModelForImageClassification
        if name in architectures.TASK_OF["bert"]:
            auto, inputs = AutoModelForSequenceClassification, batch(6)
        else:
            inputs = {"pixel_values": torch.randn(1, 3, 32, 32)}
        config.architectures = []
        model = auto.from_config(config).train()
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.eval()
        first, second = (model(**inputs).logits for _ in range(2))
        assert torch.equal(first, second), name
    before = architectures.small("swin")
    models._set_dropout(before, 0.3)
    assert (before.drop_path_rate, before.hidden_dropout_prob) == (0.1, 0.3)
    with pytest.raises(UserError, match=r"--dropout 0.3: attn_pdrop of .* can only be 0"):
        models._set_dropout(architectures.small("mpt"), 0.3)


def test_layers_in_lists_of_lists_are_split_one_by_one() -> None:
    """Funnel, PoolFormer and PVT have such; a list has no forward pass and cannot be split."""
    model = AutoModelForImageClassification.from_config(architectures.small("pvt"))
    blocks = sharding.blocks_of(model)
    assert len(blocks) > 4 and not any(isinstance(b, torch.nn.ModuleList) for b in blocks)


def test_layers_that_share_weights_are_split_with_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = AutoModelForSequenceClassification.from_config(architectures.small("zamba"))
    split: list[Any] = []
    monkeypatch.setattr(sharding, "fully_shard", lambda module, **_: split.append(module))
    monkeypatch.setattr(sharding, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: 2)
    sharding.shard(model, Settings(script="bert", strategy="fsdp"), torch.device("cpu"))
    layers = model.model.layers
    assert split == [layers[0], layers[2], model]  # the others have one transformer together


@pytest.mark.parametrize("sign", verify.UNFIT)
def test_what_a_strategy_cannot_train_is_one_line(sign: str) -> None:
    settings = Settings(script="bert", strategy="fsdp")
    with (
        pytest.raises(UserError, match=r"^--strategy fsdp: Linear .*: use --strategy .*single$"),
        verify.explained(torch.nn.Linear(1, 1), settings),
    ):
        raise RuntimeError(f"aten: {sign}, and more")
    with (
        pytest.raises(RuntimeError, match="other"),
        verify.explained(torch.nn.Linear(1, 1), settings),
    ):
        raise RuntimeError("other")
