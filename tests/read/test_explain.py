"""What is planted in real runs is named as the main cause, and without it they are as fast."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import default_data_collator

from harness.core.records import read_json
from harness.core.records.checksums import vouched
from harness.read.explain import causes
from harness.read.explain.causes import bound, lost, of_run, with_spread
from harness.read.explain.context import run_context
from harness.read.explain.explain import (
    Explanation,
    _notes,
    _rate,
    explain,
    group_breakdown,
)
from harness.read.explain.sweep import explain_sweep
from harness.read.explain.time_breakdown import (
    COMMUNICATION,
    COMPUTE,
    DATA,
    PARTS,
    REST,
    STRAGGLERS,
    UNSEPARATED,
)
from harness.read.records.selection import read_group
from harness.read.records.sweeps import read_results
from harness.train.measure import telemetry
from harness.train.strategy import compress
from tests.support.explained import on_one as record_of_one
from tests.support.explained import written
from tests.support.own_time import go_before_others
from tests.support.ranks import ranks
from tests.support.records import Plan, lines, with_epochs, with_ranks
from tests.support.toys import Net, Points, ours
from tests.support.warm_python import Python

BATCH, UPDATES = 4, 10
# Runs whose speeds are compared have to be longer, and so has one in which nothing may stand out:
# on a busy machine an evaluation takes as long as a step, and now and then all stands still for
# half a second, which of ten steps is a quarter.
MANY_UPDATES = 30
A_SAMPLE_S = 0.03  # of computing, which is a wait: others on the machine do not make it longer
PLANTED_S = 0.12  # as long as the computing of a batch


class Waiting(Net):
    """Its computing takes a set time: for each sample, each batch, evaluation, and one rank."""

    def __init__(
        self, sample_s: float = A_SAMPLE_S, batch_s: float = 0.0, eval_s: float = 0.0,
        slow_rank: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sample_s, self.batch_s, self.eval_s = sample_s, batch_s, eval_s
        self.slow_rank = slow_rank

    def forward(self, x: torch.Tensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        slow = dist.is_initialized() and dist.get_rank() == self.slow_rank
        train_s = len(x) * self.sample_s + self.batch_s + PLANTED_S * slow
        time.sleep(train_s if self.training else len(x) * self.eval_s + self.batch_s)
        return super().forward(x, **inputs)


def slow_collate(samples: list[dict[str, Any]]) -> Any:
    time.sleep(PLANTED_S)
    return default_data_collator(samples)


def slow_hook(state, bucket):  # type: ignore[no-untyped-def] # torch takes no annotations in quotes
    time.sleep(PLANTED_S)
    return compress.default_hooks.bf16_compress_hook(state, bucket)


slow_hook.__qualname__ = "bf16_hook"  # the name by which DDP reports the hook that was requested
FEW = 8  # test samples, where evaluation is not what is tested


def trained(
    folder: str, name: str, net: Net, tests: int = FEW, *more: str, collate: Any = None,
    updates: int = UPDATES,
) -> None:  # fmt: skip
    telemetry.others_share = lambda nodes: 0.0  # its computing is a wait, which others do not slow
    train = Points(updates * BATCH * 2)
    trainer, run = ours(f"{folder}/{name}", net, train, Points(tests), *more, collate=collate)
    run.train(trainer)


def on_two(folder: str) -> None:
    """Ranks of torch's launcher, with gloo between them."""
    go_before_others()
    trained(folder, "healthy", Waiting(), updates=MANY_UPDATES)
    trained(folder, "loader", Waiting(), collate=slow_collate, updates=MANY_UPDATES)
    trained(folder, "rank", Waiting(slow_rank=1), updates=MANY_UPDATES)
    batch = Waiting(sample_s=0.0, batch_s=PLANTED_S)
    trained(folder, "batch", batch, 128, "--eval_batch=64", updates=MANY_UPDATES)
    trained(folder, "evaluation", Waiting(eval_s=0.12), 64, updates=MANY_UPDATES)
    compress.bf16_hook, before = slow_hook, compress.bf16_hook
    trained(folder, "exchange", Waiting(), FEW, "--compress=bf16", updates=MANY_UPDATES)
    compress.bf16_hook = before


def on_one(folder: str) -> None:
    go_before_others()
    trained(folder, "healthy", Waiting(), updates=MANY_UPDATES)
    large = f"--per_gpu_batch={2 * BATCH}", "--eval_batch=64"
    batch = Waiting(sample_s=0.0, batch_s=PLANTED_S)
    trained(folder, "batch_of_all", batch, 128, *large, updates=MANY_UPDATES)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    ranks(1, on_one, str(folder))
    ranks(2, on_two, str(folder))
    return folder


def explained(folder: Path, base: Path | None = None) -> Explanation:
    run = read_group("RUN", str(folder), None)
    return explain(run, None if base is None else read_group("BASELINE", str(base), None))


CASES = {
    "loader": DATA, "rank": causes.SLOW_RANK, "exchange": COMMUNICATION,
    "evaluation": causes.OUTSIDE, "batch": causes.BATCH,
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_the_planted_cause_is_the_largest_part(name: str, planted: Path) -> None:
    explanation = explained(planted / name / "bert" / "1_2")
    assert explanation.main == CASES[name]
    assert "No comparable run on one process" in explanation.sentences[1]
    kind = "Largest cost" if name == "batch" else "Largest part beside computing"
    assert explanation.sentences[2].startswith(f"{kind}: ")
    if name == "rank":
        assert (
            "rank 1 is slower" in explanation.sentences[2]
            and "for computing" in explanation.sentences[2]
        )


@pytest.mark.process
@pytest.mark.parametrize("name", ["loader", "rank", "exchange", "evaluation"])
def test_it_is_the_main_cause_against_a_run_without_it(name: str, planted: Path) -> None:
    explanation = explained(planted / name / "bert" / "1_2", planted / "healthy" / "bert" / "1_1")
    assert explanation.main == CASES[name]
    assert explanation.sentences[3].startswith("Main cause: ")


@pytest.mark.process
def test_a_batch_is_small_beside_that_of_one_process(planted: Path) -> None:
    base = planted / "batch_of_all" / "bert" / "1_1"
    explanation = explained(planted / "batch" / "bert" / "1_2", base)
    assert explanation.main == causes.BATCH
    run, one = (group_breakdown(read_group("x", str(p), None)) for p in (planted / "batch", base))
    # As long for half as many samples: half of a step is lost, of ten seconds a batch.
    assert lost(run, one)[COMPUTE] == pytest.approx(PLANTED_S / 2, rel=0.25)


@pytest.mark.process
def test_a_report_says_the_same_of_the_group_that_uses_its_devices_least(planted: Path) -> None:
    """Of one that cannot be explained the reason."""
    healthy, slow = planted / "healthy", planted / "rank"
    (item,) = explain_sweep(read_results(healthy))
    assert item.below == explained(healthy / "bert" / "1_2").sentences
    (item,) = explain_sweep(read_results(slow))
    assert item.below == explained(slow / "bert" / "1_2").sentences
    assert any("Largest part beside computing: rank 1 is slower" in text for text in item.below)


@pytest.mark.process
def test_a_report_explains_each_set_up_once(planted: Path) -> None:
    """And each strategy: one run has --compress. Those of one process are not explained here."""
    items = explain_sweep(read_results(planted))
    assert len(items) == 2 and all("on 2 processes" in item.below[0] for item in items)
    (alone,) = explain_sweep(read_results(planted / "batch_of_all"))
    assert "on 1 process" in alone.below[0]


def test_without_a_baseline_a_large_part_is_no_cause(tmp_path: Path) -> None:
    """Communication takes half of a step, also of one that is as fast as on one process."""
    path = written(tmp_path, row={"data_wait_share": 0.0})
    with_ranks(path, *[{"compute_s": 4.0, "comm_exposed_s": 4.0, "comm_wait_s": 0.0}] * 2)
    assert "Largest part beside computing: communication that" in explained(path).sentences[2]
    assert "Main cause" not in " ".join(explained(path).sentences)
    base = record_of_one(tmp_path, 16, timed_s=4.0)
    assert explained(path, base).sentences[3].startswith("Main cause: communication that")


def test_what_samples_per_s_do_not_count_is_no_main_cause_of_losing_them(tmp_path: Path) -> None:
    """Evaluation takes twenty times as long as the communication that slows the steps."""
    path = written(tmp_path, row={"data_wait_share": 0.0, "eval_time_s": 80.0})
    with_ranks(path, *[{"compute_s": 4.0, "comm_exposed_s": 4.0, "comm_wait_s": 0.0}] * 2)
    base = record_of_one(tmp_path, 16, timed_s=4.0)
    told = [sentence for sentence in explained(path, base).sentences if "cause" in sentence]
    assert told[0].startswith("Main cause: communication that")


def test_a_run_beside_it_without_timed_steps_is_passed_over(tmp_path: Path) -> None:
    run = record_of_one(tmp_path, 8)
    alone = explained(run).sentences
    beside = record_of_one(tmp_path, 16)
    row = json.loads((beside / "epochs.jsonl").read_text())
    with_epochs(beside, [{**row, "timed_steps": 0, "timed_s": 0.0}])
    assert explained(run).sentences == alone


def test_a_report_says_why_a_group_is_not_explained(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    plan.run(setup="1_2")
    (item,) = explain_sweep(read_results(plan.write()))
    assert "has no timed steps" in item.below[0]


@pytest.mark.process
def test_of_a_healthy_run_nothing_stands_out(planted: Path) -> None:
    """The run of one process beside it is found."""
    explanation = explained(planted / "healthy" / "bert" / "1_2")
    text = " ".join(explanation.sentences)
    assert explanation.main is None
    assert "found beside it" in text
    assert "Nothing stands out" in text and "Main cause" not in text


@pytest.mark.process
def test_other_programs_that_slow_every_part_are_named(planted: Path, tmp_path: Path) -> None:
    root = shutil.copytree(planted / "healthy", tmp_path / "beside")
    (file,) = (root / "bert" / "1_2").glob("*/epochs.jsonl")
    rows = [vouched(json.loads(line) | {"others_cpu_share": 0.6}) for line in file.open()]
    lines(file, rows)
    text = " ".join(explained(root / "bert" / "1_2").sentences)
    assert "Other programs used 60 % of the cores and may have slowed every part." in text
    assert text.index("Other programs") < text.index("Nothing stands out")
    lines(file, [vouched(row | {"others_cpu_share": 0.04}) for row in rows])
    environment = file.parent / "environment.json"
    content = json.loads(environment.read_text()) | {"launch": {"cpu_busy_share": 0.69}}
    environment.write_text(json.dumps(content))
    text = " ".join(explained(root / "bert" / "1_2").sentences)
    assert "Other programs used 69 % of the cores before it began and may have slowed" in text
    quiet = " ".join(explained(planted / "healthy" / "bert" / "1_2").sentences)
    assert "Other programs" not in quiet


def promises(folder: Path) -> dict[str, tuple[float, float]]:
    """Of what was planted: the promised samples/s over those of the healthy run, and the gain."""
    healthy = group_breakdown(read_group("x", str(folder / "healthy" / "bert" / "1_2"), None))
    found = {}
    for name in ("loader", "rank", "exchange"):
        side = read_group("x", str(folder / name), None)
        account = group_breakdown(side)
        (cause, *_) = of_run(account, run_context(side, None))
        rate, gain = bound(account, cause)
        found[name] = rate / (healthy.rate.mean or math.nan), gain
    return found


@pytest.mark.process
def test_what_one_bound_promises_is_what_the_healthy_run_does(
    planted: Path, tmp_path: Path
) -> None:
    """Without what was planted a run is as fast as the one that it was planted in. Where another
    program slows one of the two, all are measured again.
    """
    left = {"loader", "rank", "exchange"}
    for folder in (planted, tmp_path / "again", tmp_path / "once more"):
        if folder != planted:
            ranks(2, on_two, str(folder))
        found = promises(folder)
        assert all(gain > 0.5 for _, gain in found.values())
        left -= {name for name, (ratio, _) in found.items() if ratio == pytest.approx(1, rel=0.2)}
        if not left:
            break
    assert not left, found


@pytest.mark.process
def test_all_of_an_update_is_one_part_or_another(planted: Path) -> None:
    for folder in planted.glob("*/bert/*/bert-*"):
        account = group_breakdown(read_group("x", str(folder), None))
        summary = read_json(folder / "summary.json")
        assert summary is not None and set(account.parts) == set(PARTS)
        whole_s = account.updates * sum(value or 0.0 for value in account.parts.values())
        # Where the first steps were no slower than the others, these stand for them.
        assert whole_s == pytest.approx(summary["wall_s"], rel=0.02)
        of_step = [account.parts[n] for n in (COMPUTE, DATA, COMMUNICATION, STRAGGLERS)]
        assert None not in of_step and account.parts[UNSEPARATED] == 0
        assert sum(of_step) == pytest.approx(account.step_s, rel=0.05)  # type: ignore[arg-type]


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_a_far_link_is_the_main_cause(tmp_path: Path) -> None:
    """Two emulated nodes and torchrun.

    The link is so far that its round trips cost more than a busy machine's other delays: without
    other programs an update computes for some 10 ms.
    """
    nodes = [sys.executable, "-m", "harness", "nodes", "2", "--link", "100ms", "--", "torchrun"]
    small = ["--tiny", "--train_size", "960", "--test_size", "32", "--epochs", "1", "--b", "16"]
    command = [*nodes, "vit.py", *small, "--save", "none", "--output_dir", str(tmp_path)]
    process = Python(command)
    printed, error = process.communicate(timeout=150)
    assert process.returncode == 0, printed + error
    explanation = explained(tmp_path / "vit" / "2_1")
    assert explanation.main == COMMUNICATION
    assert (
        "a round trip of" in explanation.sentences[2] and "The delay is" in explanation.sentences[2]
    )


@pytest.mark.parametrize(("gain", "said"), [(1.42, True), (1.05, False), (None, False)])
def test_bf16_is_advised_where_it_was_tried_and_pays(gain: float | None, said: bool) -> None:
    calibration = {"bf16_gain": gain}
    run: Any = SimpleNamespace(
        calibration=calibration, measures={}, broken_lines={}, other_batches=(), was_resumed=False
    )
    group: Any = SimpleNamespace(finished=[run], runs=[run])
    breakdown: Any = SimpleNamespace(parts={REST: None})
    text = " ".join(_notes(group, breakdown))
    assert ("1.4 times as fast with `--precision bf16`" in text) == said


@pytest.mark.parametrize(
    ("mean", "sd", "said"),
    [
        (570.2, 644.4, "570 ± 640"), (250.0, 2.5, "250.0 ± 2.5"), (12345.6, 151.0, "12,350 ± 150"),
        (0.5, 0.0123, "0.500 ± 0.012"), (5.0, 9.96, "5 ± 10"), (40.0, 0.0, "40 ± 0"),
        (5.0, 0.0001, "5.00000 ± 0.00010"),
    ],
)  # fmt: skip
def test_a_spread_has_two_digits(mean: float, sd: float, said: str) -> None:
    assert with_spread(mean, sd) == said


@pytest.mark.parametrize(
    ("sd", "said"), [(2.5, "250.0 ± 2.5 "), (1.4e-13, "250 ± 0 "), (0.0, "250 ± 0 ")]
)
def test_equal_rates_have_no_spread(sd: float, said: str) -> None:
    breakdown: Any = SimpleNamespace(rate=SimpleNamespace(mean=250.0, sd=sd, n=2))
    assert _rate(breakdown).startswith(f"{said}samples/s")
