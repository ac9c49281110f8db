"""What the pages say in words of published sweeps is what their records give."""

from __future__ import annotations

import statistics
from pathlib import Path

from harness.read.compare.compare import compare
from harness.read.records.groups import Group
from harness.read.records.selection import read_group


def test_the_words_about_news_are_those_of_the_records(root: Path) -> None:
    page = " ".join((root / "docs" / "reading.md").read_text().split())
    published = root / "outputs" / "published"

    def side(selected: str) -> Group:
        return read_group("A", f"{published}/sweeps/news:{selected}", None)

    times = []
    for each, whole in ((16, 32), (4, 8)):
        both = side(f"setup=1_2,per_gpu_batch={each}")
        found = compare(side(f"setup=1_1,per_gpu_batch={whole}"), both)
        rows = {row.measure.name: row for row in found.rows}
        rate, time = rows["train_samples_per_s"], rows["epoch_time_s"]
        points = rows["accuracy"].estimate
        assert points is not None and rate.estimate is not None and time.estimate is not None
        assert rate.estimate.paired and rate.estimate.n == points.n == 3
        value, low, high = (rate.estimate.value, rate.estimate.low, rate.estimate.high)
        _, _, answer = page.partition(
            f"- setup 1_2, batch per GPU {each} against setup 1_1, batch per GPU {whole}: "
        )
        assert answer.startswith(
            f"- samples/s: {value:.2f} times as many ({low:.2f} to {high:.2f})"
        )
        value, low, high = (100 * (end or 0.0) for end in (points.value, points.low, points.high))
        text = f"accuracy: {value:+.1f} points ({low:+.1f} to {high:+.1f})"
        assert text in answer.partition(" runs each")[0]
        times.append(f"{time.estimate.value:.2f} with {each}")
        sent = both.values("payload_mb_per_update")
        assert {round(mb / 2) for mb in sent} == {91} and "hands over 91 MB" in page
    assert "it is " + " each, and ".join(times) in page
    words = read_group("A", str(published / "words" / "news_words.jsonl.gz"), None)
    accuracy = statistics.fmean(words.values("accuracy"))
    assert len(words.finished) == 5 and f"an accuracy of {accuracy:.4f}." in page


def test_the_words_about_sharding_are_those_of_the_records(root: Path) -> None:
    page = " ".join((root / "docs" / "strategies.md").read_text().split())
    sweep = root / "outputs" / "published" / "sweeps" / "fsdp"
    ddp, fsdp = (
        read_group("A", f"{sweep}:strategy={strategy},precision=fp32", None)
        for strategy in ("ddp", "fsdp")
    )
    (time,) = [r for r in compare(ddp, fsdp).rows if r.measure.name == "epoch_time_s"]
    assert time.estimate is not None and time.estimate.paired and time.estimate.n == 5
    value, low, high = (time.estimate.value, time.estimate.low, time.estimate.high)
    assert f"`fsdp` takes {value:.2f} times ({low:.2f} to {high:.2f}) the training time" in page
    losses = zip(ddp.values("train_loss"), fsdp.values("train_loss"), strict=True)
    assert max(abs(one - other) for one, other in losses) < 1e-6
    assert "In fp32 their losses differ by less than 0.000001" in page
