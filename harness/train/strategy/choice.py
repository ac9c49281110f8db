"""Which exchange goes with a strategy; harness/train/strategy/base.py says what one is."""

from __future__ import annotations

from harness.train.context import Context
from harness.train.strategy.base import Exchange
from harness.train.strategy.compress import Gradients
from harness.train.strategy.diloco import Diloco
from harness.train.strategy.local_sgd import LocalSgd

# The others need nothing besides what they do by themselves.
EXCHANGES: dict[str, type[Exchange]] = {
    "ddp": Gradients,
    "local_sgd": LocalSgd,
    "diloco": Diloco,
}


def exchange_of(context: Context) -> Exchange:
    """What goes with the strategy of a run."""
    if context.settings.strategy == "hivemind":
        from harness.train.strategy.hivemind.exchange import (
            PeersExchange,  # needs a package of its own
        )

        return PeersExchange(context)
    return EXCHANGES.get(str(context.settings.strategy), Exchange)(context)
