"""Signals at chosen moments of a run: nothing is lost, doubled or falsified.

A moment is the number of a write: to an entry of the cache, a checkpoint, rows, the record. A trial
is its number: random.Random(number) draws ranks, moments and signals.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from harness.core.attempts import only_follows
from harness.core.links import link_of
from harness.core.records import FINISHED, RunFolder, find_runs, read_json
from harness.core.records.locks import Lock
from harness.launch.netns.emulation import EmulatedNodes
from harness.read.records.recorded import recorded
from tests.support import peers
from tests.support.broken_runs import assert_same_training, attempts_of, only_run
from tests.support.calibrated import copy_calibration
from tests.support.killed import NEVER, train, train_as_peer, train_on_node
from tests.support.mutants import amount
from tests.support.ranks import ran
from tests.support.sweeps import gone, wait_for
from tests.support.toys import CPU

pytestmark = pytest.mark.process

SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
PARTS = 2  # beside one another, where there are cores
Strike = tuple[int, int, str, float]  # rank, write, signal, seconds after it
ENDING = ((signal.SIGTERM, 30.0), (signal.SIGKILL, 30.0))  # as torchrun ends what others have left
NONE: Strike = (0, NEVER, "SIGKILL", 0.0)


class Place(ABC):
    """Where the ranks of a run are, and a run that nothing disturbs."""

    healthy: RunFolder
    writes: list[int]  # of each of its ranks

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        root = self.root("healthy")
        code, err = self.start(root, NONE)
        assert code == 0, err
        self.healthy = only_run(root / "out")
        told = [root.with_name(f"{root.name}.{rank}") for rank in range(count)]
        self.writes = [int(file.read_text()) for file in told]

    @abstractmethod
    def start(self, root: Path, strike: Strike) -> tuple[int, str]:
        """The exit code of the run, and what it complained of."""

    def root(self, name: str) -> Path:
        root = self.folder / f"{type(self).__name__}-{self.count}-{name}"
        copy_calibration(root / "cache")
        return root


def environment(root: Path) -> dict[str, str]:
    return CPU | {"HF_HOME": str(root / "cache")}


class ThisMachine(Place):
    def start(self, root: Path, strike: Strike) -> tuple[int, str]:
        done = ran(self.count, train, str(root), *strike, env=environment(root))
        return done.code, done.err


class Nodes(Place):
    """One rank on each of two emulated nodes; when one has failed, the other is asked to end."""

    def __init__(self, folder: Path, nodes: EmulatedNodes) -> None:
        self.nodes, self.ports = nodes, itertools.count(20_000)
        super().__init__(folder, len(nodes.nodes))

    def start(self, root: Path, strike: Strike) -> tuple[int, str]:
        met = {"MASTER_ADDR": self.nodes.nodes[0].address, "MASTER_PORT": str(next(self.ports))}
        world = {"WORLD_SIZE": str(self.count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        ranks = [
            peers.Peer(
                root.with_name(f"{root.name}.printed") / str(rank),
                *(train_on_node, self.nodes.namespaces[rank], str(root), *strike),
                env={**environment(root), **node.environment, **world, **met, "RANK": str(rank)},
            )
            for rank, node in enumerate(self.nodes.nodes)
        ]
        try:
            wait_for(
                lambda: any(r.process.exitcode for r in ranks) or all(r.ended() for r in ranks)
            )
        finally:
            for rank, (signum, within_s) in itertools.product(reversed(ranks), ENDING):
                if not rank.ended():
                    rank.kill(signum)
                    rank.process.join(within_s)
        return max(abs(rank.process.exitcode or 0) for rank in ranks), "".join(r.err for r in ranks)


def folder_of(root: Path) -> RunFolder | None:
    runs = find_runs(root / "out") if (root / "out").exists() else []
    return runs[0] if runs else None


def strikes(draw: random.Random, writes: Sequence[int]) -> Iterator[Strike]:
    for _ in range(draw.randrange(1, 4)):
        rank = draw.randrange(len(writes))
        after_s = draw.choice([0.0, draw.uniform(1e-4, 0.02)])
        how = "SIGALRM" if after_s else draw.choice(SIGNALS)
        yield rank, draw.randrange(1, writes[rank] + 1), how, after_s


def codes(how: str) -> set[int]:
    """Of a process alone that meets it, or has ended before."""
    return {0, 128 + getattr(signal, how)}


def check_reasons(folder: RunFolder, count: int, met: Sequence[str]) -> None:
    """Each attempt has ended as what it met says; a rank that misses another says that."""
    silent = sum(how in ("SIGKILL", "SIGALRM") for how in met)
    possible = Counter({**Counter(met), "the process was killed": silent})
    told = Counter(end["reason"] for end in attempts_of(folder)[1] if end["outcome"] != FINISHED)
    for reason in told:
        if count == 1:
            assert told[reason] <= possible[reason], told
        else:  # whom its launcher stops says SIGTERM
            assert reason in ({*possible, "SIGTERM"}) or only_follows(reason), told


def trial(number: int, place: Place) -> None:
    """Started until it has ended well."""
    draw = random.Random(number)
    root = place.root(f"trial-{number}")
    met: list[str] = []
    try:
        for strike in strikes(draw, place.writes):
            met.append(strike[2])
            code, err = place.start(root, strike)
            if place.count == 1:
                assert code in codes(strike[2]) and err.count("\n") <= 1, (code, err)
            if (found := folder_of(root)) is not None:
                assert recorded(found).problem is None, recorded(found).line
                if found.outcome() == FINISHED:
                    # Killed before it gave its lock back: what is left goes with the next lock.
                    lock = Lock(found.lock("run"))
                    assert lock.take()
                    lock.release()
                    break
        else:
            code, err = place.start(root, NONE)
            assert code == 0, err
        folder = only_run(root / "out")
        assert_same_training(folder, place.healthy)
        check_reasons(folder, place.count, met)
        left = [path.name for path in (root / "cache" / "harness").glob("*")]
        assert sum(name.endswith(".lock") for name in left) == 0, left
        assert not (folder.path.parent / ".locks").exists()
    except BaseException:
        print(f"trial {number} in {type(place).__name__} of {place.count} met {met}")
        raise
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, calibrated: None) -> list[ThisMachine]:
    folder = tmp_path_factory.mktemp("places")
    return [ThisMachine(folder, count) for count in (1, 2)]


@pytest.mark.parametrize("part", range(PARTS))
def test_a_run_that_is_killed_at_any_write(part: int, places: list[ThisMachine]) -> None:
    for number in range(part, amount(24, 850), PARTS):
        trial(number, places[number // PARTS % 4 == 3])


@pytest.mark.root
def test_a_run_on_emulated_nodes_that_is_killed_at_any_write(tmp_path: Path) -> None:
    with EmulatedNodes.open(2, link_of("1ms")) as nodes:
        place = Nodes(tmp_path, nodes)
        for number in range(amount(4, 100)):
            trial(number, place)


PEER = ["--tiny", "--strategy", "hivemind", "--train_size", "256", "--test_size", "40",
        "--epochs", "3", "--telemetry_hz", "0"]  # fmt: skip
# Of the recorder and of another peer, from when both train; a later moment is none.
WRITES_OF_PEERS = (40, 8)


@pytest.mark.parametrize("number", range(amount(2, 50)))
def test_a_peer_that_is_killed_at_any_write(number: int, tmp_path: Path) -> None:
    """Started again, it joins the other. The recorder may miss the end of an epoch meanwhile."""
    pytest.importorskip("hivemind")
    draw = random.Random(number)
    struck, how = number % 2, draw.choice(SIGNALS)
    at = draw.randrange(1, WRITES_OF_PEERS[struck])

    def peer(name: str, which: int, at: int, *join: str) -> peers.Peer:
        out = ["--output_dir", str(tmp_path / ("elsewhere" if which else "out"))]
        words = [*PEER, *out, *(["--initial_peers", *join] if join else [])]
        return peers.Peer(tmp_path / name, train_as_peer, str(tmp_path), at, how, 0.0, words)

    first = peer("first", 0, NEVER if struck else at)
    second = peer("second", 1, at if struck else NEVER, first.address())
    victim, other = (second, first) if struck else (first, second)
    address = first.address() if struck else second.address()
    family = wait_for(lambda: victim.family() or victim.ended(), 60)
    code = victim.code()
    print(f"trial {number}: {'a peer' if struck else 'the recorder'} met {how} at {at}: {code}")
    assert gone(family)
    last = victim
    if code:
        assert abs(code) in (getattr(signal, how), 128 + getattr(signal, how)), victim.err
        last = peer("again", struck, NEVER, address)
    # On a busy machine the recorder may have trained to the end before the other is back.
    late = struck and last.code() == 2 and "that run is over" in last.err
    assert (2 if late else 0, 0) == (last.code(), other.code()), last.err + other.err
    folder = only_run(tmp_path / "out")
    assert recorded(folder).problem is None, recorded(folder).line
    epochs = [row["epoch"] for row in peers.rows(folder)]
    assert epochs == sorted({*epochs}) and epochs[-1] == 3
    assert peers.summary(folder)["outcome"] == FINISHED
    starts, ends = attempts_of(folder)
    reasons = [end["reason"] for end in ends]
    if struck or not code:
        assert len(epochs) == 3 and len(starts) == 1 and reasons == [None]
        kept = (read_json(folder.peers) or {}).values()
        assert sum(p["samples"] for p in kept) == sum(r["samples"] for r in peers.rows(folder))
    else:
        said = "the process was killed" if how == "SIGKILL" else how
        assert len(starts) == 2 and reasons == [said, None]
