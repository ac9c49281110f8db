"""What the pages say in words of published sweeps is what their records give."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Hashable
from pathlib import Path

from harness.read.compare.compare import compare
from harness.read.records.baseline import RATE
from harness.read.records.comparable import (
    ACCURACY,
    TARGET,
    measured_against,
)
from harness.read.records.groups import Group
from harness.read.records.selection import read_group
from harness.read.records.sweeps import read_sweep
from harness.read.statistics import Estimate, Noise, Repeats, difference, ratio


def test_the_words_about_news_are_those_of_the_records(root: Path) -> None:
    page = " ".join((root / "docs" / "reading.md").read_text().split())
    published = root / "outputs" / "published"

    def side(selected: str) -> Group:
        return read_group("A", f"{published}/sweeps/news:{selected}", None)

    times = []
    for lr, each, whole in ((0.0004, 16, 32), (0.0002, 4, 8)):
        both = side(f"setup=1_2,per_gpu_batch={each}")
        found = compare(side(f"setup=1_1,per_gpu_batch={whole}"), both)
        rows = {row.measure.name: row for row in found.rows}
        rate, time = (rows[name].estimate for name in ("train_samples_per_s", "epoch_time_s"))
        points = rows["accuracy"].estimate
        assert points is not None and rate is not None and time is not None
        assert rate.paired and rate.n == points.n == 5
        base = f"setup 1_1, batch per GPU {whole} for lr {lr}"
        _, _, answer = page.partition(f"- setup 1_2, batch per GPU {each} against {base}")
        assert answer.startswith(f": - samples/s: {in_words(rate, 'times as many')}")
        text = f"accuracy: {in_words(points.scaled(100), 'points', '+.1f')}"
        assert text in answer.partition(" runs each")[0]
        times.append(f"{in_words(time)} with {each}")
        within = points.low is not None and max(-points.low, points.high or 0.0) < 0.01
        assert within == (each == 16) and "within 1 point is shown with 16 each" in page
        sent = both.values("payload_mb_per_update")
        assert {round(mb / 2) for mb in sent} == {91} and "hands over 91 MB" in page
    assert "it is " + " each, and ".join(times) in page
    words = read_group("A", str(published / "words" / "news_words.jsonl.gz"), None)
    accuracy = statistics.fmean(words.values("accuracy"))
    assert len(words.finished) == 5 and f"an accuracy of {accuracy:.4f}." in page
    groups = read_sweep(published / "sweeps/news").groups
    gained = [difference(accuracies(group), accuracies(words)).scaled(100) for group in groups]
    assert [gain.paired and gain.n for gain in gained] == [5] * 5
    *first, last = (in_words(gain, form=".1f") for gain in gained)
    assert f"In the order of the table it gains {', '.join(first)} and {last} points" in page
    shown = [group.label for group, gain in zip(groups, gained, strict=True) if (gain.low or 0) > 2]
    assert [(label["setup"], label["per_gpu_batch"]) for label in shown] == [("1_1", 32)]
    assert "2 are shown only of one process with 32." in page


def test_the_words_about_a_different_batch_are_those_of_the_records(root: Path) -> None:
    page = " ".join((root / "docs" / "reading.md").read_text().split())

    def lost(folder: str, of: dict[str, object], than: dict[str, object]) -> Estimate:
        groups = read_sweep(root / folder).groups
        one, other = (
            next(g for g in groups if all(g.label[n] == value for n, value in names.items()))
            for names in (of, than)
        )
        return difference(accuracies(other), accuracies(one)).scaled(100)

    news = lost(
        "outputs/published/sweeps/news",
        {"setup": "1_1", "per_gpu_batch": 32}, {"setup": "1_2", "per_gpu_batch": 32},
    )  # fmt: skip
    assert f"and is: {in_words(news, 'points', '+.1f').replace('+-', '-')}" in page
    assert (news.low or -9) > -1
    four = "records/gallery/sweeps/agnews_food101_topologies-tiny"
    shown = {}
    for setup in ("1_1", "1_2", "1_4", "2_2"):
        of = {"script": "vit", "setup": setup, "lr": None}
        few = lost(four, {**of, "per_gpu_batch": 16}, {**of, "per_gpu_batch": 4})
        shown[setup] = in_words(few, "points", ".1f") if (few.low or 0) > 0 else None
    assert shown["1_1"] is shown["1_2"] is None and shown["1_4"] == shown["2_2"]
    assert f"with a quarter of the updates: by {shown['1_4']}" in page
    rates = {}
    for script in ("bert", "vit"):
        of = {"script": script, "setup": "1_1", "per_gpu_batch": 16}
        loss = lost(four, {**of, "lr": 2e-5}, {**of, "lr": 0.0002})
        rates[script] = in_words(loss, "points" if script == "bert" else "", ".1f")
    assert f"one process loses {rates['bert']} with BERT and {rates['vit']} with ViT" in page


def test_wall_time_with_its_measuring_is_that_of_the_records(root: Path) -> None:
    """As it was defined when the hypotheses were written."""
    pages = [(root / name).read_text() for name in ("README.md", "docs/strategies.md")]
    front, page = (" ".join(text.split()) for text in pages)
    times: dict[str, dict[Hashable, float]] = {}
    for group in read_sweep(root / "outputs/published/exchange/sweeps/slow_link_ways-tiny").groups:
        name = f"{group.label['strategy']} {group.setting('compress')}"
        times[name] = {
            run.seed: next(row["wall_s"] for row in run.epochs if row["accuracy"] >= 0.9)
            for run in group.finished
        }
    base = times.pop("ddp none")
    found = {name: in_words(ratio(of_way, base)) for name, of_way in times.items()}
    assert all(len(of_way) == 10 for of_way in (base, *times.values()))
    ways = {
        group.label["strategy"]: group
        for group in read_sweep(
            root / "outputs/published/exchange/sweeps/slow_link_ways-tiny"
        ).groups
        if group.setting("compress") in (None, "none")
    }
    local, diloco, ddp = (ways[name] for name in ("local_sgd", "diloco", "ddp"))
    slower = measured_against(local, ddp, "tta_wall_s", TARGET)
    assert f"Local SGD's {in_words(slower)} is within DiLoCo's noise." in front
    assert measured_against(local, diloco, "tta_wall_s", TARGET).judged(1.0) == Noise.WITHIN
    value, ends = found["diloco none"].split(" ", 1)
    assert f"with it, DiLoCo takes {value} {ends} of DDP's." in front
    assert f"local SGD {found['local_sgd none']} and DiLoCo {found['diloco none']}." in page


def test_the_words_about_pictures_are_those_of_the_records(root: Path) -> None:
    page = " ".join((root / "docs" / "reading.md").read_text().split())
    file = root / "experiments" / "pictures_forest.jsonl"
    forest: dict[Hashable, float] = {
        row["seed"]: row["accuracy"] for row in map(json.loads, file.read_text().splitlines())
    }
    groups = one, half, same = read_sweep(root / "outputs/published/sweeps/pictures").groups
    (time,) = (r.estimate for r in compare(one, half).rows if r.measure.name == "epoch_time_s")
    assert time is not None and time.paired and time.n == 3
    assert f"take {time.value:.2f} of its training time ({time.low:.2f} to {time.high:.2f})" in page
    lower = in_words(difference(accuracies(one), accuracies(same)).scaled(100), "points", ".1f")
    assert "is neither shown nor excluded: it is " in page
    number, _, ends = lower.partition(" (")
    low, high = ends.rstrip(")").split(" to ")
    assert f"{number} ({float(low):+.1f} to {float(high):+.1f}), of another training" in page
    assert float(low) < 2 < float(high)
    faster = next(r.estimate for r in compare(half, same).rows if r.measure.name == RATE)
    assert faster is not None and (faster.low or 0) < 1
    assert f"is open, too: {in_words(faster, 'times')}" in page
    gained = [difference(accuracies(group), forest).scaled(100) for group in groups]
    *first, last = (in_words(gain, form=".1f") for gain in gained)
    assert f"three are above the forest by {', '.join(first)} and {last} points" in page
    assert [(gain.low or 0) > 15 for gain in gained] == [True, True, False]
    assert "15 were expected of each, which is shown of the first two." in page


def accuracies(group: Group) -> Repeats:
    return group.repeats(ACCURACY)


def in_words(estimate: Estimate, unit: str = "", form: str = ".2f") -> str:
    """A value with its unit and its interval."""
    value, low, high = (f"{end:{form}}" for end in (estimate.value, estimate.low, estimate.high))
    return f"{' '.join(filter(None, (value, unit)))} ({low} to {high})"


def test_the_words_about_sharding_are_those_of_the_records(root: Path) -> None:
    page = " ".join((root / "docs" / "strategies.md").read_text().split())
    for place in ("outputs/published", "records/xeon"):
        sweep = root / place / "sweeps" / "fsdp"
        ddp, fsdp = (
            read_group("A", f"{sweep}:strategy={strategy},precision=fp32", None)
            for strategy in ("ddp", "fsdp")
        )
        losses = zip(ddp.values("train_loss"), fsdp.values("train_loss"), strict=True)
        assert max(abs(one - other) for one, other in losses) < 1e-6
    assert "In fp32 the losses of `ddp` and `fsdp` differ by less than 0.000001" in page


def test_the_words_about_learning_rates_are_those_of_the_records(root: Path) -> None:
    page = " ".join((root / "docs" / "strategies.md").read_text().split())
    ways: dict[str, dict[float, Group]] = {}
    for group in read_sweep(root / "records/rates/sweeps/slow_link_rates-tiny").groups:
        ways.setdefault(group.label["strategy"], {})[group.label["lr"]] = group
    assert {len(rates) for rates in ways.values()} == {4} and len(ways) == 3
    ddp = ways["ddp"]
    assert all(len(group.finished) == 5 for rates in ways.values() for group in rates.values())
    epochs = {lr: statistics.fmean(group.values("tta_epochs")) for lr, group in ddp.items()}
    least = min(epochs.values())
    assert [lr for lr, value in epochs.items() if value == least] == [0.0007, 0.0015]
    assert f"the fewest epochs to the target, {least:.1f} in the mean, with 0.0015" in page
    assert max(ddp, key=lambda lr: ddp[lr].mean(ACCURACY) or 0.0) == 0.0015
    for strategy in ("local_sgd", "diloco"):
        usual = ways[strategy].pop(0.0015)
        for group in ways[strategy].values():
            gain = difference(accuracies(group), accuracies(usual))
            assert (gain.low or -1) <= 0
            faster = measured_against(group, usual, "tta_train_s", TARGET)
            assert faster.value is not None and (faster.high or math.inf) >= 1


def test_the_words_about_a_rate_for_each_batch_are_those_of_the_records(root: Path) -> None:
    page = " ".join((root / "docs" / "reading.md").read_text().split())
    groups = {
        (group.label["per_gpu_batch"], group.label["lr"]): group
        for group in read_sweep(root / "records/rates/sweeps/news_learning_rate").groups
    }
    assert sum(len(group.finished) for group in groups.values()) == 80 and len(groups) == 16
    best = {
        batch: max((lr for size, lr in groups if size == batch),
                   key=lambda lr: groups[batch, lr].mean(ACCURACY) or 0.0)
        for batch in (8, 16, 32, 64)
    }  # fmt: skip
    assert best == {8: 0.0002, 16: 0.0002, 32: 0.0004, 64: 0.0008}
    higher = difference(accuracies(groups[64, 0.0008]), accuracies(groups[64, 0.0004]))
    assert higher.value is not None and higher.low is not None and higher.high is not None
    value, low, high = (
        f"{end:{form}}" for end, form in zip(
            (higher.value * 100, higher.low * 100, higher.high * 100), (".1f", "+.1f", "+.1f"),
            strict=True,
        )
    )  # fmt: skip
    assert f"by {value} points ({low} to {high}), within the noise" in page
    used = {
        group.fact("effective_batch"): group.label["lr"]
        for group in read_sweep(root / "outputs/published/sweeps/news").groups
    }
    assert used == {8: 0.0002, 32: 0.0004, 64: 0.0004}
    for batch, lr in best.items():
        others = (group for (size, rate), group in groups.items() if size == batch and rate != lr)
        leads = [difference(accuracies(groups[batch, lr]), accuracies(each)) for each in others]
        assert any((lead.low or -1) <= 0 for lead in leads)


def test_the_words_about_equal_updates_are_those_of_the_records(root: Path) -> None:
    page = " ".join((root / "docs" / "reading.md").read_text().split())
    base, samples, updates = read_sweep(root / "records/rates/sweeps/news_updates").groups
    texts = []
    for group in (samples, updates):
        gain = difference(accuracies(group), accuracies(base)).scaled(100)
        assert gain.paired and gain.n == 5
        ends = [f"{end:+.1f}" for end in (gain.value, gain.low, gain.high) if end is not None]
        texts.append((ends, gain))
    (lost, gain), (gained, more) = texts
    assert f"differs by {lost[0]} points ({lost[1]} to {lost[2]}) with equal samples" in page
    assert f"and by {gained[0]} ({gained[1]} to {gained[2]}) with equal updates" in page
    assert (gain.low or 0) < -1 < (gain.high or 0) and (more.low or 1) < 0.5 < (more.high or 0)
    assert "both are open" in page
