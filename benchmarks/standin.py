"""A training whose computing is a timed wait, and whose gradients are real and really exchanged by
DDP over gloo: on any number of nodes that share a machine it computes as on machines of its own.

Started by torchrun, rank 0 tells the seconds of a step, and what a link probe found.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.results import parser_of, send_result
from harness.core.topology import world_of
from harness.train.measure.link import measure

FIXED_S, PER_SAMPLE_S = 0.010, 0.002  # of a step, forward and backward
LAYERS, LEFT_OUT = 8, 5


class Waiting(torch.autograd.Function):
    """A layer that waits; its backward pass takes twice as long as its forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, wait_s: float) -> torch.Tensor:
        time.sleep(wait_s)
        ctx.wait_s, ctx.shape = wait_s, weight.shape
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(2 * ctx.wait_s)
        (grad,) = grads
        return grad, torch.full(ctx.shape, float(grad.mean())), None


class Model(nn.Module):
    def __init__(self, mb: float, batch: int) -> None:
        super().__init__()
        numbers = max(1, int(mb * 1e6 / 4 / LAYERS))
        self.weights = nn.ParameterList(torch.zeros(numbers) for _ in range(LAYERS))
        self.wait_s = PER_SAMPLE_S * batch / 3 / LAYERS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = Waiting.apply(x, weight, self.wait_s)
        return x


def main(argv: list[str]) -> int:
    parser = parser_of("standin", __doc__, out=False)
    parser.add_argument("--mb", type=float, default=4.0, help="of all gradients")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=8.0, help="no step begins after these")
    parser.add_argument("--probe", help="MB of all-reduces to be measured first, with commas")
    options = parser.parse_args(argv)
    world = world_of(os.environ)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    if options.probe:
        sizes = [int(float(mb) * 1e6) for mb in options.probe.split(",")]
        found["link"] = measure(world, torch.device("cpu"), sizes)
    found["steps_s"] = steps(Model(options.mb, options.batch), options)
    send_result(found | {"step_s": statistics.mean(found["steps_s"])})
    dist.barrier()
    dist.destroy_process_group()
    return 0


def steps(model: Model, options: argparse.Namespace) -> list[float]:
    """Seconds of each step. All ranks make equally many: rank 0 says when the time is over."""
    ddp = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    x, took = torch.zeros(1), []
    more = torch.ones(1)
    until_s = time.perf_counter() + options.seconds
    for number in range(options.steps + LEFT_OUT):
        if number % 5 == 0:  # outside the timed part
            more.fill_(float(number <= LEFT_OUT or time.perf_counter() < until_s))
            dist.broadcast(more, src=0)
            if not more.item():
                break
        began_s = time.perf_counter()
        time.sleep(FIXED_S)
        ddp(x).sum().backward()
        model.zero_grad()
        if number >= LEFT_OUT:
            took.append(time.perf_counter() - began_s)
    return took


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
