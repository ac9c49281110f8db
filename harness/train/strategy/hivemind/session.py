"""A process's part in a run of peers: who records, who has which number, when the run is over.

One peer has number 0. It keeps the record and evaluates. Under a launcher that is rank 0; else it
is the one that was started without addresses to join, or, started again, the one that finds its
unfinished record on its disk.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from harness.core.locks import Lock
from harness.core.records import RunFolder
from harness.core.rules import addresses_to_join
from harness.core.settings import Settings, UserError, parse_setup
from harness.core.topology import World, asked_processes
from harness.train.strategy.hivemind import network
from harness.train.strategy.hivemind.network import (
    DATA,
    OUTCOME,
    PEERS,
    RECORDER,
    SETTINGS,
    Board,
    addresses,
    join_command,
    open_table,
    own_address,
)

START_S = 120.0  # for all that a launcher has started to be there


DATA_S = 600.0  # for the recorder to have read its data


GONE_S = 30.0  # for a recorder that is gone to be started again


GOODBYE_S = 15.0  # for all to see that the run is over


ADDRESS, FINISHED_BEFORE = "harness/peers", "finished before"


class Peers:
    """The session of one process; made before its record is opened."""

    def __init__(self, settings: Settings, world: World, folder: RunFolder) -> None:
        self.settings, self.launched_world, self.folder = settings, world, folder
        self.number = world.rank
        self.board: Board | None = None
        self.told: dict[str, Any] = {}
        self.optimizer: Any = None  # hivemind's, once training begins
        self.let_go: Callable[[], None] = lambda: None  # of threads that would wait for ever
        self.store: Any = None  # where a launcher's ranks meet
        join = addresses_to_join(settings, os.environ)
        if world.launched:
            if join:
                raise UserError(
                    "--initial_peers (or INITIAL_PEERS) does not go with torchrun, whose first "
                    "process is the first peer: start peers that join with python"
                )
        elif join:
            self._connect(None, join)
            network.compare(settings, self.said.get(SETTINGS))
            if not self._recorder_is_gone():
                self.number = self._free_number()

    @property
    def records(self) -> bool:
        return self.number == 0

    @property
    def world(self) -> World:
        """As the Trainer is to see it: one process, and no other."""
        launched = self.launched_world
        return World(rank=self.number, local_rank=launched.local_rank, launched=launched.launched)

    @property
    def shape(self) -> World:
        """As records are to see it: the peers that the set-up names, and this one's number."""
        nodes, per_node, _ = parse_setup(str(self.settings.setup))
        return World(nodes=nodes, per_node=per_node, rank=self.number)

    @property
    def said(self) -> dict[str, Any]:
        """What the others have said of the run."""
        board = self._board
        return {key: board.get(key) for key in (SETTINGS, DATA)}

    @property
    def _board(self) -> Board:
        assert self.board is not None
        return self.board

    # ---- the run begins ----

    def finished_before(self) -> None:
        """The record is whole: whoever waits to join is told so."""
        if self.records and self.launched_world.launched:
            self._meet().set(ADDRESS, FINISHED_BEFORE)
        self.close()

    def open(self) -> bool:
        """Become reachable; False for a rank whose rank 0 has found the run finished."""
        world = self.launched_world
        if self.board is None:
            host, join = None, []
            if world.launched:
                store = self._meet()
                host = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
                if not self.records:
                    found = store.get(ADDRESS).decode()
                    if found == FINISHED_BEFORE:
                        return False
                    join = json.loads(found)
            self._connect(host, join)
            if world.launched and self.records:
                self.store.set(ADDRESS, json.dumps(addresses(self._board.table)))
        board = self._board
        at = addresses(board.table)
        self.tell(number=self.number, at=at, update=0, samples=0, fed=0, loss=0.0, edges=[])
        board.say(SETTINGS, network.of(self.settings))
        if self.records:
            board.say(RECORDER, {"open": -1})
        board.start()
        if not world.launched or self.records:
            self._say_how_to_join()
        return True

    def _meet(self) -> Any:
        """The store in which a launcher's processes find each other, and nothing else."""
        if self.store is None:
            world = self.launched_world
            found = dist.rendezvous(
                "env://", world.rank, world.size, timeout=timedelta(seconds=START_S)
            )
            self.store = next(iter(found))[0]
        return self.store

    def _connect(self, host: str | None, join: list[str]) -> None:
        self.board = Board(open_table(host, join))
        if self.board.get(OUTCOME) is not None:
            raise UserError(f"--initial_peers {','.join(join)}: that run is over")

    def _recorder_is_gone(self) -> bool:
        """Whether the record on this disk is one that its process could not finish."""
        if not self.folder.attempts.is_file() or self.folder.outcome() == "finished":
            return False
        lock = Lock(self.folder.lock("run"))
        free = lock.take()
        lock.release()
        return free

    def _free_number(self) -> int:
        """One that no peer has or had; of two that chose the same, the later one chooses again."""
        board = self._board
        while True:
            told = (board.get(PEERS) or {}).items()
            taken = [peer["number"] for id_, peer in told if id_ != board.id]
            given = (board.get(RECORDER) or {}).get("given", 0)
            number = max([given, *taken]) + 1
            board.tell({"number": number, "update": 0, "samples": 0, "fed": 0, "loss": 0.0})
            told = (board.get(PEERS) or {}).items()
            if all(id_ <= board.id for id_, peer in told if peer["number"] == number):
                return number

    def _say_how_to_join(self) -> None:
        at = addresses(self._board.table)
        if not self.records:
            print(f"peer {self.number} of the run; it answers at {','.join(at)}", flush=True)
            return
        print(f"another machine joins with\n  {join_command(self.settings, at)}", flush=True)
        if asked_processes(self.settings) == 1:
            print(
                "harness: warning: one peer alone shares nothing: until another joins, this is "
                "training in one process, only slower",
                file=sys.stderr,
            )

    def check_data(self, checksum: str | None) -> None:
        """The same samples on all peers; the recorder's are those of the run."""
        board = self._board
        if not self.records:
            there = board.wait(
                lambda: board.get(DATA) or board.outcome or not self._recorder_lives(), DATA_S, 0.5
            )
            if isinstance(there, dict) and "checksum" in there:
                network.compare_data(checksum, there["checksum"])
        board.say(DATA, {"checksum": checksum})

    # ---- the run goes on ----

    def tell(self, **news: Any) -> None:
        self.told |= news
        self._board.tell(dict(self.told))

    def _recorder_lives(self) -> bool:
        return self._board.recorder is not None

    def count(self) -> int:
        """Peers that train now, this one included."""
        there = [p for p in self._board.living.values() if p.get("ready") and not p.get("ended")]
        return max(len(there), 1)

    def newest_update(self) -> int:
        return max((int(p["update"]) for p in self._board.living.values()), default=0)

    def wait_for_all(self) -> None:
        """What a launcher starts, starts together; others come when they come."""
        expected = self.launched_world.size
        if not self.launched_world.launched or expected == 1 or not self.records:
            return
        board = self._board

        def ready() -> bool:
            return sum(bool(p.get("ready")) for p in board.living.values()) >= expected

        if not board.wait(ready, START_S):
            here = sum(bool(p.get("ready")) for p in board.living.values())
            print(
                f"harness: warning: {here} of {expected} peers are there after {START_S:g} s; "
                "training begins without the others",
                file=sys.stderr,
            )

    def begin_epoch(self, epoch: int) -> None:
        """All wait while one evaluates: what others trained meanwhile would be in no one's time."""
        board = self._board
        if self.records:
            given = max((p["number"] for p in board.seen.values()), default=0)
            board.say(RECORDER, {"open": epoch, "given": given})
            return

        def may_begin() -> bool:
            told = board.recorder
            return bool(board.outcome) or told is None or told["open"] >= epoch

        while not board.wait(may_begin, GONE_S):
            pass
        board.look()  # who else begins

    @property
    def over(self) -> bool:
        """Whether the recorder has said so."""
        return self.board is not None and self.board.outcome is not None

    # ---- the run ends ----

    def finish(self) -> None:
        """After the record is whole: tell all; of those who joined: until it is."""
        board = self._board
        self.tell(ended=True)
        if self.records:
            board.end({"outcome": "finished"})
            board.wait(lambda: all(p.get("ended") for p in board.living.values()), GOODBYE_S)
            self.close()
            return
        lived_s = GONE_S
        while not board.outcome and lived_s > 0:
            board.wait(lambda: board.outcome, 1.0, 0.2)
            lived_s = GONE_S if self._recorder_lives() else lived_s - 1
        outcome = board.outcome
        self.close()
        if outcome is None:
            print(
                "harness: the peer that records the run is gone; what was trained since is in no "
                "record. The same command, started where it ran, goes on with it",
                file=sys.stderr,
            )
            raise SystemExit(1)
        if outcome["outcome"] != "finished":
            print(f"harness: the run has ended: {outcome['outcome']}", file=sys.stderr)
            raise SystemExit(1)

    def fail(self, outcome: str, interrupted: bool) -> None:
        """Of this peer. Only what would happen again to the recorder ends the run for all."""
        if self.records and not interrupted and self.board is not None:
            self.board.end({"outcome": outcome})
            self.board.closed.wait(1.0)
        self.close()

    def close(self) -> None:
        """In a thread of its own: hivemind may wait for a peer that is gone."""
        leaving = threading.Thread(target=self._leave, daemon=True)
        leaving.start()
        leaving.join(GOODBYE_S)

    def _leave(self) -> None:
        with suppress(Exception):
            if self.optimizer is not None:
                self.optimizer.shutdown()
            self.let_go()
            if self.board is not None:
                self.board.close()
                self.board.table.shutdown()
