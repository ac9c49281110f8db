"""Which samples are trained on, in which order, by which ranks: the stock stack and this harness.

Each test first shows the trap on the stock Trainer, then that this harness is free of it or
refuses it. docs/traps.md is the account.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, TrainingArguments
from transformers.utils import import_utils

from harness.core.command_line import parse
from harness.core.records import read_json
from harness.core.settings import UserError
from harness.train.data import text_layout
from harness.train.data.texts import for_model
from tests.support import architectures
from tests.support.ranks import ranks, script
from tests.support.samples import text_batches
from tests.support.toys import (
    CPU,
    Bag,
    Net,
    Points,
    Sentences,
    apart,
    argv,
    flat,
    rows,
    stock,
    trained,
    weights,
)

pytestmark = pytest.mark.process


def batches(diaries: list[list[list[int]]]) -> list[list[int]]:
    """The global batches of an epoch or more: what all ranks were fed in the same step."""
    return [sorted(flat(step)) for step in zip(*diaries, strict=True)]


def one_epoch(folder: str, batch: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for count in (13, 24):
        net = Net()
        trainer = stock(net, Points(count), per_device_train_batch_size=batch)
        trainer.train()
        results[f"stock_{count}"] = (net.fed, weights(net), trainer.state.global_step)
    for tail in ("cut", "pad"):
        net = Net()
        more = (f"--per_gpu_batch={batch}", f"--tail={tail}", "--epochs=2")
        trainer, run = trained(f"{folder}/{tail}", net, Points(13), Points(8), *more)
        results[tail] = (net.fed, weights(net), trainer.state.global_step)
        results[f"{tail}_rows"] = rows(run)
    return results


def test_trap_7_samples_duplicated_and_20_distributed_equals_single(tmp_path: Path) -> None:
    """One global batch of six, made by one, two and three ranks."""
    results = {
        count: ranks(count, one_epoch, str(tmp_path / str(count)), 6 // count, env=CPU)
        for count in (1, 2, 3)
    }

    def fed(count: int, what: str) -> list[list[int]]:
        return batches([rank[what][0] for rank in results[count]])

    def weight(count: int, what: str) -> np.ndarray:
        return results[count][0][what][1]

    for count in (1, 2, 3):
        assert {rank["stock_13"][2] for rank in results[count]} == {3}
        assert sum(map(len, fed(count, "stock_13"))) == (13 if count == 1 else 18)
        # Where the samples fill the batches, the stock stack is exact.
        assert fed(count, "stock_24") == fed(1, "stock_24")
        assert apart(weight(count, "stock_24"), weight(1, "stock_24")) < 1e-6
        # Ours is exact for any number of samples: one is left out, the others are fed once.
        assert fed(count, "cut") == fed(1, "cut")
        epochs = [fed(count, "cut")[:2], fed(count, "cut")[2:]]
        assert [sorted(flat(epoch)) for epoch in epochs] == [list(range(12))] * 2
        assert epochs[0] != epochs[1]
        assert apart(weight(count, "cut"), weight(1, "cut")) < 1e-6
        # Asked to keep the tail, it repeats samples as the stock does, and says so.
        twice = Counter(flat(fed(count, "pad")[:3]))
        assert set(twice) == set(range(13))
        for row in results[count][0]["pad_rows"]:
            assert (row["samples"], row["fed_samples"]) == (13, 13 if count == 1 else 18)
        assert sum(twice.values()) == results[count][0]["pad_rows"][0]["fed_samples"]
        assert [row["fed_samples"] for row in results[count][0]["cut_rows"]] == [12, 12]
    for count in (2, 3):
        assert apart(weight(count, "stock_13"), weight(1, "stock_13")) > 1e-3


def padded_epochs(folder: str) -> dict[str, Any]:
    """An epoch of 13 samples in effective batches of 8, in passes of 8, 4 and 2."""
    results = {}
    for batch in (8, 4, 2):
        net = Net()
        sizes = (f"--per_gpu_batch={batch}", f"--grad_acc={8 // batch}", "--epochs=1")
        where = f"{folder}/{batch}"
        run = trained(where, net, Points(13), Points(8), "--tail=pad", *sizes)[1]
        results[str(batch)] = net.fed, weights(net), rows(run)
    return results


def test_trap_7_a_short_pass_counts_as_a_whole_one(tmp_path: Path) -> None:
    (results,) = ranks(1, padded_epochs, str(tmp_path), env=CPU)
    sizes = {batch: [*map(len, fed)] for batch, (fed, *_) in results.items()}
    assert sizes == {"8": [8, 5], "4": [4, 4, 4, 1], "2": [2, 2, 2, 2, 2, 2, 1]}
    assert [[row["fed_samples"] for row in of] for *_, of in results.values()] == [[13]] * 3
    assert results["8"][0] == [flat(results["4"][0][:2]), flat(results["4"][0][2:])]
    for one, other in (("8", "4"), ("8", "2"), ("4", "2")):
        assert apart(results[one][1], results[other][1]) > 1e-4


def by_length(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for strategy in ("group_by_length", "random"):
        torch.manual_seed(0)
        model = Bag(64, dropout=0.1)
        more = {"train_sampling_strategy": strategy, "num_train_epochs": 3}
        stock(model, Sentences(64), collate=Sentences.collate, **more).train()
        results[strategy] = model.fed
    model = Bag(64, dropout=0.1)
    data = Sentences(64)
    trained(folder, model, data, data, "--epochs=3", collate=Sentences.collate)
    return {**results, "ours": model.fed}


def test_trap_8_group_by_length_desynchronises_ranks(tmp_path: Path) -> None:
    results = ranks(2, by_length, str(tmp_path), env=CPU)

    def distinct(what: str) -> list[int]:
        steps = batches([rank[what] for rank in results])
        epoch = len(steps) // 3
        return [len(set(flat(steps[i * epoch : (i + 1) * epoch]))) for i in range(3)]

    assert distinct("random") == [64, 64, 64]
    first, *later = distinct("group_by_length")
    assert first == 64 and max(later) < 64, later
    assert distinct("ours") == [64, 64, 64]
    with pytest.raises(UserError, match="gives ranks different orders"):
        parse("bert", argv(tmp_path, "--train_sampling_strategy=group_by_length"))


def orders(folder: str) -> dict[str, dict[int, list[list[int]]]]:
    results: dict[str, Any] = {"stock": {}, "ours": {}}
    for seed in (7, 8):
        net = Net()
        stock(net, Points(32), seed=seed, num_train_epochs=2).train()
        results["stock"][seed] = [flat(net.fed[:8]), flat(net.fed[8:])]
        net = Net()
        trained(folder, net, Points(32), Points(8), f"--seed={seed}", "--epochs=2")
        results["ours"][seed] = [flat(net.fed[:8]), flat(net.fed[8:])]
    return results


def test_trap_14_neighbouring_seeds_share_orders(tmp_path: Path) -> None:
    (results,) = ranks(1, orders, str(tmp_path), env=CPU)
    assert results["stock"][7][1] == results["stock"][8][0]
    own = [tuple(order) for seed in (7, 8) for order in results["ours"][seed]]
    assert all(sorted(order) == list(range(32)) for order in own)
    assert len(set(own)) == 4
    # By chance one place in 32 agrees; a shifted or shared order would agree in far more.
    for i in range(4):
        for j in range(i):
            assert sum(a == b for a, b in zip(own[i], own[j], strict=True)) < 8


def batch_sizes(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for option in ("split_batches", "dispatch_batches"):
        net = Net()
        trainer = stock(net, Points(13), accelerator_config={option: True})
        trainer.train()
        sizes = [len(batch) for batch in net.fed]
        results[option] = (sizes, trainer.get_total_train_batch_size(trainer.args))
    net = Net()
    trainer, run = trained(folder, net, Points(50), Points(8), "--grad_acc=2")
    results["ours"] = [len(batch) for batch in net.fed]
    results["rows"], results["environment"] = rows(run), read_json(run.context.folder.environment)
    return results


def test_trap_19_the_batch_is_not_what_is_said(tmp_path: Path) -> None:
    results = ranks(2, batch_sizes, str(tmp_path), env=CPU)
    sizes, reported = results[0]["split_batches"]
    assert (sizes[0], reported) == (2, 8)  # four samples make an update, eight are reported
    assert [rank["dispatch_batches"][0][-1] for rank in results] == [3, 3]  # 13 samples: 4 4, 3 3
    with pytest.raises(UserError, match="--per_gpu_batch"):
        parse("bert", argv(tmp_path, '--accelerator_config={"split_batches": true}'))
    # Ours: what is said is what the tensors held.
    (row,) = results[0]["rows"]
    assert [rank["ours"] for rank in results] == [[4] * 6] * 2
    assert row["effective_batch"] == results[0]["environment"]["effective_batch"] == 16
    assert row["fed_samples"] == row["samples"] == row["updates"] * 16 == 48
    # DataParallel would make the batch grow with the GPUs: only on request, and only with GPUs.
    done = script("bert", *argv(tmp_path, "--strategy=dp"), env=CPU)
    assert done.code == 2 and "needs a GPU" in done.err


def test_trap_28_modernbert_computes_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that its last layer computes for two texts of 4 and 32 tokens."""
    monkeypatch.setattr(import_utils, "is_flash_attn_2_available", lambda *_: True)
    model = AutoModelForSequenceClassification.from_config(architectures.small("modernbert")).eval()
    assert model.config._attn_implementation == "sdpa"
    computed = []
    model.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: computed.append(output.shape[:2].numel())
    )
    batches = text_batches(tmp_path, [4, 32], pair=False)
    padded = model(**for_model(batches([0, 1]))).logits
    settings = parse("bert", ["--tiny"])
    # Ours.
    text_layout.arrange(model, batches, settings, TrainingArguments(str(tmp_path), use_cpu=True))
    packed = model(**for_model(batches([0, 1]))).logits
    assert computed == [64, 36]
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-6)
