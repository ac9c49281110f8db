"""Which exchange goes with which strategy."""

from __future__ import annotations

from harness.train.exchange import Exchange
from harness.train.run import Run


def exchange_of(run: Run) -> Exchange:
    """What goes with the strategy of a run."""
    if run.peers is not None:
        from harness.train.peers.exchange import PeersExchange  # needs a package of its own

        return PeersExchange(run)
    return Exchange(run)
