"""Where a step's time goes on each rank: computing, and what DDP's exchange adds to it.

Until a rank's last own gradient is ready, communication is hidden behind computing. What is exposed
lies between then and the end of the backward pass: on the rank that is ready last it is
communication itself, on the others also waiting for that rank.
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
from harness.core.settings import Settings
from harness.train.context import Context
from harness.train.measure.base import Measure
from harness.train.measure.resources import GIB

FIELDS = ("compute_s", "comm_exposed_s", "comm_wait_s")


class Exposure(Measure):
    """Of one rank, update by update; a stamp costs microseconds and never waits for the GPU."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.device = context.args.device
        self.handles: dict[nn.Parameter, Any] = {}
        self.ready: Any = None
        self.last: nn.Parameter | None = None
        self.marks: list[tuple[Any, Any]] = []  # None: it is not known when that was

    def watch(self, model: nn.Module) -> bool:
        """From the next backward pass on; False where DDP exchanges no gradients between all."""
        ddp = getattr(model, "_orig_mod", model)  # inside torch.compile
        if not isinstance(ddp, DistributedDataParallel) or self.context.settings.strategy != "ddp":
            return False
        if dist.get_world_size() == 1:
            return False
        for parameter in ddp.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._gradient)
                self.handles[parameter] = hook
        return True

    def _stamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        # On the stream of the backward pass. DDP makes that stream wait for the last exchange
        # before backward() returns: an event recorded then has the exchange behind it, although
        # the host is ahead of both.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _gradient(self, parameter: nn.Parameter) -> None:
        # Before DDP's own hook on this gradient, which begins the last exchange.
        self.last, self.ready = parameter, self._stamp()

    def backward_ended(self, exchanged: bool) -> None:
        """A backward pass has ended, at which gradients were exchanged or were not."""
        if not self.handles:
            return
        if exchanged:
            self.marks.append((self.ready, self._stamp()))
        self.ready = None
        if len(self.handles) > 1 and self.last is not None:
            # Gradients become ready in one order: of the others nothing more need be known.
            for parameter, hook in self.handles.items():
                if parameter is not self.last:
                    hook.remove()
            self.handles = {self.last: self.handles[self.last]}

    def epoch_begins(self) -> None:
        self.marks = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        marks, self.marks = self.marks, []
        yield
        self.marks = marks

    def exposed(self) -> list[float]:
        """Seconds of each update of the epoch, NaN where unknown; once the device has finished."""
        cuda = self.device.type == "cuda"
        return [
            math.nan if ready is None else ready.elapsed_time(end) / 1000 if cuda else end - ready
            for ready, end in self.marks
        ]

    def of_rank(self, untimed: int) -> dict[str, Any]:
        """Sums over the timed steps; a collective where gradients are exchanged."""
        assert self.clock is not None
        steps = [seconds for _, seconds in self.clock.steps()][untimed:]
        waits = self.clock.waits()[untimed:]
        found: dict[str, float | None] = dict.fromkeys(FIELDS)
        own = math.fsum(steps) - math.fsum(waits)
        if self.handles:
            parts = self._parts(self.exposed()[untimed:], len(steps))
            if parts is not None:
                exposed, waited = parts
                found = dict(zip(FIELDS, (own - exposed, exposed, waited), strict=True))
        elif steps and self._alone():
            found["compute_s"] = own
        return found

    def _alone(self) -> bool:
        """Whether nothing is exchanged, between processes or devices."""
        return self.context.session.alone and self.context.settings.strategy != "dp"

    def _parts(self, exposed: list[float], count: int) -> tuple[float, float] | None:
        """Seconds of so many updates that were exposed, and those of them in which others were
        waited for: at each update the rank that was ready last waits the least.
        """
        if not count:
            return None
        known = len(exposed) == count and not any(map(math.isnan, exposed))
        # Less than nothing: one rank does not know, and so no rank does.
        least = torch.tensor(exposed if known else [-1.0] * count, dtype=torch.float64)
        least = least.to(self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return parts(exposed, least.tolist()) if min(least.tolist()) >= 0 else None

    def of_run(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        share = None
        if ranks[0].get("comm_exposed_s") is not None:
            share = (ranks[0]["comm_exposed_s"] - ranks[0]["comm_wait_s"]) / row["timed_s"]
        return {"comm_exposed_share": share, **skew([rank.get("compute_s") for rank in ranks])}


def parts(exposed: Sequence[float], least: Sequence[float]) -> tuple[float, float]:
    """Of one rank, over updates: seconds exposed, and those beyond the least of all ranks."""
    whole = math.fsum(exposed)
    return whole, whole - math.fsum(least)


def skew(compute: Sequence[float | None]) -> dict[str, Any]:
    """How much longer than the median rank the slowest one computes, and which one that is."""
    known = [seconds for seconds in compute if seconds is not None]
    if len(known) < max(2, len(compute)):
        return {"compute_skew": None, "slowest_rank": None}
    most, middle = max(known), statistics.median(known)
    return {
        "compute_skew": most / middle if middle > 0 else None,
        "slowest_rank": known.index(most),
    }


# ----
# What exchanging adds to a step: passes with it and without take turns, on one and the same batch.
#
# Once for each start of the processes, after the steps that are left out of timing. No weight is
# changed, and what a pass leaves behind is taken back: the training goes on as if none had been.

PAIRS, LIMIT_S = 5, 5.0  # no pair is begun after so many seconds


# Updates before it: DDP puts its buckets together after the first, PowerSGD compresses the third.
SETTLED = 3


NOT_YET = "the training has made too few updates"


class CommProbe(Measure, TrainerCallback):
    """Of one training. All ranks must come here at the same update."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.context: Context = trainer.context
        self.missing: str | None = why_not(self.context)
        self.found: dict[str, Any] | None = None
        self.model: Any = None
        self.batch: Any = None
        self.updates = 0  # of this process

    def of(self, model: nn.Module) -> None:
        """The model as training uses it."""
        self.model = model
        if self.missing is None:
            self.missing = NOT_YET
        self.updates = 0

    @property
    def due(self) -> bool:
        """Whether it comes after the update that goes on."""
        if self.clock is None or self.missing != NOT_YET:
            return False  # nobody records it, or it is done
        return self.updates + 1 == max(SETTLED, self.clock.untimed)

    def fed(self, batch: Any) -> None:
        """A batch has been trained on; the last one of the update is taken."""
        if self.due:
            self.batch = batch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due, last = self.due, state.global_step >= state.max_steps
        self.updates += 1
        if due and not last:
            self._measure()
        self.batch = None

    def _measure(self) -> None:
        sharded = self.context.settings.strategy == "fsdp"
        if sharded and (missing := _too_large(self.model, self.context)) is not None:
            self.missing = missing
            return
        began_s = time.perf_counter()
        with self.trainer.rehearsal():
            pairs = self._pairs(sharded)
        self.missing = None
        self.found = {
            "with_s": [with_s for with_s, _ in pairs],
            "without_s": [without_s for _, without_s in pairs],
            "step_s": None,  # until the epoch has ended
            "comm_share": None,
            "took_s": time.perf_counter() - began_s,
        }

    def _pairs(self, sharded: bool) -> list[tuple[float, float]]:
        """Seconds with and without, each until the last rank had ended it."""
        found: list[tuple[float, float]] = []
        until_s = LIMIT_S
        while len(found) < PAIRS and until_s > 0:
            began_s = time.perf_counter()
            if sharded or not found:
                # As a step leaves it: gradients where they are exchanged, and of shards none that
                # a pass without exchange has left to be sent with the next one.
                self._seconds(exchange=True)
            both = [0.0, 0.0]
            for number in (0, 1) if sharded or len(found) % 2 == 0 else (1, 0):
                both[number] = self._seconds(exchange=number == 0)
            numbers = torch.tensor(
                [*both, time.perf_counter() - began_s],
                dtype=torch.float64,
                device=self.context.args.device,
            )
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            with_s, without_s, took_s = numbers.tolist()
            found.append((with_s, without_s))
            until_s -= took_s  # the same on all ranks, which have to stop together
        if sharded:
            self._seconds(exchange=True)
        return found

    def _seconds(self, exchange: bool) -> float:
        """Of one pass forward and backward, begun together as far as the link lets the ranks."""
        with nullcontext() if exchange else without_exchange(self.model, self.context.settings):
            self._wait()
            dist.barrier()
            began_s = time.perf_counter()
            self.trainer.training_step(self.model, self.batch)
            self._wait()
            return time.perf_counter() - began_s

    def _wait(self) -> None:
        """A GPU only begins what it is told."""
        if self.context.args.device.type == "cuda":
            torch.cuda.synchronize()

    # ---- the record ----

    def of_run(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        """The first epoch after it gives the step that it is a share of."""
        step_s = row["step_time_median_s"]
        if self.found is not None and self.found["step_s"] is None and step_s:
            pairs = zip(self.found["with_s"], self.found["without_s"], strict=True)
            exposed_s = statistics.median(with_s - without_s for with_s, without_s in pairs)
            # More than the whole step: the machine was disturbed meanwhile, and nothing is known.
            share = exposed_s / step_s if exposed_s < step_s else None
            self.found |= {"step_s": step_s, "comm_share": share}
        return {}

    def facts(self) -> dict[str, Any]:
        found, missing = self.found, self.missing
        if found is None and missing == NOT_YET:
            # A start of the run before this one may have come so far.
            found = probe_of(self.context.folder)
            missing = None if found else missing
        return {"comm_probe": found, "comm_probe_missing": missing}


def why_not(context: Context) -> str | None:
    """Why nothing can be measured in this run; None where it can."""
    settings = context.settings
    if settings.strategy not in ("ddp", "fsdp"):
        return "only ddp and fsdp exchange at every update what can be left out"
    if context.world.size == 1:
        return "one process exchanges nothing"
    if settings.comm_probe == "off":
        return "--comm_probe off"
    if context.args.torch_compile:
        return "--torch_compile would compile a pass without exchange anew"
    if context.args.ddp_static_graph:
        return "--ddp_static_graph has no pass without exchange"
    if settings.fsdp_offload:
        return "--fsdp_offload keeps shards where no pass can do without exchange"
    return None


def _too_large(model: nn.Module, context: Context) -> str | None:
    """Without exchange each rank must hold all weights and all gradients; None where all ranks can.

    A collective, as all ranks have to decide alike.
    """
    # A weight and its gradient: both as wide as the weight, or half of it and half again for what
    # is added up more finely.
    needed = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    device = context.args.device
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + held
    else:
        free = psutil.virtual_memory().available // context.world.per_node
    least = torch.tensor(free, dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    if least.item() >= needed:
        return None
    return (
        f"without exchange {needed / GIB:.3g} GiB more are needed on each rank, and one has "
        f"{least.item() / GIB:.3g} GiB"
    )


@contextmanager
def without_exchange(model: Any, settings: Settings) -> Iterator[None]:
    """Gradients stay where they are; of shards also the weights, whole from before."""
    if settings.strategy == "ddp":
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
