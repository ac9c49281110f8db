"""Losses, gradients and metrics that the stock stack gets wrong, and that they are right here.

Each test first shows the trap on the stock Trainer, so that a release which mends it (or makes it
worse) is noticed, and then that this harness is free of it. docs/traps.md is the account.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.core.command_line import parse
from harness.core.records import read_json
from harness.core.settings import UserError
from harness.train.run.failures import Diverged
from tests.support.ranks import ranks, script
from tests.support.toys import (
    CONFIGS,
    CPU,
    Net,
    Points,
    Poisoned,
    argv,
    head,
    logged,
    ours,
    rows,
    sixteen,
    stock,
    summary,
    trained,
    true_loss,
    weights,
)

pytestmark = pytest.mark.process


def stock_first_update(name: str, batch: int, acc: int) -> tuple[float, float]:
    """(loss, norm of the gradient) of the one update that 16 samples make."""
    trainer = stock(
        head(name),
        sixteen(name),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=acc,
        logging_steps=1,
    )
    trainer.train()
    return logged(trainer, "loss")[0], logged(trainer, "grad_norm")[0]


def our_first_update(name: str, folder: str, batch: int, acc: int) -> tuple[float, float]:
    data = sixteen(name)
    trainer, _ = trained(
        folder, head(name), data, data, f"--per_gpu_batch={batch}", f"--grad_acc={acc}"
    )  # fmt: skip
    return logged(trainer, "epoch_train_loss")[0], logged(trainer, "epoch_grad_norm")[0]


def accumulated(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {
        name: (stock_first_update(name, 16, 1), stock_first_update(name, 4, 4)) for name in CONFIGS
    }
    results["ours"] = (
        our_first_update("bert", folder, 16, 1),
        our_first_update("bert", folder, 4, 4),
    )
    return results


def distributed(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {name: stock_first_update(name, 8, 1) for name in CONFIGS}
    results["ours"] = our_first_update("bert", folder, 8, 1)
    return results


def test_trap_0_loss_multiplied_by_accumulation_and_ranks(tmp_path: Path) -> None:
    (one,) = ranks(1, accumulated, str(tmp_path / "1"), env=CPU)
    two = ranks(2, distributed, str(tmp_path / "2"), env=CPU)
    for name in ("bert", "distilbert", "resnet"):
        (loss, norm), four = one[name]
        assert four == pytest.approx((4 * loss, 4 * norm), rel=1e-4), name
        assert two[0][name] == pytest.approx((2 * loss, 2 * norm), rel=1e-4), name
    (loss, norm), four = one["vit"]
    assert four == pytest.approx((loss, norm), rel=1e-4)
    assert two[0]["vit"] == pytest.approx((loss, norm), rel=1e-4)
    # Ours: the numbers of the undivided batch, and the stock's where the stock is right.
    whole, split = one["ours"]
    assert whole == pytest.approx(one["bert"][0], rel=1e-4)
    assert split == pytest.approx(whole, rel=1e-5)
    assert [rank["ours"] for rank in two] == [pytest.approx(whole, rel=1e-5)] * 2


def one_far_sample() -> Points:
    """One sample of the test set makes logits that overflow, in the net below."""
    test = Points(12)
    test.x[0] = 1e38
    return test


def far() -> Net:
    net = Net()
    with torch.no_grad():
        net.first.weight.mul_(1e3)
    return net


def stock_diverges() -> dict[str, Any]:
    net = Net()
    trainer = stock(net, Poisoned(24), logging_steps=1, num_train_epochs=2)
    done = trainer.train()
    test = one_far_sample()
    evaluation = stock(far(), None, test).evaluate()
    return {
        "losses": logged(trainer, "loss"),
        "train_loss": done.training_loss,
        "weights": weights(net),
        "eval_loss": evaluation["eval_loss"],
        "true_eval_loss": true_loss(far(), test),
    }


def lived(trainer: Any, run: Any) -> dict[str, Any]:
    """Train as a script does; what was raised, and what the record says of it."""
    error = None
    try:
        with run:
            run.train(trainer)
    except Diverged as raised:
        error = str(raised)
    return {"error": error, "rows": rows(run), **summary(run)}


def our_diverges(folder: str, log_every: int) -> dict[str, Any]:
    more = (f"--log_every={log_every}", "--epochs=2")
    return lived(*ours(folder, Net(), Poisoned(24), Points(8), *more))


def our_weights_break(folder: str) -> dict[str, Any]:
    """One update, of a finite loss and gradient, with a step beyond the largest number."""
    return lived(*ours(folder, Net(), Points(4), Points(8), "--lr=1e39"))


def our_broken_evaluation(folder: str) -> dict[str, Any]:
    """The loss of one test sample is infinite; everything else is in order."""
    return lived(*ours(folder, far(), Points(8), one_far_sample(), "--lr=1e-9"))


def test_trap_1_nan_is_logged_as_a_healthy_loss(tmp_path: Path) -> None:
    (theirs,) = ranks(1, stock_diverges, env=CPU)
    assert np.isnan(theirs["weights"]).all()
    assert all(map(math.isfinite, theirs["losses"])) and theirs["losses"][-1] == 0.0
    assert 0 < theirs["train_loss"] < 1  # below chance for three classes, 1.0986: "it learns"
    assert math.isfinite(theirs["eval_loss"]) and not math.isfinite(theirs["true_eval_loss"])

    for log_every in (1, 50):  # seen in the log, or at the end of the epoch
        (own,) = ranks(1, our_diverges, str(tmp_path / str(log_every)), log_every, env=CPU)
        assert "not finite" in own["error"] or "nan" in own["error"]
        assert (own["outcome"], own["reason"]) == ("diverged", own["error"])
    (own,) = ranks(1, our_broken_evaluation, str(tmp_path / "eval"), env=CPU)
    assert own["error"] or [row["eval_loss"] for row in own["rows"]] == [None]
    with pytest.raises(UserError, match="hides a diverged run"):
        parse("bert", argv(tmp_path, "--logging_nan_inf_filter=true"))


def test_trap_1_weights_broken_by_the_last_update(tmp_path: Path) -> None:
    (own,) = ranks(1, our_weights_break, str(tmp_path), env=CPU)
    assert own["outcome"] == "diverged", own["rows"]


def test_trap_1_on_two_ranks_from_the_command_line(tmp_path: Path) -> None:
    # A learning rate that no model survives: the script ends, and the record says why.
    done = script("bert", "--tiny", "--lr=1e30", "--train_size=64", "--test_size=16", "--epochs=3",
                  f"--output_dir={tmp_path}", "--save=none", count=2, env=CPU)  # fmt: skip
    assert done.code != 0
    (results,) = tmp_path.glob("bert/1_2/*/summary.json")
    assert read_json(results)["outcome"] == "diverged"


def stock_train_loss(count: int, **more: Any) -> dict[str, Any]:
    net = Net()
    trainer = stock(net, Points(count), **more)
    reported = trainer.train().training_loss
    return {"reported": reported, "losses": net.losses, "fed": net.fed}


def our_train_loss(folder: str, count: int, *more: str) -> dict[str, Any]:
    net = Net()
    trainer, run = trained(folder, net, Points(count), Points(8), *more)
    recorded = [row["train_loss"] for row in rows(run)]
    return {
        "reported": logged(trainer, "epoch_train_loss")[0],
        "recorded": recorded,
        "losses": net.losses,
        "fed": net.fed,
    }


def both_train_losses(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return stock_train_loss(24), our_train_loss(folder, 24)


def uneven_train_losses(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    more = ("--per_gpu_batch=2", "--grad_acc=2", "--tail=pad")
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return stock_train_loss(22, logging_steps=1, **sizes), our_train_loss(folder, 22, *more)


def over_samples(*diaries: dict[str, Any]) -> float:
    fed = [len(batch) for diary in diaries for batch in diary["fed"]]
    losses = [loss for diary in diaries for loss in diary["losses"]]
    return sum(n * loss for n, loss in zip(fed, losses, strict=True)) / sum(fed)


def test_trap_2_train_loss_is_rank_local(tmp_path: Path) -> None:
    results = ranks(2, both_train_losses, str(tmp_path / "two"), env=CPU)
    theirs, own = zip(*results, strict=True)
    true = over_samples(*theirs)
    assert theirs[0]["reported"] == pytest.approx(over_samples(theirs[0]), abs=1e-6)
    assert min(abs(rank["reported"] - true) for rank in theirs) > 0.01
    assert [rank["reported"] for rank in own] == [pytest.approx(over_samples(*own), abs=1e-6)] * 2
    assert own[0]["recorded"] == [pytest.approx(own[0]["reported"], abs=1e-9)]

    ((theirs_one, own_one),) = ranks(1, uneven_train_losses, str(tmp_path / "one"), env=CPU)
    assert abs(theirs_one["reported"] - over_samples(theirs_one)) > 0.005
    assert own_one["reported"] == pytest.approx(over_samples(own_one), abs=1e-6)
    assert own_one["recorded"] == [pytest.approx(own_one["reported"], abs=1e-9)]


def evaluations(folder: str) -> dict[str, Any]:
    """Untrained models: nothing but the evaluation can differ between numbers of ranks."""
    results: dict[str, Any] = {}
    for count in (13, 10):
        results[f"true_{count}"] = true_loss(Net(), Points(count))
        results[f"stock_{count}"] = stock(Net(), None, Points(count)).evaluate()
        trainer, _ = ours(f"{folder}/{count}", Net(), Points(24), Points(count), records=False)
        results[f"ours_{count}"] = trainer.evaluate()
    dropped = stock(Net(), Points(13), Points(13), dataloader_drop_last=True)
    results["dropped"] = dropped.evaluate()
    results["dropped_n"] = results["dropped"]["eval_n"]
    return results


def recorded_evaluation(folder: str) -> dict[str, Any]:
    trainer, run = trained(folder, Net(), Points(13), Points(13))
    return {"row": (rows(run) or [{}])[0], "true": true_loss(trainer.model, Points(13))}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By the number of ranks."""
    folder = tmp_path_factory.mktemp("evaluations")
    return {n: ranks(n, evaluations, str(folder / str(n)), env=CPU)[0] for n in (1, 2, 3)}


def test_trap_4_eval_loss_of_uneven_sizes(evaluated: dict[int, dict[str, Any]]) -> None:
    for count, results in evaluated.items():
        for samples in (13, 10):
            true = results[f"true_{samples}"]
            wrong = abs(results[f"stock_{samples}"]["eval_loss"] - true)
            assert wrong < 1e-6 if count == 1 else wrong > 1e-3, (count, samples, wrong)
            assert results[f"ours_{samples}"]["eval_loss"] == pytest.approx(true, abs=1e-6)
            # The stock's accuracy and number of samples are right.
            assert results[f"stock_{samples}"]["eval_n"] == samples
            same = results[f"stock_{samples}"]["eval_accuracy"]
            assert results[f"ours_{samples}"]["eval_accuracy"] == pytest.approx(same)


def test_trap_5_drop_last_drops_test_samples(
    evaluated: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    for count, left in ((1, 12), (2, 8)):
        results = evaluated[count]
        assert results["dropped_n"] == left
        assert results["dropped"]["eval_accuracy"] != results["stock_13"]["eval_accuracy"]
    with pytest.raises(UserError, match="drops test samples too"):
        parse("bert", argv(tmp_path, "--dataloader_drop_last=true"))
    # What is offered instead: training samples are cut, and all 13 test samples count.
    own = ranks(2, recorded_evaluation, str(tmp_path / "ours"), env=CPU)[0]
    assert (own["row"]["samples"], own["row"]["eval_samples"]) == (8, 13)
    assert own["row"]["eval_loss"] == pytest.approx(own["true"], abs=1e-6)
