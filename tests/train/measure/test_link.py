"""Links between nodes: what is measured, in how much time, and whether it is what was asked for."""

from __future__ import annotations

import math
import os
import socket
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from harness.core.collectives import GLOO, Shape, Wire, allreduce
from harness.core.identity import UNKNOWN
from harness.core.topology import World, world_of
from harness.train.measure import link, link_probe
from harness.train.measure.link import allreduce_s, difference, interface, measure, warning
from harness.train.measure.link_probe import SAMPLES, SMALLEST, busbw, pairs_of
from tests.support.probed import MIB, Link
from tests.support.ranks import ranks

# ---- how much is measured in how much time ----


def test_busbw_is_what_one_rank_s_link_carries() -> None:
    # A ring of n ranks sends 2(n-1) of n parts over each link.
    assert [busbw(100.0, n) for n in (2, 4, 8)] == [100.0, 150.0, 175.0]


def test_a_fast_link_is_measured_at_the_size_asked_for() -> None:
    fast = Link(1000)
    assert fast.climb(25_000_000, 4.0) == (25_000_000, pytest.approx(0.2))
    assert fast.sizes[:4] == [SMALLEST, 4 * SMALLEST, 16 * SMALLEST, 64 * SMALLEST]
    assert fast.sizes.count(25_000_000) == 1 + SAMPLES
    assert Link(1000).climb(400, 1.0) == (400, pytest.approx(400 * 8e-9))


def test_what_is_known_to_fit_is_measured_at_once() -> None:
    known = Link(1000)
    assert known.climb(25_000_000, 4.0, first=25_000_000) == (25_000_000, pytest.approx(0.2))
    assert known.sizes == [25_000_000] * (1 + SAMPLES)


def test_an_all_reduce_is_foreseen_by_the_links_that_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    pairs, world = [pair(40.0, 80.0), pair(80.0, 200.0)], World(3)
    expected = allreduce(GLOO, MIB, Shape(3), Wire(0.04, 10e6)).alone_s
    assert allreduce_s(pairs, world, MIB) == pytest.approx(expected)
    assert allreduce_s([*pairs, pair(40.0)], world, MIB) == pytest.approx(expected)
    assert allreduce_s([*pairs, pair(400.0)], world, MIB) is None  # the most distant may be slower
    assert allreduce_s([], World(2), MIB) is None
    delays = allreduce(GLOO, 1, Shape(3), Wire(0.2, math.inf)).alone_s
    assert allreduce_s([*pairs, pair(400.0)], world, 1) == pytest.approx(delays) and delays > 0.4


@pytest.mark.parametrize("latency_s", [0.0, 0.4])
@pytest.mark.parametrize("besides_s", [0.0, 0.4])
@pytest.mark.parametrize("mbit", [1, 10, 100, 1000])
@pytest.mark.parametrize("budget_s", [0.01, 1.0, 4.0])
def test_a_slow_link_costs_no_more_than_the_time_there_is(
    mbit: float, latency_s: float, besides_s: float, budget_s: float
) -> None:
    slow = Link(mbit, latency_s, besides_s)
    result = slow.climb(400 * MIB, budget_s, latency_s=latency_s)
    assert result is not None
    size, seconds = result
    assert seconds == pytest.approx(latency_s + size * 8 / mbit / 1e6)
    # The first size is tried blindly, twice.
    first_s = latency_s + besides_s + SMALLEST * 8 / mbit / 1e6
    assert slow.now_s - 100.0 <= max(budget_s, 2 * first_s) + 1e-9
    if budget_s == 4.0 and mbit >= 10:
        assert size > SMALLEST


def test_latency_is_not_taken_for_bandwidth() -> None:
    """At 0.3 s whatever the size, four times the bytes do not take four times as long."""
    far = Link(1000, latency_s=0.3)
    assert far.climb(25_000_000, 4.0) == (25_000_000, pytest.approx(0.5))


def test_growing_ends_where_a_transfer_is_long_enough() -> None:
    assert Link(100).climb(64 * MIB, 100.0, is_enough=lambda size, s: s >= 0.1) == (
        4 * MIB,
        pytest.approx(0.336, rel=0.01),
    )


def test_the_first_exchange_of_a_size_opens_the_window() -> None:
    class Cold(Link):
        def once(self, size: int) -> float:
            seconds = super().once(size)
            return seconds if self.sizes.count(size) > 1 else 3 * seconds

    assert Cold(100).climb(SMALLEST, 4.0) == (SMALLEST, pytest.approx(SMALLEST * 8e-8))
    # The very first is not counted, though the time was for it alone.
    assert Cold(1).climb(SMALLEST, 0.5) == (SMALLEST, pytest.approx(SMALLEST * 8e-6))
    known = Cold(10)
    assert known.climb(MIB, 2.6, first=MIB) == (MIB, pytest.approx(MIB * 8e-7))


def test_what_takes_long_is_not_repeated_more_than_it_says() -> None:
    slow = Link(1000, latency_s=1.2)
    slow.climb(SMALLEST, 100.0)
    assert slow.sizes == [SMALLEST] * 2


def test_without_time_nothing_is_known() -> None:
    assert Link(1000).climb(MIB, -0.001) is None


def test_every_pair_up_to_eight_nodes_and_those_of_node_0_of_more() -> None:
    assert pairs_of(2) == [(0, 1)]
    assert pairs_of(3) == [(0, 1), (0, 2), (1, 2)]
    assert len(pairs_of(8)) == 28 and pairs_of(8)[:7] == [(0, n) for n in range(1, 8)]
    assert pairs_of(9) == [(0, n) for n in range(1, 9)]


# ---- what was asked for ----


def pair(rtt: float | None, mbit: float | None = None, size: int = 64 * MIB) -> dict[str, Any]:
    return {
        "nodes": [0, 1], "rtt_min_ms": rtt, "rtt_median_ms": rtt, "bandwidth_mbit": mbit,
        "transfer_bytes": None if mbit is None else size,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "rtt", "far"),
    [
        ({"delay_ms": 20}, 40.0, False),
        ({"delay_ms": 20}, 43.9, False),
        ({"delay_ms": 20}, 44.1, True),
        ({"delay_ms": 20}, 35.9, True),
        ({"delay_ms": 1}, 3.9, False),  # 95 %, but less than 2 ms
        ({"delay_ms": 1}, 4.1, True),
        ({"delay_ms": 200}, 438.0, False),  # 38 ms, but less than 10 %
        ({"delay_ms": 0}, 1.9, False),
        ({"rate_mbit": 100}, 2.1, True),
        ({"delay_ms": 20, "jitter_ms": 5}, 31.0, False),  # each way may be 5 ms sooner
        ({"delay_ms": 20, "jitter_ms": 5}, 25.0, True),
        ({"delay_ms": 20}, None, False),
    ],
)
def test_a_round_trip_far_from_twice_the_delay(
    asked: dict[str, float], rtt: float | None, far: bool
) -> None:
    message = difference(asked, pair(rtt))
    assert bool(message) == far
    if far:
        assert f"{rtt:.1f} ms, not {2 * asked.get('delay_ms', 0):g}" in message


@pytest.mark.parametrize(
    ("mbit", "size", "far"),
    [
        (100.0, 4 * MIB, False),
        (71.0, 4 * MIB, False),
        (69.0, 4 * MIB, True),
        (131.0, 4 * MIB, True),
        # At 100 Mbit/s this would take 42 ms.
        (50.0, MIB // 2, False),
        (None, 0, False),
    ],
)
def test_a_bandwidth_far_from_the_rate(mbit: float | None, size: int, far: bool) -> None:
    message = difference({"rate_mbit": 100}, pair(1.0, mbit, size))
    assert message == (f"it carries {mbit:,.0f} Mbit/s, not 100" if far else "")
    # As far apart, where the window was open: 0.34 s are three round trips, 42 ms are half of one.
    assert difference({"rate_mbit": 100, "delay_ms": 50}, pair(100.0, mbit, size)) == message


def test_a_warning_names_the_pair_and_counts_the_others() -> None:
    near, far = {"delay_ms": 0}, {"delay_ms": 50}
    result = [{**pair(rtt), "nodes": nodes} for nodes, rtt in (([0, 1], 0.1), ([0, 2], 100.0))]
    listed = [{"nodes": [0, 1], **near}, {"nodes": [2, 0], **far}]
    assert warning(listed, result) is None
    assert warning(None, result) is None and warning([], result) is None
    assert warning(listed[:1], result) is None  # of the other nothing was asked
    message = warning(near, result)
    assert (
        message is not None
        and "between nodes 0 and 2 a round trip takes 100.0 ms, not 0" in message
    )
    both = warning({"delay_ms": 200}, result)
    assert both is not None and "between nodes 0 and 1" in both and "and 1 more" in both


# ---- which interface ----


def test_the_interface_is_the_named_one_or_that_of_the_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    named = {"GLOO_SOCKET_IFNAME": "vA", "NCCL_SOCKET_IFNAME": "ib", "MASTER_PORT": "1"}
    with monkeypatch.context() as patched:
        patched.setattr(psutil, "net_if_addrs", lambda: {"vA": [], "ib": [], "eth0": []})
        assert interface(cpu, named) == "vA" and interface(gpu, named) == "ib"
    # Patterns, as NCCL takes them, and several are no interface.
    for pattern in ("^lo,docker0", "=eth0", "eth", "eth0,eth1"):
        assert interface(gpu, named | {"NCCL_SOCKET_IFNAME": pattern}) is None
    real = psutil.Process.net_connections
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def alone(self: psutil.Process, kind: str) -> list[Any]:
            """No connections but this one: tests before it may have left some."""
            return [c for c in real(self, kind) if c.raddr and port in (c.laddr.port, c.raddr.port)]

        monkeypatch.setattr(psutil.Process, "net_connections", alone)
        with socket.create_connection(("127.0.0.1", port)):
            result = interface(cpu, {"MASTER_PORT": "1"})
            assert result is not None
            assert "127.0.0.1" in [a.address for a in psutil.net_if_addrs()[result]]
            assert interface(cpu, {"MASTER_PORT": str(port)}) is None  # the launcher's own

            def hidden(self: psutil.Process, kind: str) -> None:
                raise psutil.AccessDenied

            monkeypatch.setattr(psutil.Process, "net_connections", hidden)
            assert interface(cpu, {"MASTER_PORT": "1"}) is None


# ---- real ranks ----


def measured(sizes: list[int], patch: str = "") -> Any:
    """What a rank finds; in a process that was started for it."""
    groups = []
    if patch == "nccl":
        # Stands in for what needs several GPUs: a group of the leaders alone, gone afterwards.
        real = dist.new_group
        dist.get_backend = lambda *args: "nccl"
        dist.new_group = lambda members: groups.append(members) or real(members)
    if patch == "cut off":  # of the first pair there is time for one size, over 160 ms
        real_trips, real_transfer = link_probe.measure_trips, link_probe.measure_transfer

        def is_first(peer: int) -> bool:
            return (dist.get_rank(), peer) == (0, 1)

        def far(channel: Any, peer: int, *more: float) -> list[float]:
            found = real_trips(channel, peer, *more)
            return [0.16, 0.16] if is_first(peer) else found

        def cut_off(channel: Any, peer: int, *times: float) -> list[float]:
            found = real_transfer(channel, peer, *times)
            return [SMALLEST, 0.25] if is_first(peer) else found

        link_probe.measure_trips, link_probe.measure_transfer = far, cut_off
    budget_s = -1.0 if patch == "late" else link.BUDGET_S
    dist.init_process_group("gloo")
    before = torch.get_rng_state()
    result = measure(world_of(os.environ), torch.device("cpu"), sizes, budget_s=budget_s)
    same = torch.equal(before, torch.get_rng_state())
    left = torch.ones(1)
    dist.all_reduce(left)  # the ranks agree on where they are
    size = dist.get_world_size()
    dist.destroy_process_group()
    return {"found": result, "same": same, "agreed": left.item() == size, "groups": groups}


@pytest.mark.process
def test_three_nodes_of_one_process() -> None:
    first, *others = ranks(3, measured, [400, MIB], env={"LOCAL_WORLD_SIZE": "1"})
    assert all(one["same"] and one["agreed"] for one in (first, *others))
    assert [one["found"] for one in others] == [None, None]
    result = first["found"]
    assert [row["nodes"] for row in result["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for row in result["pairs"]:
        assert 0 < row["rtt_min_ms"] <= row["rtt_median_ms"] < 100
        assert row["bandwidth_mbit"] > 10 and row["transfer_bytes"] >= SMALLEST
    assert result["rtt_min_ms"] == max(row["rtt_min_ms"] for row in result["pairs"])
    assert result["bandwidth_mbit"] == min(row["bandwidth_mbit"] for row in result["pairs"])
    for row, size in zip(result["allreduce"], (400, MIB), strict=True):
        assert row["asked_bytes"] == row["bytes"] == size
        assert row["algbw_mbit"] == pytest.approx(size * 8 / row["s"] / 1e6)
        assert row["busbw_mbit"] == pytest.approx(row["algbw_mbit"] * 4 / 3)
    assert result["interface"] is not None
    assert result["took_s"] < link.BUDGET_S and result["asked"] is result["warning"] is None


@pytest.mark.process
def test_two_nodes_of_two_processes_and_a_group_of_their_leaders() -> None:
    first, *others = ranks(4, measured, [MIB], "nccl", env={"LOCAL_WORLD_SIZE": "2"})
    assert all(one["groups"] == [[0, 2]] and one["agreed"] for one in (first, *others))
    (row,) = first["found"]["pairs"]
    assert row["nodes"] == [0, 1] and row["bandwidth_mbit"] > 10
    assert first["found"]["allreduce"][0]["bytes"] == MIB


@pytest.mark.process
def test_what_there_is_no_time_for_is_unknown() -> None:
    first, _ = ranks(2, measured, [MIB], "late", env={"LOCAL_WORLD_SIZE": "1"})
    result = first["found"]
    assert result["pairs"] == [{**pair(None), "nodes": [0, 1]}]
    assert result["rtt_min_ms"] is result["bandwidth_mbit"] is None
    assert result["allreduce"] == [
        {"asked_bytes": MIB, "bytes": None, "s": None, "algbw_mbit": None, "busbw_mbit": None}
    ]


def test_sizes_without_time_are_named() -> None:
    def row(asked: int, size: int | None) -> dict[str, int | None]:
        return {"asked_bytes": asked, "bytes": size}

    assert link.without_time([row(400, 400), row(MIB, MIB)], 10.0) is None
    rows = [row(400_000, 400_000), row(1_000_000, SMALLEST), row(25_000_000, None)]
    assert link.without_time(rows, 2.5) == (
        "no time in 2.5 s for an all-reduce of 1, 25 MB: give more with --seconds"
    )


def test_one_node_has_no_link() -> None:
    model = torch.nn.Linear(1, 1)
    assert link.link_of_run(model, World(nodes=1, per_node=4), torch.device("cpu")) is None


def test_nccl_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    link_probe.TensorChannel(torch.device("cpu")).finish()
    assert waited == []
    link_probe.TensorChannel(torch.device("cuda", 1)).finish()
    assert waited == [torch.device("cuda", 1)]


def test_a_transfer_shorter_than_a_round_trip_says_nothing_of_bandwidth() -> None:
    row = link_probe.pair_row((0, 1), 0.001, 0.002, SMALLEST, -0.0001)
    assert row["bandwidth_mbit"] is None and row["rtt_min_ms"] == 1.0
    # Over 80 ms and 50 Mbit/s: without time for more than the first transfer, and with it.
    cut_off = link_probe.pair_row((0, 3), 0.16, 0.16, SMALLEST, 0.25)
    assert cut_off["bandwidth_mbit"] is None and cut_off["transfer_bytes"] == SMALLEST
    whole = link_probe.pair_row((0, 1), 0.16, 0.16, MIB, 0.174)
    assert whole["bandwidth_mbit"] == pytest.approx(48.2, abs=0.1)


@pytest.mark.process
def test_the_rate_of_near_pairs_is_not_that_of_one_further_apart() -> None:
    first, *_ = ranks(3, measured, [400], "cut off", env={"LOCAL_WORLD_SIZE": "1"})
    cut_off, *others = first["found"]["pairs"]
    assert cut_off["bandwidth_mbit"] is None and cut_off["transfer_bytes"] == SMALLEST
    assert min(row["bandwidth_mbit"] for row in others) > 10
    assert first["found"]["bandwidth_mbit"] is None


def test_a_probe_grows_until_a_transfer_tells_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.7 Mbit/s over 160 ms: 64 KiB take 4.7 round trips, and the window may be one of them."""
    slow = Link(0.7)
    channel = link_probe.TensorChannel(torch.device("cpu"))
    monkeypatch.setattr(link_probe, "_transfer", lambda *args: 0.16 + slow.once(args[2]))
    monkeypatch.setattr(channel, "send_message", lambda *_: None)
    size, seconds = link_probe.measure_transfer(channel, 1, 60.0, 0.16)
    assert (size, seconds) == (4 * SMALLEST, pytest.approx(4 * SMALLEST * 8 / 0.7e6))


def test_a_rate_that_nothing_tells_is_said() -> None:
    known, distant = pair(40.0, 80.0), pair(160.0)
    for pairs, rate, said in (
        ([known], 80.0, False), ([distant], None, True), ([], None, False),
        ([{**distant, "transfer_bytes": MIB}], None, False),  # so much in a round trip, at least
    ):  # fmt: skip
        line = link.without_rate({"pairs": pairs, "bandwidth_mbit": rate}, 2.5)
        assert bool(line) == said
        assert not said or line == (
            "no time in 2.5 s for a transfer that tells the rate of the link"
        )


def test_pairs_of_unknown_rate_are_counted() -> None:
    known, distant = pair(40.0, 80.0), pair(160.0)
    bounded = {**distant, "transfer_bytes": MIB}  # so much in a round trip, at least
    assert link.unknown_pairs({"pairs": [known, bounded]}, 2.5) is None
    assert link.unknown_pairs({"pairs": [known, distant, distant]}, 2.5) == (
        "no time in 2.5 s for a transfer that tells the rate of 2 of 3 pairs of nodes"
    )


def test_a_run_says_that_its_link_has_no_known_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"asked_bytes": 8, "bytes": 8, "s": 0.4, "algbw_mbit": None, "busbw_mbit": None}
    found = {"asked": None, "interface": None, "pairs": [pair(160.0)], "rtt_min_ms": 160.0,
             "rtt_median_ms": 160.0, "bandwidth_mbit": None, "allreduce": [row], "took_s": 1.0,
             "warning": None}  # fmt: skip
    monkeypatch.setattr(link, "measure", lambda *_: found)
    result = link.link_of_run(torch.nn.Linear(1, 1), World(2), torch.device("cpu"))
    assert result is not None and result["bandwidth_mbit"] is None
    line = "warning: no time in 10 s for a transfer that tells the rate of the link: "
    assert capsys.readouterr().err == f"{line}estimates count delays alone\n"


def test_columns_of_numbers_end_below_each_other() -> None:
    lines = link.aligned(("nodes", "median"), [("0 - 1", "2.50"), ("0 - 10", UNKNOWN)])
    assert [*lines] == [" nodes  median", " 0 - 1    2.50", "0 - 10       -"]
