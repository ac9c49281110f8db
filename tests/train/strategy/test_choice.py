"""--exchange auto: what the measured link makes fastest, the same on all ranks and attempts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from harness.core.collectives import GLOO, Shape, Wire, allreduce
from harness.core.command_line import parse
from harness.core.identity import run_id
from harness.core.links import slowest_rate
from harness.core.settings import as_mapping
from harness.core.topology import World
from harness.read.records.recorded import settings_of
from harness.read.records.runs import identity_settings
from harness.train.loop import trainer as loop
from harness.train.strategy.choice import early_s, estimates, set_way
from tests.support import toys
from tests.support.ranks import ranks
from tests.support.replicas import SGD
from tests.support.settings import launched

MB = 10**6


def link_of(rtt_ms: float, rate: float | None, backend_s: float, **more: Any) -> dict[str, Any]:
    """As a run of many updates measures it; its gradient has a million bytes."""
    sizes = {"gradient_bytes": MB, "allreduce_bytes": MB}
    measured = {"rtt_min_ms": rtt_ms, "bandwidth_mbit": rate, "allreduce_s": backend_s}
    return {"asked": None, **sizes, **measured, **more}


def test_estimates_are_delays_and_bytes() -> None:
    two, four = World(2), World(4)
    link = link_of(80.0, 80.0, 0.5)  # 10 MB a second
    assert estimates(link, two, MB) == pytest.approx({"backend": 0.5, "direct": 0.04 + 0.1})
    # Half of what was measured: half of the bytes, and as many round trips.
    form = [allreduce(GLOO, size, Shape(2), Wire(0.04, 10e6)).alone_s for size in (MB / 2, MB)]
    assert estimates(link, two, MB / 2)["backend"] == pytest.approx(0.5 * form[0] / form[1])
    of_four = {"backend": 0.5, "direct": 2 * 0.04 + 2 * 3 / 4 * 0.1, "all_to_all": 0.04 + 3 * 0.1}
    assert estimates(link, four, MB) == pytest.approx(of_four)
    # Emulated nodes have a link to each of the others.
    own = estimates(link | {"asked": {"delay_ms": 40}}, four, MB)
    assert own == pytest.approx(of_four | {"direct": 2 * (0.04 + 0.1 / 4), "all_to_all": 0.14})
    # Codes take two collectives: a round trip for each rank, and 1.15 in which bytes pass.
    assert estimates(link, four, MB, coded=True)["backend"] == pytest.approx(4 * 0.08 + 0.15)
    # Of emulated nodes, the first of the two goes over all links at once.
    codes = estimates(link | {"asked": {"delay_ms": 40}}, four, MB, coded=True)["backend"]
    assert (1 + 3) / 4 * 0.1 > 1.15 * 0.08 and codes == pytest.approx(4 * 0.08 + 0.1)
    # What a transfer could not show costs nothing; no exchange is shorter than its delay.
    assert estimates(link_of(80.0, None, 0.5), four, MB)["direct"] == pytest.approx(0.08)
    assert estimates(link_of(80.0, 80.0, 0.03), four, MB / 4)["backend"] == 0.04


def pair_of(nodes: list[int], rtt_ms: float | None, rate: float | None, size: int | None) -> Any:
    return {"nodes": nodes, "rtt_min_ms": rtt_ms, "bandwidth_mbit": rate, "transfer_bytes": size}


def test_transfers_that_were_cut_off_tell_no_rate() -> None:
    """Four nodes over 80 ms and 50 Mbit/s each way, where the probe had no time for all pairs: by
    hand a direct exchange of 0.41 MB takes about 0.2 s and all to all 0.15 s.
    """
    asked = {"asked": {"delay_ms": 80.0, "rate_mbit": 50.0}, "allreduce_bytes": 65536}
    pairs = [pair_of([0, 1], 160.5, 48.3, 2**20), pair_of([0, 2], 160.4, 47.3, 2**20),
             pair_of([0, 3], 160.5, None, 65536), pair_of([1, 2], None, None, None)]  # fmt: skip
    link = link_of(160.5, slowest_rate(pairs), 2.0, pairs=pairs, **asked)
    expected = estimates(link, World(4), 413_000)
    assert expected["direct"] == pytest.approx(0.195, abs=0.005)
    assert expected["all_to_all"] == pytest.approx(0.150, abs=0.005)
    # Where none tells it: all bytes of the largest in a round trip at least, or nothing is known.
    fast = [pair_of([0, 1], 160.0, None, 2**20), pair_of([0, 2], 160.0, None, 65536)]
    at_least = estimates(link_of(160.0, None, 2.0, pairs=fast, **asked), World(4), MB)
    assert at_least["all_to_all"] == pytest.approx(0.08 + 0.16 * MB / 2**20)
    unknown = estimates(link_of(160.0, None, 2.0, pairs=fast[1:], **asked), World(4), MB)
    assert "all_to_all" not in unknown and unknown["direct"] == pytest.approx(0.16)


# Measured over links that delay and limit each way, in bytes and seconds: an all-reduce of the
# probe, and the update of a whole run (the gradient's all-reduce, and some 0.1 s to compute).
PROBED = [
    # Two nodes of two processes over 80 ms and 50 Mbit/s, where the probe had time for 64 KiB.
    (World(2, 2), link_of(161.1, 48.1, 1.11, allreduce_bytes=65536), 412_712, 1.27),
    (World(2, 2), link_of(41.0, 192.0, 0.299, allreduce_bytes=412_712), 412_712, 0.35),
]


@pytest.mark.parametrize(("world", "link", "size", "update_s"), PROBED)
def test_more_bytes_than_the_probe_took_do_not_wait_in_proportion(
    world: World, link: dict[str, Any], size: int, update_s: float
) -> None:
    assert 0.8 < estimates(link, world, size)["backend"] / update_s < 1


def test_of_nodes_that_train_apart_one_process_each_takes_part() -> None:
    world, size = World(2, 2), 412_712
    link = link_of(41.0, 192.0, 0.299, allreduce_bytes=size)
    all_s, apart_s = (estimates(link, world, size, apart=a)["backend"] for a in (False, True))
    wire = Wire(0.0205, 24e6)
    form = [allreduce(GLOO, size, shape, wire).alone_s for shape in (Shape(2, 2), Shape(2))]
    assert all_s == 0.299 and apart_s == pytest.approx(all_s * form[1] / form[0])


# Nodes, the link, flags: what is chosen.
CHOICES: dict[str, tuple[int, dict[str, Any] | None, str, str]] = {
    "far": (2, link_of(80, 1000, 0.3), "", "direct"),
    "near": (2, link_of(0.2, 1000, 0.3), "", "backend"),
    "as fast by the backend": (2, link_of(80, 80, 0.17), "", "backend"),
    "one node": (1, None, "", "backend"),
    "no time for an all-reduce": (2, link_of(80, 1000, None), "", "backend"),  # type: ignore[arg-type]
    "delays": (4, link_of(160, 1000, 1.3), "", "all_to_all"),
    "bytes": (4, link_of(20, 80, 1.3), "", "direct"),
    "fewer bytes": (4, link_of(160, 80, 1.3), "--compress int4", "all_to_all"),
    # The all-reduce took longer than its form says, and codes do not take it.
    "gradients are codes in int8": (4, link_of(80, 2.1, 6.19), "--compress int8", "backend"),
    "gradients are numbers in bf16": (4, link_of(80, 6, 2.8), "--compress bf16", "direct"),
    "changes are codes in bf16": (
        4, link_of(80, 2.1, 6.19), "--compress bf16 --strategy local_sgd", "backend"
    ),
    "codes wait for more round trips": (
        4, link_of(80, 12, 2.8), "--compress bf16 --strategy local_sgd", "direct"
    ),
    "in parts": (4, link_of(60, 80, 1.3), "--strategy diloco --fragments 10", "all_to_all"),
    "as asked": (4, link_of(160, 1000, 1.3), "--exchange direct", "direct"),
}  # fmt: skip


def exchange_of(nodes: int, flags: str) -> Any:
    settings = parse("bert", flags.split(), launched(2, 1))
    world = World(nodes, 1 if nodes > 1 else 2)
    context = SimpleNamespace(settings=settings, world=world, is_rank0=True, checkpoint=None)
    return SimpleNamespace(context=context, way="backend")


@pytest.mark.parametrize("name", CHOICES)
def test_which_exchange_is_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, link, flags, expected = CHOICES[name]
    exchange = exchange_of(nodes, flags)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    way = set_way(exchange, link)
    assert way["exchange"] == exchange.way == expected
    assert way.get("exchange_early_s", 0.0) == early_s(exchange, link)
    if "--exchange" not in flags:
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        assert set_way(exchange, link) == {"exchange": "backend"}


# Flags, nodes and processes of each: whether there is a choice.
MAY_CHOOSE = {
    ("", 2, 1): True, ("", 1, 2): False, ("", 2, 2): True, ("--strategy fsdp", 2, 1): False,
    ("--compress bf16", 2, 2): True, ("--compress int8", 2, 2): False,
    ("--compress powersgd:2", 2, 1): False, ("--compress int4", 2, 1): True,
    ("--strategy local_sgd", 2, 2): True, ("--strategy diloco --sync_scope rank", 2, 2): False,
}  # fmt: skip


def test_without_a_choice_it_is_the_run_of_the_backend() -> None:
    for (flags, nodes, per_node), may in MAY_CHOOSE.items():
        settings = parse("bert", flags.split(), launched(nodes, per_node))
        assert settings.exchange == ("auto" if may else "backend"), flags
        same = run_id(settings) == run_id(replace(settings, exchange="backend"))
        assert same != may
    assert parse("bert", ["--exchange", "auto"], {}).exchange == "backend"


@pytest.mark.parametrize("way", ["backend", "direct"])
def test_a_record_is_told_apart_by_its_exchange(way: str) -> None:
    known = as_mapping(parse("bert", ["--tiny"], {})) | {"exchange": way}
    assert identity_settings(known)["exchange"] == way


def attempts(folder: str, way: list[str]) -> list[Any]:
    """What three attempts record, the second and third of which find another link than the first;
    the last one is another run.
    """
    found: list[Any] = []
    links = [link_of(160, 1000, 1.3), link_of(0.1, 9000, 0.001), link_of(0.1, 9000, 0.001)]
    argv = [*SGD, *way, "--save", "last", "--save_steps", "7"]
    for number, (link, stop) in enumerate(zip(links, (7, None, None), strict=True)):
        # Only rank 0 knows the link.
        known = link if dist.is_initialized() is False or dist.get_rank() == 0 else None
        loop.link_of_run = lambda *_, known=known: known  # type: ignore[assignment]
        where = f"{folder}/{number // 2}"
        calls = [toys.BreakOff(stop)] if stop else []
        data = toys.Points(40 * 3)
        trainer, run = toys.ours(where, toys.Net(), data, toys.Points(9, 1), *argv, callbacks=calls)
        with suppress(toys.BrokenOffError):
            run.train(trainer)
        observed = trainer.observations.observed
        found.append((observed["exchange"], observed["gradient_hook"], trainer.exchange.way))
        found.append(sorted(observed.get("exchange_estimates_s", {})))
        if run.context.is_rank0:  # as it is read
            assert settings_of(run.context.folder)["exchange"] == observed["exchange"]
    return found


@pytest.mark.process
def test_all_ranks_take_it_and_an_attempt_that_goes_on_keeps_it(tmp_path: Path) -> None:
    env = {"LOCAL_WORLD_SIZE": "1"}
    kept = ("all_to_all", "DirectGradients.hook by all_to_all", "all_to_all")
    names = ["all_to_all", "backend", "direct"]
    backend = ("backend", None, "backend")
    for rank in ranks(3, attempts, str(tmp_path), ["--epochs", "2"], env=env):
        assert rank == [kept, names, kept, names, backend, []]


@pytest.mark.parametrize(
    ("way", "rtt_ms", "expected"),
    [("direct", 200.0, 0.2), ("all_to_all", 30.0, 0.03), ("backend", 200.0, 0.0),
     ("direct", None, 0.0)],
)  # fmt: skip
def test_ranks_may_differ_by_a_round_trip_where_they_send_directly(
    way: str, rtt_ms: float | None, expected: float
) -> None:
    exchange: Any = SimpleNamespace(way=way)
    assert early_s(exchange, {"rtt_min_ms": rtt_ms}) == expected
    assert early_s(exchange, None) == 0.0
