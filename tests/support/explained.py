"""Records of one epoch that explain reads: of two processes, and of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.read.explain.context import RunContext
from harness.read.explain.time_breakdown import IN_STEP, PARTS, TimeBreakdown
from harness.read.statistics import spread
from tests.support.paired import DATA, pair
from tests.support.paired import written as record_of
from tests.support.records import with_epochs

ROW = {
    "epoch": 1.0, "timed_steps": 4, "timed_s": 8.0, "timed_samples": 64, "epoch_time_s": 12.0,
    "data_wait_share": 0.25, "eval_samples": 16, "eval_time_s": 2.0,
}  # fmt: skip
TIMES = {"updates": 5, "wall_s": 20.0, "eval_time_s": 2.0, "save_time_s": 1.0}


def written(folder: Path, *flags: str, row: dict[str, Any] | None = None, **more: Any) -> Path:
    """A record of two processes without rows of their ranks, with one epoch."""
    path = pair(folder, 1, *flags, **{**TIMES, **more})
    return with_epochs(path, [{**ROW, **(row or {})}])


FACTS = {
    "machine": "a-cpux2", "gpus": [], "effective_batch": 32, "threads": 1,
    "observed": {"device": "cpu"}, "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
}  # fmt: skip


def on_one(
    root: Path, batch: int, timed_s: float = 8.0, seed: int = 1, more: Sequence[str] = (),
    **facts: Any,
) -> Path:  # fmt: skip
    """A run of one process, with 64 timed samples. more: words of its command line."""
    path = root / "bert" / "1_1" / f"b{batch}_s{seed}"
    known = {**FACTS, "data": DATA, "effective_batch": batch, **facts}
    words = ["--per_gpu_batch", str(batch), "--seed", str(seed), "--setup", "1_1", *more]
    record_of(path, "bert", words, (1, 1), known, {**TIMES, "samples": 2000})
    return with_epochs(path, [{**ROW, "timed_s": timed_s}])


CONTEXT = RunContext(
    strategy="ddp", nodes=1, processes=2, micro_batch=8, baseline_micro_batch=8, eval_batch=64,
    on_cpu=True, emulated=False, cpu_percent=None,
    others_cores=None, throttled=None, payload_bytes=None, rtt_ms=None, bandwidth_mbit=None,
    requested_link=None, compress="none", padding_setting=None,
)  # fmt: skip


def breakdown(
    devices: int = 2, batch: int = 8, parts: dict[str, float | None] | None = None, **more: Any
) -> TimeBreakdown:
    """In powers of two, whose sums and shares are exact."""
    whole: dict[str, float | None] = {**dict.fromkeys(PARTS, 0.0), **(parts or {})}
    step_s = sum(whole[name] or 0.0 for name in IN_STEP)
    result = TimeBreakdown(
        devices=devices, samples=float(devices * batch), updates=16.0,
        rate=spread([devices * batch / step_s]), step_s=step_s, parts=whole,
        spreads=dict.fromkeys(PARTS), padding=None, evaluation_s=None, slowest=None,
    )  # fmt: skip
    return replace(result, **more)
