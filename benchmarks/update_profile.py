"""Where the time of an update goes: on the host, and on the GPU if there is one.

    python -m benchmarks.update_profile bert --model bert-base --dataset embedded:english \
        --train_size all --max_length 128 --per_gpu_batch 32 --precision bf16
    python -m benchmarks.update_profile vit --rows 40    the longest 40 operators

Any flags of bert.py or vit.py, which give at least 26 updates an epoch. Sixteen updates are timed
without a profiler, then four with torch's, which slows the host down: its shares are to be read,
not its times. Of the stages on the host training_step holds three others. Weights are random.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from benchmarks.overhead import watch
from benchmarks.prepared import prepared
from benchmarks.results import markdown, parser_of
from harness.core.settings import UserError
from harness.train.loop.progress import Console
from logcallback import LogCallback

FIRST, TIMED, PROFILED = 6, 16, 4  # updates
LAST = FIRST + TIMED + PROFILED


class Profile(TrainerCallback):
    """Times of whole updates and of their stages on the host, then a profile."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.update_s = self.began_s = 0.0
        self.calls: dict[str, list[float]] = {}  # stage -> seconds of its calls on the host
        self.stages_s: dict[str, float] = {}
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self.profiler = profile(activities=kinds)

    def watch(self, owner: Any, name: str) -> None:
        self.calls[name] = watch(owner, name, cuda=False)

    def _now_s(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch(kwargs["optimizer"], "step")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == FIRST:
            for calls in self.calls.values():
                calls.clear()
            self.began_s = self._now_s()
        elif state.global_step == FIRST + TIMED:
            self.update_s = (self._now_s() - self.began_s) / TIMED
            self.stages_s = {name: sum(calls) for name, calls in self.calls.items()}
            self.profiler.start()
        elif state.global_step == LAST:
            self._now_s()
            self.profiler.stop()
            control.should_training_stop = True


def measure(script: str, flags: list[str], root: Path) -> Profile:
    folder = ["--tiny", "--rerun", "--output_dir", str(root)]
    run = prepared(script, [*flags, *folder, "--telemetry_hz", "0", "--comm_probe", "off"], {})
    found = Profile(run.context.args.device.type == "cuda")
    log = LogCallback(run.context)
    trainer = run.trainer(log, Console(log, run.context), found)
    for name in ("_prepare_inputs", "compute_loss", "training_step", "_clip_grad_norm"):
        found.watch(trainer, name)
    found.watch(trainer.accelerator, "backward")
    updates = len(trainer.get_train_dataloader()) // run.context.args.gradient_accumulation_steps
    if updates < LAST:
        raise UserError(
            f"an epoch has {updates} updates, and {LAST} are looked at: use more samples or a "
            "smaller --per_gpu_batch"
        )
    trainer.train()
    return found


def report(found: Profile, rows: int) -> str:
    averages = found.profiler.key_averages()
    stages = ", ".join(f"{name} {s / TIMED * 1e3:.2f}" for name, s in found.stages_s.items())
    lines = [f"an update: {found.update_s * 1e3:.2f} ms; on the host, in ms: {stages}"]
    if found.cuda:
        on_gpu = [e for e in found.profiler.events() if e.device_type.name == "CUDA"]
        kernels = [event for event in on_gpu if not event.is_user_annotation]  # and copies
        busy_ms = sum(e.device_time_total for e in kernels) / PROFILED / 1e3
        count = f"{len(kernels) / PROFILED:.0f} kernels and copies"
        lines.append(f"{count} an update, {busy_ms:.2f} ms on the GPU")
        lines.append(_longest(averages, "self_device_time_total", rows))
    lines.append(_longest(averages, "self_cpu_time_total", rows))
    return "\n\n".join(lines)


def _longest(averages: Any, column: str, rows: int) -> str:
    """A table of operators: their share of the time in this column, and their calls per update."""
    averages = [event for event in averages if event.device_type.name == "CPU"]
    whole = sum(getattr(event, column) for event in averages)
    ranked = sorted(averages, key=lambda event: -getattr(event, column))[:rows]
    shares = [getattr(event, column) / whole if whole else 0.0 for event in ranked]
    cells = [(event.key[:80], f"{share:.1%}", f"{event.count / PROFILED:.0f}")
            for event, share in zip(ranked, shares, strict=True)]  # fmt: skip
    return markdown("lrr", (column, "share", "calls an update"), cells, as_is=True)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("update_profile", __doc__, out=False)
    parser.add_argument("script", choices=("bert", "vit"))
    parser.add_argument("--rows", type=int, default=25, help="operators in each table (25)")
    options, flags = parser.parse_known_args(argv)
    try:
        with tempfile.TemporaryDirectory() as root:
            print(report(measure(options.script, flags, Path(root)), options.rows))
    except UserError as error:
        print(f"update_profile: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
