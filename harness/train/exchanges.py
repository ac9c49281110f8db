"""Which exchange goes with a strategy; harness/train/exchange.py says what one is."""

from __future__ import annotations

from harness.train.compress import Gradients
from harness.train.exchange import Exchange
from harness.train.run import Run

KINDS: dict[str, type[Exchange]] = {"ddp": Gradients}


def exchange_of(run: Run) -> Exchange:
    """What goes with the strategy of a run."""
    return KINDS.get(str(run.settings.strategy), Exchange)(run)
