"""--lora: what is trained, exchanged, computed and saved are adapters and head, exactly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from harness.core.command_line import parse
from harness.core.identity import run_id
from harness.core.provenance import PEFT
from harness.core.settings import Settings, UserError
from harness.core.topology import World
from harness.train.data import lora, models
from harness.train.data.texts import for_model, load_texts
from harness.train.measure.flops import work_of
from harness.train.strategy import sharding, verify
from tests.support.broken_runs import (
    SHORT,
    assert_same_training,
    broken_off,
    only_run,
    weights_of,
)
from tests.support.ranks import script

pytest.importorskip("peft")

RANK, WIDTH, INNER, LAYERS = 4, 16, 48, 2
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "intermediate_size": INNER, "num_labels": 3,
}  # fmt: skip
TEXT = transformers.BertConfig(vocab_size=60, max_position_embeddings=64, **SIZES)
CONFIGS: dict[str, tuple[Any, set[str]]] = {  # with the last names of the layers that are adapted
    "peft's choice": (TEXT, {"query", "value"}),
    "its choice, transposed weights": (
        transformers.GPT2Config(
            vocab_size=60, n_embd=WIDTH, n_layer=2, n_head=2, num_labels=3, pad_token_id=0
        ),
        {"c_attn"},
    ),
    "all linear layers": (
        transformers.ViTConfig(image_size=8, patch_size=4, **SIZES),
        {"q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"},
    ),
}


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(5, 3, 8, 8, generator=generator)}
    return {"input_ids": torch.randint(1, 60, (5, 7), generator=generator)}


def plain(config: Any) -> Any:
    torch.manual_seed(0)
    auto = transformers.AutoModelForSequenceClassification
    if config.model_type == "vit":
        auto = transformers.AutoModelForImageClassification
    return auto.from_config(config).eval()


def moved(model: Any) -> Any:
    """As after some training: everything that is trained has changed."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) / 10)
    return model


@pytest.mark.parametrize("case", CONFIGS)
def test_adapters_and_head_are_trained_and_the_saved_model_computes_the_same(
    case: str, tmp_path: Path
) -> None:
    config, adapted = CONFIGS[case]
    model = plain(config)
    names = {*model.state_dict()}
    before = model(**inputs_of(model)).logits
    lora.add(model, RANK)
    torch.testing.assert_close(model(**inputs_of(model)).logits, before)  # adapters begin at 0
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained if ".lora_" in name}
    assert layers == adapted
    heads = {name.split(".")[0] for name in trained if ".lora_" not in name}
    assert heads == ({"score"} if config.model_type == "gpt2" else {"classifier"})

    after = moved(model)(**inputs_of(model)).logits
    assert (after - before).abs().max() > 0.01
    sharding.save_weights(model, tmp_path)
    assert {*load_file(tmp_path / sharding.WEIGHTS)} == names
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**inputs_of(model)).logits, after, rtol=1e-5, atol=1e-6)

    settings = Settings(script="bert", lora=RANK)
    again = plain(config)
    lora.add(again, RANK)
    sharding.load_weights(again, tmp_path / sharding.WEIGHTS, settings)
    for name, weight in model.state_dict().items():  # to the bit: a run can go on from here
        assert torch.equal(again.state_dict()[name], weight), name

    # Merged on another device, the same weights have other last bits.
    stored = load_file(tmp_path / sharding.WEIGHTS)
    nearly = {n: w * (1 + 1e-6) if w.is_floating_point() else w for n, w in stored.items()}
    save_file(nearly, tmp_path / sharding.WEIGHTS, metadata={"format": "pt"})
    sharding.load_weights(again, tmp_path / sharding.WEIGHTS, settings)

    other = plain(config)
    lora.add(other, RANK)
    next(p for p in other.parameters() if p.ndim == 2).data[0] += 1.0
    with pytest.raises(RuntimeError, match="its weights are not those that the model was built"):
        sharding.load_weights(other, tmp_path / sharding.WEIGHTS, settings)
    trained_file = tmp_path / lora.TRAINED
    fewer = load_file(trained_file)
    fewer.popitem()
    save_file(fewer, trained_file)
    with pytest.raises(RuntimeError, match="has other trained weights than the model"):
        sharding.load_weights(again, tmp_path / sharding.WEIGHTS, settings)


def test_frozen_weights_of_two_names_are_not_saved() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(3)))
    model[1].weight = model[0].weight
    model[0].requires_grad_(False)
    assert [*lora._trained(model)] == ["2.weight"]


def test_what_a_checkpoint_lacks_is_trained_too(tmp_path: Path) -> None:
    """Otherwise a pooler would stay as it was drawn."""
    plain(TEXT).save_pretrained(tmp_path)
    settings = Settings(script="bert", model=str(tmp_path), lora=RANK)

    def trained() -> set[str]:
        model = models.build(settings, ["bad", "fair", "good"])
        named = model.named_parameters()
        return {name for name, p in named if p.requires_grad and "lora" not in name}

    assert trained() == {"classifier.weight", "classifier.bias"}
    weights = load_file(tmp_path / "model.safetensors")
    whole = {name: w for name, w in weights.items() if "pooler" not in name}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert trained() == {"classifier.weight", "classifier.bias", *pooler}


def test_flops_are_those_of_the_gradients_that_are_computed() -> None:
    model = plain(TEXT)
    lora.add(model, RANK)
    one = {"input_ids": torch.ones(1, 9, dtype=int), "labels": torch.zeros(1, dtype=int)}
    work = work_of(model, lambda: one)
    assert work.how == "counted"
    dense = 4 * WIDTH * WIDTH + 2 * WIDTH * INNER
    forward = LAYERS * dense
    # Frozen weights need the gradient of their input alone, and in the first layer query, key and
    # value not even that: embeddings are frozen. Adapters stand at query and value.
    backward = LAYERS * dense - 3 * WIDTH * WIDTH
    down_or_up = WIDTH * RANK
    adapters = LAYERS * 2 * 2 * down_or_up * 3 - 2 * down_or_up
    assert work.per_token == pytest.approx(2 * (forward + backward + adapters))
    # Attention: two products forward, and the gradients of both sides of each, but for the keys of
    # the first layer, on which nothing depends that is trained.
    assert work.per_pair == pytest.approx(2 * (LAYERS * 2 * WIDTH * 3 - WIDTH))
    # Of the pooler the weight is frozen, of the head it is trained.
    assert work.fixed == pytest.approx(2 * (2 * WIDTH * WIDTH + 3 * 3 * WIDTH), rel=1e-6)


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "hivemind"])
def test_lora_is_refused_with_some_strategies(strategy: str) -> None:
    with pytest.raises(UserError, match=rf"--lora 4 does not go with --strategy {strategy}, wh"):
        parse("bert", ["--tiny", "--strategy", strategy, "--lora", "4"])


def test_bad_cases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    model = transformers.AutoModelForImageClassification.from_config(resnet)
    with pytest.raises(UserError, match="ResNetForImageClassification has no linear layers before"):
        lora.add(model, 4)
    with pytest.raises(UserError, match=r"the model of mine.py has no adapters: make it with"):
        verify.observe(model, Settings(script="mine", strategy="single", lora=4), World())
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=f"--lora 4 needs peft, .*: {PEFT.install}"):
        lora.add(model, 4)


def test_it_is_in_the_name_of_a_run_and_without_it_names_stay() -> None:
    names = [run_id(parse("vit", ["--tiny", *more])) for more in ([], ["--lora", "4"])]
    assert "_lora4_" in names[1]
    assert names[0] == "vit-nano_single_b32_lr0.0015_e12_s42_a46178a8"  # before there was the flag


COMMON = ["--tiny", "--train_size", "256", "--test_size", "65", "--epochs", "1", "--dropout", "0",
          "--lora", "4", "--optim", "sgd", "--lr", "0.5"]  # fmt: skip


@pytest.mark.process
def test_strategies_train_and_exchange_adapters_and_head_alone(tmp_path: Path) -> None:
    arms = {
        "single": (1, ["--b", "32"]),
        "ddp": (2, ["--b", "16"]),
        "local_sgd": (2, ["--b", "16", "--strategy", "local_sgd", "--sync_scope", "rank"]),
    }
    seen = {}
    for arm, (count, more) in arms.items():
        done = script("bert", *COMMON, *more, "--o", str(tmp_path / arm), count=count)
        assert done.code == 0, done.err
        folder = only_run(tmp_path / arm)
        ((row,), _), environment = folder.read_epochs(), folder.read_environment()
        assert environment is not None
        seen[arm] = (row, weights_of(folder), environment["observed"], folder)
    row, reference, _, folder = seen["single"]
    other_row, other, _, _ = seen["ddp"]
    for field in ("train_loss", "eval_loss", "accuracy", "grad_norm"):
        assert other_row[field] == pytest.approx(row[field], rel=1e-5), field
    for name, weight in reference.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-5, msg=name)

    (checkpoint,) = folder.path.glob("checkpoint-*")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    texts = load_texts(parse("bert", COMMON), 1)
    numbers = [texts.test[i] for i in range(len(texts.test))]
    with torch.no_grad():
        loss = model(**for_model(texts.collate(numbers))).loss
    assert float(loss) == pytest.approx(row["eval_loss"], rel=1e-5)

    trained = load_file(checkpoint / lora.TRAINED)
    size = sum(weight.nbytes for weight in trained.values())
    assert 0 < size < sum(weight.nbytes for weight in reference.values()) / 50
    assert {each[2]["trained_bytes"] for each in seen.values()} == {size}
    assert other_row["payload_bytes"] == 2 * size * row["updates"]  # of both ranks
    assert seen["local_sgd"][2]["exchanged_bytes"] == size


@pytest.mark.process
def test_a_broken_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    argv = [*SHORT, "--lora", "4", "--o"]
    broken_off(1, [*argv, str(tmp_path / "broken")], 10, "kill", "vit")
    for name in ("broken", "whole"):
        done = script("vit", *argv, str(tmp_path / name))
        assert done.code == 0, done.err
        assert ("resumes from update" in done.out) == (name == "broken")
    assert_same_training(only_run(tmp_path / "broken"), only_run(tmp_path / "whole"))
    # What the last one says: the plain model, adapters added to its weights.
    loaded = done.loaded()["classify"].model.state_dict()
    (folder,) = only_run(tmp_path / "whole").path.glob("checkpoint-*")
    saved = load_file(folder / sharding.WEIGHTS)
    assert loaded.keys() == saved.keys() and all(loaded[k].equal(w) for k, w in saved.items())
