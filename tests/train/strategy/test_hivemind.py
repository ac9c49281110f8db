"""Peers make the updates that one process would make of the samples of all."""

from __future__ import annotations

import importlib
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from harness.core.provenance import HIVEMIND
from harness.core.records import read_json, read_rows
from harness.core.settings import UserError
from tests.support.ranks import ROOT, ranks
from tests.support.toys import Net, Points, apart, flat, ours, rows, summary, weights

hivemind = pytest.importorskip("hivemind")
from hivemind.compression import CompressionInfo, serialization
from hivemind.p2p import P2P

from harness.train.measure import telemetry
from harness.train.patches import CHECKED
from harness.train.strategy.hivemind import (
    Int8,
    optimizer,
    patch_hivemind,
    private_sockets,
    session,
)
from harness.train.strategy.hivemind.exchange import NOT_SEEN
from harness.train.strategy.hivemind.optimizer import state_interval
from harness.train.strategy.hivemind.session import PEERS, Peers

TRAIN, TEST = Points(64), Points(10, draw=1)
FLAGS = ["--strategy=hivemind", "--per_gpu_batch=4", "--epochs=2", "--lr=0.05",
         "--weight_decay=0.1", "--max_grad_norm=0.1"]  # fmt: skip
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Diary(TrainerCallback):
    """The update of all peers into which each batch of this one went."""

    def __init__(self, model: Net) -> None:
        self.model = model
        self.made: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.made.append(state.global_step)

    def batches(self) -> dict[int, list[int]]:
        """update -> the samples that this peer brought; one belongs to the next that is made."""
        brought: dict[int, list[int]] = defaultdict(list)
        waiting: list[int] = []
        before = 0
        each = len(self.model.fed) // len(self.made)
        for number, update in enumerate(self.made):
            waiting += flat(self.model.fed[number * each : (number + 1) * each])
            if update > before:
                brought[update] += waiting
                waiting, before = [], update
        return dict(brought)


def trained(folder: str, *flags: str, **model: Any) -> dict[str, Any]:
    """The result of a toy run, as one process sees it."""
    # No peer goes here: one that does not answer for seconds only waits for a busy processor.
    for name in ("ASK_S", "CHUNK_S", "PROGRESS_S"):
        setattr(optimizer, name, 60.0)
    net = Net(**model)
    diary = Diary(net)
    trainer, run = ours(folder, net, TRAIN, TEST, *flags, callbacks=[diary])
    with run:
        run.train(trainer)
        made_by = getattr(run.context.session, "optimizer", None)
        counted = {
            name: getattr(made_by, name, 0)
            for name in ("averaged_rounds", "failed_averages", "loads", "payload_bytes")
        }
    return {
        "sockets": P2P._UNIX_SOCKET_PREFIX.removeprefix("/unix"),
        "weights": weights(net),
        "batches": diary.batches(),
        "fed": net.fed,
        "rate": trainer.optimizer.param_groups[0]["lr"],
        "rows": rows(run) if run.context.is_rank0 else [],
        "summary": summary(run) if run.context.is_rank0 else {},
        "folder": str(run.context.folder.path),
        "state": {
            name: value.double().numpy().copy()
            for name, value in trainer.optimizer.state_dict()["state"][0].items()
        },
        **counted,
    }


def replayed(batches: dict[int, list[int]], sgd: bool = False) -> np.ndarray:
    """A plain loop over these batches, with what the Trainer makes of the flags above."""
    net = Net()
    decayed = [p for n, p in net.named_parameters() if "bias" not in n]
    others = [p for n, p in net.named_parameters() if "bias" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer: Any = (torch.optim.SGD if sgd else torch.optim.AdamW)(groups, lr=0.05)
    for update in range(1, max(batches) + 1):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - (update - 1) / max(batches))
        chosen = torch.tensor(batches[update])
        optimizer.zero_grad()
        net(TRAIN.x[chosen], TRAIN.labels[chosen], chosen)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    return weights(net)


def test_a_peer_that_joins_gets_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """hivemind's own tensors would move to other memory while their peer trains on them."""
    net = torch.nn.BatchNorm1d(3)
    peer: Any = optimizer.PeerState.__new__(optimizer.PeerState)
    peer.lock_optimizer, peer.lock_averaged_tensors = threading.Lock(), threading.Lock()
    peer._parent_pid, peer.unmade = 0, None  # of no process
    locked: list[bool] = []

    def own(self: Any) -> Any:
        locked.append(self.lock_optimizer.locked())
        peer.local_epoch += 1  # the next step has begun, and waits for the lock
        return {"epoch": 8}, [p.detach().cpu() for p in net.parameters()], ["weight", "bias"]

    monkeypatch.setattr(optimizer.TrainingStateAverager, "get_current_state", own)
    monkeypatch.setattr(optimizer.TrainingStateAverager, "local_epoch", 7, raising=False)
    metadata, tensors, infos = peer.get_current_state()
    assert (metadata, infos, locked) == ({"epoch": 7}, ["weight", "bias"], [True])
    for given, kept in zip(tensors, net.parameters(), strict=True):
        assert torch.equal(given, kept) and given.data_ptr() != kept.data_ptr()


def asked_while_it_steps(folder: str, *flags: str) -> list[tuple[int, int]]:
    """(updates made, update of the state that a peer would get) as each begins, and at the end."""
    seen: list[tuple[int, int]] = []
    do = optimizer.PeerState._do

    def number(peer: Any) -> int:
        return int(peer.get_current_state()[0]["epoch"])

    def begin(peer: Any, wait_for: Any, makes_step: bool, *args: Any, **how: Any) -> Any:
        if makes_step:  # the update is counted, and the lock in which it is made is not taken
            seen.append((peer.local_epoch - 1, number(peer)))
        return do(peer, wait_for, makes_step, *args, **how)

    optimizer.PeerState._do = begin  # type: ignore[method-assign]
    trainer, run = ours(folder, Net(), TRAIN, TEST, *flags)
    with run:
        run.train(trainer)
        made_by: Any = getattr(run.context.session, "optimizer", None)
        seen.append((made_by.local_epoch, number(made_by.state_averager)))
    return seen


@pytest.mark.process
def test_an_update_counts_for_others_once_it_is_made(tmp_path: Path) -> None:
    """hivemind counts it before: a peer that joined then lacked one update."""
    (seen,) = ranks(1, asked_while_it_steps, str(tmp_path), *FLAGS, env=ENV)
    assert seen == [(update, update) for update in range(2 * 16 + 1)]


@pytest.mark.process
def test_one_peer_is_training_in_one_process(tmp_path: Path) -> None:
    (alone,) = ranks(1, trained, str(tmp_path / "peer"), *FLAGS, "--grad_acc=2", env=ENV)
    flags = ["--strategy=single", *FLAGS[1:], "--grad_acc=2"]
    (plain,) = ranks(1, trained, str(tmp_path / "plain"), *flags, env=ENV)
    assert alone["fed"] == plain["fed"]
    assert apart(alone["weights"], plain["weights"]) < 1e-6
    # Nothing is lost of what Adam knows, and its steps are counted alike.
    assert all(apart(alone["state"][n], plain["state"][n]) < 1e-6 for n in plain["state"])
    timing = ("_s", "checksum", "unix", "per_gpu", "share", "memory_gib_per_rank", "timed_samples",
              "node", "_without_padding", "mfu")  # fmt: skip
    for one, other in zip(alone["rows"], plain["rows"], strict=True):
        assert (one.pop("peers"), one.pop("failed_averages")) == (1, 0)
        untimed = {k: v for k, v in one.items() if not k.endswith(timing)}
        assert untimed == pytest.approx({k: v for k, v in other.items() if k in untimed})
        assert set(one) == set(other)
        assert one["clipped_share"] == other["clipped_share"] == 1
    assert alone["payload_bytes"] == 0


@pytest.mark.process
def test_one_peer_alone_uses_all_batches_of_an_update(tmp_path: Path) -> None:
    """Of three batches, the step used the gradient of the last one."""
    (alone,) = ranks(1, trained, str(tmp_path), *FLAGS, "--target_batch=12", env=ENV)
    assert {len(brought) for brought in alone["batches"].values()} == {12}
    assert len(alone["batches"]) == 2 * 5
    assert apart(alone["weights"], replayed(alone["batches"])) < 1e-6
    last = {update: brought[-4:] for update, brought in alone["batches"].items()}
    assert apart(alone["weights"], replayed(last)) > 1e-3


def left_by_the_other(folder: str, *flags: str) -> dict[str, Any]:
    """Each update is begun as if another peer were there, which then has gone."""
    update = optimizer.PeerOptimizer._update_global_epoch

    def begun_with_another(made_by: Any, scaler: Any) -> None:
        there = iter((2,))

        def count() -> int:
            made_by.tracker.global_progress.num_peers = 1
            return next(there, 1)

        made_by.count_peers = count
        update(made_by, scaler)

    optimizer.PeerOptimizer._update_global_epoch = begun_with_another  # type: ignore[method-assign]
    return trained(folder, *flags)


@pytest.mark.process
def test_where_the_average_fails_a_peer_goes_on_with_its_own_gradients(tmp_path: Path) -> None:
    (left,) = ranks(1, left_by_the_other, str(tmp_path / "left"), *FLAGS, env=ENV)
    flags = ["--strategy=single", *FLAGS[1:]]
    (plain,) = ranks(1, trained, str(tmp_path / "plain"), *flags, env=ENV)
    # Of the gradients of 32 updates, and of the weights at the end of both epochs.
    assert (left["failed_averages"], left["averaged_rounds"]) == (34, 0)
    assert apart(left["weights"], plain["weights"]) < 1e-6


def missing_an_update(folder: str, *flags: str) -> dict[str, Any]:
    """With the first batch of its third update a peer finds that others have made it."""
    behind = optimizer.PeerOptimizer._should_load_state_from_peers

    def too_late(made_by: Any) -> bool:
        return behind(made_by) or (made_by.local_epoch == 2 and not made_by.loads)

    optimizer.PeerOptimizer._should_load_state_from_peers = too_late  # type: ignore[method-assign]
    return trained(folder, *flags)


@pytest.mark.process
def test_a_batch_that_comes_too_late_is_not_counted_as_used(tmp_path: Path) -> None:
    (late,) = ranks(1, missing_an_update, str(tmp_path), *FLAGS, env=ENV)
    assert late["loads"] == 1
    assert [row["samples"] for row in late["rows"]] == [64, 64]
    assert [row["fed_samples"] for row in late["rows"]] == [68, 64]


def away_at_first(folder: str, *flags: str) -> dict[str, Any]:
    """When it begins, another has made an update; all energy is that of a sampler."""
    newest, seen = Peers.newest_update, iter((1,))
    Peers.newest_update = lambda made_by: next(seen, newest(made_by))  # type: ignore[method-assign]
    telemetry.Telemetry.run_fields = lambda *_: {"energy_j": 5.0}  # type: ignore[method-assign]
    return trained(folder, *flags)


@pytest.mark.process
def test_what_the_recorder_has_not_seen_is_unknown(tmp_path: Path) -> None:
    (alone,) = ranks(1, away_at_first, str(tmp_path), *FLAGS, env=ENV)
    first, second = ([row[name] for name in NOT_SEEN] for row in alone["rows"])
    assert first == [None] * 5
    assert min(second) > 0 and alone["rows"][1]["energy_j"] == 5.0
    assert alone["summary"]["train_time_s"] is alone["summary"]["energy_j"] is None


@pytest.mark.process
def test_two_peers_make_the_updates_of_the_samples_of_both(tmp_path: Path) -> None:
    both = ranks(2, trained, str(tmp_path), *FLAGS, env=ENV)
    leader, other = both
    assert not any(Path(one["sockets"]).exists() for one in both)
    assert len({one["sockets"] for one in both} - {"/tmp/hivemind-"}) == 2
    assert apart(leader["weights"], other["weights"]) < 1e-6
    updates = 2 * 64 // 8
    counted = [(o["averaged_rounds"], o["failed_averages"], o["loads"]) for o in both]
    assert counted == [(updates, 0, 0)] * 2, [len(o["batches"]) for o in both]
    together = {
        u: leader["batches"].get(u, []) + other["batches"].get(u, []) for u in range(1, updates + 1)
    }
    assert apart(leader["weights"], replayed(together)) < 1e-5
    # A gradient that is clipped by each for itself is another one, and so is one without a share.
    assert apart(leader["weights"], replayed(leader["batches"])) > 1e-3
    assert leader["rate"] == other["rate"] == 0

    # The two do not begin with the same samples, and each walks through all of them.
    assert set(flat(leader["fed"][:4])) != set(flat(other["fed"][:4]))
    for one in both:
        assert sorted(flat(one["fed"])[:64]) == list(range(64))

    # One record, of the samples of both.
    fed = [len(flat(one["fed"])) for one in both]
    first, last = leader["rows"]
    assert first["samples"] + last["samples"] == sum(fed) == leader["summary"]["samples"]
    assert first["fed_samples"] + last["fed_samples"] == sum(fed)
    assert (first["epoch"], last["epoch"], first["updates"], last["updates"]) == (1, 2, 8, 16)
    assert all(row["peers"] == 2 and row["effective_batch"] == 8 for row in leader["rows"])
    assert all(row["failed_averages"] == 0 for row in leader["rows"])
    assert last["train_samples_per_s"] == pytest.approx(2 * last["train_samples_per_s_per_gpu"])
    assert last["timed_samples"] == pytest.approx(last["samples"])
    assert len(last["peak_memory_gib_per_rank"]) == 2
    assert len(leader["summary"]["user_s_per_rank"]) == 2
    for number in (0, 1):
        own, _ = read_rows(Path(leader["folder"], "ranks", f"rank_{number}.jsonl"))
        assert [row["epoch"] for row in own] == [1, 2]
        assert ("eval_accuracy" in own[0]) == (number == 0)
        assert all(row["telemetry"] for row in own)  # each looks at its own device
    kept = read_json(Path(leader["folder"], "peers.json")) or {}
    assert sorted((p["rank"], p["samples"]) for p in kept.values()) == list(enumerate(fed))
    # What a peer hands to an average: its gradient each time, its weights at an epoch's end.
    size = 4 * len(leader["weights"])
    assert leader["payload_bytes"] == size * (updates + 2)


@pytest.mark.process
@pytest.mark.slow
def test_the_loss_of_an_epoch_is_that_of_all_peers(tmp_path: Path) -> None:
    flags = ["--strategy=hivemind", "--per_gpu_batch=4", "--epochs=1", "--lr=1e-12"]
    both = ranks(2, trained, str(tmp_path), *flags, env=ENV)
    net = Net()
    samples = torch.tensor([i for one in both for i in flat(one["fed"])])
    with torch.no_grad():
        loss = float(net(TRAIN.x[samples], TRAIN.labels[samples], samples)["loss"])
    assert both[0]["rows"][0]["train_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("compress", ["fp16", "int8"])
def test_compression_sends_less_and_stays_near(tmp_path: Path, compress: str) -> None:
    # Adam would make a large step of a rounding error where the gradient is small.
    flags = [*FLAGS, "--optim=sgd", f"--compress={compress}"]
    leader, other = ranks(2, trained, str(tmp_path), *flags, env=ENV)
    both = leader["batches"], other["batches"]
    exact = replayed({u: both[0].get(u, []) + both[1].get(u, []) for u in range(1, 17)}, sgd=True)
    far = apart(leader["weights"], exact)
    moved = apart(weights(Net()), exact)
    assert 0 < far < {"fp16": 0.01, "int8": 0.1}[compress] * moved
    assert leader["failed_averages"] == other["failed_averages"] == 0
    packed = {"fp16": 2, "int8": 1}[compress]
    assert leader["payload_bytes"] == (16 * packed + 2 * 2) * len(exact)


@pytest.mark.process
@pytest.mark.slow
def test_local_updates_average_weights(tmp_path: Path) -> None:
    both = ranks(2, trained, str(tmp_path), *FLAGS, "--local_updates", env=ENV)
    assert apart(both[0]["weights"], both[1]["weights"]) < 1e-6
    assert both[0]["rows"][-1]["updates"] == 16
    size = 4 * len(both[0]["weights"])
    counted = [(o["payload_bytes"] / size, o["failed_averages"], o["loads"]) for o in both]
    assert counted == [(16, 0, 0)] * 2


@pytest.mark.parametrize("value", [0.0, -0.3, None])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (0,)])
def test_8_bits_take_any_gradient(value: float | None, shape: tuple[int, ...]) -> None:
    """hivemind's own encoding fails for one number, and for numbers that are all the same."""
    patch_hivemind()
    sent = torch.randn(shape) if value is None else torch.full(shape, value)
    packed = Int8().compress(sent, CompressionInfo.from_tensor(sent))
    # As the one who receives it unpacks it.
    got = serialization.deserialize_torch_tensor(packed)
    assert got.shape == sent.shape and got.dtype == sent.dtype
    torch.testing.assert_close(got, sent, rtol=0, atol=0 if value is not None else 0.05)


def batchnorm(folder: str, *flags: str) -> list[float]:
    net = Net(batchnorm=True)
    trainer, run = ours(folder, net, TRAIN, TEST, *flags)
    with run:
        run.train(trainer)
    return list(net.norm.running_mean.tolist())


@pytest.mark.process
@pytest.mark.slow
def test_batchnorm_statistics_are_averaged_with_the_weights(tmp_path: Path) -> None:
    flags = [*FLAGS[:2], "--epochs=1", "--lr=0.01"]
    one, other = ranks(2, batchnorm, str(tmp_path), *flags, env=ENV)
    assert one == pytest.approx(other, abs=1e-6) and any(one)


def test_weights_meet_at_the_end_of_every_epoch() -> None:
    for updates in range(1, 200):
        assert updates % state_interval(updates) == 0 and state_interval(updates) <= 16
    assert [state_interval(updates) for updates in (33, 64, 97)] == [11, 16, 1]


@pytest.mark.parametrize("temporary", ["short", "/too-long" * 7])
def test_sockets_lie_where_nobody_else_may_enter(
    temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(P2P, "_UNIX_SOCKET_PREFIX", "")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short if temporary == "short" else temporary)
        with private_sockets() as folder:
            assert Path(folder).stat().st_mode & 0o777 == 0o700
            assert f"/unix{folder}/" == P2P._UNIX_SOCKET_PREFIX
        assert Path(folder).parent == Path(short if temporary == "short" else "/tmp")
        assert not Path(folder).exists()


def test_another_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is patched, and its private methods are overridden: as they are in the pinned version."""
    version = CHECKED["hivemind"].version
    assert f"hivemind=={version}\n" in (ROOT / "constraints.txt").read_text()
    assert HIVEMIND.install.endswith(f" hivemind=={version}")
    monkeypatch.setattr(hivemind, "__version__", "1.2.0")
    refused = rf"hivemind 1.2.0 is installed, .* were checked with {version}: {HIVEMIND.install}$"
    with pytest.raises(UserError, match=refused):  # once, for all that patches or overrides it
        importlib.reload(importlib.import_module("harness.train.strategy.hivemind"))


@pytest.mark.parametrize("lacks", ["hivemind.p2p.P2P._make_process_args", "hivemind.p2p.P2P"])
def test_another_version_is_refused_before_its_parts_are_looked_up(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it lacks what is imported: it had been said not to be installed."""
    monkeypatch.setattr(hivemind, "__version__", "1.2.0")
    monkeypatch.delattr(lacks)
    with pytest.raises(UserError, match=r"^hivemind 1.2.0 is installed, but the parts"):
        importlib.reload(importlib.import_module("harness.train.strategy.hivemind"))


def test_what_fails_while_a_peer_closes_keeps_none_of_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    def broken() -> None:
        raise RuntimeError("planted")

    peer = object.__new__(Peers)
    peer.optimizer = SimpleNamespace(shutdown=broken)
    monkeypatch.setattr(session.Progress, "release_threads", lambda: closed.append("threads"))
    dht = SimpleNamespace(shutdown=lambda: closed.append("dht"))
    peer._state = SimpleNamespace(close=broken, dht=dht)  # type: ignore[assignment]
    peer.sockets = SimpleNamespace(cleanup=lambda: closed.append("sockets"))  # type: ignore[assignment]
    peer.close()
    assert closed == ["threads", "dht", "sockets"]


class Table:
    """Of peers in the network, to which others write while this one settles."""

    def __init__(self, own: str, others: list[tuple[str, dict[str, Any]]]) -> None:
        self.id, self.others = own, others
        self.peers: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        return dict(self.peers) if key == PEERS else None

    def publish_own(self, entry: dict[str, Any]) -> None:
        self.peers[self.id] = entry

    def settle(self, seconds: float) -> None:
        assert seconds > 0
        if self.others:
            peer, entry = self.others.pop(0)
            self.peers[peer] = entry


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ("b", {"number": 1}, 1),  # of two at the same moment the higher id keeps it
        ("a", {"number": 1}, 2),
        ("b", {"number": 1, "at": ["/ip4/127.0.0.1/tcp/1"]}, 2),  # chosen before
        ("a", {"number": 5}, 1),
    ],
)
def test_peers_that_join_at_the_same_moment_have_different_numbers(
    own: str, other: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = object.__new__(session.Peers)
    table = Table(own, [("b" if own == "a" else "a", other)])
    joining._state = table  # type: ignore[assignment]
    monkeypatch.setattr(session, "time", SimpleNamespace(sleep=table.settle))
    assert joining._choose_number() == expected


def test_what_a_model_computes_again_is_not_averaged() -> None:
    """Rotary frequencies, in the half precision that is sent, would differ from peer to peer."""
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("frequencies", torch.ones(4), persistent=False)
    learned = optimizer.learned_buffers(model)
    assert len(learned) == 2
    assert learned[0] is model.running_mean and learned[1] is model.running_var
