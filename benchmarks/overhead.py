"""What the apparatus costs per training step, against transformers' bare Trainer on the same work.

    python -m benchmarks.overhead --pairs 8 --out overhead.json

Four arms take turns in one process, step by step, from the same weights and with the same batches
in the same order; a pair is one such round, with new models:

    ours    ExactTrainer + LogCallback + Console, as bert.py and vit.py put them together
    bare    the Trainer with the same arguments: the honest baseline, held to at most 1 %
    stock   the Trainer with its own defaults for what ours switches off (NaN filter, item count)
    loop    no Trainer: a loop by hand on batches that are ready on the device

The Trainers evaluate alike, with the same metrics, and save nothing. Evaluation is in none of the
figures, nor is telemetry, whose process would disturb all arms alike. It is measured by itself:

    python -m benchmarks.overhead --telemetry 60        so many turns of 2 s with it and without
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer

from benchmarks import start_up, telemetry_cost
from benchmarks.bare_loop import Loop
from benchmarks.baton import Baton, Marks
from benchmarks.overhead_table import table
from benchmarks.prepared import Prepared, prepared
from benchmarks.results import parser_of, show
from harness.train.data.samples import EpochOrder
from harness.train.loop.progress import Console
from harness.train.measure.environment import environment
from logcallback import LogCallback

ARMS = ("ours", "bare", "stock", "loop")
TURN_S = 2.0  # two or three readings of the sampler
THREADS = int(os.environ.get("OMP_NUM_THREADS", 1))
# Script and flags. Nano is the worst case: a step takes a few milliseconds.
CASES = {
    "bert-nano": "bert --train_size 2560 --test_size 256 --epochs 2",
    "vit-nano": "vit --train_size 1280 --test_size 256 --epochs 3",
    "bert-mini": "bert --model bert-mini --b 16 --train_size 320 --test_size 64 --epochs 2",
    "vit-tiny": "vit --model vit-tiny-patch32 --image_size 224 --b 8 --train_size 160 "
    "--test_size 64 --epochs 2",
    "bert-base": "bert --model bert-base --train_size 1280 --test_size 128 --epochs 2 "
    "--precision bf16",
    "vit-base": "vit --model vit-base-patch16 --image_size 224 --train_size 1280 --test_size 128 "
    "--epochs 2 --precision bf16",
}
CPU_CASES, GPU_CASES = "bert-nano,vit-nano,bert-mini,vit-tiny", "bert-nano,vit-base"


class Bare(Trainer):
    """The Trainer, fed with the same samples as ours, in the same order and form."""

    seed = 0
    to_device: Any = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return EpochOrder(len(self.train_dataset), self.seed)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self.to_device(super()._prepare_inputs(inputs))


def watch(owner: Any, name: str, cuda: bool) -> list[float]:
    """Time each call of this method; return the list to which the seconds are added."""
    taken, method = [], getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        if cuda:
            torch.cuda.synchronize()  # do not count the wait for earlier steps
        began = time.perf_counter()
        result = method(*args, **kwargs)
        taken.append(time.perf_counter() - began)
        return result

    setattr(owner, name, timed)
    return taken


def begin(arm: str, case: str, root: Path, *more: str) -> Prepared:
    script, *flags = case.split()
    flags += ["--tiny", "--rerun", "--output_dir", str(root / arm), *more]
    flags += ["--padding", "batch"] if script == "bert" else []  # the layout of the other arms
    return prepared(script, flags, environ={})


def prepare(arm: str, case: str, root: Path, baton: Baton) -> Callable[[], dict[str, Any]]:
    """Prepare an arm; the returned function trains it in its turns and returns what it took."""
    run = begin(arm, case, root, "--telemetry_hz", "0")
    context, data, model = run
    cuda = context.args.device.type == "cuda"
    log, marks = LogCallback(context), Marks(arm, baton, cuda)
    writing = [watch(log, name, cuda) for name in ("on_epoch_end", "on_evaluate")]
    trainer: Any
    if arm == "loop":
        trainer = Loop(context, data, model, marks)
    elif arm == "ours":
        trainer = run.trainer(log, Console(log, context), marks)
    else:
        if arm == "stock":
            args = context.args
            args.logging_nan_inf_filter = args.average_tokens_across_devices = True
        else:
            model.accepts_loss_kwargs = False
        trainer = Bare(callbacks=[marks], **run.arguments)
        trainer.seed, trainer.to_device = context.settings.seed, data.to_device
        trainer.remove_callback(PrinterCallback)
    evaluating = watch(trainer, "evaluation_loop", cuda)

    def train() -> dict[str, Any]:
        torch.set_num_threads(THREADS)  # each thread has its own setting
        baton.take(arm)
        try:
            began = time.perf_counter()
            trainer.train()
            train_s = time.perf_counter() - began - marks.waited_s - sum(evaluating)
        finally:
            baton.give(arm, stay=False)
        times, thread = zip(*marks.steps, strict=True)
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        return {
            "steps": len(times), "step_s": statistics.median(times), "all_steps_s": sum(times),
            "step_thread_s": statistics.median(thread), "train_s": train_s,
            "first_step_s": marks.first_s - began, "eval_loss": losses[-1],
            "writing_s": [sum(both) for both in zip(*writing, strict=True)],
        }  # fmt: skip

    return train


def measure(case: str, pairs: int) -> list[dict[str, Any]]:
    """Results of all arms, once per pair; the first round is dropped as a warm-up."""
    found = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for pair in range(pairs + 1):
            # Every arm begins, and follows each of the others, equally often.
            turn = pair % len(ARMS)
            order = (ARMS[turn:] + ARMS[:turn])[:: -1 if pair % 2 else 1]
            baton = Baton(order)
            # Trainers last: each run resets accelerate's state, and a Trainer sets it again.
            made = sorted(order, key=lambda arm: arm != "loop")
            trains = {arm: prepare(arm, case, Path(folder), baton) for arm in made}
            with ThreadPoolExecutor(len(order)) as pool:
                rounds = [pool.submit(trains[arm]) for arm in order]
            found.append({arm: done.result() for arm, done in zip(order, rounds, strict=True)})
    return found[1:]


def measure_telemetry(case: str, turns: int, turn_s: float = TURN_S) -> dict[str, Any]:
    """Train ours once; its telemetry sampler sleeps in every other turn."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        more = ("--telemetry_hz", "1", "--max_steps", "1000000")
        run = begin("ours", case, Path(folder), *more)
        context = run.context
        assert context.sampler is not None
        sampler = telemetry_cost.Sampler(context.sampler)
        marks = telemetry_cost.Turns(sampler, turns, turn_s, context.args.device.type == "cuda")
        log = LogCallback(context)
        trainer = run.trainer(log, Console(log, context), marks)
        try:
            trainer.train()
        finally:
            context.sampler.close()
        return marks.found()


def main(argv: list[str] | None = None) -> int:
    cases = GPU_CASES if torch.cuda.is_available() else CPU_CASES
    parser = parser_of("overhead", __doc__)
    parser.add_argument("--pairs", type=int, default=8, help="rounds of each arm (8)")
    parser.add_argument("--cases", default=cases, help=f"of {', '.join(CASES)} ({cases})")
    parser.add_argument("--quick", action="store_true", help="one small pair: does it run?")
    parser.add_argument("--bar", action="store_true", help="with the progress bar of a terminal")
    parser.add_argument("--no_start_up", action="store_true", help="do not time the start")
    parser.add_argument("--telemetry", type=int, metavar="TURNS",
                        help="only telemetry against none, so many turns of each kind")  # fmt: skip
    options = parser.parse_args(argv)
    torch.set_num_threads(THREADS)
    chosen, pairs = {name: CASES[name] for name in options.cases.split(",")}, options.pairs
    if options.quick:
        chosen, pairs = {"vit-nano": "vit --train_size 640 --test_size 64 --epochs 2"}, 1
    if options.bar:
        os.environ["TTY_COMPATIBLE"] = "1"  # rich then draws as on a terminal
    record: dict[str, Any] = {"environment": environment(), "threads": THREADS}
    if options.telemetry:
        turn_s = 0.2 if options.quick else TURN_S
        record["telemetry"] = {
            name: measure_telemetry(case, options.telemetry, turn_s)
            for name, case in chosen.items()
        }
        text = telemetry_cost.table(record["telemetry"], THREADS)
    else:
        scripts = () if options.quick or options.no_start_up else ("bert", "vit")
        record |= {
            "pairs": pairs, "bar": options.bar,
            "cases": {name: measure(case, pairs) for name, case in chosen.items()},
            "start_up": {script: start_up.start_up(script, THREADS) for script in scripts},
        }  # fmt: skip
        text = table(record)
    show(text, options.out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
