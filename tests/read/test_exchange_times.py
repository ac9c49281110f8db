"""What an exchange takes by the model: of every strategy, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from harness.core.collectives import (
    GLOO,
    NCCL,
    TCP_SHARE,
    Cost,
    Shape,
    Wire,
    all_to_all_mean,
    allreduce,
    coded_mean,
    direct_mean,
    gloo_round_trips,
    wire_of,
)
from harness.core.links import Link
from harness.core.settings import UserError
from harness.read.labels import strategy_text
from harness.read.predict.computing import fit_line
from harness.read.predict.exchange import alpha_beta, buckets, last_end, ready_times, slow_start_s
from harness.read.predict.model import EXCHANGE, SHARING, WIRE_SHARES, Model, predict
from harness.read.predict.scenario import Scenario, exchanges_of_update, together_of
from harness.train.strategy.coded import CODECS
from tests.support.predicted import FAR, LINE, MB, MODEL


def test_the_ring_of_gloo_by_hand() -> None:
    # 25 MB in pieces of 1 MiB: 24 of them, 12 a rank; two ranks send 12 twice, two at a time.
    assert gloo_round_trips(25 * MB, 2) == (12, 0.7)
    # A small one has two pieces a rank all the same; four ranks pass them on three times, twice.
    assert gloo_round_trips(1000, 2) == (2, 0.7)
    assert gloo_round_trips(1000, 4) == (6, pytest.approx(2.1))
    cost = allreduce(GLOO, 5 * MB, Shape(2), FAR)
    assert cost == Cost(0.2, pytest.approx(3 * 0.04), pytest.approx(0.7 * 0.04))
    assert cost.alone_s == pytest.approx(0.32)
    # Four ranks: 1.5 times the bytes, half of them while pieces are waited for.
    four = allreduce(GLOO, 5 * MB, Shape(2, 2), FAR)
    assert four.alone_s == pytest.approx(6 * 0.04 + 0.3 / 2)
    assert allreduce(GLOO, 5 * MB, Shape(1, 8), FAR) == Cost()


def test_nccl_waits_for_a_tree_and_the_textbook_for_a_ring() -> None:
    cost = allreduce(NCCL, 8 * MB, Shape(8, 2), Wire(0.001, 1e9))
    assert cost.wire_s == pytest.approx(2 * 15 / 16 * 0.008)
    assert cost.waits_s == pytest.approx(2 * 3 * 0.001)
    assert allreduce(NCCL, 8 * MB, Shape(2), Wire(0.001, 1e9)).waits_s == pytest.approx(0.002)
    assert alpha_beta(8 * MB, Shape(4), Wire(0.001, 1e9)) == pytest.approx(0.006 + 1.5 * 0.008)


def test_a_link_in_seconds_and_bytes() -> None:
    wire = wire_of(Link(20, 200))
    assert wire.round_trip_s == 0.04 and wire.bytes_per_s == pytest.approx(25e6 * TCP_SHARE)
    assert math.isinf(wire_of(Link()).bytes_per_s)


def test_buckets_as_ddp_makes_them() -> None:
    mib = 2**20
    assert buckets(60 * mib) == [mib, 25 * mib, 25 * mib, 9 * mib]
    assert buckets(mib / 2) == [mib / 2] and buckets(0) == []
    assert buckets(3 * mib, cap_mb=2) == [mib, 2 * mib]
    assert ready_times([1, 3], 8.0) == [2.0, 8.0]


def test_exchanges_overlap_by_hand() -> None:
    cost = Cost(wire_s=2.0, waits_s=1.0)
    # One at a time: 1 to 4, 4 to 7.
    assert last_end([1, 3], [cost, cost], 1) == 7
    # Two at a time share the link (1 to 3, 3 to 5) and wait together.
    assert last_end([1, 3], [cost, cost], 2) == 6
    # The third waits for the first (4), and for the link (5).
    assert last_end([1, 3, 3], [cost, cost, cost], 2) == 8
    # Half of what passes does so while it waits: 1 + 2 - 1 + 1, and never before all has passed.
    assert last_end([1], [Cost(2.0, 1.0, added=0.5)], 2) == 3
    assert last_end([1], [Cost(2.0, 4.0, added=0.5)], 2) == 6
    # What may pass while it waits hides what is shorter.
    assert last_end([1], [Cost(0.5, 1.0, 2.0)], 2) == 4
    assert last_end([], [], 1) == 0


SENT = {("ddp", "powersgd"): 0.01}


def exposed_s(shape: Shape | None = None, model: Model = MODEL, **more: object) -> float:
    plan = Scenario(shape or Shape(2), 16, FAR, **more)  # type: ignore[arg-type]
    return predict(model, plan).parts[EXCHANGE]


RESTLESS = replace(MODEL, slow_start_after_idle=False)
HOST_S = MODEL.inside_s  # what an exchange of two takes beside its link
LATER_S = 0.3 * 0.04  # and what it takes where they do not begin together


def apart_s(size: float) -> float:
    """An all-reduce after updates apart: it begins 0.3 of a round trip later for one of the two."""
    return allreduce(GLOO, size, Shape(2), FAR).alone_s + LATER_S + HOST_S


def test_what_makes_a_slow_link_bearable() -> None:
    whole_s = apart_s(4 * MB)
    assert exposed_s(strategy="diloco", sync_every=9) == pytest.approx(whole_s / 9)
    going_on_s = 4 * 0.026
    assert exposed_s(strategy="diloco", sync_every=9, overlap=4) == pytest.approx(
        (whole_s - going_on_s) / 9
    )
    assert exposed_s(strategy="diloco", overlap=100, sync_every=200) == 0
    assert exposed_s(compress="bf16") < exposed_s()
    # Two round trips of codes, and the bytes.
    coded_s = (0.25 + 1 / 1024) * 4 * MB / 25e6 + 2 * 0.04 + LATER_S + HOST_S
    assert exposed_s(strategy="diloco", sync_every=9, compress="int8") == pytest.approx(coded_s / 9)


def test_a_window_opens_again_by_hand() -> None:
    """Half of 4 MB at once, of which the link holds 1 MB: 14.48 kB doubles to it in seven round
    trips, one of which an open window takes as well.
    """
    assert slow_start_s(2 * MB, FAR) == pytest.approx(6 * 0.04)
    assert slow_start_s(14_000, FAR) == 0  # ten segments hold it
    assert slow_start_s(14_500, FAR) == pytest.approx(0.04)
    assert slow_start_s(2 * MB, Wire(0.0, 25e6)) == 0


def test_connections_rest_between_exchanges_that_are_rare() -> None:
    """More than 40 ms + 200 ms lie between two from 10 updates of 26 ms on; of more frequent ones,
    the first of each epoch comes after an evaluation.
    """
    whole_s = apart_s(4 * MB)
    slow_s = whole_s + slow_start_s(2 * MB, FAR)
    assert exposed_s(strategy="diloco", sync_every=10) == pytest.approx(slow_s / 10)
    found_s = exposed_s(strategy="local_sgd", sync_every=9, epoch_updates=44)
    assert found_s == pytest.approx(whole_s / 9 + (slow_s - whole_s) / 44)
    # Seven exchanges of 50 updates, and one after the last of 352.
    found_s = exposed_s(strategy="diloco", sync_every=50, updates=352)
    assert found_s == pytest.approx(8 * slow_s / 352)
    half_s = apart_s(2 * MB) - HOST_S / 2 + slow_start_s(MB, FAR)
    # A half every 25 updates; after the last the other one, and where none was due then, both.
    for updates, often in ((352, 16), (375, 16), (380, 17)):
        halves_s = exposed_s(strategy="diloco", sync_every=50, updates=updates, fragments=2)
        assert halves_s == pytest.approx(often * half_s / updates), updates


@pytest.mark.parametrize(
    ("more", "way"),
    [
        ({}, "direct"),
        ({"strategy": "diloco", "sync_every": 9}, "direct"),
        ({"strategy": "ddp", "compress": "int8"}, "direct"),
        ({"compress": "powersgd", "model": replace(MODEL, payloads=SENT)}, "backend"),
        ({"shape": Shape(4)}, "direct"),
        ({"shape": Shape(4), "wire": Wire(0.2, 25e6)}, "all_to_all"),
        ({"wire": Wire(0.0001, 25e6)}, "backend"),
        ({"model": replace(MODEL, backend=NCCL)}, "backend"),
        # All processes of a node would send.
        ({"shape": Shape(2, 2), "strategy": "diloco", "sync_scope": "rank"}, "backend"),
    ],
)
def test_auto_is_what_a_run_would_take(more: dict[str, Any], way: str) -> None:
    model = more.pop("model", MODEL)
    given = {"shape": Shape(2), "wire": FAR, "emulated": True, **more}
    plan = Scenario(batch=16, exchange="auto", **given)
    found = predict(model, plan)
    assert found.plan.exchange == way
    assert found.step_s == predict(model, replace(plan, exchange=way)).step_s


def test_a_kernel_may_keep_the_windows_of_connections_that_rest() -> None:
    """After a rest an exchange takes half a round trip longer all the same, and the first direct
    one a whole one.
    """
    rested_s = apart_s(4 * MB) + 0.02
    model = replace(MODEL, slow_start_after_idle=False)
    rare = {"model": model, "strategy": "diloco", "sync_every": 10}
    assert exposed_s(**rare) == pytest.approx(rested_s / 10)  # type: ignore[arg-type]
    direct_s = exposed_s(**rare, updates=100, exchange="direct")  # type: ignore[arg-type]
    once_s = 10 * (0.16 + 0.02 + LATER_S + 0.02 + HOST_S) + 0.04
    assert direct_s == pytest.approx(once_s / 100)


def test_replicas_wait_for_the_slowest() -> None:
    """Two emulated nodes slow each other by a tenth in DDP and by a fortieth in updates apart. At
    an exchange they wait for 0.8 of an update, and for no more than the difference has come to.
    """
    for every, wait_s in ((20, 0.8 * 1.025 * 0.026), (4, 4 * 0.075 * 0.026)):
        often = {"strategy": "local_sgd", "sync_every": every, "emulated": True}
        found = predict(RESTLESS, Scenario(Shape(2), 16, FAR, **often))  # type: ignore[arg-type]
        assert found.parts[SHARING] == pytest.approx(0.025 * 0.026)
        whole_s = apart_s(4 * MB) + HOST_S / 2 + wait_s  # what delays packets uses the same cores
        whole_s += 0.02 * (every == 20)  # after more than 240 ms
        assert found.parts[EXCHANGE] == pytest.approx(whole_s / every)
    pieces = exposed_s(model=RESTLESS, strategy="diloco", sync_every=20, fragments=4, emulated=True)
    part_s = apart_s(MB) - HOST_S + (1.5 * HOST_S + 0.8 * 1.025 * 0.026) / 4
    assert pieces == pytest.approx(part_s / 5)


def test_codes_of_long_steps_find_connections_at_rest() -> None:
    """Steps of more than a round trip and 200 ms, as of five round trips of 80 ms."""
    wire = Wire(0.04, 25e6)
    plan = Scenario(Shape(2), 16, wire, compress="int8")
    whole_s = 3.15 * 0.08 + HOST_S
    assert predict(RESTLESS, plan).parts[EXCHANGE] == pytest.approx(whole_s)
    slow = replace(RESTLESS, line=fit_line([(16, 0.3), (16, 0.3)]))
    assert predict(slow, plan).parts[EXCHANGE] == pytest.approx(whole_s + 0.04)
    # As many rows as updates, of a diloco that begins with the first updates together.
    begun = replace(plan, strategy="diloco", sync_every=10, updates=1000, sync_first=999)
    all_s = predict(slow, begun).parts[EXCHANGE] - predict(RESTLESS, begun).parts[EXCHANGE]
    assert all_s == pytest.approx(0.04, rel=0.01)
    slow = replace(slow, slow_start_after_idle=True)
    begins_s = slow_start_s((0.25 + 1 / 1024) * 4 * MB / 2, wire)
    assert predict(slow, plan).parts[EXCHANGE] == pytest.approx(whole_s + begins_s)


def test_exchanges_are_counted_in_the_updates_that_are_timed() -> None:
    """Of 88 updates the first eight are not: the exchanges after 10, 20 ... 80 and 88 are nine."""
    plan = Scenario(Shape(2), 16, FAR, "diloco", sync_every=10, updates=88, untimed=8)
    assert exchanges_of_update(plan) == 9 / 80
    assert exchanges_of_update(replace(plan, untimed=0)) == 9 / 88
    assert exchanges_of_update(replace(plan, sync_every=4)) == 20 / 80  # not those after 4 and 8
    together = replace(plan, sync_first=44)
    assert (together_of(together), exchanges_of_update(together)) == (36 / 80, 5 / 44)


def test_the_textbook_exchanges_as_often_as_the_model() -> None:
    """By a ring, 0.04 + 0.16 s of all or 0.04 + 0.08 s of a half, between updates of 26 ms."""
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, 0.2 / 50),
        ({"updates": 11}, 0.2 / 11),  # once, after the last one
        ({"updates": 50}, 0.2 / 50),
        ({"updates": 352}, 8 * 0.2 / 352),
        ({"updates": 380, "fragments": 2}, 17 * 0.12 / 380),
        ({"updates": 100, "sync_first": 40}, (40 * 0.2 + 2 * 0.2) / 100),
    ]
    for known, by_hand_s in cases:
        plan = Scenario(Shape(2), 16, FAR, "diloco", sync_every=50, **known)
        assert predict(MODEL, plan).baseline_s == pytest.approx(0.026 + by_hand_s), known


def test_a_start_together_by_hand() -> None:
    """40 of 100 updates wait for a row of all gradients; of the others every ninth exchanges, and
    the last one.
    """
    whole_s = allreduce(GLOO, 4 * MB, Shape(2), FAR).alone_s
    for strategy in ("local_sgd", "diloco"):
        found_s = exposed_s(strategy=strategy, sync_every=9, updates=100, sync_first=40)
        assert found_s == pytest.approx((40 * (whole_s + HOST_S) + 7 * apart_s(4 * MB)) / 100)
        later_s = exposed_s(strategy=strategy, sync_every=9, updates=60)
        assert found_s == pytest.approx(0.4 * (whole_s + HOST_S) + 0.6 * later_s)
    half_s = exposed_s(strategy="diloco", exchange="direct", sync_every=10, fragments=2,
                       updates=100, sync_first=40)  # fmt: skip
    together_s, part_s = 0.16 + 0.02 + HOST_S, 0.08 + 0.02 + LATER_S + HOST_S / 2
    assert half_s == pytest.approx((40 * together_s + 13 * part_s) / 100)
    plan = Scenario(Shape(2), 16, FAR, "diloco", updates=100, sync_first=40)
    assert plan.label == "diloco h10 first40"


def test_a_scenario_has_the_name_that_tables_give_a_strategy() -> None:
    plan = Scenario(Shape(2), 16, FAR, "local_sgd", compress="int8", sync_every=50)
    flags = {"strategy": "local_sgd", "compress": "int8", "sync_every": 50}
    assert plan.label == strategy_text(flags) == "local_sgd int8 h50"
    assert replace(plan, exchange="direct").label == "local_sgd int8 h50 direct"
    # Flags without a meaning for a strategy are not in its name.
    assert replace(plan, strategy="ddp", compress="none").label == "ddp"
    assert replace(plan, shape=Shape(1)).label == "single"


@pytest.mark.parametrize(("updates", "there"), [(40, "40"), (None, "an unknown number of")])
def test_a_start_together_needs_updates_after_it(updates: int | None, there: str) -> None:
    with pytest.raises(UserError, match=f"--sync_first 40: the run has {there} updates"):
        exposed_s(strategy="diloco", updates=updates, sync_first=40)


def test_direct_exchange_by_hand() -> None:
    assert direct_mean(5 * MB, Shape(2), FAR).alone_s == pytest.approx(0.2 + 0.02)
    assert direct_mean(5 * MB, Shape(4), FAR).alone_s == pytest.approx(1.5 * 0.2 + 2 * 0.02)
    assert direct_mean(5 * MB, Shape(1, 2), FAR) == Cost()
    # The last of two buckets ends the backward pass, and all bytes have passed one delay later.
    begins_s = (2**20 / (4 * MB)) * LINE.backward_s(16)
    ends_s = max(begins_s + 0.16, LINE.backward_s(16) + (4 * MB - 2**20) / 25e6) + 0.02
    assert exposed_s(exchange="direct") == pytest.approx(ends_s + HOST_S - LINE.backward_s(16))
    found_s = exposed_s(strategy="diloco", sync_every=9, exchange="direct")
    assert found_s == pytest.approx((0.16 + 0.02 + LATER_S + HOST_S) / 9)


def test_all_to_all_by_hand() -> None:
    """Each of four sends all it has to three others, and waits for one delay; two do so anyway."""
    assert all_to_all_mean(5 * MB, Shape(4), FAR).alone_s == pytest.approx(3 * 0.2 + 0.02)
    assert all_to_all_mean(5 * MB, Shape(2), FAR) == direct_mean(5 * MB, Shape(2), FAR)
    assert all_to_all_mean(5 * MB, Shape(1, 2), FAR) == Cost()
    many = partial(exposed_s, Shape(4), exchange="all_to_all")
    host_s = 2 * 3 / 4 * HOST_S
    found_s = many(strategy="diloco", sync_every=9)
    assert found_s == pytest.approx((3 * 0.16 + 0.02 + LATER_S + host_s) / 9)
    assert many(compress="int8") == pytest.approx(3 * (0.25 + 1 / 1024) * 0.16 + 0.02 + host_s)
    # All buckets are under way at a time.
    begins_s = (2**20 / (4 * MB)) * LINE.backward_s(16)
    assert many() == pytest.approx(begins_s + 3 * 0.16 + 0.02 + host_s - LINE.backward_s(16))
    assert Scenario(Shape(4), 16, exchange="all_to_all").label == "ddp all_to_all"


def test_emulated_nodes_have_a_link_for_each_pair() -> None:
    """Its rate is that pair's: of four nodes, what three would send over one link, each sends over
    its own. A ring sends to one neighbour either way.
    """
    by_pair = {"of_pairs": True}
    assert all_to_all_mean(5 * MB, Shape(4), FAR, **by_pair).alone_s == pytest.approx(0.2 + 0.02)
    assert direct_mean(5 * MB, Shape(4), FAR, **by_pair).wire_s == pytest.approx(2 / 4 * 0.2)
    assert coded_mean(5 * MB, Shape(4), FAR).wire_s == pytest.approx(1.5 * 0.2)
    assert coded_mean(5 * MB, Shape(4), FAR, **by_pair).wire_s == pytest.approx((3 + 1) / 4 * 0.2)
    for mean in (direct_mean, all_to_all_mean, coded_mean):
        for two in (Shape(2), Shape(2, 2)):
            assert mean(5 * MB, two, FAR, **by_pair) == mean(5 * MB, two, FAR)
    # Two processes of each node send to two of each other one: 4 rows on the link of a pair.
    assert all_to_all_mean(5 * MB, Shape(2, 2), FAR).wire_s == pytest.approx(4 * 0.2)
    assert all_to_all_mean(5 * MB, Shape(3, 2), FAR).wire_s == pytest.approx(8 * 0.2)
    assert all_to_all_mean(5 * MB, Shape(3, 2), FAR, **by_pair).wire_s == pytest.approx(4 * 0.2)
    often = {"strategy": "diloco", "sync_every": 5, "exchange": "all_to_all"}
    found_s = exposed_s(Shape(4), **often, emulated=True)  # too often for connections to rest
    host_s = 1.5 * 2 * 3 / 4 * HOST_S  # and what delays packets uses the same cores
    wait_s = 0.8 * (1 + 0.25 * 3 * 0.1) * 0.026
    assert found_s == pytest.approx((0.16 + 0.02 + LATER_S + host_s + wait_s) / 5)
    coded_s = exposed_s(Shape(4), compress="int8", exchange="all_to_all", emulated=True)
    assert coded_s == pytest.approx((0.25 + 1 / 1024) * 0.16 + 0.02 + host_s)


def test_codes_follow_the_backward_pass() -> None:
    """One row of 4.125 or 8 bits a number and their scales: of two ranks two round trips, and 1.15
    of another one in which it passes, or one delay if they send directly.
    """
    assert {name: CODECS[name].bits / 32 for name in CODECS} == {
        name: WIRE_SHARES[name] for name in ("bf16", "int8", "int4")
    }
    row_s = (0.125 + 1 / 256) * 4 * MB / 25e6
    assert row_s < 1.15 * 0.04
    assert exposed_s(compress="int4") == pytest.approx(3.15 * 0.04 + HOST_S)
    assert exposed_s(compress="int4", exchange="direct") == pytest.approx(row_s + 0.02 + HOST_S)
    found_s = exposed_s(strategy="diloco", sync_every=9, compress="int4", exchange="direct")
    assert found_s == pytest.approx((row_s + 0.02 + LATER_S + HOST_S) / 9)


def test_powersgd_by_hand() -> None:
    """Three sums one after the other, of two round trips each. What compressing takes was measured
    on one machine.
    """
    model = replace(MODEL, payloads={("ddp", "powersgd"): 0.01})
    found = predict(model, Scenario(Shape(2), 16, FAR, compress="powersgd"))
    sent_s = 0.01 * (4 * MB - 2**20) / 25e6  # of the bucket that ends the backward pass
    ready_s = LINE.backward_s(16) * 2**20 / (4 * MB)
    assert found.parts[EXCHANGE] == pytest.approx(6 * 0.04 + sent_s + HOST_S)
    assert ready_s + 0.01 * 2**20 / 25e6 < LINE.backward_s(16)
    slow = predict(replace(model, hosts={"powersgd": 0.009}), found.plan)
    assert slow.step_s == pytest.approx(found.step_s + 0.009 - HOST_S)
    assert model.payload(found.plan) == pytest.approx(40_000)


def test_fsdp_by_hand() -> None:
    """Two layers of 2 MB: half of an all-reduce each, 80 ms + 80 ms / 2; nothing hides much."""
    plan = Scenario(Shape(2), 16, FAR, "fsdp", blocks=2)
    half_s = allreduce(GLOO, 2 * MB, Shape(2), FAR).alone_s / 2
    forward_s, backward_s = 0.016 / 3, 0.016 * 2 / 3
    expected = half_s + (half_s - forward_s) + 2 * half_s + (2 * half_s - backward_s)
    assert predict(MODEL, plan).parts[EXCHANGE] == pytest.approx(expected)
