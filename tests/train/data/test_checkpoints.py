"""Checkpoints of others: what is loaded is what they hold, in float32, or they are refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from harness.core.command_line import parse
from harness.core.settings import Settings, UserError
from harness.train.data import models
from harness.train.data.texts import _fingerprint
from tests.support import architectures
from tests.support.broken_runs import only_run
from tests.support.ranks import script

LABELS = ["bad", "fair", "good"]
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 32, "num_labels": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint with a head for other classes."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def build(folder: Path, **more: Any) -> Any:
    return models.build(Settings(script="bert", model=str(folder), **more), LABELS)


def test_the_files_of_timm_do_not_say_how_many_classes_there_are(tmp_path: Path) -> None:
    """Its 1,000 were kept, whatever the data had."""
    content = {"architecture": "resnet18", "num_classes": 1000, "pretrained_cfg": {"tag": None}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = models.configuration(Settings(script="vit", model=str(tmp_path)), LABELS)
    assert config.num_labels == 3 and config.id2label == dict(enumerate(LABELS))
    assert config.label2id == {name: number for number, name in enumerate(LABELS)}


def test_a_head_inside_the_body_is_drawn_and_no_other_weight(tmp_path: Path) -> None:
    model: Any = torch.nn.Module()
    model.base_model_prefix = "timm_model"
    model.timm_model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    loaded: Any = {"missing_keys": [], "mismatched_keys": [("timm_model.1.weight", (9, 4), (3, 4))]}
    settings = Settings(script="vit", model="x")
    assert models._drawn(settings, model, loaded) == ["timm_model.1.weight"]
    loaded["missing_keys"] = ["timm_model.0.bias"]
    with pytest.raises(UserError, match=r"lack 1 tensors .* such as timm_model\.0\.bias"):
        models._drawn(settings, model, loaded)


def edit(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_the_body_is_that_of_the_checkpoint_and_the_head_is_new(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    model = build(folder)
    body = {name: w for name, w in model.state_dict().items() if name.startswith("bert.")}
    assert len(body) > 30 and all(torch.equal(w, stored[name]) for name, w in body.items())
    assert model.classifier.weight.shape == (3, 16)


@pytest.mark.parametrize(("order", "told"), [
    (["x", "y"], "the head is new, for 3 classes (bad, fair, good): the checkpoint has one for 2 "
                 "(x, y)\n"),
    (["x", "y", "z"], "the head of the checkpoint is kept: its classes x, y, z now stand for bad, "
                      "fair, good\n"),
    ([*"uvwxyz"], "the head is new, for 3 classes (bad, fair, good): the checkpoint has one for 6 "
                  "(u, v, w, x, y, ...)\n"),
    ([*reversed(LABELS)], ""),
])  # fmt: skip
def test_what_becomes_of_a_head_for_other_classes_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], order: list[str], told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    names = {"id2label": dict(enumerate(order)), "num_labels": len(order)}
    config = transformers.BertConfig(**{**SIZES, **names})
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    capfd.readouterr()
    build(tmp_path)
    assert capfd.readouterr().out == told
    edit(tmp_path, lambda w: {k: v for k, v in w.items() if k.startswith("bert.")})
    monkeypatch.setenv("RANK", "0")
    build(tmp_path)  # a body alone, as most pretrained checkpoints are
    assert capfd.readouterr().out == ""


def test_without_its_pooler_a_checkpoint_is_whole(folder: Path) -> None:
    edit(folder, lambda w: {k: v for k, v in w.items() if "pooler" not in k and "bert" in k})
    assert build(folder).classifier.weight.shape == (3, 16)


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        (lambda w: {k: v for k, v in w.items() if ".layer.1." not in k}, "bert.encoder.layer.1."),
        (
            lambda w: {k: v[:50].clone() if "word_emb" in k else v for k, v in w.items()},
            "bert.embeddings.word_embeddings.weight",
        ),
    ],
    ids=["missing", "misshapen"],
)
def test_a_body_with_gaps_is_refused(folder: Path, change: Any, lacking: str) -> None:
    edit(folder, change)
    with pytest.raises(UserError, match=rf"lack \d+ tensors of the model, such as {lacking}"):
        build(folder)
    assert build(folder, from_scratch=True).num_labels == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("from_scratch", [False, True])
def test_weights_are_float32_whatever_they_were_saved_in(
    folder: Path, dtype: torch.dtype, from_scratch: bool
) -> None:
    transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=dtype
    ).save_pretrained(folder)
    assert transformers.AutoConfig.from_pretrained(folder).dtype == dtype
    kinds = {weight.dtype for weight in build(folder, from_scratch=from_scratch).parameters()}
    assert kinds == {torch.float32}


def test_a_tokenizer_is_more_than_its_vocabulary() -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "A", "b"]
    vocabulary = {name: number for number, name in enumerate(names)}

    def of(**rules: Any) -> Any:
        return transformers.BertTokenizer(dict(vocabulary), **rules)

    lower, cased = of(do_lower_case=True), of(do_lower_case=False)
    assert lower.get_vocab() == cased.get_vocab() and lower("A").input_ids != cased("A").input_ids
    others = [cased, of(strip_accents=True), of(truncation_side="left")]
    assert len({_fingerprint(tokenizer) for tokenizer in (lower, *others)}) == 4
    # Of one tokenizer it stays the same, whatever it was called with before.
    before = _fingerprint(lower)
    lower(["a b", "b"], truncation=True, max_length=3, padding=True)
    assert _fingerprint(lower) == before == _fingerprint(of(do_lower_case=True))


def test_the_code_that_a_tokenizer_brings_is_part_of_it(tmp_path: Path) -> None:
    """With --trust_remote_code the rules may stand there and nowhere else."""
    file = tmp_path / "own.py"
    found = []
    for rule in ("lower", "upper"):
        file.write_text(f"class Own:\n    rule = '{rule}'\n")
        spec = importlib.util.spec_from_file_location("transformers_modules.here.own", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found.append(models.code_of(module.Own()))
        del sys.modules[spec.name]
    assert None not in found and found[0] != found[1]
    assert models.code_of(transformers.BertTokenizer({"[UNK]": 0})) is None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("imagegpt", "it does not take pixel_values"),
        ("pp_lcnet", "it returns no loss"),
        ("siglip2", "it takes patches of its own processor"),
    ],
)
def test_a_classifier_that_cannot_be_fed_is_refused(tmp_path: Path, kind: str, why: str) -> None:
    architectures.small(kind).save_pretrained(tmp_path)
    settings = Settings(script="vit", model=str(tmp_path), from_scratch=True)
    with pytest.raises(UserError, match=rf"\({kind}\) cannot be trained: {why}"):
        models.build(settings, LABELS)


def test_a_configuration_that_names_no_class_of_a_model_is_built(tmp_path: Path) -> None:
    """transformers walks over the names where a kind of model has several classifiers."""
    transformers.DeiTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ).save_pretrained(tmp_path)
    settings = Settings(script="vit", model=str(tmp_path), from_scratch=True)
    assert models.build(settings, LABELS).num_labels == 3


ORDERS = [("bad", "fair", "good"), ("good", "bad", "fair"), ("a", "b", "c")]


@pytest.mark.parametrize("order", ORDERS)
def test_a_head_for_the_same_classes_answers_alike_in_whatever_order(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    config = transformers.BertConfig(**{**SIZES, "num_labels": 3}, id2label=dict(enumerate(order)))
    saved = transformers.BertForSequenceClassification(config).eval()
    saved.save_pretrained(tmp_path)
    text = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        was, now = saved(text).logits[0], build(tmp_path).eval()(text).logits[0]
    of = dict(zip(order, was.tolist(), strict=True))
    expected = [of[name] for name in LABELS] if set(order) == set(LABELS) else was.tolist()
    assert now.tolist() == pytest.approx(expected, rel=1e-6)
    assert build(tmp_path).config.id2label == dict(enumerate(LABELS))


def test_where_it_is_not_clear_which_layer_is_the_head_another_order_is_refused() -> None:
    two = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"another order \(b, a\) than the data, and 2 layers of"):
        models._order_head(two, ["b", "a"], ["a", "b"])


@pytest.mark.parametrize("was", ["regression", "multi_label_classification"])
def test_what_a_model_was_trained_for_before_does_not_matter(folder: Path, was: str) -> None:
    config = transformers.BertConfig(**SIZES, problem_type=was)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    loss = build(folder)(torch.tensor([[5, 6, 7]]), labels=torch.tensor([2])).loss
    assert 0.5 < loss.item() < 2  # a cross-entropy of three classes


def test_damaged_weights_are_one_line(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"bert: its weights are damaged \(.*\): copy them once"):
        build(folder)


@pytest.mark.parametrize("trust", [True, False])
def test_a_folder_without_weights_is_one_line(folder: Path, trust: bool) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="bert is a folder without weights: save them there, or"):
        build(folder, trust_remote_code=trust)
    assert build(folder, from_scratch=True).num_labels == 3


@pytest.mark.process
def test_a_resnet_with_a_small_stem_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "32", "--test_size", "16", "--epochs", "1", "--b", "16"]
    named = ["--model", "resnet-8-cifar", "--image_size", "16"]
    done = script("vit", *argv, *named, "--o", str(tmp_path / "first"))
    assert done.code == 0, done.err
    printed = done.loaded()["model"].eval()
    saved = str(printed.config._name_or_path)
    assert printed.resnet.embedder.embedder.convolution.weight.shape == (16, 3, 3, 3)
    labels = [str(printed.config.id2label[n]) for n in range(10)]
    again = models.build(parse("vit", ["--model", saved], environ={}), labels).eval()
    trained = load_file(Path(saved) / "model.safetensors")
    assert trained.keys() == again.state_dict().keys()
    assert all(again.state_dict()[name].equal(value) for name, value in trained.items())
    pixels = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again(pixels).logits, printed(pixels).logits)
    done = script("vit", *argv, "--model", saved, "--o", str(tmp_path / "second"))
    assert done.code == 0, done.err
    # The class of this project is not a model of the user.
    for folder in ("first", "second"):
        environment = only_run(tmp_path / folder).read_environment() or {}
        assert "own_model" not in environment["observed"]
    # transformers has another first layer, and does not load these weights as if they were its own.
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.AutoModelForImageClassification.from_pretrained(saved)


@pytest.mark.parametrize("more", [{"model_type": "other"}, {"auto_map": {"AutoConfig": "a.B"}}])
def test_another_model_with_this_name_in_its_configuration_is_its_own(more: dict[str, Any]) -> None:
    config = SimpleNamespace(**{"model_type": "resnet", "cifar_stem": True})
    assert models.has_small_stem(config)
    assert not models.has_small_stem(SimpleNamespace(**{**vars(config), **more}))


def test_random_weights_for_a_saved_small_stem_have_it_too(tmp_path: Path) -> None:
    named = models.build(parse("vit", ["--model", "resnet-8-cifar"], environ={}), LABELS)
    named.save_pretrained(tmp_path)
    argv = ["--model", str(tmp_path), "--from_scratch"]
    other = models.build(parse("vit", argv, environ={}), LABELS)
    shapes = [{name: value.shape for name, value in m.state_dict().items()} for m in (named, other)]
    assert shapes[0] == shapes[1]
    first = "resnet.embedder.embedder.convolution.weight"
    assert not named.state_dict()[first].equal(other.state_dict()[first])
