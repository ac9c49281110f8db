"""How long reading takes: load and load_runs over many run folders.

    python -m benchmarks.loading            1,000 runs of 5 epochs, target: under 3 s each

The folders are made with the functions that write real ones, so they hold what real ones hold.
They have just been written: they are read from the system's memory, not from a disk.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.results import markdown, parser_of
from harness.core import attempts
from harness.core.attempts import write_summary
from harness.core.command_line import parse, trainer_flags
from harness.core.identity import run_id
from harness.core.records import FINISHED, SCHEMA, RunFolder, append_row, write_json
from harness.core.records.checksums import vouched
from harness.core.settings import Settings, as_mapping
from harness.read import load, load_runs

EPOCHS, RANKS, TARGET_S = 5, 4, 3.0
HEADINGS = ("function", "rows", "columns", "best s", "worst s", "target s")
QUALITY = (
    "train_loss", "eval_loss", "accuracy", "top5_accuracy", "precision", "recall", "f1",
    "precision_macro", "recall_macro", "f1_macro",
)  # fmt: skip

OF_A_DEVICE = (
    "utilisation_percent", "memory_gib", "power_w", "temperature_c", "sm_clock_mhz",
    "memory_clock_mhz",
)  # fmt: skip
OF_A_NODE = ("cpu_percent", "memory_gib")


def epoch_row(seed: int, epoch: int) -> dict[str, Any]:
    """A row with the fields of a real one; the values only look the part."""
    wobble = 1 + (seed * 31 + epoch * 7) % 100 / 1234.5
    return vouched({
        "epoch": float(epoch), "updates": 125 * epoch, "samples": 8000, "fed_samples": 8000,
        "effective_batch": 64, "learning_rate": 2e-5 / epoch, "grad_norm": 1.3 * wobble,
        "clipped_share": 0.5 / wobble, **{name: 0.876 * wobble for name in QUALITY},
        "skipped_updates": 0,
        "epoch_time_s": 31.4 * wobble, "train_samples_per_s": 8000 / 31.2 / wobble,
        "train_samples_per_s_per_gpu": 2000 / 31.2 / wobble, "timed_steps": 125,
        "timed_samples": 8000, "timed_s": 31.2 * wobble, "step_time_median_s": 0.25 * wobble,
        "step_time_p95_s": 0.26 * wobble, "data_wait_share": 0.012 * wobble,
        "tflops_per_s": 41.2 / wobble, "tflops_per_s_without_padding": 40.1 / wobble,
        "mfu": 0.131 / wobble, "tokens_per_s": 13_300 / wobble, "padding_share": 0.11 * wobble,
        "peak_memory_gib_per_rank": [11.5 * wobble] * RANKS, "network_sent_bytes": None,
        "reserved_memory_gib_per_rank": [12.5 * wobble] * RANKS,
        "comm_exposed_share": 0.05 * wobble, "compute_skew": 1.01 * wobble, "slowest_rank": 2,
        "payload_bytes": 125 * RANKS * 438_000_000, "energy_j": 43_000 * wobble,
        "gpu": {name: dict.fromkeys(("mean", "p95", "max"), 57.3 * wobble) for name in OF_A_DEVICE},
        "others_cpu_share": 0.02 * wobble,
        "node": {name: dict.fromkeys(("mean", "p95", "max"), 3.1 * wobble) for name in OF_A_NODE},
        "eval_samples": 2000,
        "eval_time_s": 5.1 * wobble, "eval_samples_per_s": 2000 / 5.1 / wobble, "attempt": 1,
        "wall_s": 40.0 * epoch * wobble, "measuring_s": 3.0 * wobble,
        "unix": 1.7e9 + 40.0 * epoch,
    })  # fmt: skip


def machine(seed: int) -> dict[str, Any]:
    """The content of environment.json, of one of two kinds of machine."""
    return {
        "machine": ("nvidia-a100-sxm4-80gbx4", "tesla-p100-pcie-16gbx4")[seed % 2],
        "cpu": "a processor", "cpu_cores": 64, "memory_gib": 503.5, "gpus": ["a GPU"] * RANKS,
        "versions": {name: "1.2.3" for name in ("torch", "transformers", "accelerate", "numpy")},
        "commit": "0" * 40, "dirty": False, "command": "bert.py", "variables": {},
        "nodes": 1, "processes_per_node": RANKS, "effective_batch": 64, "updates": 125 * EPOCHS,
        "telemetry_hz": 1.0, "telemetry_missing": {}, "idle_power_w": 281.5,
        "observed": {"strategy": "ddp", "world": RANKS, "parameters": 199},
        "data": {"dataset": "fancyzhx/ag_news", "train_samples": 8000, "classes": 4},
    }  # fmt: skip


def settings_of(seed: int) -> Settings:
    """Every setting of a run on four processes."""
    world = {"RANK": "0", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    return parse("bert", ["--seed", str(seed), "--epochs", str(EPOCHS)], environ=world)


# Waiting for the disk ten thousand times is not part of what is measured.
@mock.patch("os.fsync", mock.Mock())
def make_runs(root: Path, count: int) -> None:
    """Write `count` finished runs below a folder."""
    # All arguments of the Trainer, as LogCallback writes them.
    arguments = {name: default for name, (default, *_) in trainer_flags().items()}
    for seed in range(count):
        settings = settings_of(seed)
        folder = RunFolder(root / "bert" / str(settings.setup) / run_id(settings))
        content = {"schema": SCHEMA, **as_mapping(settings), "training_arguments": arguments}
        write_json(folder.settings, content)
        write_json(folder.environment, machine(seed))
        attempts.begin(folder, update=0, processes=RANKS)
        for epoch in range(1, EPOCHS + 1):
            append_row(folder.epochs, epoch_row(seed, epoch))
            for rank in range(RANKS):
                append_row(folder.rank(rank), {"epoch": epoch, "rank": rank, "epoch_time_s": 31.4})
        attempts.end(folder, FINISHED, None, 220.0)
        write_summary(folder, FINISHED, None, settings.best_metric)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("loading", __doc__, out=False)
    parser.add_argument("--runs", type=int, default=1000, help="run folders (1000)")
    parser.add_argument("--quick", action="store_true", help="20 run folders")
    options = parser.parse_args(argv)
    count = 20 if options.quick else options.runs
    print(f"{count} runs of {EPOCHS} epochs, made anew; best and worst of 3\n")
    slow, rows = False, []
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder), count)
        for function in (load, load_runs):
            took = []
            for _ in range(3):
                began = time.perf_counter()
                frame = function(folder)
                took.append(time.perf_counter() - began)
            slow |= max(took) > TARGET_S
            cells = (f"{min(took):.3f}", f"{max(took):.3f}", f"{TARGET_S:g}")
            rows.append((function.__name__, *map(str, frame.shape), *cells))
    print(markdown("llllll", HEADINGS, rows))
    return int(slow and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
