"""What the record counts of peers that miss updates, come too late or go inside an epoch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.core.command_line import parse
from harness.core.records import RunFolder, read_json
from harness.core.rules import fit_to_world
from harness.core.settings import UserError
from harness.core.topology import World

pytest.importorskip("hivemind")

from harness.train.strategy.hivemind import network
from harness.train.strategy.hivemind.exchange import NOT_SEEN, PeersExchange
from harness.train.strategy.hivemind.session import Peers

FLAGS = ["--tiny", "--strategy=hivemind", "--per_gpu_batch=4", "--target_batch=8"]
TELEMETRY = {"gpus": [], "node": {}, "processors": {}, "energy_j": 7.0}


class Network:
    """What this peer knows of the others, without a network."""

    def __init__(self) -> None:
        self.id = "recorder"
        self.known: dict[str, dict[str, Any]] = {}
        self.alive: dict[str, dict[str, Any]] = {}

    def publish(self, *args: Any) -> None:
        pass

    def publish_own(self, own: dict[str, Any]) -> None:
        self.known[self.id] = self.alive[self.id] = own

    def wait(self, condition: Callable[[], Any], within_s: float) -> Any:
        return condition()

    def refresh(self) -> None:
        pass


class Made:
    """An optimizer whose state the test sets."""

    local_epoch = loads = payload_bytes = failed_averages = 0

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def step(self) -> None:
        self.steps.pop(0)()

    def resume_after_pause(self) -> None:
        pass


def recorder(folder: Path, checkpoint: int = 0, rows: Any = None) -> PeersExchange:
    """Peer 0 of a run with epochs of 8 updates, which has these rows."""
    session = object.__new__(Peers)
    session._state, session.own, session.number = Network(), {}, 0  # type: ignore[assignment]
    session.launched_world = session.world = session.recorded_world = World()
    session.publish(number=0, update=0, samples=0, fed=0, loss=0.0, edges=[])
    own = RunFolder(folder)
    context: Any = SimpleNamespace(
        settings=fit_to_world(parse("vit", FLAGS, {}), World()),
        session=session,
        data_facts={"train_samples": 64},
        position=SimpleNamespace(update=checkpoint),
        folder=SimpleNamespace(
            read_peers=own.read_peers,
            write_peers=own.write_peers,
            read_epochs=lambda: (rows or [], 0),
        ),
        args=SimpleNamespace(device=torch.device("cpu")),
        sampler=None,
        cpu_began=None,
    )
    exchange = PeersExchange(context)
    exchange.optimizer, exchange.payload_bytes = Made(), 0
    exchange.optimizer.local_epoch = checkpoint
    exchange.sampler(64)
    return exchange


def ends(exchange: PeersExchange, epoch: int, fed: int, loss: float) -> list[float]:
    """The sums of an epoch in which this peer fed so many samples with this mean loss."""
    exchange.samples, exchange.fed = exchange.samples + fed, exchange.fed + fed
    return exchange.end_epoch(float(epoch), [loss * fed, fed, 0, 0, 0, 0])


def edge(epoch: int, fed: int, loss: float) -> dict[str, Any]:
    """What another peer publishes at the end of an epoch, when it has fed so many samples."""
    counts = {"samples": fed, "fed": fed, "loss": loss * fed, "loss_samples": fed}
    counts |= dict.fromkeys(("payload", "network", "failed_averages"), 0)
    resources = {
        "peak_memory_gib": 1.0,
        "reserved_memory_gib": None,
        "user_s": 2.0,
        "system_s": 1.0,
    }
    edges = {"edges": [[float(epoch), *counts.values()]]}
    return {"number": 1, "update": 0, **counts, **edges, **resources, "telemetry": TELEMETRY}


def test_the_loss_is_the_mean_over_those_samples_whose_loss_is_known(tmp_path: Path) -> None:
    """A peer that goes, or is late at the end of an epoch, has told what it fed, and no loss."""
    exchange = recorder(tmp_path)
    known = exchange.peers.state.known
    known["other"] = edge(1, fed=32, loss=2.0)
    loss, samples, *_ = ends(exchange, 1, fed=32, loss=1.0)
    assert (loss / samples, exchange.epoch_fields["fed_samples"]) == (1.5, 64)

    known["other"] |= {"fed": 56, "samples": 52}  # with an update inside the second epoch
    loss, samples, *_ = ends(exchange, 2, fed=32, loss=1.0)
    assert (loss / samples, exchange.epoch_fields["fed_samples"]) == (1.0, 32 + 24)
    assert exchange.epoch_fields["samples"] == 32 + 20

    known["other"] = edge(3, fed=96, loss=2.0)  # it was late: what was left out comes now
    loss, samples, *_ = ends(exchange, 3, fed=32, loss=1.0)
    assert (loss, samples) == (2.0 * 64 + 32, 96)
    assert exchange.epoch_fields["fed_samples"] == 32 + 40
    kept = read_json(tmp_path / "peers.json") or {}
    assert [(p["rank"], p["fed"], p["loss_samples"]) for p in kept.values()] == [
        (0, 96, 96),
        (1, 96, 96),
    ]


@pytest.mark.parametrize("away", [True, False])  # whether others have what it did
@pytest.mark.parametrize("written", [1, 2])  # rows before the recorder is killed
def test_what_no_row_has_counted_is_in_the_next_one(
    written: int, away: bool, tmp_path: Path
) -> None:
    """A recorder that is killed while it evaluates: the counts of that epoch were in no row."""
    exchange = recorder(tmp_path)
    exchange.peers.state.known["other"] = edge(1, fed=32, loss=2.0)
    counted = []
    for epoch in (1, 2):
        ends(exchange, epoch, fed=32, loss=1.0)
        counted.append(exchange.epoch_fields["fed_samples"])
        exchange.peers.state.known["other"] = edge(2, fed=72, loss=2.0)
    assert counted == [64, 32 + 40]
    kept = read_json(tmp_path / "peers.json") or {}
    assert [(kept[name]["fed"], kept[name]["before"]["fed"]) for name in ("recorder", "other")] == [
        (64, 32), (72, 32)
    ]  # fmt: skip
    rows = [{"epoch": float(epoch)} for epoch in range(1, written + 1)]
    again = recorder(tmp_path, checkpoint=8, rows=rows)  # under another name
    known = again.peers.state.known
    known["other"], known["gone"] = edge(3, fed=100, loss=2.0), edge(2, fed=64, loss=1.0)
    again.peers.state.id = "again"
    del known["recorder"]
    again.away = away
    ends(again, 3, fed=8, loss=1.0)
    of_other = 100 - (72 if written == 2 else 32)
    of_killed = 32 if away and written == 1 else 0  # else its row has it, or it trains it again
    assert again.epoch_fields["fed_samples"] == 8 + of_other + 64 + of_killed
    again.peers.state.known["other"] = edge(4, fed=120, loss=2.0)
    ends(again, 4, fed=8, loss=1.0)
    assert again.epoch_fields["fed_samples"] == 8 + 20  # nothing is counted twice


def test_an_optimizer_without_the_part_that_is_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="SimpleNamespace has no _is_overflow, which must be repl"):
        recorder(tmp_path).attach(torch.nn.Linear(1, 1), SimpleNamespace())


def test_each_norm_of_a_gradient_that_the_exchange_clips_is_taken_once(tmp_path: Path) -> None:
    exchange, weight = recorder(tmp_path), torch.nn.Parameter(torch.zeros(2))
    for norm in (5.0, 10.0):
        weight.grad = torch.tensor([0.6, 0.8]) * norm
        exchange._clip([weight], 1.0)
        assert weight.grad.norm() == pytest.approx(1.0)
    assert [float(norm) for norm in exchange.take_norms()] == pytest.approx([5.0, 10.0])
    assert exchange.take_norms() == [] and exchange.update_norm == pytest.approx(10.0)


class Answers:
    """A DHT that answers, or does not."""

    peer_id = "me"

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.takes_s = 0.0
        self.clock = 100.0

    def get(self, key: str, **how: Any) -> Any:
        self.clock += self.takes_s
        future: Future[Any] = Future()
        if self.takes_s:
            future.set_exception(FutureTimeout())
        else:
            value = self.values.get(key)
            future.set_result(None if value is None else SimpleNamespace(value=value))
        return future

    def store(self, *args: Any, **how: Any) -> None: ...

    def run_coroutine(self, *args: Any, **how: Any) -> None: ...


def test_a_look_up_that_is_not_answered_makes_no_peer_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After one, a peer went on alone."""
    dht = Answers()
    monkeypatch.setattr(network.time, "monotonic", lambda: dht.clock)
    state = network.DhtState(dht)
    state.publish_own({"number": 0})
    dht.values = {network.PEERS: {"other": {"number": 1}}, network.RECORDER: {"open": 1}}
    state.refresh()
    assert set(state.alive) == {"me", "other"} and state.recorder == {"open": 1}
    dht.takes_s = network.ANSWER_S
    state.refresh()
    assert set(state.alive) == {"me", "other"} and state.recorder == {"open": 1}
    state.refresh()  # half a minute without any answer
    assert set(state.alive) == {"me"} and state.recorder is None
    dht.takes_s = 0.0
    state.refresh()
    assert set(state.alive) == {"me", "other"} and state.recorder == {"open": 1}
    dht.values = {network.PEERS: {}}  # they have gone
    dht.clock += network.GRACE_S - 1
    state.refresh()
    assert set(state.alive) == {"me", "other"} and state.recorder == {"open": 1}
    dht.clock += 1
    state.refresh()
    assert set(state.alive) == {"me"} and state.recorder is None


def test_nobody_joins_a_run_whose_settings_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up that failed once let a peer in unchecked."""
    dht = Answers()
    monkeypatch.setattr(network.time, "monotonic", lambda: dht.clock)
    state = network.DhtState(dht)
    dht.takes_s = network.ANSWER_S
    monkeypatch.setattr(state.closed, "wait", lambda _: setattr(dht, "takes_s", 0.0))
    dht.values = {network.SETTINGS: {"--lr": "0.5"}}
    assert state.settings() == {"--lr": "0.5"} and dht.clock >= 100 + network.ANSWER_S
    dht.takes_s, dht.values = 1.0, {}
    monkeypatch.setattr(state.closed, "wait", lambda _: False)
    with pytest.raises(UserError, match="none has said within 22 s what the run trains"):
        state.settings()
    dht.takes_s, dht.values = 0.0, {network.OUTCOME: {"outcome": "finished"}}
    with pytest.raises(UserError, match="that run is over"):
        state.settings()


def test_what_a_peer_measured_belongs_to_the_epoch_whose_end_it_reported(tmp_path: Path) -> None:
    exchange = recorder(tmp_path)
    known = exchange.peers.state.known
    known["other"] = reported = edge(1, fed=32, loss=2.0)
    rows = []
    for epoch in (1, 2, 3):
        ends(exchange, epoch, fed=32, loss=1.0)
        rows.append(exchange.gather({"telemetry": TELEMETRY}))
        known["other"] = reported | {"fed": 56, "samples": 52}  # killed inside the second epoch
    # In the row of the second one it is unknown: a sum over the others would be too small.
    assert [own["telemetry"] for own, _ in rows] == [TELEMETRY, None, TELEMETRY]
    assert ["telemetry" in other for _, other in rows] == [True, False, False]
    # A processor's time counts from the start: that of a peer that has gone stays.
    assert [other["user_s"] for _, other in rows] == [2.0, 2.0, 2.0]


def test_what_a_peer_measured_that_goes_in_its_first_epoch_is_unknown(tmp_path: Path) -> None:
    exchange = recorder(tmp_path)
    known = exchange.peers.state.known
    known["other"] = {"number": 1, "update": 3, "samples": 20, "fed": 24, "loss": 0.0, "edges": []}
    rows = []
    for epoch in (1, 2):
        ends(exchange, epoch, fed=32, loss=1.0)
        rows.append(exchange.gather({"telemetry": TELEMETRY}))
    assert rows == [[{"telemetry": None}], [{"telemetry": TELEMETRY}]]
    assert exchange.gather({"rank": 0}) == [{"rank": 0}]  # without a sampler


@pytest.mark.parametrize("update", [8, 13, 24])  # that another has made when the recorder goes on
def test_of_a_time_that_was_not_seen_the_record_knows_nothing(update: int, tmp_path: Path) -> None:
    exchange = recorder(tmp_path, checkpoint=8)
    state = exchange.peers.state
    state.known["other"] = state.alive["other"] = edge(2, fed=64, loss=2.0) | {"update": update}
    exchange.optimizer.local_epoch = update  # it has taken over what the other has
    exchange.begin_epoch()
    ends(exchange, 2, fed=8, loss=1.0)
    unknown = {name for name, value in exchange.epoch_fields.items() if value is None}
    assert (unknown >= set(NOT_SEEN)) == (update > 8) == bool(unknown & set(NOT_SEEN))
    exchange.begin_epoch()
    ends(exchange, 3, fed=8, loss=1.0)
    assert not set(NOT_SEEN) & set(exchange.epoch_fields)
