"""Where a step's time goes on each rank: computing, and what the exchange adds to it.

Exposure, with DDP, at every update. Until a rank's last own gradient is ready, communication is
hidden behind computing. What is exposed lies between then and the end of the backward pass: on the
rank that is ready last it is communication itself, on the others also waiting for that rank. Sums
that are sent directly over a delay reach a rank that is ready later while it still computes. Then
the ranks take turns in waiting for the delay: this is no waiting for a slower rank.

CommProbe, with DDP and FSDP, once for each start of the processes, after the warm-up steps: passes
with exchange and without alternate on one and the same batch. No weight is changed, and what a pass
leaves behind is undone: the training goes on as if there had been none.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from harness.core.attempts import probe_of
from harness.core.schema.environment import CommProbeRecord, MeasuredRecord
from harness.core.settings import Settings
from harness.core.strategies import EACH_UPDATE, strategy_of
from harness.train.context import Context
from harness.train.measure.clock import MEASURING, seconds_between, stamp
from harness.train.measure.rows import EpochMeasure
from harness.train.measure.sampler import GIB
from harness.train.session import barrier, gather

FIELDS = ("compute_s", "comm_exposed_s", "comm_wait_s")
PAIRS, LIMIT_S = 5, 5.0  # no pair is begun after so many seconds
# Updates before the probe: DDP arranges its buckets after the first, PowerSGD begins at the third.
SETTLED = 3
NOT_YET = "the training has made too few updates"


def uncompiled(model: nn.Module) -> Any:
    """The model itself, where torch.compile has wrapped it."""
    return getattr(model, "_orig_mod", model)


class Exposure(EpochMeasure):
    """One rank, update by update; a stamp costs microseconds and never waits for the GPU."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.device = context.args.device
        self.cuda = self.device.type == "cuda"
        self.handles: dict[nn.Parameter, Any] = {}
        self.ready: Any = None
        self.last: nn.Parameter | None = None
        self.early_s = 0.0  # how much less one rank may wait than another because of the delay
        self.marks: list[tuple[Any, Any]] = []  # last gradient (None: unknown), end of backward

    def watch(self, model: nn.Module, early_s: float = 0.0) -> bool:
        """Begin with the next backward pass; False if DDP does not average over all ranks."""
        self.early_s = early_s
        ddp = uncompiled(model)
        reduces = strategy_of(self.context.settings).reduces_gradients
        if not isinstance(ddp, DistributedDataParallel) or not reduces:
            return False
        if dist.get_world_size() == 1:
            return False
        for parameter in ddp.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._gradient)
                self.handles[parameter] = hook
        return True

    def _gradient(self, parameter: nn.Parameter) -> None:
        # Runs before DDP's own hook on this gradient, which begins the last exchange.
        self.last, self.ready = parameter, stamp(self.cuda)

    def backward_ended(self, exchanged: bool) -> None:
        """Record the end of a backward pass, with or without an exchange of gradients."""
        if not self.handles:
            return
        if exchanged:
            # On the stream of the backward pass. DDP makes that stream wait for the last exchange
            # before backward() returns, so an event recorded now comes after the exchange, although
            # the host is ahead of both.
            self.marks.append((self.ready, stamp(self.cuda)))
        self.ready = None
        if len(self.handles) > 1 and self.last is not None:
            # Gradients become ready in a fixed order, so the other hooks are not needed any more.
            for parameter, hook in self.handles.items():
                if parameter is not self.last:
                    hook.remove()
            self.handles = {self.last: self.handles[self.last]}

    def epoch_begins(self) -> None:
        self.marks = []

    @contextmanager
    def excluded(self) -> Iterator[None]:
        marks, self.marks = self.marks, []
        yield
        self.marks = marks

    def exposed(self) -> list[float]:
        """Seconds of each update of the epoch, NaN if unknown; call it when the device is done."""
        return [
            math.nan if ready is None else seconds_between(ready, end) for ready, end in self.marks
        ]

    def rank_fields(self, untimed: int) -> dict[str, Any]:
        """Sums over the timed steps; a collective where gradients are exchanged."""
        assert self.clock is not None
        steps = [seconds for _, seconds in self.clock.steps()][untimed:]
        waits = self.clock.waits()[untimed:]
        fields: dict[str, float | None] = dict.fromkeys(FIELDS)
        own = math.fsum(steps) - math.fsum(waits)
        if self.handles:
            exposed_of, logs = self.exposed(), self.clock.log_waits()
            if len(exposed_of) == len(logs):  # else an update is not known
                exposed_of = [sum(pair) for pair in zip(exposed_of, logs, strict=True)]
            split = self._split(exposed_of[untimed:], len(steps))
            if split is not None:
                exposed, waited = split
                fields = dict(zip(FIELDS, (own - exposed, exposed, waited), strict=True))
        elif steps and self._is_alone():
            fields["compute_s"] = own
        return fields

    def _is_alone(self) -> bool:
        """Whether nothing is exchanged between processes or devices."""
        splits = strategy_of(self.context.settings).splits_batch
        return self.context.session.is_single and not splits

    def _split(self, exposed: list[float], count: int) -> tuple[float, float] | None:
        """Exposed seconds of so many updates, and those of them spent waiting for other ranks."""
        if not count:
            return None
        known = len(exposed) == count and all(seconds >= 0 for seconds in exposed)  # and no NaN
        of_ranks, early = zip(*gather((exposed if known else None, self.early_s)), strict=True)
        if None in of_ranks:
            return None  # unknown on one rank, and so on all
        return split_waiting(exposed, of_ranks, early[0])

    def run_fields(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        share = None
        if ranks[0].get("comm_exposed_s") is not None:
            share = (ranks[0]["comm_exposed_s"] - ranks[0]["comm_wait_s"]) / row["timed_s"]
        return {"comm_exposed_share": share, **skew([rank.get("compute_s") for rank in ranks])}


def split_waiting(
    exposed: Sequence[float], of_ranks: Sequence[Sequence[float]], early_s: float = 0.0
) -> tuple[float, float]:
    """One rank's exposed seconds, and those that it spent waiting for slower ranks.

    At each update the rank that is ready last has the least exposed time and waits for nobody; what
    the others have beyond it is waiting, except for what the delay alone explains. In the sums over
    all updates the delay is equal for all ranks: what a rank has beyond the least sum is waiting.
    """
    total = math.fsum(exposed)
    least = map(min, zip(*of_ranks, strict=True))
    beyond = math.fsum(
        max(0.0, own - of_last - early_s) for own, of_last in zip(exposed, least, strict=True)
    )
    return total, max(beyond, total - min(map(math.fsum, of_ranks)))


def skew(compute: Sequence[float | None]) -> dict[str, Any]:
    """The computing time of the slowest rank relative to the median one, and which rank it is."""
    known = [seconds for seconds in compute if seconds is not None]
    if len(known) < max(2, len(compute)):
        return {"compute_skew": None, "slowest_rank": None}
    most, middle = max(known), statistics.median(known)
    return {
        "compute_skew": most / middle if middle > 0 else None,
        "slowest_rank": known.index(most),
    }


class CommProbe(EpochMeasure, TrainerCallback):
    """The probe of one training; all ranks must run it at the same update."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.context: Context = trainer.context
        self.missing: str | None = why_not(self.context)
        self.result: CommProbeRecord | None = None
        self.model: Any = None
        self.batch: Any = None
        self.updates = 0  # of this process

    def use(self, model: nn.Module, skips_layers: bool = False) -> None:
        """The model as training uses it, wrapped, and whether it skips layers at random."""
        self.model = model
        if skips_layers:
            self.missing = "layers are skipped at random: passes differ"
        if self.missing is None:
            self.missing = NOT_YET
        self.updates = 0

    @property
    def due(self) -> bool:
        """Whether the probe runs after the current update."""
        if self.clock is None or self.missing != NOT_YET:
            return False  # not recorded, or done already
        return self.updates + 1 == max(SETTLED, int(self.clock.untimed))

    def fed(self, batch: Any) -> None:
        """A batch has been trained on; the last one of the update is used."""
        if self.due:
            self.batch = batch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due, last = self.due, state.global_step >= state.max_steps
        self.updates += 1
        if due and not last:
            self._measure()
        self.batch = None

    @MEASURING.counted()
    def _measure(self) -> None:
        sharded = strategy_of(self.context.settings).shards
        if sharded and (missing := _too_large(self.model, self.context)) is not None:
            self.missing = missing
            return
        began_s = time.perf_counter()
        with self.trainer.rehearsal():
            pairs = self._pairs(sharded)
        self.missing = None
        self.result = {
            "with_s": [with_s for with_s, _ in pairs],
            "without_s": [without_s for _, without_s in pairs],
            "step_s": None,  # until the epoch has ended
            "comm_share": None,
            "took_s": time.perf_counter() - began_s,
        }

    def _pairs(self, sharded: bool) -> list[tuple[float, float]]:
        """Seconds with and without exchange, of the last rank to finish each."""
        pairs: list[tuple[float, float]] = []
        # DDP exchanges with the last pass of an update; shards gather the weights in each of them.
        passes = self.context.settings.grad_acc if sharded else 1
        left_s = LIMIT_S
        while len(pairs) < PAIRS and left_s > 0:
            began_s = time.perf_counter()
            if sharded or not pairs:
                # Restores the state after a step: gradients are exchanged, and shards have none
                # left from a pass without exchange that the next one would send.
                self._seconds(exchange=True)
            both = [0.0, 0.0]
            for number in (0, 1) if sharded or len(pairs) % 2 == 0 else (1, 0):
                both[number] = self._seconds(number == 0, passes)
            numbers = gather([*both, time.perf_counter() - began_s])
            with_s, without_s, took_s = map(max, zip(*numbers, strict=True))
            pairs.append((with_s, without_s))
            left_s -= took_s  # the same on all ranks, which have to stop together
        if sharded:
            self._seconds(exchange=True)
        return pairs

    def _seconds(self, exchange: bool, passes: int = 1) -> float:
        """Forward and backward passes, which all ranks begin after a barrier; gradients are
        exchanged with the last one.
        """
        trainer = self.trainer
        with nullcontext() if exchange else without_exchange(self.model, self.context.settings):
            self._synchronise()
            barrier()
            began_s = time.perf_counter()
            for _ in range(passes - 1):
                with trainer._defer_fsdp_gradient_reduction() if exchange else nullcontext():
                    trainer.training_step(self.model, self.batch)
            trainer.training_step(self.model, self.batch)
            self._synchronise()
            return time.perf_counter() - began_s

    def _synchronise(self) -> None:
        if self.context.args.device.type == "cuda":
            torch.cuda.synchronize()

    def run_fields(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        """Fill in the exchange's share of a step: the median step of the epoch after the probe."""
        step_s = row["step_time_median_s"]
        if self.result is not None and self.result["step_s"] is None and step_s:
            pairs = zip(self.result["with_s"], self.result["without_s"], strict=True)
            exposed_s = statistics.median(with_s - without_s for with_s, without_s in pairs)
            # More than a whole step: something disturbed the machine, and nothing is known.
            share = exposed_s / step_s if exposed_s < step_s else None
            self.result["step_s"], self.result["comm_share"] = step_s, share
        return {}

    def facts(self) -> MeasuredRecord:
        result, missing = self.result, self.missing
        if result is None and missing == NOT_YET:
            # An earlier attempt may have got as far as the probe.
            result = probe_of(self.context.folder)
            missing = None if result else missing
        return {"comm_probe": result, "comm_probe_missing": missing}


def why_not(context: Context) -> str | None:
    """Why the probe cannot run; None if it can."""
    settings = context.settings
    if not strategy_of(settings).each_update:
        known = " and ".join(EACH_UPDATE)
        return f"only {known} have an exchange at every update that can be left out"
    if context.world.size == 1:
        return "one process exchanges nothing"
    if settings.comm_probe == "off":
        return "--comm_probe off"
    if context.args.torch_compile:
        return "--torch_compile would recompile for a pass without exchange"
    if context.args.ddp_static_graph:
        return "--ddp_static_graph has no pass without exchange"
    if settings.fsdp_offload:
        return "--fsdp_offload keeps the shards on the host, so that every pass exchanges them"
    return None


def _too_large(model: nn.Module, context: Context) -> str | None:
    """Why a rank cannot hold all weights and gradients, as it must without exchange; else None.

    A collective, because all ranks have to decide alike.
    """
    # A weight and its gradient at the weight's width. Mixed precision needs no more: half of both,
    # and half again for gradients accumulated in full precision.
    needed = sum(2 * p.nbytes for p in model.parameters())
    device = context.args.device
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    else:
        free = psutil.virtual_memory().available // context.world.per_node
    least = min(gather(free))
    if least >= needed:
        return None
    return (
        f"a pass without exchange needs {needed / GIB:.3g} GiB more on each rank, and one has "
        f"{least / GIB:.3g} GiB"
    )


@contextmanager
def without_exchange(model: Any, settings: Settings) -> Iterator[None]:
    """Inside, gradients are not exchanged, and sharded weights are gathered beforehand."""
    if strategy_of(settings).reduces_gradients:
        with model.no_sync():
            yield
        return
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    for shard in shards:
        shard.unshard()
    try:
        yield
    finally:
        for shard in shards:
            shard.reshard()
        model.set_reshard_after_forward(settings.fsdp_shard == "full")
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
