"""What peers tell one another besides weights and gradients: who there is, and how far.

Everything is said again every second and forgotten some seconds after its peer is gone, so that
nothing outlives a run, and nobody has to say goodbye. Times are those of the peers' own clocks:
they must agree within a few seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as TooLate
from typing import Any

from hivemind.utils import ValueWithExpiration, get_dht_time

from harness.train.peers.network import connect

BEAT_S = 1.0
FORGET_S = 8.0  # what is not said again for so long is no longer in the table
LINGER_S = 4.0  # and is believed for so long after, because the table may fail to answer once
ANSWER_S = 10.0  # for the table to answer; far apart it takes some round trips
OUTCOME_KEPT_S = 600.0

SETTINGS, DATA, RECORDER, PEERS, OUTCOME = "settings", "data", "recorder", "peers", "outcome"


class Board:
    """Keys of the table, and a thread that says again what holds."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.id = str(table.peer_id)
        self.said: dict[tuple[str, str | None], Any] = {}
        self.seen: dict[str, dict[str, Any]] = {}  # the last that each peer has told
        self.living: dict[str, dict[str, Any]] = {}  # of these, who tells still
        self.heard_s: dict[str, float] = {}
        self.recorder: dict[str, Any] | None = None
        self.outcome: dict[str, Any] | None = None
        self.connected: set[str] = set()
        self.closed = threading.Event()
        # Held while processes are forked: a child must not inherit a pipe in the middle of a word.
        self.quiet = threading.Lock()
        self.thread = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        self.look()
        self.thread.start()

    def say(self, key: str, value: Any, subkey: str | None = None) -> None:
        """From now on, until something else is said."""
        self.said[key, subkey] = value
        self._store(key, value, subkey, FORGET_S)

    def tell(self, own: dict[str, Any]) -> None:
        """What this peer has done so far."""
        self.seen[self.id] = self.living[self.id] = own
        self.heard_s[self.id] = time.monotonic()
        self.say(PEERS, own, self.id)

    def end(self, outcome: dict[str, Any]) -> None:
        """What became of the run; kept for those who are late."""
        self.outcome = outcome
        self._store(OUTCOME, outcome, None, OUTCOME_KEPT_S)

    def get(self, key: str) -> Any:
        """What was said last under a key; None where nothing was, or nobody answers."""
        try:
            found = self.table.get(key, latest=True, return_future=True).result(ANSWER_S)
        except (TooLate, OSError, RuntimeError):
            return None
        return None if found is None else _bare(found.value)

    def look(self) -> None:
        # First: who has heard that an epoch is open sees all peers that it was opened for.
        recorder = self.get(RECORDER)
        told = self.get(PEERS) or {}
        now_s = time.monotonic()
        self.heard_s |= dict.fromkeys(told, now_s)
        fresh = {k: v for k, v in {**self.living, **told}.items() if isinstance(v, dict)}
        self.living = {k: v for k, v in fresh.items() if now_s - self.heard_s[k] < LINGER_S}
        if recorder is not None:
            self.recorder, self.heard_s[RECORDER] = recorder, now_s
        elif now_s - self.heard_s.get(RECORDER, now_s) >= LINGER_S:
            self.recorder = None
        if (own := self.said.get((PEERS, self.id))) is not None:
            self.living[self.id] = own  # what is said now may not be in the table yet
        for peer in self.living.keys() - self.connected - {self.id}:
            self.connected.add(peer)
            connect(self.table, peer, self.living[peer].get("at", []))
        self.seen = {**self.seen, **self.living}
        self.outcome = self.outcome or self.get(OUTCOME)

    def wait(self, what: Callable[[], Any], within_s: float, every_s: float = 0.02) -> Any:
        """The first true value of a function of what is seen; what it is at the end otherwise."""
        until = time.monotonic() + within_s
        while not (found := what()) and time.monotonic() < until and not self.closed.wait(every_s):
            with self.quiet:
                self.look()
        return found

    def close(self) -> None:
        self.closed.set()
        if self.thread.is_alive():
            self.thread.join(ANSWER_S)

    def _beat(self) -> None:
        while not self.closed.wait(BEAT_S):
            with self.quiet:
                for (key, subkey), value in list(self.said.items()):
                    self._store(key, value, subkey, FORGET_S)
                self.look()

    def _store(self, key: str, value: Any, subkey: str | None, kept_s: float) -> None:
        until = get_dht_time() + kept_s
        self.table.store(key, value, until, subkey=subkey, return_future=True)


def _bare(value: Any) -> Any:
    """Without the times until which parts of it hold."""
    if isinstance(value, ValueWithExpiration):
        return _bare(value.value)
    if isinstance(value, dict):
        return {k: _bare(v) for k, v in value.items()}
    return value
