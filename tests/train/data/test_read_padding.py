"""Models whose scores depend on padding: how they are evaluated, and what the record says."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.core.command_line import parse
from harness.train.data import probes, text_layout
from harness.train.data.samples import Indices
from harness.train.data.texts import EVAL_PARTS, Layout, for_model, join_predictions, parts_of
from harness.train.measure.metrics import BatchMetrics
from tests.support.padded import TEST, TRAIN, lengths, small
from tests.support.ranks import ranks
from tests.support.samples import text_batches


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_of_one_length_are_evaluated_together(side: str, tmp_path: Path) -> None:
    batches = text_batches(tmp_path, np.array([5, 3, 9, 3, 5, 3]), side=side)
    assert parts_of(batches(range(6)), evaluates=True) == []
    batches.layout = Layout(by_length=True)
    batch = batches(range(6))
    assert parts_of(batch) == [] and EVAL_PARTS not in for_model(batch)
    parts = parts_of(batch, evaluates=True)
    assert [tuple(part["input_ids"].shape) for part in parts] == [(3, 3), (2, 5), (1, 9)]
    assert all(bool(part["attention_mask"].all()) for part in parts)
    firsts = [(torch.tensor(0.0), part["input_ids"][:, :1], part["labels"]) for part in parts]
    _, joined, labels = join_predictions(batch, firsts)
    assert joined.flatten().tolist() == [int(batches.tokens[at]) for at in batches.offsets[:6]]
    assert torch.equal(labels, batch["labels"])
    assert EVAL_PARTS not in batches([1, 3, 5])  # of one length anyway


def qualities(folder: str, *argv: str) -> dict[str, Any]:
    """Quality after one training, evaluated in batches of several sizes; at the end padded."""
    from harness.train.loop.trainer import ExactTrainer
    from harness.train.run.start import start

    flags = ["--tiny", "--epochs", "1", "--save", "none", "--b", "4", "--o", folder, *argv]
    run = start(parse("bert", flags))
    assert run is not None
    batches = text_batches(Path(tempfile.mkdtemp()), lengths())
    trainer = ExactTrainer(
        context=run.context, model=small("fnet"), args=run.context.args,
        train_dataset=Indices(TRAIN), eval_dataset=Indices(TEST, first=TRAIN),
        data_collator=batches, to_device=for_model, compute_metrics=BatchMetrics(3),
    )  # fmt: skip
    trainer.train()
    found: dict[str, Any] = {"observed": trainer.observations.observed, "losses": {}}
    for by_length in (batches.layout.by_length, False):
        batches.layout = Layout(by_length=by_length)
        for size in (1, 7, 64):
            trainer.args.per_device_eval_batch_size = size
            loss = trainer.evaluate()["eval_loss"]
            found["losses"].setdefault(by_length, []).append(loss)
    return found


@pytest.mark.process
@pytest.mark.parametrize("count", [1, 2])
def test_quality_does_not_depend_on_the_batch_of_evaluation(count: int, tmp_path: Path) -> None:
    results = ranks(count, qualities, str(tmp_path))
    for result in results:
        alone, *others = result["losses"][True]
        assert others == pytest.approx([alone] * 2, rel=1e-6)
        padded_alone, *padded = result["losses"][False]
        assert padded_alone == pytest.approx(alone, rel=1e-6)
        assert abs(padded[1] / padded[0] - 1) > 1e-5
        assert result["observed"]["reads_padding"] == {"train_batch": 4, "eval_batch": None}


@pytest.mark.parametrize(("name", "more", "own", "by_length"), [
    ("fnet", {}, False, True),
    ("fnet", {"padding": "batch"}, False, True),
    ("fnet", {"strategy": "fsdp"}, False, False),  # ranks would make unlike numbers of passes
    ("fnet", {"compile": True}, False, False),  # each length would be compiled
    ("fnet", {}, True, False),  # its loss may need the whole batch
    ("fnet", {"short": True}, False, False),  # it cannot read some text without padding
    ("mpnet", {"padding": "batch"}, False, None),
    ("bert", {"padding": "batch"}, False, None),
])  # fmt: skip
def test_what_a_model_that_reads_padding_is_told(
    name: str, more: dict[str, Any], own: bool, by_length: bool | None, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "short" in more:
        monkeypatch.setattr(probes, "fails_alone", lambda model, pairs: len(pairs) == 4)
    batches = text_batches(tmp_path, lengths())
    sizes = {"train_batch_size": 6, "eval_batch_size": 9}
    args: Any = SimpleNamespace(torch_compile=more.get("compile", False), **sizes)
    args.neftune_noise_alpha, args.device = None, torch.device("cpu")
    settings = replace(
        parse("bert", ["--tiny"]),
        **{k: v for k, v in more.items() if k not in ("compile", "short")},
    )
    seen = text_layout.arrange(small(name), batches, settings, args, own)
    told = capsys.readouterr().err
    if by_length is None:
        assert "reads_padding" not in seen and not told and not batches.layout.by_length
        return
    assert seen["padding"] == "batch" and batches.layout.by_length == by_length
    assert seen["reads_padding"] == {"train_batch": 6, "eval_batch": None if by_length else 9}
    assert told.startswith("warning: the scores of fnet depend on padding (") and by_length == (
        "as texts are evaluated unpadded, quality does not depend on --eval_batch" in told
    )
    assert by_length != ("(quality depends on --eval_batch, too)" in told)
    assert told.endswith("): to split a batch otherwise is another training\n")


@pytest.mark.parametrize(("name", "found"), [("fnet", True), ("mpnet", False)])
def test_a_model_without_float64_is_tried_in_float32(
    name: str, found: bool, tmp_path: Path
) -> None:
    """Which may show that it reads padding, and does not rule it out."""

    def refuse(module: Any, *_: Any) -> None:
        if next(module.parameters()).dtype == torch.float64:
            raise RuntimeError("no double")

    model, batches = small(name), text_batches(tmp_path, lengths())
    model.register_forward_pre_hook(refuse)
    args: Any = SimpleNamespace(
        torch_compile=False, neftune_noise_alpha=None, train_batch_size=6, eval_batch_size=9
    )
    seen = text_layout.arrange(model, batches, parse("bert", ["--tiny"]), args)
    assert ("reads_padding" in seen) == found == batches.layout.by_length
    assert ("cannot be tried: RuntimeError: no double" in seen["padding_reason"]) != found
    assert seen["padding"] == "batch"
