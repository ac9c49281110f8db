"""Operations of the timed steps, and their share of what the devices can do at most (MFU).

What a model's shape takes: operations that are made again (activation checkpointing) are not
counted, as nowhere where MFU is spoken of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from harness.settings import Settings
from harness.train.flops import Uncountable, Work, work_of
from harness.train.measures import Measure, total
from harness.train.peaks import peak_tflops
from harness.train.shapes import Shape, added

TERA = 1e12
# Of each rank: what its timed steps have taken.
SUMS = ("timed_tflop", "timed_tflop_without_padding", "timed_tokens", "timed_padded_tokens")


class Utilisation(Measure):
    """The trainer tells of each forward pass; here is added up what belongs to a timed step."""

    def __init__(
        self, run: Any, model: nn.Module, one_sample: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        self.run = run
        self.work: Work | None = None
        self.missing: str | None = None  # why the work is not known
        shape = run.data_facts.get("image_shape")
        try:
            self.work = work_of(model, one_sample, (shape[1], shape[2]) if shape else None)
        except Uncountable as error:
            self.missing = str(error)
        self.peak, self.peak_from = peak_of(run.settings)
        self.updates: dict[int, Shape] = {}  # of this epoch

    def told(self, update: int, shape: Shape) -> None:
        """A forward pass of the update after so many; there may be several."""
        before = self.updates.get(update)
        self.updates[update] = shape if before is None else added(before, shape)

    def epoch_begins(self) -> None:
        self.updates = {}

    def of_rank(self, untimed: int) -> dict[str, Any]:
        timed = list(self.updates.values())[untimed:]
        if not timed:
            return dict.fromkeys(SUMS)
        all_of_it = timed[0]
        for shape in timed[1:]:
            all_of_it = added(all_of_it, shape)
        return sums_of(self.work, all_of_it)

    def of_run(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        sums = {name: total([rank.get(name) for rank in ranks]) for name in SUMS}
        peak = self.peak * self.run.devices if self.peak is not None else None
        return rates(sums, row["timed_s"], peak)

    def facts(self) -> dict[str, Any]:
        work = self.work
        return {
            "flops": {
                "how": work and work.how,
                "missing": self.missing,
                "per_sample": work and work.fixed,
                "per_token": work and work.per_token,
                "per_pair_of_tokens": work and work.per_pair,
                "peak_tflops_per_gpu": self.peak,
                "peak_from": self.peak_from,
            }
        }


def sums_of(work: Work | None, shape: Shape) -> dict[str, Any]:
    """What a rank tells of so many samples."""
    sums: dict[str, Any] = dict.fromkeys(SUMS)
    sums["timed_tokens"], sums["timed_padded_tokens"] = shape.text_tokens, shape.tokens
    if work is None:
        return sums
    samples = shape.samples
    if not work.per_token and not work.per_pair:
        # Of equal samples: nothing is padded.
        sums["timed_tflop"] = work.of(samples=samples) / TERA
        return sums | {"timed_tflop_without_padding": sums["timed_tflop"]}
    if shape.tokens is not None:
        sums["timed_tflop"] = work.of(shape.tokens, shape.squares, samples) / TERA
    if shape.text_tokens is not None:
        without = work.of(shape.text_tokens, shape.text_squares, samples)
        sums["timed_tflop_without_padding"] = without / TERA
    return sums


def rates(
    sums: Mapping[str, float | None], seconds: float, peak_tflops: float | None
) -> dict[str, float | None]:
    """For the run's row, of what all ranks have done and what their devices can do together."""
    tflop, without, tokens, padded = (sums[name] for name in SUMS)
    rate = _share(tflop, seconds)
    filled = _share(tokens, padded)
    return {
        "tflops_per_s": rate,
        "tflops_per_s_without_padding": _share(without, seconds),
        "mfu": _share(rate, peak_tflops),
        "tokens_per_s": _share(tokens, seconds),
        "padding_share": None if filled is None else 1 - filled,
    }


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def peak_of(settings: Settings) -> tuple[float | None, str | None]:
    """Of one device, in the number format of the run, and who says so."""
    if settings.peak_tflops is not None:
        return settings.peak_tflops, "flag"
    if not torch.cuda.is_available():
        return None, None
    known = peak_tflops(torch.cuda.get_device_name(), settings.precision)
    return known, None if known is None else "table"
