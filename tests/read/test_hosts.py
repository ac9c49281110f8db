"""What an exchange takes beside its link, as runs on one machine tell it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.collectives import GLOO, NCCL, TCP_SEGMENT, TCP_SHARE, Shape, Wire, wire_of
from harness.core.links import Link
from harness.read.predict.exchange import HANDOVER_S, UNMEASURED, Reduction, correction, relay_s
from harness.read.predict.facts import Overrides
from harness.read.predict.fitting import fit_records
from harness.read.predict.model import COMPUTE, EXCHANGE, SHARED_APART, SHARING, Model, predict
from harness.read.predict.scenario import Scenario
from tests.support.paired import Verb, measured, planted_s, timed
from tests.support.predicted import FAR, MB, MODEL

ASKED = ("--setup=2_1", "--link=20ms/200mbit", "--exchange=backend", "--batch=16")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """No process slows another, and one of two waits 2 ms for an exchange without a link."""
    for batch in (8, 16, 32):
        timed(tmp_path, batch)
        step_s = planted_s(batch) + 0.002
        timed(tmp_path, batch, 1, 2, step_s=step_s, comm_exposed_share=0.002 / step_s)
    return tmp_path


def hosts(records: Path) -> dict[str, float]:
    return dict(fit_records(str(records), Overrides()).model.hosts)


def test_it_is_told_by_compression_and_by_quiet_runs(records: Path) -> None:
    assert hosts(records) == {}
    timed(records, 16, 1, 2, "--compress", "bf16", step_s=planted_s(16) + 0.004)
    timed(records, 16, 1, 2, "--compress", "int8", step_s=planted_s(16) - 0.001, seed=2)
    timed(records, 16, 1, 4, "--compress", "powersgd", step_s=planted_s(16) + 0.012)
    busy = timed(records, 32, 1, 2, "--compress", "bf16", step_s=9.0) / "environment.json"
    disturbed = {"launch": {"cpu_busy_share": 0.5}}
    busy.write_text(json.dumps(json.loads(busy.read_text()) | disturbed))
    # A ring of four sends 1.5 times what one of two sends.
    expected = {"bf16": 0.004, "int8": 0.0, "powersgd": 0.012 / 1.5}
    assert hosts(records) == pytest.approx(expected, abs=1e-6)


def test_a_prediction_says_where_it_is_not_known(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = Verb("predict", capsys)
    asked = (records, *ASKED, "--compress=int8")
    unknown = "note: what compressing by int8 takes is in no record, and counts as nothing: measure"
    assert unknown in predicted.in_one_line(*asked)
    before_s = json.loads(predicted(*asked, "--json"))["step_s"]
    timed(records, 16, 1, 2, "--compress", "int8", step_s=planted_s(16) + 0.005)
    assert unknown not in predicted.in_one_line(*asked)
    after_s = json.loads(predicted(*asked, "--json"))["step_s"]
    assert after_s - before_s == pytest.approx(0.005 - 0.002, abs=1e-6)
    assert unknown not in predicted.in_one_line(records, *ASKED)


def test_runs_of_another_kind_do_not_tell_it(records: Path) -> None:
    for seed, change in enumerate(({"threads": 7}, {"versions": {"torch": "1.0"}})):
        words = ("--compress", "bf16")
        file = timed(records, 16, 1, 2, *words, step_s=9.0, seed=seed) / "environment.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    timed(records, 16, 1, 2, "--compress", "int8", "--grad_acc", "4", step_s=9.0, seed=5)
    for file in records.rglob("environment.json"):
        content = {"threads": 1, "versions": {"torch": "2.0"}} | json.loads(file.read_text())
        file.write_text(json.dumps(content))
    assert hosts(records) == {}


def exchange_s(model: Model, **more: object) -> float:
    plan = Scenario(Shape(2), 16, FAR, **more)  # type: ignore[arg-type]
    return predict(model, plan).parts[EXCHANGE]


def test_a_measured_all_reduce_has_passed_the_hosts_and_no_other_exchange() -> None:
    table = (Reduction(GLOO, 4 * MB, 0.24, Shape(2), FAR),)
    slow = replace(MODEL, hosts={"powersgd": 0.05, "int8": 0.05}, inside_s=0.05)
    measured = replace(slow, table=table)
    assert exchange_s(slow) > 0.24 + 0.04 and exchange_s(measured) < 0.24
    for compress in ("powersgd", "int8"):
        own = {"compress": compress}
        slow = replace(slow, payloads={("ddp", "powersgd"): 0.01})
        measured = replace(measured, payloads=slow.payloads)
        assert exchange_s(slow, **own) == exchange_s(measured, **own), compress
        ends = predict(measured, Scenario(Shape(2), 16, FAR, **own))  # type: ignore[arg-type]
        assert ends.low_s is not None, compress
    assert exchange_s(replace(slow, backend=NCCL)) < 0.24


def test_the_factor_of_other_links_has_no_host_in_it() -> None:
    """A slower link is never faster, and two nodes no faster than two processes of a machine."""
    table = (Reduction(GLOO, 4 * MB, 0.24, Shape(2), FAR),)
    slow = replace(MODEL, inside_s=0.05, table=table)
    wires = (Wire(), Wire(0.0, 12.5e9), Wire(0.0, 1.25e9), Wire(0.001, 1.25e8))
    for strategy in ("ddp", "local_sgd"):
        plans = [Scenario(Shape(2), 16, wire, strategy, emulated=True) for wire in wires]
        found = [predict(slow, plan).step_s for plan in plans]
        assert found == sorted(found)
    one_machine_s = predict(slow, Scenario(Shape(1, 2), 16)).step_s
    assert predict(slow, Scenario(Shape(2), 16, emulated=True)).step_s >= one_machine_s


def test_a_fragment_takes_its_part() -> None:
    slow = replace(MODEL, inside_s=0.05)
    for fragments in (1, 5):
        own = {"strategy": "diloco", "sync_every": 5, "fragments": fragments}
        more_s = exchange_s(slow, **own) - exchange_s(replace(MODEL, inside_s=0.0), **own)
        assert more_s == pytest.approx(0.05 / 5)


def test_replicas_of_several_processes_share_a_machine_as_ddp() -> None:
    def sharing_s(**more: object) -> float:
        plan = Scenario(Shape(2, 2), 16, FAR, **more)  # type: ignore[arg-type]
        return predict(MODEL, plan).parts[SHARING]

    assert sharing_s(strategy="diloco") == sharing_s() > 0
    alone_s = sharing_s(strategy="diloco", sync_scope="rank")
    assert alone_s == pytest.approx(SHARED_APART * sharing_s())
    together = {"strategy": "diloco", "sync_scope": "rank", "updates": 100, "sync_first": 50}
    assert sharing_s(**together) == pytest.approx((1 + SHARED_APART) / 2 * sharing_s())


def test_processes_of_one_machine_exchange_less_often_where_they_train_apart() -> None:
    def exchange_s(**more: object) -> float:
        plan = Scenario(Shape(1, 2), 16, strategy="local_sgd", **more)  # type: ignore[arg-type]
        return predict(MODEL, plan).parts[EXCHANGE]

    whole_s = predict(MODEL, Scenario(Shape(1, 2), 16)).parts[EXCHANGE]
    assert exchange_s(sync_scope="node") == exchange_s(sync_every=1) == whole_s > 0
    assert exchange_s() == exchange_s(sync_scope="rank") == pytest.approx(whole_s / 10)
    halved = exchange_s(updates=100, sync_first=50)
    assert halved == pytest.approx((0.5 + 0.5 * 6 / 50) * whole_s, rel=0.05)


def test_measured_all_reduces_are_said_to_tell_of_all_reduces_alone(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed(records, 16, 2, 1, link=measured(20, 200, 1.6))
    predicted = Verb("predict", capsys)
    for words, tells in (((), True), (("--compress=int8",), False)):
        asked = (records, *ASKED, *words)
        assert json.loads(predicted(*asked, "--json"))["link_measured"] is tells
        text = predicted.in_one_line(*asked)
        assert ("note: all-reduce over this link was measured, at 4 MB" in text) is tells
        said = "note: --compress int8, by a closed form; measured all-reduces do not apply"
        assert (said in text) is not tells


def test_carrying_packets_between_emulated_nodes_by_hand() -> None:
    """4 packets pass in half a millisecond: 100 mbit with headers. 24 packets are 6 handovers."""
    wire = Wire(0.01, 12.5e6 * TCP_SHARE)
    size = 4 * TCP_SEGMENT
    # To the three others a quarter each, from all four, and the sums back; or all of it.
    assert relay_s(size, Shape(4), wire, to_all=False) == pytest.approx(6 * HANDOVER_S)
    assert relay_s(size, Shape(4), wire, to_all=True) == pytest.approx(12 * HANDOVER_S)
    # One process for its node; or two, each of which sends to the two of the other node.
    assert relay_s(size, Shape(2), wire, to_all=True) == pytest.approx(2 * HANDOVER_S)
    assert relay_s(size, Shape(2, 2), wire, to_all=True) == pytest.approx(8 * HANDOVER_S)


def test_the_relay_takes_time_where_processes_take_turns() -> None:
    """Elsewhere their cores rest during an exchange. All-reduces were fitted with it."""
    size = 40 * TCP_SEGMENT  # one bucket, which is ready when the backward pass ends
    wire = Wire(0.01, 12.5e6 * TCP_SHARE)
    crowded = replace(MODEL, gradient_bytes=size, own_cores=2)
    free = replace(crowded, own_cores=8)

    def more_s(shape: Shape, **more: object) -> float:
        plan = Scenario(shape, 16, wire, **{"emulated": True, **more})  # type: ignore[arg-type]
        return predict(crowded, plan).parts[EXCHANGE] - predict(free, plan).parts[EXCHANGE]

    direct_s = 60 * HANDOVER_S / 2  # on two cores
    assert more_s(Shape(4), exchange="direct") == pytest.approx(direct_s)
    assert more_s(Shape(4), exchange="all_to_all") == pytest.approx(2 * direct_s)
    of_nodes_s = relay_s(size, Shape(2), wire, to_all=False) / 2  # one process of each sends
    assert more_s(Shape(2, 2), exchange="direct") == pytest.approx(of_nodes_s)
    assert more_s(Shape(4)) == more_s(Shape(2), exchange="direct") == pytest.approx(0)
    assert more_s(Shape(4), exchange="direct", emulated=False) == pytest.approx(0)


def test_replicas_that_take_turns_slow_each_other_in_full() -> None:
    plan = Scenario(Shape(4), 16, FAR, "local_sgd", emulated=True)
    parts = [predict(replace(MODEL, own_cores=n), plan).parts for n in (2, 4)]
    assert [each[COMPUTE] + each[SHARING] for each in parts] == pytest.approx(
        [0.026 * (1 + MODEL.sharing) * 2, 0.026 * (1 + 3 * SHARED_APART * MODEL.sharing)]
    )


@pytest.mark.parametrize("fault", [{"loss": 0.01}, {"jitter_ms": 2.0}])
def test_a_link_that_loses_or_shakes_tells_nothing_of_a_steady_one(
    records: Path, fault: dict[str, float]
) -> None:
    link = measured(20, 200, 1.5)
    timed(records, 16, 2, 1, link=link | {"asked": link["asked"] | fault})
    fitted = fit_records(str(records), Overrides())
    steady = correction(fitted.model.table, GLOO, Shape(2), wire_of(Link(20, 200)))
    assert steady == UNMEASURED and not fitted.phases.over_links
    assert [row.wire.is_steady for row in fitted.model.table] == [False]
