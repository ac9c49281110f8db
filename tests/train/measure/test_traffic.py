"""What ranks send: counted, read off the interface, and never half of it recorded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from harness.core.attempts import write_summary
from harness.core.records import RunFolder, append_row, find_runs, read_json, read_rows
from harness.core.topology import World
from harness.train.measure.clock import StepClock
from harness.train.measure.resources import Traffic, interfaces_sent, over_ranks, traffic_of
from harness.train.strategy import exchange_of
from tests.support.sweeps import sweep_file
from tests.support.warm_sweeps import sweep


def test_what_all_interfaces_but_the_loopback_have_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {"lo": 900, "link0": 70000, "eth1": 1234567890123}
    counters = {name: SimpleNamespace(bytes_sent=count) for name, count in sent.items()}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: counters)
    assert interfaces_sent() == 70000 + 1234567890123


def reading(*values: Any) -> Any:
    return iter(values).__next__


def test_what_is_sent_between_the_edges_of_the_epochs_time() -> None:
    # Begins, is paused for a checkpoint, goes on, ends; then an epoch without a pause.
    read = reading((10, 100), (15, 150), (17, 190), (27, 300), (30, 400), (34, 404))
    clock = StepClock(cuda=False, traffic=Traffic(read, sent=(1000, 5)))
    clock.start()
    assert clock.traffic.so_far() == (1005, 55)
    clock.resume()
    clock.stop()
    assert clock.traffic.stop() == {"payload_bytes": 1015, "network_sent_bytes": 165}
    clock.start()
    assert clock.traffic.stop() == {"payload_bytes": 4, "network_sent_bytes": 4}


def test_traffic_is_unknown_if_a_part_is_unknown() -> None:
    traffic = Traffic(reading((1, None), (3, None)), sent=(None, 7))
    traffic.start()
    assert traffic.stop() == {"payload_bytes": None, "network_sent_bytes": None}
    ranks = [{"payload_bytes": 5, "network_sent_bytes": n} for n in (7, None, 9, None)]
    assert over_ranks(ranks, per_node=2) == {"payload_bytes": 20, "network_sent_bytes": 16}
    assert over_ranks(ranks, per_node=1) == {"payload_bytes": 20, "network_sent_bytes": None}
    # Nodes on one machine: what the interfaces sent is none of it.
    large = [{"payload_bytes": 10**6, "network_sent_bytes": n} for n in (100, 26)]
    assert over_ranks(large, per_node=1) == {"payload_bytes": 2 * 10**6, "network_sent_bytes": None}
    large[0]["network_sent_bytes"] = 10**6
    assert over_ranks(large, per_node=1)["network_sent_bytes"] == 10**6 + 26
    ranks[1] = {"payload_bytes": None, "network_sent_bytes": None}
    assert over_ranks(ranks, per_node=2) == {"payload_bytes": None, "network_sent_bytes": 16}


def traffic(rank: int, epoch: dict[str, Any], other: bool = False, nodes: int = 2) -> Traffic:
    world = World(nodes=nodes, per_node=2, rank=rank, local_rank=rank % 2)
    context: Any = SimpleNamespace(
        world=world, is_rank0=rank == 0, epoch_so_far=epoch, other_processes=other
    )
    return traffic_of(context, lambda: 3)


def test_an_epoch_goes_on_with_what_was_sent_before_its_checkpoint() -> None:
    sent = [[10, 100], [20, None], [30, 300], [40, None]]
    epoch = {"samples": 64, "sent": sent}
    assert [traffic(r, epoch).sent for r in range(4)] == [tuple(s) for s in sent]
    # Other processes than those that made it: counted once.
    assert [traffic(r, epoch, other=True).sent for r in (0, 1)] == [(100, 400), (0, 0)]
    # Of a checkpoint that says nothing of it, and of one between two epochs.
    assert traffic(1, {"samples": 64}).sent == (None, None)
    assert traffic(1, {"sums": [], "sent": [None] * 4}).sent == (0, 0)
    # Who reads the interface: the first rank of each of several nodes; alone, nobody knows a thing.
    assert traffic(1, {}).read() == (3, None)
    assert traffic(2, {}).read()[1] == pytest.approx(interfaces_sent(), rel=0.1)
    assert traffic(0, {}, nodes=1).read() == (3, None)
    assert traffic_of(None, lambda: 3).read() == (None, None)


def test_which_strategies_know_their_payload() -> None:
    known = {}
    for strategy in ("single", "dp", "fsdp", "ddp"):
        run: Any = SimpleNamespace(settings=SimpleNamespace(strategy=strategy, compress="none"))
        known[strategy] = exchange_of(run).payload_bytes
    assert known == {"single": 0, "dp": None, "fsdp": None, "ddp": 0}


def test_the_sum_of_a_run_is_unknown_where_an_epoch_is(tmp_path: Path) -> None:
    row = {"timed_s": 0.0, "timed_samples": 0, "epoch_time_s": 1.0, "samples": 1, "epoch": 1,
           "peak_memory_gib_per_rank": []}  # fmt: skip
    for options, expected in (
        ([{"payload_bytes": 3}, {"payload_bytes": 4}], 7),
        ([{"payload_bytes": 3}, {"payload_bytes": None}], None),
        ([{}, {"payload_bytes": 4}], None),  # a record from before it was counted
        ([], None),
    ):
        folder = RunFolder(tmp_path / str(len(list(tmp_path.iterdir()))))
        folder.path.mkdir()
        for more in options:
            append_row(folder.epochs, row | more)
        write_summary(folder, "finished")
        result = read_json(folder.summary) or {}
        assert (result["payload_bytes"], result["network_sent_bytes"]) == (expected, None)


# What goes over the link, and how often, as a share of what plain ddp sends.
WAYS = {
    "{strategy: ddp, exchange: backend}": 1.0,
    "{strategy: ddp, compress: bf16}": 1 / 2,
    "{strategy: ddp, exchange: direct}": 1.0,
    "{strategy: local_sgd, sync_every: 5}": 1 / 5,
    "{strategy: diloco, sync_every: 10}": 1 / 10,
    "{strategy: diloco, sync_every: 5, compress: int8}": 1 / 5 * (8 + 32 / 1024) / 32,
}


@pytest.mark.process
@pytest.mark.root
def test_what_leaves_a_node_is_what_theory_says(tmp_path: Path) -> None:
    """A ring of n ranks: each sends 2(n-1)/n of the payload."""
    text = (
        "script: vit\nsettings: {epochs: 1, per_gpu_batch: 8, train_size: 320, test_size: 32, "
        f"setup: 2_1, link: 1ms}}\nruns: [{', '.join(WAYS)}]\n"
    )
    out = tmp_path / "out"
    done = sweep(sweep_file(tmp_path, text), out, "--tiny", "--launcher", "netns")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = {}
    for folder in find_runs(out):
        (row,) = read_rows(folder.epochs)[0]
        settings = read_json(folder.settings) or {}
        way = ", ".join(
            f"{name}: {settings[name]}"
            for name in ("strategy", "sync_every", "compress", "exchange")
            if settings[name] not in (None, "none", "auto")
        )
        gradient = (read_json(folder.environment) or {})["link"]["gradient_bytes"]
        expected = row["updates"] * gradient * WAYS[f"{{{way}}}"]
        seen[way] = row["network_sent_bytes"]
        for rank in (0, 1):
            (of_rank,) = read_rows(folder.rank(rank))[0]
            # int8 fills up what is sent to whole blocks.
            assert of_rank["payload_bytes"] == pytest.approx(
                expected, rel=0.02 if settings["compress"] == "int8" else 1e-9
            )
            ring = 2 * (2 - 1) / 2
            assert of_rank["network_sent_bytes"] == pytest.approx(
                of_rank["payload_bytes"] * ring, rel=0.05
            )
        summary = read_json(folder.summary) or {}
        assert summary["payload_bytes"] == row["payload_bytes"]
        assert summary["network_sent_bytes"] == row["network_sent_bytes"]
    assert len(seen) == len(WAYS)
    assert seen["strategy: diloco, sync_every: 10"] == pytest.approx(
        seen["strategy: ddp, exchange: backend"] / 10, rel=0.05
    )
