"""What a training step costs beside a hand-written loop that does the same work.

    OMP_NUM_THREADS=1 python benchmarks/step.py --cases bert-mini --rounds 6
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 benchmarks/step.py

Two arms take turns in the same processes, round by round, from the same weights and with the same
samples in the same order:

    ours    ExactTrainer + LogCallback + Console, as bert.py and vit.py put them together
    bare    forward, backward, clipping, optimizer, schedule; batches ready in memory; torch's
            own DDP where there are several processes

Both must end with the same loss, without dropout, or the comparison is refused.
"""

# ruff: noqa: E402 - the checkout is put on the path first, so that this runs from any folder.

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from harness.core.command_line import parse
from harness.train.data import models
from harness.train.data.images import load_images
from harness.train.data.samples import Data, EpochOrder
from harness.train.data.texts import load_texts
from harness.train.loop.progress import Console
from harness.train.loop.trainer import ExactTrainer
from harness.train.measure.environment import environment
from harness.train.measure.metrics import BatchMetrics
from harness.train.run.lifecycle import Lifecycle
from harness.train.run.start import start
from logcallback import LogCallback

LEFT_OUT = 5  # first steps of a round
CASES = {
    "bert-nano": "bert --train_size 2560",
    "vit-nano": "vit --train_size 1280",
    "bert-mini": "bert --model bert-mini --b 16 --train_size 384",
    "vit-tiny": "vit --model vit-tiny-patch32 --image_size 224 --b 8 --train_size 192",
}


class Marks(TrainerCallback):
    """Last of the callbacks, so that what the others do is in the step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def opened(case: str, folder: str) -> tuple[Lifecycle, Data, nn.Module]:
    """A run with the weights that both arms begin with."""
    script, *flags = case.split()
    fixed = ["--tiny", "--epochs", "1", "--test_size", "8", "--save", "none", "--dropout", "0"]
    run = start(parse(script, [*flags, *fixed, "--rerun", "--output_dir", folder]))
    assert run is not None
    settings, load = run.context.settings, load_texts if script == "bert" else load_images
    data = load(settings, run.context.data_parallel_size)
    run.resume(data.facts)
    torch.manual_seed(settings.seed)
    return run, data, models.build(settings, data.labels)


def close(run: Lifecycle) -> None:
    run.unlock()
    if run.context.sampler is not None:
        run.context.sampler.close()


def ours(case: str, folder: str) -> tuple[list[float], float]:
    """When its steps ended, and the mean loss of the epoch."""
    run, data, model = opened(case, folder)
    marks, context = Marks(), run.context
    recorder = LogCallback(context)
    trainer = ExactTrainer(
        context=context, model=model, args=context.args,
        train_dataset=data.train, eval_dataset=data.test,
        data_collator=data.collate, to_device=data.to_device, processing_class=data.processing,
        compute_metrics=BatchMetrics(len(data.labels)),
        callbacks=[recorder, Console(recorder, context), marks],
    )  # fmt: skip
    trainer.train()
    close(run)
    logged = [log for log in trainer.state.log_history if "epoch_train_loss" in log]
    return marks.ends, logged[-1]["epoch_train_loss"]


def bare(case: str, folder: str) -> tuple[list[float], float]:
    """The same by hand."""
    run, data, model = opened(case, folder)
    close(run)
    context = run.context
    args, rank, world = context.args, context.world.rank, context.world.size
    train: Any = data.train
    order, size = list(EpochOrder(len(train), context.settings.seed)), args.train_batch_size
    batches = [
        data.collate(train.__getitems__(order[n : n + size]))
        for n in range(rank * size, len(order), world * size)
    ]
    model.to(args.device).train()
    many = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    wrapped = DistributedDataParallel(model, **many) if world > 1 else model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0.0, fused=True)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / len(batches))
    ends, losses = [], []
    for batch in batches:
        inputs = data.to_device({k: v.to(args.device) for k, v in batch.items()})
        loss = wrapped(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        optimizer.step()
        falling.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        ends.append(time.perf_counter())
    mean = torch.stack(losses).double().mean()
    if world > 1:
        dist.all_reduce(mean)
    return ends, float(mean) / world


def measure(case: str, rounds: int) -> list[dict[str, float]]:
    """Seconds of a step by arm, once a round, after a round that is dropped."""
    found = []
    for number in range(rounds + 1):
        step_s, losses = {}, {}
        for arm in ((ours, bare), (bare, ours))[number % 2]:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                ends, losses[arm.__name__] = arm(case, folder)
            kept = ends[LEFT_OUT:]
            step_s[arm.__name__] = (kept[-1] - kept[0]) / (len(kept) - 1)
        if abs(losses["ours"] / losses["bare"] - 1) > 1e-5:
            raise SystemExit(f"{case}: the arms do not do the same work: losses {losses}")
        found.append(step_s)
    return found[1:]


def table(record: dict[str, Any]) -> str:
    facts = record["environment"]
    lines = [
        f"{facts['machine']}, {record['processes']} process(es) of {facts['threads']} thread(s), "
        f"torch {facts['versions']['torch']}; median of {record['rounds']} rounds\n",
        "| model | bare ms a step | ours ms | speed of the bare loop that ours reaches |",
        "|---|---|---|---|",
    ]
    for case, rounds in record["cases"].items():
        by_hand, with_us = (
            1000 * statistics.median(r[arm] for r in rounds) for arm in ("bare", "ours")
        )
        reached = sorted(r["bare"] / r["ours"] for r in rounds)
        spread = f"{statistics.median(reached):.3f} ({reached[0]:.3f} to {reached[-1]:.3f})"
        lines.append(f"| {case} | {by_hand:.2f} | {with_us:.2f} | {spread} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of both arms (6)")
    parser.add_argument("--quick", action="store_true", help="one small round: does it run?")
    parser.add_argument("--out", type=Path, help="JSON record; the table goes beside it as .md")
    options = parser.parse_args(argv)
    chosen, rounds = {name: CASES[name] for name in options.cases.split(",")}, options.rounds
    if options.quick:
        chosen, rounds = {"vit-nano": "vit --train_size 640"}, 1
    cases = {name: measure(case, rounds) for name, case in chosen.items()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        processes = dist.get_world_size() if dist.is_initialized() else 1
        record = {
            "environment": environment(), "processes": processes, "rounds": rounds, "cases": cases,
        }  # fmt: skip
        print(table(record))
        if options.out is not None:
            options.out.write_text(json.dumps(record, indent=2) + "\n")
            options.out.with_suffix(".md").write_text(table(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
