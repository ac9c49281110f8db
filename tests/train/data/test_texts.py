"""Texts are as long as their model can read them, and padded where it knows no padding."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from harness.core.settings import Settings, UserError
from harness.train.data import models
from harness.train.data.texts import load_texts
from tests.support.broken_runs import only_run
from tests.support.ranks import script
from tests.support.samples import settings

WORDS = [f"w{i}" for i in range(40)]
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
OF_GPT2 = {
    "vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64,
    "bos_token_id": 3, "eos_token_id": 3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def saved(folder: Path, config: Any, **special: str) -> Settings:
    """A model's folder, a tokenizer of one token a word, and texts of 1 to 30 words."""
    tokens = ["[A]", "[PAD]", "[UNK]", "[END]", *WORDS]
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(tokens)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", **special)
    tokenizer.save_pretrained(folder / "model")
    config.save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, 1 + i % 30)) for i in range(60)]
    data = Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(60)]})
    DatasetDict({"train": data, "test": data.select(range(21))}).save_to_disk(folder / "data")
    return settings(folder / "data", model=str(folder / "model"), from_scratch=True)


@pytest.mark.parametrize(("kind", "first"), [("Roberta", 2), ("MPNet", 2), ("Bert", 0)])
def test_texts_end_where_positions_do(tmp_path: Path, kind: str, first: int) -> None:
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, max_position_embeddings=22, pad_token_id=1
    )
    options = saved(tmp_path, config, pad_token="[PAD]")
    data = load_texts(options, 1)
    assert data.facts["max_length"] == 22 - first
    # Training and test texts have 1 to 30 and once more 1 to 21 words.
    cut = sum(max(0, longest - (22 - first)) for longest in (30, 30, 21))
    assert data.facts["truncated_texts"] == cut
    model = models.build(options, data.labels).eval()
    longest = int(np.diff(data.collate.offsets).argmax())  # type: ignore[attr-defined]
    assert model(**data.to_device(data.collate([longest]))).logits.isfinite().all()


def test_pairs_that_are_cut_off_are_counted(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES, max_position_embeddings=22)
    options = saved(tmp_path, config, pad_token="[PAD]")
    data = load_texts(replace(options, text_column="text,text"), 1)
    cut = sum(max(0, longest - 11) for longest in (30, 30, 21))
    assert data.facts["truncated_texts"] == cut


@pytest.mark.parametrize("typed", [True, False])
def test_types_are_for_models_whose_tokenizer_has_them(typed: bool, tmp_path: Path) -> None:
    """GPT-2 would add the embeddings of its first two words to each token of a pair."""
    options = saved(tmp_path, transformers.GPT2Config(**OF_GPT2), eos_token="[END]")
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if typed else [])]
    tokenizer = AutoTokenizer.from_pretrained(options.model, model_input_names=names)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A", pair="$A $B:1", special_tokens=[]
    )
    tokenizer.save_pretrained(options.model)
    batch = load_texts(replace(options, text_column="text,text"), 1).collate([0, 7])
    assert ("token_type_ids" in batch) is typed


@pytest.mark.process
def test_a_model_without_padding_is_trained_and_saved_with_the_end_token(tmp_path: Path) -> None:
    config = transformers.GPT2Config(**OF_GPT2)
    options = saved(tmp_path, config, eos_token="[END]")
    argv = ["--model", str(options.model), "--dataset", str(options.dataset), "--from_scratch"]
    argv += ["--train_size", "all", "--test_size", "all", "--epochs", "1", "--b", "12"]
    done = script("bert", *argv, "--eval_batch", "8", "--o", str(tmp_path / "runs"))
    assert done.code == 0, done.err
    folder = only_run(tmp_path / "runs")
    (row,) = folder.read_epochs()[0]
    environment = folder.read_environment() or {}
    assert environment["observed"]["padding"] == "parts" and row["tflops_per_s"] > 0
    (checkpoint,) = folder.path.glob("checkpoint-*")
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert (tokenizer.pad_token, model.config.pad_token_id) == ("[END]", 3)
    test = DatasetDict.load_from_disk(options.dataset)["test"]
    with torch.no_grad():
        losses = [
            model(**tokenizer(text, return_tensors="pt"), labels=torch.tensor([label])).loss.item()
            for text, label in zip(test["text"], test["label"], strict=True)
        ]
    assert row["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_no_token_to_pad_with_is_refused(tmp_path: Path) -> None:
    options = saved(tmp_path, transformers.GPT2Config(**OF_GPT2))
    with pytest.raises(UserError, match="no padding token, and no end token to take its place"):
        load_texts(options, 1)


@pytest.mark.parametrize(("known", "types", "told"), [
    (40, 2, "tokens up to 43, and the model knows those below 40"),
    (44, 1, "token types up to 1, and the model knows those below 1"),
    (44, 2, None),
])  # fmt: skip
def test_a_model_without_a_row_for_a_token_is_refused(
    tmp_path: Path, known: int, types: int, told: str | None
) -> None:
    config = transformers.BertConfig(**{**SIZES, "vocab_size": known, "type_vocab_size": types})
    options = saved(tmp_path, config, pad_token="[PAD]")
    names = ["input_ids", "token_type_ids"]
    tokenizer = AutoTokenizer.from_pretrained(options.model, model_input_names=names)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A", pair="$A $B:1", special_tokens=[]
    )
    tokenizer.save_pretrained(options.model)
    data: Any = load_texts(replace(options, text_column="text,text"), 1)
    model = models.build(options, data.labels)
    if told is None:
        data.collate.check_model("mine", model)
        data.collate.check_model("mine", torch.nn.Linear(2, 2))  # which tells nothing
        return
    with pytest.raises(UserError, match=f"^--model mine: its tokenizer gives {told}: save"):
        data.collate.check_model("mine", model)


@pytest.mark.parametrize(("adds", "more", "told"), [
    (True, "", None),
    (True, " [END] w1", "1 texts have [END] elsewhere, too: remove it from them"),
    (False, "", "end token, number 3, and its tokenizer adds none: save a tokenizer that does"),
])  # fmt: skip
def test_texts_without_one_end_are_refused(
    tmp_path: Path, adds: bool, more: str, told: str | None
) -> None:
    """BART and T5 would end the run at the first batch with one."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    ends = {"eos_token_id": 3, "pad_token_id": 1, "bos_token_id": 0, "decoder_start_token_id": 3}
    config = transformers.BartConfig(
        vocab_size=50, forced_eos_token_id=None, **sizes, **heads, **ends
    )
    options = saved(tmp_path, config, pad_token="[PAD]", eos_token="[END]")
    if adds:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A [END]", pair="$A [END] $B [END]", special_tokens=[("[END]", 3)]
        )
        tokenizer.save_pretrained(options.model)
    texts = [f"w{i} w2{more if i == 7 else ''}" for i in range(40)]
    rows = Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(40)]})
    folder = tmp_path / "other"
    DatasetDict({"train": rows, "test": rows.select(range(20, 40))}).save_to_disk(folder)
    data: Any = load_texts(replace(options, dataset=str(folder)), 1)
    model = models.build(options, data.labels)
    if told is None:
        data.collate.check_model("mine", model)
        model(**{k: v for k, v in data.collate(range(9)).items() if k != "shape"})
        return
    with pytest.raises(UserError, match=re.escape(told)):
        data.collate.check_model("mine", model)


def test_a_model_without_a_row_for_what_pads_is_refused(tmp_path: Path) -> None:
    """As a tokenizer that was given one more token, beside a model that was not."""
    options = saved(tmp_path, transformers.GPT2Config(**{**OF_GPT2, "vocab_size": 44}),
                    pad_token="[MORE]")  # fmt: skip
    data: Any = load_texts(options, 1)
    model = models.build(options, data.labels)
    with pytest.raises(UserError, match="gives tokens up to 44, and the model knows those"):
        data.collate.check_model("mine", model)


def test_a_text_without_a_token_has_one_to_read(tmp_path: Path) -> None:
    options = saved(tmp_path, transformers.GPT2Config(**OF_GPT2), eos_token="[END]")
    splits = DatasetDict.load_from_disk(options.dataset)
    empty = Dataset.from_dict({"text": ["", "w1 w2"], "label": [0, 1]})
    DatasetDict({"train": splits["train"], "test": empty}).save_to_disk(tmp_path / "empty")
    data: Any = load_texts(replace(options, dataset=str(tmp_path / "empty"), test_size="all"), 1)
    batch = data.to_device(data.collate([len(splits["train"])]))
    assert batch["input_ids"].tolist() == [[3]] and batch["attention_mask"].tolist() == [[1]]
    model = models.build(options, data.labels).eval()
    assert model(**batch).logits.isfinite().all()


@pytest.mark.process
def test_a_model_folder_that_contradicts_itself_is_one_line(tmp_path: Path) -> None:
    options = saved(
        tmp_path, transformers.BertConfig(**{**SIZES, "vocab_size": 40}), pad_token="[PAD]"
    )
    argv = ["--model", str(options.model), "--dataset", str(options.dataset), "--from_scratch"]
    done = script(
        "bert",
        *argv,
        "--b",
        "12",
        "--train_size",
        "all",
        "--test_size",
        "all",
        "--o",
        str(tmp_path),
    )
    assert done.code == 2 and "the model knows those below 40" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(("known", "refused"), [(0, True), (15, True), (25, False)])
def test_a_tokenizer_that_knows_few_of_the_words_is_refused(
    tmp_path: Path, known: int, refused: bool
) -> None:
    """As transformers makes one for a folder that has none."""
    options = saved(tmp_path, transformers.BertConfig(**SIZES), pad_token="[PAD]")
    tokens = ["[A]", "[PAD]", "[UNK]", "[END]", *WORDS[:known]]
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(tokens)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    few = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
    few.save_pretrained(options.model)
    if not refused:
        assert load_texts(options, 1).labels == ["0", "1"]
        return
    with pytest.raises(UserError, match=r"its tokenizer does not know \d+% of the tokens of these"):
        load_texts(options, 1)


def test_a_folder_without_a_tokenizer_is_said_to_have_none(tmp_path: Path) -> None:
    options = saved(tmp_path, transformers.BertConfig(**SIZES), pad_token="[PAD]")
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    with pytest.raises(UserError, match="there is no tokenizer in its folder: save the tokenizer"):
        load_texts(options, 1)


def test_checkpointing_that_a_model_lacks_is_refused(tmp_path: Path) -> None:
    options = saved(tmp_path, transformers.AlbertConfig(**SIZES, embedding_size=8))
    options = replace(options, trainer=(("gradient_checkpointing", True),))
    with pytest.raises(UserError, match="--gradient_checkpointing: albert does not support it"):
        models.build(options, ["a", "b"])


@pytest.mark.parametrize("metric", ["top5_accuracy", "eval_top5_accuracy"])
def test_a_metric_that_five_classes_lack_is_refused(tmp_path: Path, metric: str) -> None:
    config = transformers.BertConfig(**SIZES)
    options = replace(saved(tmp_path, config, pad_token="[PAD]"), best_metric=metric)
    with pytest.raises(UserError, match="top5_accuracy: with 2 classes all are among the first 5"):
        load_texts(options, 1)
