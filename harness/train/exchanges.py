"""Which exchange goes with which strategy."""

from __future__ import annotations

from harness.train.apart import LocalSgd
from harness.train.diloco import Diloco
from harness.train.exchange import Exchange
from harness.train.run import Run

# What is not here needs nothing besides what DDP or FSDP do.
EXCHANGES: dict[str, type[Exchange]] = {
    "local_sgd": LocalSgd,
    "diloco": Diloco,
}


def exchange_of(run: Run) -> Exchange:
    """What goes with the strategy of a run."""
    return EXCHANGES.get(str(run.settings.strategy), Exchange)(run)
