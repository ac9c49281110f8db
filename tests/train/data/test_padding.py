"""Texts in a row, and in parts: the loss, gradient and quality of padded batches."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertModel,
    BertPreTrainedModel,
)

from harness.core.command_line import parse
from harness.train.data import models, text_layout
from harness.train.data.samples import SHAPE
from harness.train.data.texts import PARTS, Layout, TextBatches, for_model, parts_of
from tests.support.padded import (
    OWN_SIZES,
    SIZES,
    TEST,
    TRAIN,
    by_each_text,
    lengths,
    outcome,
    small,
)
from tests.support.ranks import ranks, script
from tests.support.samples import text_batches


class MeanOfAll(BertPreTrainedModel):
    """Somebody's own head on the layers of BERT: packed, it would read first tokens alone."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.head = BertModel(config), torch.nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return self.head(self.bert(input_ids, attention_mask, **kwargs).last_hidden_state.mean(1))


def test_a_class_of_ones_own_is_not_packed_for_its_configuration() -> None:
    own = MeanOfAll(AutoConfig.for_model("bert", **SIZES))
    plain = torch.nn.Module()
    plain.config = AutoConfig.for_model("modernbert", **OWN_SIZES["modernbert"])  # type: ignore[assignment]
    assert not text_layout.reads_packed(own) and not text_layout.reads_packed(plain)
    replaced = small("roberta")
    mean = torch.nn.AdaptiveAvgPool2d((1, None)), torch.nn.Flatten(1), torch.nn.Linear(16, 3)
    replaced.classifier = torch.nn.Sequential(*mean)
    assert not text_layout.reads_packed(replaced)
    assert not text_layout.reads_packed(BertModel(AutoConfig.for_model("bert", **SIZES)))
    assert text_layout.reads_packed(small("bert"))


# ---- a model on one batch ----


@pytest.mark.parametrize("name", [*text_layout.ENCODERS, "modernbert-cls"])
def test_a_row_of_texts_is_read_like_padded_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = name != "distilbert" and not name.startswith("modernbert")
    batches = text_batches(tmp_path, lengths(), pair=typed)
    model, samples = small(name), np.random.default_rng(0).permutation(TRAIN)[:16]
    scores, gradient = outcome(model, batches(samples))
    text_layout.accept_packed(model)
    first = models.first_position(model)
    monkeypatch.setattr(text_layout, "kernel_attention", by_each_text)
    again = outcome(model, batches(samples))  # it still takes padded texts
    assert torch.equal(again[0], scores) and torch.equal(again[1], gradient)
    kinds = [("runs", False, 1), ("runs", False, 32), ("padded", False, 1)]
    kinds += [("kernel", False, 1), ("kernel", True, 1)]
    # With windows: another kernel where there is a mask, and rotary positions in float32.
    near = 1e-5 if text_layout.has_windows(model) else 1e-6
    for attention, few, step in kinds:
        batches.layout = Layout("packed", attention, first, few, step)
        batch = batches(samples)
        assert batch["input_ids"].shape == (1, batch[SHAPE].tokens)
        assert batch[SHAPE].tokens % step == 0 or step == 1
        result = outcome(model, batch)
        torch.testing.assert_close(result[0], scores, rtol=near, atol=near / 10)
        assert (result[1] - gradient).norm() < near * gradient.norm(), (attention, few, step)


def test_in_half_precision_attention_is_trained_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its gradient is slow in bfloat16; scores alone are computed in bfloat16."""
    used: list[torch.dtype] = []

    def attend(query: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        result = torch.nn.functional.scaled_dot_product_attention(query, *given, **more)
        used.append(result.dtype)
        return result

    monkeypatch.setattr(text_layout, "scaled_dot_product_attention", attend)
    batches, model, samples = text_batches(tmp_path, lengths()), small("bert"), np.arange(16)
    scores, gradient = outcome(model, batches(samples))
    text_layout.accept_packed(model)
    batches.layout = Layout("packed", "runs", row_step=32)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = outcome(model, batches(samples))
        assert {*used} == {torch.float32}
        used.clear()
        with torch.no_grad():
            again = model(**for_model(batches(samples))).logits
    assert {*used} == {torch.bfloat16}
    torch.testing.assert_close(rounded[0].float(), scores, rtol=0.05, atol=0.01)
    torch.testing.assert_close(again, rounded[0], rtol=0.05, atol=0.01)
    assert 0 < (rounded[1] - gradient).norm() < 0.05 * gradient.norm()


def test_texts_in_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    batches = text_batches(tmp_path, lengths())
    model = small("bert").eval()
    text_layout.accept_packed(model)
    batches.layout = Layout("packed", "runs")
    samples = np.arange(6)
    before = model(**for_model(batches(samples))).logits
    begin, end = batches.offsets[5:7]
    batches.tokens = batches.tokens.copy()
    batches.tokens[begin:end] = 5 + (batches.tokens[begin:end] + 7) % 50
    after = model(**for_model(batches(samples))).logits
    assert torch.equal(before[:5], after[:5])
    assert not torch.allclose(before[5], after[5])


def test_attention_drops_what_it_is_told_to(tmp_path: Path) -> None:
    """Its masks are others than those of padded texts, with the same share and scale."""
    batches = text_batches(tmp_path, np.full(8, 40))
    places = torch.ones(8 * 40, 2, 4)
    for attention in ("runs", "padded"):
        batches.layout = Layout("packed", attention)
        layout_inputs = batches(np.arange(8))["texts"]
        torch.manual_seed(0)
        rows = [places[None].transpose(1, 2)] * 3
        (result,), _ = text_layout.packed_attention(
            torch.nn.Identity(), *rows, None, dropout=0.5, texts=layout_inputs
        )
        # Forty equal weights, each kept with one half and doubled.
        assert result.mean() == pytest.approx(1, abs=0.02)
        assert result[:, 0, 0].std() == pytest.approx(40**-0.5, rel=0.2)


def test_the_gradient_of_a_row_is_not_copied(tmp_path: Path) -> None:
    batches, model = text_batches(tmp_path, lengths()), small("bert")
    text_layout.accept_packed(model)
    for attention in ("runs", "padded"):
        batches.layout = Layout("packed", attention)
        batch = for_model(batches(np.arange(6)))
        with torch.profiler.profile() as profile:
            model(**batch).loss.backward()
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts["aten::select_backward"] == 1, attention  # the pooler's: one row a text


# ---- training ----


class Noted(TextBatches):
    """Writes down how many parts the batches have."""

    seen: list[int]

    def __call__(self, samples: np.ndarray) -> dict[str, Any]:
        batch = super().__call__(samples)
        self.seen.append(len(batch.get(PARTS, ())))
        return batch


def trained(folder: str, name: str, kinds: list[str], *argv: str) -> dict[str, dict[str, Any]]:
    """A few updates with each layout: what they lead to on this rank."""
    from harness.core.command_line import parse
    from harness.train.data.samples import Indices
    from harness.train.loop.trainer import ExactTrainer
    from harness.train.measure.metrics import BatchMetrics
    from harness.train.run.start import start

    result = {}
    for kind in kinds:
        flags = ["--tiny", "--epochs", "1", "--save", "none", "--optim", "sgd", "--lr", "0.05"]
        flags += ["--log_every", "1", "--eval_batch", "8", "--o", f"{folder}/{kind}", *argv]
        flags += ["--padding", "batch"] if kind == "batch" else []
        run = start(parse("bert", flags))
        assert run is not None
        batches = text_batches(Path(tempfile.mkdtemp()), lengths(), pair=name != "distilbert")
        batches.__class__, batches.seen = Noted, []
        trainer = ExactTrainer(
            context=run.context, model=small(name), args=run.context.args,
            train_dataset=Indices(TRAIN),
            eval_dataset=Indices(TEST, first=TRAIN), data_collator=batches, to_device=for_model,
            compute_metrics=BatchMetrics(3),
        )  # fmt: skip
        if kind == "parts" and batches.layout.kind != "parts":
            batches.layout = Layout("parts")
        if kind == "padded":
            batches.layout = Layout("packed", "padded", models.first_position(trainer.model))
        trainer.train()
        logs = trainer.state.log_history
        quality = next(log for log in logs if "eval_loss" in log)
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in trainer.model.parameters()]
        result[kind] = {
            "losses": [log["loss"] for log in logs if "loss" in log],
            "norms": [log["grad_norm"] for log in logs if "grad_norm" in log],
            "sums": next(log["epoch_train_loss"] for log in logs if "epoch_train_loss" in log),
            "quality": {k: quality[k] for k in ("eval_loss", "eval_accuracy", "eval_f1")},
            "own": trainer.observations.rank_metrics(trainer.args),
            "weights": torch.cat([w.detach().flatten() for w in whole]).numpy(),
            "observed": {k: v for k, v in trainer.observations.observed.items() if "padding" in k},
            "parts": batches.seen,
            "amount": trainer.utilisation.rank_fields(0),
            "flops": trainer.utilisation.facts()["flops"],
        }  # fmt: skip
    return result


SMOOTH = ["--label_smoothing_factor", "0.1"]
LOCAL = ["--b", "8", "--strategy", "local_sgd", "--sync_every", "2", "--sync_scope", "rank"]
CASES: list[tuple[str, int, list[str], list[str]]] = [
    ("bert", 1, ["packed", "padded", "parts"], ["--b", "16"]),
    ("mpnet", 1, ["parts"], ["--b", "16", *SMOOTH]),
    ("distilbert", 2, ["packed", "parts"],
     ["--b", "4", "--grad_acc", "2", "--max_grad_norm", "0.5", *SMOOTH]),
]  # fmt: skip
SLOW_CASES: list[tuple[str, int, list[str], list[str]]] = [
    ("distilbert", 1, ["packed", "parts"], ["--b", "8", "--grad_acc", "2"]),
    ("bert", 2, ["packed", "parts"], ["--b", "8"]),
    ("bert", 2, ["packed"], ["--b", "4", "--grad_acc", "2", "--strategy", "fsdp"]),
    ("bert", 2, ["packed", "parts"], LOCAL),
]


ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]


@pytest.mark.process
@pytest.mark.parametrize(("name", "count", "kinds", "argv"), ALL)
def test_an_update_does_not_depend_on_the_layout(
    name: str, count: int, kinds: list[str], argv: list[str], tmp_path: Path
) -> None:
    results = ranks(count, trained, str(tmp_path), name, ["batch", *kinds], *argv)
    for result in results:
        batch = result["batch"]
        assert len(batch["losses"]) == TRAIN // 16
        assert all(not seen for seen in batch["parts"])
        for kind in kinds:
            other = result[kind]
            assert other["losses"] == pytest.approx(batch["losses"], rel=2e-6)
            assert other["norms"] == pytest.approx(batch["norms"], rel=2e-6)
            assert other["sums"] == pytest.approx(batch["sums"], rel=1e-6)
            np.testing.assert_allclose(other["weights"], batch["weights"], rtol=1e-5, atol=1e-7)
            assert other["quality"] == pytest.approx(batch["quality"], rel=1e-6)
            assert other["own"] == batch["own"]
            if kind == "packed":
                assert other["observed"]["padding"] == "packed, runs"
            if kind == "parts":
                assert max(other["parts"]) > 1
    if count == 2 and "parts" in kinds:
        # One rank goes through its batch in more parts than the other.
        assert results[0]["parts"]["parts"] != results[1]["parts"]["parts"]


@pytest.mark.process
def test_a_model_that_reads_one_text_a_row_gets_parts(tmp_path: Path) -> None:
    (result,) = ranks(1, trained, str(tmp_path), "mpnet", ["auto"], "--b", "16")
    observed = result["auto"]["observed"]
    assert observed["padding"] == "parts"
    assert observed["padding_reason"] == "mpnet reads one text per row"
    amount = result["auto"]["amount"]
    assert result["auto"]["flops"]["how"] == "counted" and amount["timed_tflop"] > 0
    assert 0.5 < amount["timed_tokens"] / amount["timed_padded_tokens"] < 1


# ---- which layout ----


def chosen(folder: str, name: str, *argv: str, **more: Any) -> tuple[str, str | None]:
    from harness.train.data.text_layout import arrange
    from harness.train.run.start import start

    run = start(parse("bert", ["--tiny", "--o", folder, *argv]))
    assert run is not None
    model = small(name)
    if more.get("batchnorm"):
        model.add_module("norm", torch.nn.BatchNorm1d(4))
    settings = run.context.settings
    if "strategy" in more:
        from dataclasses import replace

        settings = replace(settings, strategy=more["strategy"])
    batches = text_batches(Path(folder), lengths())
    seen = arrange(model, batches, settings, run.context.args)
    how = f"{batches.layout.kind} {batches.layout.attention}".strip()
    assert seen["padding"] == how.replace(" ", ", ")
    assert batches.layout.few_shapes == run.context.args.torch_compile
    in_half = settings.precision == "bf16" and how == "packed runs"
    assert batches.layout.row_step == (text_layout.CPU_ROW_STEP if in_half else 1)
    return how, seen["padding_reason"]


CHOICES: list[tuple[str, list[str], dict[str, Any], str, str]] = [
    ("bert", [], {}, "packed runs", "needs CUDA"),
    ("bert", ["--precision", "bf16"], {}, "packed runs", "needs CUDA"),
    ("mpnet", ["--precision", "bf16"], {}, "parts", "mpnet"),
    ("modernbert", [], {}, "packed runs", "needs CUDA"),
    ("bert", ["--padding", "batch"], {}, "batch", "asked for"),
    ("bert", ["--neftune_noise_alpha", "5"], {}, "batch", "neftune"),
    ("bert", ["--torch_compile"], {}, "batch", "many shapes"),
    ("bert", [], {"strategy": "dp"}, "batch", "by rows"),
    ("bert", [], {"batchnorm": True}, "batch", "BatchNorm"),
    ("mpnet", [], {}, "parts", "mpnet"),
    ("mpnet", ["--torch_compile"], {}, "batch", "mpnet"),
    ("mpnet", [], {"strategy": "fsdp"}, "batch", "fsdp"),
    ("fnet", [], {}, "batch", "the scores of fnet depend on padding"),
]


def all_choices(folder: str) -> list[tuple[str, str | None]]:
    """Each in a folder of its own."""
    return [
        chosen(str(Path(folder, str(i))), name, *argv, **more)
        for i, (name, argv, more, *_) in enumerate(CHOICES)
    ]


@pytest.mark.process
def test_what_the_layout_depends_on(tmp_path: Path) -> None:
    for number in range(len(CHOICES)):
        (tmp_path / str(number)).mkdir()
    (result,) = ranks(1, all_choices, str(tmp_path))
    for (*_, how, word), (layout, reason) in zip(CHOICES, result, strict=True):
        assert layout == how
        assert word in str(reason)


def test_a_model_that_does_not_compute_in_float64_is_padded(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mixtral", **SIZES, num_key_value_heads=2, num_local_experts=2)
    model = AutoModelForSequenceClassification.from_config(config)
    args: Any = SimpleNamespace(torch_compile=False, neftune_noise_alpha=None)
    batches = text_batches(tmp_path, lengths())
    seen = text_layout.arrange(model, batches, parse("bert", ["--tiny"]), args)
    assert seen["padding"] == "batch"
    reason = "whether the scores of mixtral depend on padding cannot be tried: RuntimeError: "
    assert seen["padding_reason"].startswith(reason) and "\n" not in seen["padding_reason"]


@pytest.mark.process
def test_the_record_says_how_texts_were_laid_out(tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "64", "--test_size", "32", "--epochs", "1", "--save", "none"]
    done = script("bert", *argv, "--o", str(tmp_path))
    assert done.code == 0, done.err
    (folder,) = tmp_path.glob("bert/*/*")
    observed = json.loads((folder / "environment.json").read_text())["observed"]
    (row,) = (folder / "epochs.jsonl").read_text().splitlines()
    assert observed["padding"] == "packed, runs" and json.loads(row)["padding_share"] == 0
    assert json.loads((folder / "settings.json").read_text())["padding"] == "auto"


def test_texts_are_padded_on_the_side_of_their_tokenizer(tmp_path: Path) -> None:
    """XLNet reads the last token, which on the other side is padding."""
    right = text_batches(tmp_path, lengths(), pair=False)
    left = text_batches(tmp_path, lengths(), pair=False, side="left")
    rows = np.arange(24)
    for kind in ("batch", "parts"):
        right.layout = left.layout = Layout(kind)
        here, there = right(rows), left(rows)
        width = here["input_ids"].shape[1]
        for row, length in enumerate(lengths()[rows]):
            own = here["input_ids"][row, :length]
            assert torch.equal(there["input_ids"][row, width - length :], own)
            assert there["attention_mask"][row].tolist() == [0] * (width - length) + [1] * length
        assert bool(parts_of(there)) == (kind == "parts")
        for one, other in zip(parts_of(here), parts_of(there), strict=True):
            assert one["input_ids"].shape == other["input_ids"].shape
            assert torch.equal(one["attention_mask"].flip(1), other["attention_mask"])
