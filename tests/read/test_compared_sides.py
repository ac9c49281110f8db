"""What the runs of a side may differ by among themselves: it is told, or nothing is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.read.compare.critical_batch import fit
from tests.support.paired import Verb, pair, pairs
from tests.support.records import timed_epochs, with_epochs


@pytest.fixture
def compared(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("compare", capsys)


def calibrated(fp32: float, bf16: float | None = None) -> dict[str, Any]:
    known = {"fp32_tflops": fp32, "bf16_tflops": bf16, "threads": 1}
    return {"cpu_calibration": known, "observed": {"device": "cpu"}}


def test_seeds_that_were_measured_twice_are_not_paired(tmp_path: Path, compared: Verb) -> None:
    """Nothing tells which of both is whose partner: the order of their folders did."""
    for rate in (1000.0, 500.0):
        pairs(tmp_path / "a", [0.7, 0.8, 0.9], rate=rate)
    other = pairs(tmp_path / "b", [0.7, 0.8, 0.9], rate=1500.0)
    text = compared.in_one_line(tmp_path / "a", other)
    # The geometric mean of both rates is 707.1; each half of the runs lies ln(2) / 2 from it.
    assert "samples/s: B has 2.121 times that of A, 95 % interval 1.424 to 3.160, 6 and 3" in text
    assert "values, not paired" in text
    assert "accuracy: B is equal to A, 3 seeds paired by seed" in text


def test_processors_that_were_unlike_within_a_side_are_noted(
    tmp_path: Path, compared: Verb
) -> None:
    one = pairs(tmp_path / "a", [0.7, 0.8, 0.9], environment=calibrated(0.08))
    other = pairs(tmp_path / "b", [0.7, 0.8], environment=calibrated(0.08))
    pair(other, 3, environment=calibrated(0.04), rate=50.0)
    text = compared.in_one_line(one, other)
    assert "speed: comparable" in text
    assert "note: before these runs matrix products ran at 0.04 to 0.08 TFLOP/s in fp32" in text
    assert "matrix products ran" not in compared.in_one_line(one, one)


def test_processors_are_compared_in_the_number_formats_of_both_sides(
    tmp_path: Path, compared: Verb
) -> None:
    """Where formats are the question, no run has trained in both."""
    one = pairs(tmp_path / "a", [0.7, 0.8], environment=calibrated(0.3, 0.6))
    other = pairs(
        tmp_path / "b", [0.7, 0.8], "--precision", "bf16", environment=calibrated(0.1, 0.2)
    )
    text = compared.in_one_line(one, other, code=2)
    for number_format, ours, theirs in (("bf16", "0.6", "0.2"), ("fp32", "0.3", "0.1")):
        assert (
            f"processor: before training it did {ours} TFLOP/s in {number_format} for A and "
            f"{theirs} for B" in text
        )


def test_one_model_of_other_contents_is_another_training(tmp_path: Path, compared: Verb) -> None:
    def side(name: str, checksum: str, *flags: str, code: str = "c0") -> Path:
        inputs = {"model": {"files": 1, "bytes": 9, "checksum": checksum}, "code": code}
        return pairs(tmp_path / name, [0.7, 0.8], *flags, environment={"inputs": inputs})

    one, same = side("a", "m0"), side("same", "m0")
    assert "quality: comparable" in compared.in_one_line(one, same)
    text = compared.in_one_line(one, side("b", "m1"))
    assert "quality: not comparable model: " in text and "had 2 contents" in text
    assert "speed: comparable" in text
    # Two models are a question.
    other = side("c", "m1", "--model", "bert-micro")
    assert "quality: comparable" in compared.in_one_line(one, other)
    text = compared.in_one_line(one, side("d", "m0", code="c1"))
    assert text.count("note: code of this project: A has c0, B has c1") == 2


def test_a_tail_that_was_padded_otherwise_is_noted(tmp_path: Path, compared: Verb) -> None:
    for name, fed in (("a", 250), ("b", 256)):
        for seed in (1, 2):
            rows = [{**row, "fed_samples": fed} for row in timed_epochs(0.5, 0.9)]
            with_epochs(pair(tmp_path / name, seed, "--tail", "pad"), rows)
    text = compared.in_one_line(tmp_path / "a", tmp_path / "b")
    assert "quality: comparable note: samples fed per epoch: A has 250, B has 256 (--tail" in text
    assert "samples fed" not in compared.in_one_line(tmp_path / "a", tmp_path / "a")


@pytest.mark.parametrize(("split", "other", "noted"), [
    ((24, 1), (12, 2), None),  # 9 samples are one pass
    ((24, 1), (4, 6), "A has 33, B has 33, in the last update 1 as much as 4"),
    ((8, 3), (4, 6), "A has 33, in the last update 1 as much as 8, B has 33, in the last update"),
    ((3, 8), (1, 24), None),  # passes without a short one
])  # fmt: skip
def test_a_short_pass_of_a_padded_tail_is_noted(
    split: tuple[int, int], other: tuple[int, int], noted: str | None,
    tmp_path: Path, compared: Verb,
) -> None:  # fmt: skip
    """33 samples, in one process, in effective batches of 24."""
    for name, (batch, passes) in (("a", split), ("b", other)):
        for seed in (1, 2):
            sizes = ("--b", str(batch), "--grad_acc", str(passes), "--tail", "pad")
            rows = [{**row, "fed_samples": 33} for row in timed_epochs(0.5, 0.9)]
            run = pair(tmp_path / name, seed, *sizes, environment={"effective_batch": 24})
            with_epochs(run, rows)
    text = compared.in_one_line(tmp_path / "a", tmp_path / "b")
    assert ("samples fed per epoch" in text) == (noted is not None)
    assert "quality: comparable" in text and (noted or "") in text


def reading(train: int, evaluation: int | None) -> dict[str, Any]:
    reads = {"train_batch": train, "eval_batch": evaluation}
    return {"environment": {"observed": {"reads_padding": reads}}}


def test_padding_that_a_model_reads_is_told(tmp_path: Path, compared: Verb) -> None:
    base = pairs(tmp_path / "base", [0.7, 0.8], **reading(16, None))
    assert "padded together" not in compared.in_one_line(base, base)
    text = compared.in_one_line(base, pairs(tmp_path / "split", [0.5, 0.6], **reading(4, None)))
    note = "note: texts padded together: A has 16, B has 4 (scores depend on padding: it is another"
    assert f"quality: comparable {note}" in text and text.count("padded together") == 1
    aimed = ("--target", "accuracy=0.6")
    for name, other in (("fsdp", reading(16, 64)), ("large", reading(16, 9))):
        for seed in (1, 2):
            for folder, more in ((f"{name}-base", reading(16, None)), (name, other)):
                with_epochs(pair(tmp_path / folder, seed, **more), timed_epochs(0.5, 0.9))
        text = compared.in_one_line(tmp_path / f"{name}-base", tmp_path / name, *aimed)
        reason = "evaluation: bert-nano reads padding, and was evaluated on padded batches of"
        assert text.count(f"comparable {reason}") == 2, text
        assert "quality: not comparable" in text and "time to accuracy 0.6: not comparable" in text
    more = reading(16, 64)
    two, alone = pairs(tmp_path / "two", [0.7, 0.8], **more), reading(16, 64)
    alone["environment"]["processes_per_node"] = 1
    one = pairs(tmp_path / "one", [0.7, 0.8], **alone)
    text = compared.in_one_line(one, two)
    assert "evaluated on padded batches of 64 and padded batches of 64 in 2 processes" in text
    for side in (alone, more):  # two processes fill nothing up
        side["data"] = {"test_samples": 512}
    one = pairs(tmp_path / "one-512", [0.7, 0.8], **alone)
    two = pairs(tmp_path / "two-512", [0.7, 0.8], **more)
    assert "quality: comparable" in compared.in_one_line(one, two)
    # Two models are a question.
    more = reading(16, 64)
    other = pairs(tmp_path / "model", [0.7, 0.8], "--model", "bert-micro", **more)
    assert "quality: comparable" in compared.in_one_line(base, other)


def test_padding_that_a_model_reads_is_told_where_it_was_tried(
    tmp_path: Path, compared: Verb
) -> None:
    def side(name: str, reason: str, *flags: str, reads: tuple[int, int] | None = None) -> Path:
        observed: dict[str, Any] = {"padding": "batch", "padding_reason": reason}
        if reads is not None:
            observed["reads_padding"] = dict(zip(("train_batch", "eval_batch"), reads, strict=True))
        more: dict[str, Any] = {"environment": {"observed": observed}}
        return pairs(tmp_path / name, [0.7, 0.8], *flags, **more)

    reason = "the scores of xlnet depend on padding"
    one = side("one", reason, "--b", "32", reads=(32, 64))
    other = side("other", reason, "--b", "8", reads=(8, 64))
    assert "texts padded together: A has 32, B has 8" in compared.in_one_line(one, other)
    small = side("small", reason, "--b", "32", "--eval_batch", "1", reads=(32, 1))
    text = compared.in_one_line(one, small)
    assert "padded batches of 1 and padded batches of 64" in text
    unknown = f"whether {reason} cannot be tried: RuntimeError: x"
    one, other = side("u", unknown, "--b", "32"), side("v", unknown, "--b", "8")
    assert "padded together" not in compared.in_one_line(one, other)


def test_what_was_resumed_is_noted_beside_times_to_a_target(tmp_path: Path, compared: Verb) -> None:
    for name, attempts in (("a", 1), ("b", 2)):
        for seed in (1, 2):
            with_epochs(pair(tmp_path / name, seed, attempts=attempts), timed_epochs(0.5, 0.9))
    aimed = ("--target", "accuracy=0.8")
    text = compared.in_one_line(tmp_path / "a", tmp_path / "b", *aimed)
    assert "note: B: 2 runs stopped and continued: wall times include the interruption" in text
    assert "note: A: " not in text


def test_a_missed_target_changes_no_advice_on_seeds(tmp_path: Path, compared: Verb) -> None:
    for seed in (1, 2):
        with_epochs(pair(tmp_path / "a", seed), timed_epochs(0.5, 0.9))
        with_epochs(pair(tmp_path / "b", seed), timed_epochs(0.5, 0.9 if seed == 1 else 0.6))
    for target in ("accuracy=0.5", "accuracy=0.8"):
        text = compared.in_one_line(tmp_path / "a", tmp_path / "b", "--target", target)
        for side in "AB":
            assert f"{side} has 2 seeds: a wide interval; more: for seed in 3; do" in text
    assert "the target is reached by 2 of 2 runs of A and 1 of 2 of B" in text


def test_a_machine_can_be_selected(
    tmp_path: Path, compared: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pairs(tmp_path / "a", [0.7, 0.8])
    pair(folder, 3, environment={"machine": "b-cpux8"})
    said = Verb("explain", capsys).refused(folder)
    here, there = f"{folder}:machine=a-cpux2", f"{folder}:machine=b-cpux8"
    assert "machine (a-cpux2, b-cpux8)" in said and here in said
    text = compared.in_one_line(here, there)
    assert "(2 finished runs, seeds 1, 2, a-cpux2)" in text
    assert "speed: not comparable machine: A has a-cpux2, B has b-cpux8" in text


def test_without_any_spread_there_is_no_bound() -> None:
    """Errors of rounding gave one of 2e17 samples."""
    alike = fit({8.0: [1000.0, 1000.0], 16.0: [1000.0, 1000.0], 32.0: [1000.0, 1000.0]})
    assert alike.critical is None and alike.low is None and "by more than noise" in str(alike.why)
