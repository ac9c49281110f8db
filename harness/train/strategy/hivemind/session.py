"""A process's part in a run of peers: who records, who has which number, when the run is over.

Peer 0 keeps the record and evaluates. Under a launcher that is rank 0; otherwise it is the peer
that was started without addresses to join, or, started again, the one that finds its unfinished
record on its disk.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import IntervalStrategy, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from harness.core.process import complain, warn
from harness.core.records import FINISHED, RunFolder
from harness.core.records.locks import is_free
from harness.core.rules import addresses_to_join
from harness.core.settings import Settings, UserError, parse_setup
from harness.core.topology import World, asked_processes
from harness.train.session import Session
from harness.train.strategy.hivemind import patch_hivemind, private_sockets
from harness.train.strategy.hivemind.network import (
    DATA,
    LOOPBACK,
    OUTCOME,
    PEERS,
    RECORDER,
    SETTINGS,
    DhtState,
    addresses,
    check_checksum,
    check_requirements,
    join_command,
    listening_address,
    open_dht,
    own_address,
    requirements,
)
from harness.train.strategy.hivemind.optimizer import Progress

START_S = 120.0  # for all processes that a launcher has started to arrive
DATA_S = 600.0  # for the recorder to have read its data
GONE_S = 30.0  # for a recorder that is gone to be started again
SETTLE_S = 1.0  # for what peers that join at the same moment publish to reach each other
GOODBYE_S = 15.0  # for all to see that the run is over
ADDRESS, ALREADY_FINISHED = "harness/peers", "finished before"


class Peers(Session):
    ends_when_silent = False  # peers come and go, and wait for one another

    def __init__(self, settings: Settings, world: World, folder: RunFolder) -> None:
        patch_hivemind()
        self.settings, self.launched_world, self.folder = settings, world, folder
        self.number = world.rank
        self._state: DhtState | None = None
        self.own: dict[str, Any] = {}  # what this peer publishes of itself
        self.optimizer: Any = None  # hivemind's, once training begins
        self.store: Any = None  # where a launcher's ranks meet
        join = addresses_to_join(settings, os.environ)
        if world.launched:
            if join:
                raise UserError(
                    "--initial_peers (or INITIAL_PEERS) does not go with torchrun, whose first "
                    "process is the first peer: start peers that join with python"
                )
        elif join:
            self._connect(listening_address(settings, join), join)
            check_requirements(settings, self.state.settings())
            if not self._recorder_is_gone():
                self.number = self._choose_number()
        # The Trainer sees one process; the record has the peers that the set-up names.
        self.world = World(rank=self.number, local_rank=world.local_rank, launched=world.launched)
        nodes, per_node, _ = parse_setup(str(settings.setup))
        self.recorded_world = World(nodes=nodes, per_node=per_node, rank=self.number)

    @property
    def is_single(self) -> bool:
        return False  # others may join

    @property
    def is_recorder(self) -> bool:
        return self.number == 0

    @property
    def state(self) -> DhtState:
        assert self._state is not None
        return self._state

    def restrict(self, args: TrainingArguments) -> None:
        if not self.is_recorder:
            args.eval_strategy, args.save_strategy = IntervalStrategy.NO, SaveStrategy.NO
            args.load_best_model_at_end, args.report_to = False, []

    def already_finished(self) -> None:
        """Tell the peers that wait to join."""
        if self.is_recorder and self.launched_world.launched:
            self._meet().set(ADDRESS, ALREADY_FINISHED)
        self.close()

    def open(self) -> bool:
        """Become reachable; False for a rank whose rank 0 has found the run finished."""
        launched = self.launched_world.launched
        if self._state is None:
            join: list[str] = []
            if not launched:
                host = listening_address(self.settings, join)
            else:
                store = self._meet()
                host = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
                if not self.is_recorder:
                    answer = store.get(ADDRESS).decode()
                    if answer == ALREADY_FINISHED:
                        return False
                    join = json.loads(answer)
            self._connect(host, join)
            if launched and self.is_recorder:
                self.store.set(ADDRESS, json.dumps(addresses(self.state.dht)))
        at = addresses(self.state.dht)
        self.publish(number=self.number, at=at, update=0, samples=0, fed=0, loss=0.0, edges=[])
        self.state.publish(SETTINGS, requirements(self.settings))
        if self.is_recorder:
            self.state.publish(RECORDER, {"open": -1})
        self.state.start()
        if not launched or self.is_recorder:
            self._print_how_to_join(at)
        return True

    def _meet(self) -> Any:
        """The launcher's store, which is used for nothing but the first peer's address."""
        if self.store is None:
            world = self.launched_world
            rendezvous = dist.rendezvous(
                "env://", world.rank, world.size, timeout=timedelta(seconds=START_S)
            )
            self.store = next(iter(rendezvous))[0]
        return self.store

    def _connect(self, host: str, join: list[str]) -> None:
        self.sockets = private_sockets()
        self._state = DhtState(open_dht(host, join))
        if self._state.get(OUTCOME) is not None:
            raise UserError(f"--initial_peers {','.join(join)}: that run is over")

    def _recorder_is_gone(self) -> bool:
        """Whether the record on this disk is one that its process could not finish."""
        if not self.folder.attempts.is_file() or self.folder.outcome() == FINISHED:
            return False
        return is_free(self.folder.lock("run"))

    def _choose_number(self) -> int:
        """A number that no peer has or had; of two that chose the same, one chooses again."""
        while True:
            others = [p for id_, p in self._all_peers() if id_ != self.state.id]
            highest = (self.state.get(RECORDER) or {}).get("highest_number", 0)
            number = int(max([highest, *(p["number"] for p in others)])) + 1
            self.state.publish_own(
                {"number": number, "update": 0, "samples": 0, "fed": 0, "loss": 0.0}
            )
            time.sleep(SETTLE_S)
            same = {id_: p for id_, p in self._all_peers() if p["number"] == number}
            same.pop(self.state.id, None)
            # A peer that has published its address has chosen before.
            if all(id_ < self.state.id and "at" not in p for id_, p in same.items()):
                return number

    def _all_peers(self) -> Any:
        return (self.state.get(PEERS) or {}).items()

    def _print_how_to_join(self, at: list[str]) -> None:
        if not self.is_recorder:
            print(f"peer {self.number} of the run; it answers at {','.join(at)}", flush=True)
            return
        who = "another machine"
        if at[0].startswith(LOOPBACK):
            who = "another process of this machine (--setup 2_1 or more: another machine)"
        print(f"{who} joins with\n  {join_command(self.settings, at)}", flush=True)
        if asked_processes(self.settings) == 1:
            warn(
                "one peer alone shares nothing: until another joins, this is training in one "
                "process, only slower"
            )

    def check_data(self, checksum: str | None) -> None:
        """Compare the samples of all peers with the recorder's, which are those of the run."""
        state = self.state
        if not self.is_recorder:
            there = state.wait(
                lambda: state.get(DATA) or state.outcome or state.recorder is None, DATA_S, 0.5
            )
            if isinstance(there, dict) and "checksum" in there:
                check_checksum(checksum, there["checksum"])
        state.publish(DATA, {"checksum": checksum})

    def publish(self, **news: Any) -> None:
        self.own |= news
        self.state.publish_own(dict(self.own))

    def count(self) -> int:
        """Peers that train now, this one included."""
        training = [p for p in self.state.alive.values() if p.get("ready") and not p.get("ended")]
        return max(len(training), 1)

    def newest_update(self) -> int:
        return max((int(p["update"]) for p in self.state.alive.values()), default=0)

    def wait_for_all(self) -> None:
        """Wait for the peers that a launcher has started; others join when they come."""
        expected = self.launched_world.size
        if not self.launched_world.launched or expected == 1 or not self.is_recorder:
            return

        def ready() -> int:
            return sum(bool(p.get("ready")) for p in self.state.alive.values())

        if not self.state.wait(lambda: ready() >= expected, START_S):
            warn(
                f"{ready()} of {expected} peers are there after {START_S:g} s; training begins "
                "without the others"
            )

    def begin_epoch(self, epoch: int) -> None:
        """Wait while the recorder evaluates: training meanwhile would count in no one's time."""
        state = self.state
        if self.is_recorder:
            highest = max((p["number"] for p in state.known.values()), default=0)
            state.publish(RECORDER, {"open": epoch, "highest_number": highest})
            return

        def may_begin() -> bool:
            recorder = state.recorder
            return bool(state.outcome) or recorder is None or recorder["open"] >= epoch

        while not state.wait(may_begin, GONE_S):
            pass
        state.refresh()  # who else begins

    @property
    def over(self) -> bool:
        """Whether the recorder has ended the run."""
        return self._state is not None and self._state.outcome is not None

    def finish(self) -> None:
        """The recorder publishes the outcome, and the others wait for it."""
        state = self.state
        self.publish(ended=True)
        if self.is_recorder:
            state.publish_outcome({"outcome": FINISHED})
            state.wait(lambda: all(p.get("ended") for p in state.alive.values()), GOODBYE_S)
            self.close()
            return
        left_s = GONE_S
        while not state.outcome and left_s > 0:
            state.wait(lambda: state.outcome, 1.0, 0.2)
            left_s = GONE_S if state.recorder is not None else left_s - 1
        outcome = state.outcome
        self.close()
        if outcome is None:
            complain(
                "harness",
                "the peer that records the run is gone; what was trained since then is not "
                "recorded. The same command, started where that peer ran, continues the run",
            )
            raise SystemExit(1)
        if outcome["outcome"] != FINISHED:
            complain("harness", f"the run has ended: {outcome['outcome']}")
            raise SystemExit(1)

    def fail(self, outcome: str, interrupted: bool) -> None:
        """End the run for all only by a failure that the recorder would meet again."""
        if self.is_recorder and not interrupted and self._state is not None:
            self._state.publish_outcome({"outcome": outcome})
        self.close()

    def close(self) -> None:
        """Close in a thread of its own, since hivemind may wait for a peer that is gone."""
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(GOODBYE_S)

    def _close(self) -> None:
        """Close each part by itself: a failure of one must not keep the others' processes."""
        state, optimizer = self._state, self.optimizer
        parts = [
            *([optimizer.shutdown] if optimizer is not None else []),
            Progress.release_threads,  # those that would wait for ever
            *([state.close, state.dht.shutdown, self.sockets.cleanup] if state is not None else []),
        ]
        for part in parts:
            with suppress(Exception):
                part()
