"""Links so slow that measuring them takes longer than its time: one line says what follows."""

from __future__ import annotations

import contextlib
import io
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.core.command_line import parse
from harness.core.topology import world_of
from harness.train.measure import link_probe
from harness.train.measure.link import link_of_run, not_measured
from harness.train.strategy.choice import set_way
from tests.support.ranks import ranks
from tests.support.settings import launched

NODES = 3


def chosen_on(jump_s: float) -> dict[str, Any]:
    """What a rank takes on a clock that jumps at each look at it, further on later ranks."""
    dist.init_process_group("gloo")
    world, real, looks = world_of(os.environ), time.perf_counter, [0]

    def clock() -> float:
        looks[0] += 1
        return real() + looks[0] * jump_s * (1 + dist.get_rank())

    time.perf_counter = clock
    of_climb = link_probe.climb.__defaults__ or ()
    link_probe.climb.__defaults__ = tuple(clock if each is real else each for each in of_climb)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        link = link_of_run(torch.nn.Linear(64, 64), world, torch.device("cpu"))
    time.perf_counter = real
    settings = parse("bert", ["--tiny", "--setup", f"{NODES}_1"], launched(NODES, 1))
    context = SimpleNamespace(settings=settings, world=world, is_rank0=not world.rank,
                              checkpoint=None)  # fmt: skip
    exchange: Any = SimpleNamespace(context=context, way="")
    if link is not None and link["rtt_min_ms"]:
        link["rtt_min_ms"] += 300  # a distant link, of which more than the backend may be taken
    set_way(exchange, link)
    dist.destroy_process_group()
    return {"way": exchange.way, "link": link, "printed": printed.getvalue()}


@pytest.mark.process
@pytest.mark.parametrize("jump_s", [0.01, 0.1, 1.0, 100.0])
def test_however_late_all_ranks_take_the_same_and_one_line_says_so(jump_s: float) -> None:
    first, *others = ranks(NODES, chosen_on, jump_s, env={"LOCAL_WORLD_SIZE": "1"})
    assert {other["way"] for other in others} == {first["way"]}
    assert {other["printed"] for other in others} == {""}
    assert first["printed"].count("\n") <= 1
    link = first["link"]
    if jump_s >= 1:
        assert first["way"] == "backend" and link["allreduce_s"] is None
        line = f"measuring the links took {link['took_s']:.0f} s (shortest round trip "
        assert first["printed"].startswith(f"warning: {line}")
        assert first["printed"].endswith("an all-reduce: --exchange auto takes the backend\n")


def found(trips_ms: list[float | None], rate: float | None, size: int | None) -> dict[str, Any]:
    pairs = [{"rtt_min_ms": ms, "bandwidth_mbit": rate, "transfer_bytes": None} for ms in trips_ms]
    longest = max((ms for ms in trips_ms if ms is not None), default=None)
    return {"pairs": pairs, "rtt_min_ms": longest, "bandwidth_mbit": rate, "took_s": 9.0,
            "allreduce": [{"bytes": size}]}  # fmt: skip


@pytest.mark.parametrize(("result", "line"), [
    (found([40.0, 80.0], 90.0, 8), None),
    (found([40.0], None, 8),
     "no time in 10 s for a transfer that tells the rate of the link: "
     "estimates count delays alone"),
    (found([40.0, None, None], 90.0, 8),
     "no time in 10 s for round trips of 2 of 3 pairs of nodes: estimates leave these pairs out"),
    (found([40.0, None], None, None),
     "no time in 10 s for round trips of 1 of 2 pairs of nodes and an all-reduce: "
     "--exchange auto takes the backend"),
    (found([40.0], 90.0, None),
     "no time in 10 s for an all-reduce: --exchange auto takes the backend"),
    ({**found([4000.0], 90.0, 8), "took_s": 23.4},
     "measuring the links took 23 s (shortest round trip 4,000 ms)"),
    ({**found([None], None, None), "took_s": 61.0},
     "measuring the links took 61 s (shortest round trip -); no time in 10 s for round trips of "
     "1 of 1 pairs of nodes and an all-reduce: --exchange auto takes the backend"),
])  # fmt: skip
def test_one_line_says_what_there_was_no_time_for(result: Any, line: str | None) -> None:
    assert not_measured(result, 10.0) == line
