"""The peak rates of a processor, and how much faster --precision bf16 makes a model on it.

Products of matrices in each number format, and memory traffic, are measured anew every few hours,
as machines are shared.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.core.provenance import cache_root
from harness.core.records.locks import Lock
from harness.core.records.manifests import Calibration, read_calibration, write_calibration
from harness.core.settings import UserError
from harness.train.data import probes
from harness.train.measure.environment import cpu_name

SIDE = 1024  # of the matrices: larger ones are no faster
SMALL, SLOW_S = 256, 0.01  # used if such a product takes longer: no unit for this format
COPIED = 1 << 27  # bytes, more than caches hold
SECONDS = 0.3  # of each of the three measurements
OWN_SHARE = 0.9  # of the processor time of its own threads: with less, other programs took some
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# bf16 is tried on a model if products are WORTH_TRYING times as fast in it, and advised if passes
# are WORTH_SAYING times as fast.
WORTH_TRYING, WORTH_SAYING = 1.3, 1.15
PASSES, LIMIT_S = 3, 3.0
APART = 1.25  # times as large as the gain in processor time: other programs disturbed the passes
FRESH_S = 6 * 3600.0  # what is older is measured again: what a shared machine gives changes


def calibration() -> Calibration:
    """What this process reaches with its threads, from the cache or measured now (a second).

    What was measured beside other programs is not cached.
    """
    facts = [cpu_name(), platform.machine(), os.cpu_count(), torch.get_num_threads()]
    key = hashlib.sha256(json.dumps([*facts, torch.__version__]).encode()).hexdigest()[:16]
    file = cache_root() / f"processor-{key}.json"
    if (known := _read(file)) is not None:
        return known
    lock = Lock(file.with_suffix(".lock"))
    with suppress(OSError, UserError):  # without a cache it is measured again
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.take(LIMIT_S)  # emulated nodes share a machine, and measure in turn
    try:
        known = _read(file) or _measured()
        if None not in known.values():
            with suppress(OSError):
                write_calibration(file, known)
    finally:
        lock.release()
    return known


def _read(file: Path) -> Calibration | None:
    with suppress(OSError):
        if abs(time.time() - file.stat().st_mtime) <= FRESH_S:  # the clock may have been set back
            return read_calibration(file)
    return None


def _measured() -> Calibration:
    """Measure; a peak is None if other programs took processor time in each repetition.

    Such a peak would be too low, and what is compared with it too high.
    """
    peaks: dict[str, float | None] = {}
    for name, dtype in FORMATS.items():
        one = torch.randn(SMALL, SMALL).to(dtype)
        if min(_times_s(partial(torch.mm, one, one), 0.0))[0] < SLOW_S:
            one = torch.randn(SIDE, SIDE).to(dtype)
        times = _times_s(partial(torch.mm, one, one))
        quiet = [took_s for took_s, share in times if share >= OWN_SHARE]
        peaks[name] = 2 * len(one) ** 3 / min(quiet) / 1e12 if quiet else None
    source = torch.ones(COPIED, dtype=torch.uint8)
    target = torch.zeros_like(source)
    # Read once and written once.
    rate = 2 * COPIED / min(_times_s(lambda: target.copy_(source)))[0] / 1e9
    threads = torch.get_num_threads()
    return {
        "fp32_tflops": peaks["fp32"],
        "bf16_tflops": peaks["bf16"],
        "memory_gb_per_s": rate,
        "threads": threads,
        "unix": time.time(),
    }


def _times_s(work: Callable[[], Any], seconds: float | None = None) -> list[tuple[float, float]]:
    """The seconds of each repetition, and the share of all threads' time that they really got."""
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + (SECONDS if seconds is None else seconds)
    while len(times) < 2 or time.perf_counter() < end:
        began_s, used_s = time.perf_counter(), time.process_time()
        work()
        took_s, used_s = time.perf_counter() - began_s, time.process_time() - used_s
        times.append((took_s, used_s / took_s / torch.get_num_threads()))
    return times


def bf16_gain(
    model: nn.Module, batch: Callable[[], Mapping[str, Any]], known: Mapping[str, Any]
) -> float | None:
    """How many times as fast the passes of a batch are in bf16; None if it is unknown.

    It is unknown if the processor's matrix products are not faster in bf16, if the model cannot be
    tried, or if other programs disturbed the measurement: passes then gain more than products do,
    or much more or less than in processor time.
    """
    bf16, fp32 = known["bf16_tflops"], known["fp32_tflops"]
    if not bf16 or not fp32 or bf16 < WORTH_TRYING * fp32:
        return None
    try:
        inputs, copy = batch(), probes.twin(model)
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        began_s = time.perf_counter()
        # The first pass of each prepares its kernels.
        while (
            len(times[True]) <= PASSES
            and not _clearly_slower(times)
            and time.perf_counter() - began_s < LIMIT_S
        ):
            for in_half, of_format in times.items():
                used_s = time.process_time()
                took_s = pass_s(copy, inputs, torch.autocast("cpu", torch.bfloat16, in_half))
                of_format.append((took_s, time.process_time() - used_s))
        if len(times[True]) < 2:
            return None
        (fp32_s, fp32_used_s), (bf16_s, bf16_used_s) = (min(of[1:]) for of in times.values())
        gain, of_use = fp32_s / bf16_s, fp32_used_s / bf16_used_s
        likely = gain <= 1.1 * bf16 / fp32 and max(gain, of_use) <= APART * min(gain, of_use)
        return gain if likely else None
    except Exception:  # any model of a user may fail here, and training goes on
        return None


def _clearly_slower(times: Mapping[bool, Sequence[tuple[float, float]]]) -> bool:
    """Whether a pass in bf16 needed more processor time than others can disturb by: further passes
    would advise nothing else.
    """
    if len(times[True]) != 2:
        return False
    (_, fp32_used_s), (_, bf16_used_s) = times[False][1], times[True][1]
    return bf16_used_s > APART * fp32_used_s


def pass_s(model: nn.Module, inputs: Mapping[str, Any], autocast: torch.autocast) -> float:
    """Seconds of a forward pass, in this number format, and a backward pass."""
    began_s = time.perf_counter()
    with torch.enable_grad(), autocast:
        loss = model(**inputs)["loss"]
    loss.backward()
    model.zero_grad()
    return time.perf_counter() - began_s
