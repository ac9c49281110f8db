"""The most that a device reaches: a large matrix product, and copying within its memory.

    python -m benchmarks.roofline bf16        in the number format of the training to be judged
    python -m benchmarks.roofline bf16 --quick    small: does it run?

Measured, not from a data sheet: benchmarks/speed.py puts it beside what training reaches.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

BEST_OF = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def roofline(precision: str, quick: bool = False) -> dict[str, float]:
    """The peaks of one process with its threads, or of one GPU: the best of a few tries each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    large = device.type == "cuda" and not quick
    side, times = (8192, 20) if large else (1024, 3)
    a, b = (torch.randn(side, side, device=device).to(DTYPES[precision]) for _ in range(2))
    matmul_s = _best(lambda: a @ b, times)
    source = torch.zeros((2**30 if large else 2**26) // 4, device=device)  # beyond any cache
    target = torch.empty_like(source)
    copy_s = _best(lambda: target.copy_(source), times)
    return {
        "matmul_tflops": 2 * side**3 / matmul_s / 1e12,
        # Each byte is read and written.
        "copy_gb_per_s": 2 * source.numel() * source.element_size() / copy_s / 1e9,
    }


def _best(work: Callable[[], torch.Tensor], times: int) -> float:
    work()
    found = []
    for _ in range(BEST_OF):
        _wait()
        began_s = time.perf_counter()
        for _ in range(times):
            work()
        _wait()
        found.append((time.perf_counter() - began_s) / times)
    return min(found)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(roofline((*sys.argv[1:], "fp32")[0], "--quick" in sys.argv), indent=2))
