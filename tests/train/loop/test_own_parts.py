"""A script of one's own with its own metric and its own model."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from transformers import AutoConfig, AutoModelForSequenceClassification, EvalPrediction

from harness.core.command_line import parse
from harness.core.records import find_runs
from harness.core.records.summary import best_of
from harness.core.rules import resolve
from harness.core.settings import Settings, UserError
from harness.train.data import probes, text_layout
from harness.train.data.models import build, loading
from harness.train.loop.evaluation import logits_first
from harness.train.measure.metrics import BatchMetrics, check_before
from tests.support.broken_runs import only_run
from tests.support.declared import assert_declared
from tests.support.paired import Verb
from tests.support.ranks import script
from tests.support.samples import text_batches

BERT = Path(__file__).resolve().parents[3] / "bert.py"
TFIDF = BERT.parent / "docs" / "tfidf.py"
METRIC = """
def quality(p):
    right = p.predictions.argmax(-1) == p.label_ids
    places = int((p.label_ids * range(1, 1 + len(p.label_ids))).sum())
    return {"accuracy": right.mean(), "seen": len(right), "mistakes": sum(~right), "places": places}
"""
MODEL = """
class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.words, self.head = nn.Embedding(4096, 8), nn.Linear(8, classes)

    def forward(self, input_ids, attention_mask, labels):
        states = self.words(input_ids) * attention_mask[..., None]
        logits = self.head(states.sum(1) / attention_mask.sum(1, keepdim=True))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
"""


def write(folder: Path, metric: bool = False, model: bool = False) -> None:
    text = BERT.read_text()
    if metric:
        text = text.replace("\n\ndef main(", f"{METRIC}\n\ndef main(")
        text = text.replace("BatchMetrics(len(texts.labels))", "quality")
    if model:
        text = text.replace("\n\ndef main(", f"{MODEL}\n\ndef main(")
        text = text.replace("build_model(context, texts.labels)", "Net(len(texts.labels))")
    (folder / "mine.py").write_text(text)


def trained(folder: Path, *flags: str, count: int = 1) -> dict[str, Any]:
    """The summary of a short run of mine.py."""
    argv = ["--tiny", "--epochs", "2", "--train_size", "64", "--test_size", "51", *flags]
    done = script("mine", *argv, count=count, cwd=folder)
    assert done.code == 0, done.err
    (run,) = find_runs(folder / "outputs")
    assert_declared("summary", run.read_summary() or {})
    return json.loads(run.summary.read_text())


@pytest.mark.process
@pytest.mark.parametrize("count", [1, 2])
def test_an_own_metric_sees_each_sample_once_in_order(count: int, tmp_path: Path) -> None:
    write(tmp_path, metric=True)
    flags = ["--eval_batch", "8", "--save", "best", "--best_metric", "mistakes:min"]
    summary = trained(tmp_path, *flags, count=count)
    assert summary["seen"] == 51
    assert summary["own_accuracy"] == pytest.approx(summary["accuracy"])
    assert summary["mistakes"] == round(51 * (1 - summary["accuracy"]))
    assert summary["places"] == PLACES
    assert summary["best_metric"] == "mistakes"


PLACES = 1818  # of these 51 test samples


@pytest.mark.process
def test_an_own_model_without_config_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, model=True)
    assert trained(tmp_path, count=2)["outcome"] == "finished"
    assert "Net" in Verb("table", capsys)(tmp_path / "outputs")
    assert Verb("explain", capsys)(tmp_path / "outputs").startswith("Net with ddp on 2 processes")


@pytest.mark.process
@pytest.mark.parametrize("flags", [(), ("--padding", "batch")])
def test_quality_is_of_the_logits_whatever_else_a_model_returns(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    summaries = []
    for returned in ('{"logits": logits, ', '{"features": states.mean(1), "logits": logits, '):
        write(tmp_path, model=True)
        text = (tmp_path / "mine.py").read_text().replace(', "logits": logits}', "}")
        text = text.replace('return {"loss"', f'return {returned}"loss"')
        (tmp_path / "mine.py").write_text(text)
        summaries.append(trained(tmp_path, "--rerun", *flags))
    one, other = summaries
    for name in ("accuracy", "f1", "eval_loss"):
        assert one[name] == other[name]


@pytest.mark.process
def test_a_model_that_returns_a_tensor_is_refused_before_training(tmp_path: Path) -> None:
    write(tmp_path, model=True)
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(re.sub(r'return \{"loss".*', "return logits", text))
    done = script("mine", "--tiny", "--train_size", "64", cwd=tmp_path)
    assert done.code == 2, done.err
    assert "Net returned a tensor: it must return a dict with loss and logits" in done.err
    assert "Traceback" not in done.err


def test_a_model_without_logits_is_refused() -> None:
    with pytest.raises(UserError, match=r"returns loss, scores: name its scores.*logits"):
        logits_first({"loss": 1, "scores": 2})
    assert logits_first((1, 2)) == (1, 2)
    assert [*logits_first({"loss": 1, "states": 2, "logits": 3})] == ["logits", "loss", "states"]


WEIGHED = (
    "functional.cross_entropy(logits, labels)",
    "functional.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2, 4, 8]).to(logits))",
)


@pytest.mark.process
@pytest.mark.usefixtures("quiet_machine")
def test_a_loss_that_weighs_classes_reads_whole_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fed in parts it was another loss, and so another training."""
    write(tmp_path, model=True)
    argv = ["--tiny", "--epochs", "1", "--train_size", "64", "--test_size", "51"]
    assert "loss of a batch" not in (done := script("mine", *argv, cwd=tmp_path)).err
    observed = (only_run(tmp_path / "outputs").read_environment() or {})["observed"]
    assert done.code == 0 and observed["padding"] == "parts" and "loss_of_batch" not in observed
    text = (tmp_path / "mine.py").read_text().replace(*WEIGHED)
    (tmp_path / "mine.py").write_text(text.replace("import nn", "import nn\nimport torch"))
    out = {}
    for name, *flags in (("auto",), ("padded", "--padding", "batch"), ("two", "--b", "2")):
        out[name] = tmp_path / name
        done = script("mine", *argv, *flags, "--o", str(out[name]), cwd=tmp_path)
        assert done.code == 0, done.err
        assert "is not the mean of those of its texts: to split a batch" in done.err
    runs = {name: only_run(path) for name, path in out.items()}
    environment = runs["auto"].read_environment() or {}
    assert_declared("environment", environment)
    assert environment["observed"]["padding"] == "batch"
    assert environment["observed"]["padding_reason"] == environment["observed"]["loss_of_batch"]
    rows = {name: run.read_epochs()[0][-1] for name, run in runs.items()}
    assert rows["auto"]["train_loss"] == pytest.approx(rows["padded"]["train_loss"], rel=1e-6)
    compared = Verb("compare", capsys)(out["auto"], out["two"])
    assert "note: batch of a forward pass: A has" in compared


@pytest.mark.parametrize("numbers", ["", ".to(logits)"])
@pytest.mark.parametrize("weighed", [True, False])
def test_whether_a_loss_is_a_mean_over_samples(weighed: bool, numbers: str) -> None:
    """Also of a model with numbers in float32, which does not compute in float64."""
    scope: dict[str, Any] = {"nn": torch.nn, "torch": torch}
    text = MODEL.replace(WEIGHED[0], WEIGHED[1].replace(".to(logits)", numbers))
    if not weighed:
        text = text.replace("1.0, 2, 4, 8", "1.0, 1, 1, 1")
    exec(text.replace("states.sum(1)", "nn.functional.dropout(states).sum(1)"), scope)
    ids = torch.randint(4096, (4, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(4)}
    alone = [{name: value[[row]] for name, value in batch.items()} for row in range(4)]
    torch.manual_seed(0)
    model = scope["Net"](4)
    assert probes.loss_is_mean(model, batch, alone) == (not weighed)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


OWN_LOSS = """
class Weighs(ExactTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        loss = 2 * loss + 0 * outputs["states"].sum() + 0 * outputs["logits"][0, labels[0]]
        return (loss, outputs) if return_outputs else loss
"""


@pytest.mark.process
def test_a_trainer_with_a_loss_of_its_own(tmp_path: Path) -> None:
    """It gets all that the model returns, and whole batches; quality is of the logits."""
    write(tmp_path, model=True)
    argv = ["--max_grad_norm", "0", "--optim", "sgd", "--lr"]
    plain = trained(tmp_path, *argv, "0.1", "--padding", "batch")
    shutil.rmtree(tmp_path / "outputs")
    text = (tmp_path / "mine.py").read_text().replace("\n\ndef main(", f"{OWN_LOSS}\n\ndef main(")
    text = text.replace('return {"loss"', 'return {"states": states, "loss"')
    (tmp_path / "mine.py").write_text(text.replace("trainer = ExactTrainer(", "trainer = Weighs("))
    own = trained(tmp_path, *argv, "0.05")  # half of the rate for twice the loss
    observed = (only_run(tmp_path / "outputs").read_environment() or {})["observed"]
    assert observed["padding_reason"] == "the script has a loss of its own"
    assert own["accuracy"] == plain["accuracy"]
    assert own["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(("drops", "mean"), [
    ("nn.functional.scaled_dot_product_attention(states, states, states, None, 0.5)", True),
    ("torch.dropout(states, 0.5, True)", True),
    ("states * torch.rand(1)", None),
])  # fmt: skip
def test_dropout_does_not_decide_whether_a_loss_is_a_mean(drops: str, mean: bool | None) -> None:
    scope: dict[str, Any] = {"nn": torch.nn, "torch": torch}
    exec(MODEL.replace("states.sum(1)", f"({drops}).sum(1)"), scope)
    ids = torch.arange(24).reshape(4, 6)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(4)}
    alone = [{name: value[[row]] for name, value in batch.items()} for row in range(4)]
    torch.manual_seed(0)
    if mean is not None:
        assert probes.loss_is_mean(scope["Net"](4), batch, alone)
        return
    with pytest.raises(RuntimeError, match="differs from pass to pass"):
        probes.loss_is_mean(scope["Net"](4), batch, alone)


CONTRASTIVE = """
        near = torch.nn.functional.normalize(states.mean(1), dim=-1)
        alike = (labels[:, None] == labels) & ~torch.eye(len(labels), dtype=torch.bool)
        loss = nn.functional.cross_entropy(logits, labels) - ((near @ near.T) * alike).sum()
        return {"loss": loss, "logits": logits}
"""


@pytest.mark.parametrize("kind", ["mean", "last class", "pairs", "classes"])
def test_losses_are_tried_with_texts_of_every_class(kind: str, tmp_path: Path) -> None:
    """Also a weight of the class with the longest texts, and a term of pairs of one class."""
    classes = 65 if kind == "classes" else 10
    lengths = np.concatenate([np.full(3, 3 + n) for n in range(classes)])
    batches = text_batches(tmp_path, lengths)
    batches.labels, batches.types = np.repeat(np.arange(classes), 3), None
    scope: dict[str, Any] = {"nn": torch.nn, "torch": torch}
    text = MODEL
    if kind == "last class":
        weights = f"torch.tensor([1.0] * {classes - 1} + [20.0]).to(logits)"
        text = text.replace(WEIGHED[0], f"{WEIGHED[0][:-1]}, weight={weights})")
    if kind == "pairs":
        text = text[: text.index("        return {")] + CONTRASTIVE[1:]
    exec(text, scope)
    torch.manual_seed(0)
    args: Any = SimpleNamespace(torch_compile=False, neftune_noise_alpha=None)
    seen = text_layout.arrange(scope["Net"](classes), batches, parse("bert", ["--tiny"]), args)
    assert seen["padding"] == ("parts" if kind == "mean" else "batch")
    assert ("loss_of_batch" in seen) == (kind in ("last class", "pairs"))
    assert ("there are 65 classes" in str(seen["padding_reason"])) == (kind == "classes")


def test_batchnorm_mixes_the_texts_of_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scope: dict[str, Any] = {"nn": torch.nn, "torch": torch}
    exec(MODEL, scope)
    model = scope["Net"](4)
    model.norm = torch.nn.BatchNorm1d(8)
    args: Any = SimpleNamespace(torch_compile=False, neftune_noise_alpha=None)
    batches = text_batches(tmp_path, np.array([3, 5, 9]))
    batches.types = None
    seen = text_layout.arrange(model, batches, parse("bert", ["--tiny"]), args)
    assert seen["padding_reason"] == "BatchNorm mixes the texts of a batch"
    assert "is not the mean of those of its texts" in seen["loss_of_batch"]
    assert "to split a batch otherwise is another training" in capsys.readouterr().err


def test_a_script_with_a_loss_of_its_own_reads_whole_batches(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mpnet", hidden_size=16, num_hidden_layers=1, vocab_size=60,
                                  num_attention_heads=2, intermediate_size=32)  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    args: Any = SimpleNamespace(torch_compile=False, neftune_noise_alpha=None)
    batches = text_batches(tmp_path, np.array([3, 5, 9]))
    for own, padding in ((True, "batch"), (False, "parts")):
        seen = text_layout.arrange(model, batches, parse("bert", ["--tiny"]), args, own)
        assert seen["padding"] == padding
        assert ("a loss of its own" in seen["padding_reason"]) == own


def metrics(own: Any) -> dict[str, float]:
    scores = np.array([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    counted = BatchMetrics(2, own)
    return counted(EvalPrediction(scores, np.array([1, 0, 0])))


def test_a_name_of_ours_is_kept_beside_ours() -> None:
    found = metrics(lambda p: {"eval_mcc": np.float32(0.5), "f1": -1, "rows": len(p.predictions)})
    assert found["mcc"] == 0.5 and found["own_f1"] == -1 and found["rows"] == 3
    assert found["f1"] == metrics(None)["f1"]


def test_what_is_no_dict_of_metrics_is_refused() -> None:
    with pytest.raises(UserError, match="compute_metrics returned float: expected a dict"):
        metrics(lambda p: 0.5)


def test_metrics_that_are_no_numbers_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They ended the run after its first epoch."""
    odd = {"eval_conf": np.eye(2), "name": "best", "ragged": [[1], [1, 2]], "mcc": 0.5}
    counted = BatchMetrics(2, lambda p: odd)
    check_before(counted, "mcc")
    assert capsys.readouterr().err == (
        "warning: metrics that are no numbers are not recorded: conf (ndarray), name (str), "
        "ragged (list)\n"
    )
    found = counted(EvalPrediction(np.eye(2), np.array([1, 0])))
    assert found["mcc"] == 0.5 and not {"conf", "name", "ragged"} & {*found}
    assert capsys.readouterr().err == ""
    said = "--best_metric conf: compute_metrics returned ndarray: expected a number"
    with pytest.raises(UserError, match=said):
        check_before(counted, "conf")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert BatchMetrics(2, lambda p: odd)(EvalPrediction(np.eye(2), np.array([1, 0])))["mcc"] == 0.5
    assert capsys.readouterr().err == ""


def test_which_way_is_better_is_said_with_the_name() -> None:
    rows = [{"epoch": n, "rmse": v, "mcc": v} for n, v in enumerate((0.3, 0.1, 0.2), 1)]
    assert best_of(rows, "rmse:min") == {"best_metric": "rmse", "best_value": 0.1, "best_epoch": 2}
    assert best_of(rows, "mcc")["best_epoch"] == 1
    with pytest.raises(UserError, match="--best_metric mcc: expected one of accuracy, "):
        resolve(Settings(script="bert", best_metric="mcc"))


@pytest.mark.process
def test_an_own_model_is_loaded_as_its_run_says(tmp_path: Path) -> None:
    write(tmp_path, model=True)
    argv = ["--tiny", "--epochs", "1", "--train_size", "64", "--test_size", "51"]
    done = script("mine", *argv, cwd=tmp_path)
    scope: dict[str, Any] = {"nn": torch.nn}
    exec(MODEL, scope)
    model = scope["Net"](4)
    before = model.head.bias.detach().clone()
    with chdir(tmp_path):
        done.loaded(model=model)
    assert "# model: a Net, as mine.py makes it\n" in done.out
    done = script("mine", *argv, "--save", "none", "--rerun", cwd=tmp_path)
    assert "\n  the trained model was not kept (--save none)\n" in done.out
    assert "load it" not in done.out
    assert not torch.equal(model.head.bias, before)


def test_an_architecture_that_transformers_would_make_otherwise_is_loaded_by_ours(
    tmp_path: Path,
) -> None:
    settings = resolve(Settings(script="vit", model="resnet-18-cifar", dataset="embedded:digits"))
    model = build(settings, ["a", "b"])
    assert loading(settings, model, tmp_path, None) == (
        "from harness.train.data.models import small_stem_resnet; "
        f"model = small_stem_resnet().from_pretrained('{tmp_path}')"
    )
    usual = build(replace(settings, model="vit-nano"), ["a", "b"])
    assert loading(settings, usual, tmp_path, None) == (
        "from transformers import pipeline; "
        f"classify = pipeline('image-classification', '{tmp_path}')"
    )
    type(usual).__module__, before = "transformers_modules.own", type(usual).__module__
    try:
        line = loading(settings, usual, tmp_path, 12)
        assert line.endswith(", truncation=True, max_length=12, trust_remote_code=True)")
    finally:
        type(usual).__module__ = before


@pytest.mark.process
def test_a_metric_that_there_is_not_is_named(tmp_path: Path) -> None:
    write(tmp_path, metric=True)
    argv = ["--tiny", "--epochs", "1", "--train_size", "64", "--best_metric", "mistake"]
    done = script("mine", *argv, cwd=tmp_path)
    assert done.code == 2
    assert "--best_metric mistake: the metrics are loss, accuracy" in done.err
    assert "mistakes" in done.err
    assert done.err.count("\n") == 1 and not find_runs(tmp_path / "outputs")  # before training


class More(BatchMetrics):
    def result(self, *given: Any) -> dict[str, float]:
        return super().result(*given) | {"more": 1.0}


@pytest.mark.parametrize("counted", [BatchMetrics(3, lambda p: {"more": 1}), More(3)])
def test_the_names_of_own_metrics_are_known_before_training(counted: BatchMetrics) -> None:
    for name in ("more", "more:min", "eval_more", "precision_macro", "accuracy"):
        check_before(counted, name)
    with pytest.raises(UserError, match=r"the metrics are loss, .*, more; did you mean more\?$"):
        check_before(counted, "mor")
    with pytest.raises(UserError, match=r"--best_metric more:mn: .*; only :min may stand"):
        check_before(counted, "more:mn")
    assert counted.batches == []


def test_an_own_metric_is_tried_on_every_class_and_only_where_it_chooses() -> None:
    seen: list[EvalPrediction] = []

    def own(p: EvalPrediction) -> dict[str, float]:
        seen.append(p)
        return {f"class {kind}": 0.0 for kind in np.unique(p.label_ids)}

    check_before(BatchMetrics(3, own), "f1")
    assert seen == []
    check_before(BatchMetrics(3, own), "class 2")
    assert len(seen) == 1 and seen[0].predictions.shape == (12, 3)
    with pytest.raises(UserError, match="compute_metrics returned float"):
        check_before(BatchMetrics(3, lambda p: 0.5), "mcc")


def test_a_metric_that_takes_no_made_up_scores_is_left_to_the_first_evaluation() -> None:
    def own(p: EvalPrediction) -> dict[str, float]:
        raise ValueError("12 rows: expected the 51 of the test set")

    counted = BatchMetrics(3, own)
    check_before(counted, "mcc")
    assert counted.batches == []


@pytest.mark.process
@pytest.mark.parametrize("count", [1, 2])
def test_an_own_model_that_fails_stands_under_its_class(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks try the model before DDP wraps it, and training has not begun."""
    write(tmp_path, model=True)
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace("states.sum(1)", "states.sum(2)"))
    done = script("mine", "--tiny", "--train_size", "64", count=count, cwd=tmp_path)
    assert done.code == 1
    (run,) = find_runs(tmp_path / "outputs")
    environment = run.read_environment() or {}
    assert_declared("environment", environment)
    assert environment["observed"]["own_model"] == "Net" and environment["inputs"]["script"]
    assert environment["data"]["train_samples"] == 64 and environment["processes_per_node"] == count
    shown = Verb("table", capsys)(tmp_path / "outputs")
    assert " Net " in shown and "bert-nano " not in shown and "machine unknown" not in shown


def test_the_example_weighs_words_as_scikit_learn_does() -> None:
    spec = importlib.util.spec_from_file_location("tfidf", TFIDF)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    texts = [[5, 5, 2], [2, 3], [7, 3, 3, 3, 2], [4]]

    def collate(samples: list[int]) -> dict[str, torch.Tensor]:
        longest = max(len(texts[sample]) for sample in samples)
        rows = [texts[sample] + [0] * (longest - len(texts[sample])) for sample in samples]
        ids = torch.tensor(rows)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    data = SimpleNamespace(
        train=range(3), collate=collate, processing=range(9), labels=["one", "other"]
    )
    net = example.TfIdf(data)
    net.head = torch.nn.Identity()
    weights = net(**collate([0, 1, 2, 3]), labels=torch.zeros(4, dtype=torch.long))["logits"]
    vectors = TfidfVectorizer(
        analyzer=lambda text: text,
        sublinear_tf=True,
        lowercase=False,
        vocabulary={token: token for token in range(9)},
    )
    expected = vectors.fit(texts[:3]).transform(texts).toarray()
    np.testing.assert_allclose(weights, expected, atol=1e-6)


@pytest.mark.process
def test_the_example_learns(tmp_path: Path) -> None:
    (tmp_path / "tfidf.py").write_text(TFIDF.read_text())
    argv = ["--tiny", "--train_size", "256", "--test_size", "100", "--lr", "0.1"]
    done = script("tfidf", *argv, cwd=tmp_path)
    assert done.code == 0, done.err
    (run,) = find_runs(tmp_path / "outputs")
    assert (run.read_summary() or {})["accuracy"] > 0.5  # of four libraries
