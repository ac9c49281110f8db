"""Strategies: how processes take part in a run (session.py, one folder up) and what they exchange
(base.py), each behind one contract.

Sharding is in sharding.py; verify.py proves that what runs is what was asked for.
"""

from harness.core.records import RunFolder
from harness.core.settings import Settings
from harness.core.topology import World
from harness.train.context import Context
from harness.train.session import Session
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


def session_of(settings: Settings, world: World, folder: RunFolder) -> Session:
    if settings.strategy == "hivemind":
        # Imported here, since it needs a package that other strategies do not.
        from harness.train.strategy.hivemind.session import Peers

        return Peers(settings, world, folder)
    return Session(world)


def exchange_of(context: Context) -> Exchange:
    if context.settings.strategy == "hivemind":
        from harness.train.strategy.hivemind.exchange import PeersExchange

        return PeersExchange(context)
    return EXCHANGES.get(str(context.settings.strategy), Exchange)(context)
