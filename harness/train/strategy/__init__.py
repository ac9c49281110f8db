"""Strategies: what processes exchange, in the form of one contract (base.py).

Sharding is in sharding.py; verify.py proves that what runs is what was asked for.
"""

from harness.train.context import Context
from harness.train.strategy.base import Exchange
from harness.train.strategy.compress import DdpExchange
from harness.train.strategy.diloco import Diloco
from harness.train.strategy.local_sgd import LocalSgd

# A strategy that is not listed exchanges nothing besides what torch does by itself.
EXCHANGES: dict[str, type[Exchange]] = {
    "ddp": DdpExchange,
    "local_sgd": LocalSgd,
    "diloco": Diloco,
}


def exchange_of(context: Context) -> Exchange:
    if context.settings.strategy == "hivemind":
        # Imported here, since it needs a package that other strategies do not.
        from harness.train.strategy.hivemind.exchange import PeersExchange

        return PeersExchange(context)
    return EXCHANGES.get(str(context.settings.strategy), Exchange)(context)
