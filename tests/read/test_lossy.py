"""Loss and jitter by simulation, against closed forms and the laws of TCP."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.exchange import compared
from harness.core.collectives import BACKEND, TCP_SEGMENT, Cost, Shape, Wire, wire_of
from harness.core.links import Link, plain_link
from harness.core.settings import UserError
from harness.read.predict import exchange
from harness.read.predict.exchange import Reduction, correction, longer_over, relay_s
from harness.read.predict.facts import Overrides
from harness.read.predict.fitting import fit_records
from harness.read.predict.lossy import messages
from harness.read.predict.lossy.messages import LONG, longer_s, messages_s, waited_s
from harness.read.predict.lossy.tcp import BBR, CUBIC, RENO, Connection, control_of
from harness.read.predict.model import EXCHANGE, chosen_way, predict
from harness.read.predict.phases import EVALUATION, PhaseFit, Phases
from harness.read.predict.scenario import Scenario, form_of
from tests.support.paired import Verb, measured, timed
from tests.support.predicted import FAR, MODEL
from tests.support.sweeps import ROOT

FAST = 1.25e9  # bytes per second: windows limit what passes
SHAKY = replace(FAR, jitter_s=0.005)
LOSSY = replace(FAR, loss=0.01)


class Loses(random.Random):
    """Loses packets by their number, the first is 1, and no acknowledgement."""

    def __init__(self, is_lost: Callable[[int], bool]) -> None:
        super().__init__()
        self.is_lost, self.packets, self.is_answer = is_lost, 0, False

    def random(self) -> float:
        if self.is_answer:  # asked after each packet that arrives
            self.is_answer = False
            return 1.0
        self.packets += 1
        self.is_answer = not self.is_lost(self.packets)
        return 1.0 if self.is_answer else 0.0


def arrival_s(count: int, *lost: int) -> float:
    """When a message that is sent at 0 over a round trip of 100 ms has arrived."""
    return Connection(Wire(0.05, FAST, loss=1e-4), CUBIC, Loses(lost.__contains__)).send(
        0.0, count
    )[1]


def mean_window(control: str, round_trip_s: float, every: int) -> float:
    """Packets per round trip of a long transfer."""
    wire = Wire(round_trip_s / 2, FAST, loss=1 / every)
    connection = Connection(wire, control, Loses(lambda number: number % every == 0))
    _, begins_s = connection.send(0.0, 10 * every)
    _, ends_s = connection.send(begins_s, 20 * every)
    return 20 * every / (ends_s - begins_s) * round_trip_s


@pytest.mark.parametrize("round_trip_s", [0.02, 0.1])
@pytest.mark.parametrize("every", [100, 1000, 4000])
def test_reno_has_the_window_of_its_law(every: int, round_trip_s: float) -> None:
    """sqrt(3/2) / sqrt(p), Mathis et al. 1997; whole packets make a small window smaller."""
    law = 1.2247 * every**0.5
    assert mean_window(RENO, round_trip_s, every) == pytest.approx(law, rel=0.16)


@pytest.mark.parametrize(("round_trip_s", "every"), [(0.4, 1000), (0.2, 4000), (0.4, 4000)])
def test_cubic_has_the_window_of_its_law(round_trip_s: float, every: int) -> None:
    """1.054 (RTT / p)^(3/4), RFC 9438, where that is more than Reno's."""
    law = 1.054 * (round_trip_s * every) ** 0.75
    assert mean_window(CUBIC, round_trip_s, every) == pytest.approx(law, rel=0.2)


def test_cubic_has_the_window_of_reno_over_short_round_trips() -> None:
    assert mean_window(CUBIC, 0.02, 1000) == pytest.approx(1.2247 * 1000**0.5, rel=0.15)


def test_bbr_keeps_the_rate_of_the_link() -> None:
    """What is lost is sent again: 1 % more packets, and at most a few round trips at the end."""
    wire = Wire(0.01, 50e6 / 8, loss=0.01)
    steady_s = LONG * TCP_SEGMENT / wire.bytes_per_s
    later_s = messages_s(wire, BBR, LONG).mean()
    assert 0 < later_s < 0.01 * steady_s + 4 * wire.round_trip_s
    assert messages_s(wire, CUBIC, LONG).mean() > steady_s  # its window falls


def test_a_message_of_one_packet_waits_for_the_timeout() -> None:
    """A packet is lost k times in a row with p^k; each time the wait doubles."""
    wire, loss = Wire(0.01, FAST, loss=0.05), 0.05
    wait_s = wire.round_trip_s + 0.2
    expected_s = sum(loss**k * 2 ** (k - 1) * wait_s for k in range(1, 9))
    assert messages_s(wire, CUBIC, 1).mean() == pytest.approx(expected_s, rel=0.1)
    assert np.median(messages_s(wire, CUBIC, 1)) == pytest.approx(0, abs=1e-9)


def test_a_lost_packet_is_sent_again_as_linux_does() -> None:
    """After three later packets at once; after fewer a quarter of a round trip later; after none by
    the timeout, which begins with the last acknowledgement, or by a probe after two round trips if
    several are lost, whose answer tells of the others.
    """
    round_trip_s, there_s = 0.1, 0.05
    waits_s = [round_trip_s * 1.25, round_trip_s + (round_trip_s + 0.2), 4 * round_trip_s]
    again_s = [arrival_s(13, 10), arrival_s(12, 10), arrival_s(10, 10), arrival_s(10, 9, 10)]
    expected_s = [each + there_s for each in (round_trip_s, *waits_s)]
    assert again_s == pytest.approx(expected_s, rel=1e-3)
    twice_s = round_trip_s + 3 * (round_trip_s + 0.2) + there_s  # lost again, twice the timeout
    assert arrival_s(10, 10, 11) == pytest.approx(twice_s, rel=1e-3)
    eleven_times_s = 0.25 * (2**9 - 1) + 2 * 120 + there_s
    wire = Wire(0.05 / 2, FAST, loss=1e-4)
    sent_s = Connection(wire, CUBIC, Loses(lambda number: number < 12)).send(0.0, 1)[1]
    assert sent_s == pytest.approx(eleven_times_s - there_s / 2, rel=1e-3)  # two minutes at most


@pytest.mark.parametrize("control", [RENO, CUBIC, BBR])
@pytest.mark.parametrize("wire", [
    Wire(loss=0.3), Wire(0.01, 1e6, 0.01, 0.2), Wire(0.05, FAST, 0.0, 0.4),
    Wire(0.1, 1e5, loss=0.05),
])  # fmt: skip
def test_each_message_arrives_whole_and_once(wire: Wire, control: str) -> None:
    connection, begins_s = Connection(wire, control, random.Random(2)), 0.0
    for count in [*range(1, 15)] * 8:
        half_s, ends_s = connection.send(begins_s, count)
        assert begins_s <= half_s <= ends_s
        lost = [lost for _, _, lost in connection.flying if lost]
        assert (connection.known_lost, len(connection.holes), lost) == (0, 0, [])
        begins_s = ends_s + wire.delay_s


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_nodes_wait_for_the_latest_of_uniform_delays(nodes: int) -> None:
    """The last of k messages is jitter x (k - 1) / (k + 1) later than the mean."""
    jitter_s, count = 0.01, nodes * (nodes - 1)
    pool = messages_s(Wire(0.02, FAST, jitter_s), BBR, 1)
    assert pool.mean() == pytest.approx(0, abs=jitter_s / 50)
    draw, begin = np.random.default_rng(0), np.zeros(nodes)
    last = [
        waited_s(begin, draw.choice(pool, (nodes, nodes)), 0.02, True).max() for _ in range(4000)
    ]
    assert np.mean(last) == pytest.approx(jitter_s * (count - 1) / (count + 1), rel=0.05)


def test_packets_that_are_handed_over_together_are_late_together() -> None:
    """Drawn one by one, the last of 40 would be almost the whole jitter late."""
    jitter_s = 0.01
    assert abs(messages_s(Wire(0.02, FAST, jitter_s), BBR, 40).mean()) < jitter_s / 10
    slow_s = messages_s(Wire(0.02, 50e6 / 8, jitter_s), BBR, 40).mean()
    assert slow_s > jitter_s / 4  # two packets at a time


def test_two_nodes_that_exchange_again_and_again_are_late_as_their_messages_are() -> None:
    """Each waits for the other's last message alone: jitter nearly evens out, in a ring as well."""
    wire = replace(FAR, jitter_s=0.01)
    for to_all in (True, False):
        assert 0 <= longer_s(wire, BBR, 4, 1, 2, to_all) < 0.1 * wire.jitter_s
    four_s = longer_s(wire, BBR, 4, 1, 4, True)
    assert 0.002 < four_s < 0.01 * 11 / 13  # more of them wait for the latest


def test_the_same_input_gives_the_same_output() -> None:
    one_s = longer_s(LOSSY, CUBIC, 1e5, 2, 2, True)
    messages._sent.cache_clear()
    messages._round_s.cache_clear()
    assert longer_s(LOSSY, CUBIC, 1e5, 2, 2, True) == one_s > 0


def test_nothing_is_added_without_loss_and_jitter() -> None:
    assert longer_s(FAR, CUBIC, 4e6, 6, 4, False) == 0 == longer_s(LOSSY, CUBIC, 4e6, 6, 1, True)
    assert longer_s(LOSSY, CUBIC, 1, 0.0, 2, True) == 0  # nothing is waited for
    half_s, one_s = (longer_s(LOSSY, CUBIC, 1, rounds, 2, True) for rounds in (0.5, 1.0))
    assert half_s == one_s / 2 > 0


def test_what_loses_most_packets_is_refused() -> None:
    with pytest.raises(UserError, match=r"a loss of 0\.6 is not simulated: 0\.5 at most"):
        longer_s(replace(FAR, loss=0.6), CUBIC, 1, 1, 2, True)
    assert longer_s(replace(FAR, loss=0.5), BBR, 1e4, 1, 2, True) > 0


def test_long_transfers_and_many_rounds_go_on_as_they_began() -> None:
    wire = Wire(0.01, FAST, loss=0.01)
    once, twice = (messages_s(wire, CUBIC, n * LONG).mean() for n in (1, 2))
    assert twice == pytest.approx(2 * once, rel=0.1)
    few, many = (longer_s(LOSSY, BBR, n * 1448, n, 2, False) for n in (32, 64))
    assert many == pytest.approx(2 * few)


def test_the_link_of_a_node_is_shared_by_its_connections() -> None:
    """Of real nodes; emulated ones have a link for each pair."""
    plan = Scenario(Shape(3), 16, LOSSY, exchange="all_to_all")
    form = form_of("gloo", 1e6, plan.shape, plan)
    shared_s = longer_over(form, plan.shape, LOSSY, CUBIC, True, False)
    half = replace(LOSSY, bytes_per_s=LOSSY.bytes_per_s / 2)
    assert shared_s == longer_s(half, CUBIC, 1e6, 1, 3, True)
    pairs = replace(plan, emulated=True)
    form = form_of("gloo", 1e6, plan.shape, pairs)
    assert longer_over(form, plan.shape, LOSSY, CUBIC, True, True) == longer_s(
        LOSSY, CUBIC, 1e6, 1, 3, True
    )
    two = replace(pairs, shape=Shape(2, 2), exchange="direct")  # each process sends to two others
    form = form_of("gloo", 1e6, two.shape, two)
    quarter = replace(LOSSY, bytes_per_s=LOSSY.bytes_per_s / 4)
    assert longer_over(form, two.shape, LOSSY, CUBIC, True, True) == longer_s(
        quarter, CUBIC, 2 * 1e6 / 4, 2, 2, True
    )


@pytest.mark.parametrize("more", [
    {}, {"exchange": "direct"}, {"compress": "int8"}, {"strategy": "local_sgd"},
    {"strategy": "diloco", "exchange": "direct", "compress": "int4"},
])  # fmt: skip
@pytest.mark.parametrize("wire", [SHAKY, LOSSY])
def test_each_way_of_exchange_takes_longer(wire: Wire, more: dict[str, str]) -> None:
    plan = Scenario(Shape(4), 16, wire, emulated=True, **more)  # type: ignore[arg-type]
    model = replace(MODEL, own_cores=4)
    steady = predict(model, replace(plan, wire=FAR))
    assert predict(model, plan).parts[EXCHANGE] > steady.parts[EXCHANGE]


def test_congestion_control_decides_what_losses_cost() -> None:
    steps = [
        predict(replace(MODEL, congestion=name), Scenario(Shape(2), 16, LOSSY)).step_s
        for name in (RENO, CUBIC, BBR)
    ]
    assert steps[0] > 2 * steps[2] and steps[1] > 2 * steps[2]


def test_a_link_that_only_loses_waits_for_timeouts() -> None:
    found = [predict(MODEL, Scenario(Shape(2), 16, Wire(loss=loss))) for loss in (0.05, 1e-9, 0)]
    assert found[0].step_s > found[1].step_s == found[2].step_s
    assert found[2].low_s is not None


def test_an_interval_holds_how_far_simulations_are_off() -> None:
    """Of two nodes alone."""
    plan = Scenario(Shape(2), 16, LOSSY)
    simulated, steady = predict(MODEL, plan), predict(MODEL, replace(plan, wire=FAR))
    assert simulated.low_s and simulated.high_s and steady.low_s
    part_s = simulated.parts[EXCHANGE]
    assert 0.1 < (simulated.step_s - simulated.low_s) / (2 * part_s) < 0.15
    assert (steady.step_s - steady.low_s) / (2 * steady.parts[EXCHANGE]) < 0.06
    assert predict(MODEL, replace(plan, shape=Shape(3))).low_s is None


def test_the_spread_of_simulations_is_that_of_the_records() -> None:
    files = sorted((ROOT / "records/lossy").glob("*.json"))
    cases = [case for file in files for case in compared(json.loads(file.read_text()))]
    logs = [
        math.log(simulated_s / measured_s) for _, size, way, _, simulated_s, measured_s in cases
        if size > 4 or way != BACKEND
    ]  # fmt: skip
    assert len(logs) == exchange.SIMULATED_FREEDOM + 1
    rms = math.sqrt(sum(log**2 for log in logs) / len(logs))
    assert round(rms, 3) == exchange.SIMULATED_SPREAD


def test_buckets_wait_for_their_losses_one_after_the_other() -> None:
    cost = Cost(1.0, 0.5, 0.2, 0.75).later(2.0)
    assert cost.alone_s == pytest.approx(Cost(1.0, 0.5, 0.2, 0.75).alone_s + 2.0)
    assert (cost.wire_s, cost.waits_s) == (3.0, 0.5) and (1 - cost.added) * 3 == pytest.approx(0.25)
    assert Cost().later(0.0) == Cost() and Cost().later(2.0).alone_s == 2.0
    sizes = [25e6] * 4
    costs = [Cost(0.2, 0.5).later(50.0) for _ in sizes]
    assert exchange.last_end([0.0] * 4, costs, 2) > 200


def test_the_way_is_chosen_with_the_link_s_losses() -> None:
    """Where windows limit what passes, direct sends are hardly sooner than the backend."""
    wire = Wire(0.01, 125e6)
    steady, lossy = (
        chosen_way(MODEL, Scenario(Shape(2), 16, each, exchange="auto"))
        for each in (wire, replace(wire, loss=0.01))
    )
    assert (steady, lossy) == ("direct", "backend")


def test_all_reduces_over_links_with_losses_or_jitter_correct_nothing() -> None:
    """A median of few includes no rare losses, not even for the link that it was measured over."""
    rows = [Reduction("gloo", 4_000_000, 3.0, Shape(2), wire) for wire in (LOSSY, SHAKY, FAR)]
    assert min(row.factor for row in rows) > 1
    for row, wire in zip(rows[:2], (LOSSY, SHAKY), strict=True):
        for other in (wire, FAR):
            assert correction([row], "gloo", Shape(2), other) == exchange.UNMEASURED
        plan = Scenario(Shape(2), 16, wire)
        alone, measured_there = (predict(m, plan) for m in (MODEL, replace(MODEL, table=(row,))))
        assert measured_there == alone and alone.low_s is not None
        of_another = correction(rows, "gloo", Shape(2), wire)
        assert not of_another.of_link and of_another.at(1e6) == pytest.approx(rows[2].factor)


def test_single_packets_are_handed_over_where_a_link_loses() -> None:
    handed = [relay_s(1e6, Shape(4), wire, False) for wire in (LOSSY, FAR)]
    assert handed[0] > 5 * handed[1]


def test_evaluation_and_saving_wait_longer_for_each_delay() -> None:
    phases = Phases({Shape(2): {EVALUATION: PhaseFit(1.0, 20.0)}})
    steady, lossy = (phases.at(Shape(2), wire, BBR)[EVALUATION].fixed_s for wire in (FAR, LOSSY))
    assert steady == 1.0 + 20 * FAR.delay_s
    more = longer_s(LOSSY, BBR, 1, 20.0, 2, True)
    assert lossy == steady + more and more > 20 * 0.01 * 0.2
    assert phases.at(Shape(1), LOSSY, BBR).keys() == set()


def test_a_link_becomes_a_wire_with_its_loss_and_jitter() -> None:
    wire = wire_of(plain_link("20ms/200mbit/jitter2ms/loss1%"))
    assert (wire.jitter_s, wire.loss, wire.is_steady) == (0.002, 0.01, False)
    assert wire_of(Link(20, 200)).is_steady and wire_of(Link(20, 200)) != wire


def test_the_congestion_control_of_records() -> None:
    assert control_of([]) == CUBIC == control_of([{"congestion_control": "htcp"}])
    assert control_of([{"congestion_control": "bbr2"}]) == BBR
    assert control_of([{"congestion_control": name} for name in (RENO, RENO, BBR)]) == RENO


def test_predict_says_what_it_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for batch in (8, 16, 32):
        timed(tmp_path, batch, seed=1)
        timed(tmp_path, batch, seed=2)
    predicted = Verb("predict", capsys)
    asked = (str(tmp_path), "--setup", "2_1", "--sharing", "0", "--link")
    text = predicted(*asked, "20ms/200mbit/loss1%")
    assert "assumed: loss and jitter by simulation (seed 1" in " ".join(text.split())
    assert "TCP has cubic" in " ".join(text.split())
    lossy, steady = (
        json.loads(predicted(*asked, link, "--json"))
        for link in ("20ms/200mbit/loss1%", "20ms/200mbit")
    )
    assert lossy["simulated"] and not steady["simulated"]
    assert lossy["step_s"] > steady["step_s"]
    assert any("simulation" in each for each in lossy["assumed"]) and len(steady["assumed"]) == 1
    assert "what is assumed is not in it" in text  # of --sharing
    timed(tmp_path, 16, 1, 2, seed=1)
    timed(tmp_path, 16, 1, 2, seed=2)
    measured = predicted(str(tmp_path), "--setup", "2_1", "--link", "20ms/200mbit/loss1%")
    assert "95 % interval" in measured and "what is assumed is not in it" not in measured


def test_named_links_with_jitter_are_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for batch in (8, 16, 32):
        timed(tmp_path, batch)
    timed(tmp_path, 16, 1, 2)
    text = Verb("predict", capsys)(str(tmp_path), "--setup", "2_1", "--link", "wifi")
    assert "over 2ms/200mbit/jitter1.5ms/loss0.001" in text


def test_records_tell_the_congestion_control(tmp_path: Path) -> None:
    for batch in (8, 16):
        folder = timed(tmp_path, batch)
        file = folder / "environment.json"
        tcp = {"congestion_control": "bbr", "slow_start_after_idle": True}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tcp": tcp}))
    timed(tmp_path, 16, 2, 1, link=measured(20, 200, 1.5))
    assert fit_records(str(tmp_path), Overrides()).model.congestion == BBR
    assert MODEL.congestion == CUBIC  # where no record says it
