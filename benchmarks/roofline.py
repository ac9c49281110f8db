"""What a device reaches at most: a large matrix product, and copying within its memory.

    python -m benchmarks.roofline bf16        in the number format of the training to be judged

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


def roofline(precision: str, side: int | None = None) -> dict[str, float]:
    """Of one process with its threads, or of one GPU: the best of a few tries each."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    side = side or (8192 if cuda else 1024)
    a, b = (torch.randn(side, side, device=device).to(DTYPES[precision]) for _ in range(2))
    matmul_s = _best(lambda: a @ b, 20 if cuda else 3)
    source = torch.zeros((2**30 if cuda else 2**26) // 4, device=device)  # beyond any cache
    target = torch.empty_like(source)
    copy_s = _best(lambda: target.copy_(source), 20 if cuda else 3)
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
    print(json.dumps(roofline(sys.argv[1] if len(sys.argv) > 1 else "fp32"), indent=2))
