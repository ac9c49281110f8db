"""Which exchange goes with a strategy; harness/train/exchange.py says what one is."""

from __future__ import annotations

from harness.train.apart import LocalSgd
from harness.train.compress import Gradients
from harness.train.diloco import Diloco
from harness.train.exchange import Exchange
from harness.train.run import Run

# The others need nothing besides what they do by themselves.
EXCHANGES: dict[str, type[Exchange]] = {
    "ddp": Gradients,
    "local_sgd": LocalSgd,
    "diloco": Diloco,
}


def exchange_of(run: Run) -> Exchange:
    """What goes with the strategy of a run."""
    if run.settings.strategy == "hivemind":
        from harness.train.peers.exchange import PeersExchange  # needs a package of its own

        return PeersExchange(run)
    return EXCHANGES.get(str(run.settings.strategy), Exchange)(run)
