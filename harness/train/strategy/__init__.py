"""Strategies: how processes take part in a run (session.py, one folder up) and what they exchange
(base.py), each behind one contract.

Sharding is in sharding.py; verify.py proves that what runs is what was asked for.
"""

from functools import cache

from harness.core.records import RunFolder
from harness.core.settings import NodeError, Settings
from harness.core.strategies import STRATEGIES, own_strategy
from harness.core.tasks import module_from
from harness.core.topology import World
from harness.train.context import Context
from harness.train.session import Session
from harness.train.strategy.base import Exchange
from harness.train.strategy.builtin import DataParallelExchange, FsdpExchange
from harness.train.strategy.compress import DdpExchange
from harness.train.strategy.diloco import Diloco
from harness.train.strategy.local_sgd import LocalSgd

# A strategy that is not listed exchanges nothing.
EXCHANGES: dict[str, type[Exchange]] = {
    "dp": DataParallelExchange,
    "ddp": DdpExchange,
    "fsdp": FsdpExchange,
    "local_sgd": LocalSgd,
    "diloco": Diloco,
}


@cache
def own_exchange(strategy: str) -> type[Exchange]:
    """The class that FILE.py:CLASS names, from that file and no other place."""
    own = own_strategy(strategy)
    assert own is not None
    file, name = own
    try:
        exchange = getattr(module_from(file), name, None)
    except Exception as error:  # whatever a user's file raises
        reason = f"{type(error).__name__}: {error}"
        raise NodeError(f"--strategy {strategy}: {file} cannot be loaded: {reason}") from error
    if not (isinstance(exchange, type) and issubclass(exchange, Exchange)):
        raise NodeError(
            f"--strategy {strategy}: {name} is no Exchange: derive it from "
            "harness.train.strategy.base.Exchange"
        )
    if exchange.apart != STRATEGIES[strategy].apart:
        raise NodeError(f"--strategy {strategy}: write apart = {exchange.apart} into class {name}")
    return exchange


def session_of(settings: Settings, world: World, folder: RunFolder) -> Session:
    if own_strategy(settings.strategy):
        own_exchange(str(settings.strategy))  # a mistake in the class is told before any loading
    if settings.strategy == "hivemind":
        # Imported here, since it needs a package that other strategies do not.
        from harness.train.strategy.hivemind.session import Peers

        return Peers(settings, world, folder)
    return Session(world)


def exchange_of(context: Context) -> Exchange:
    if context.settings.strategy == "hivemind":
        from harness.train.strategy.hivemind.exchange import PeersExchange

        return PeersExchange(context)
    if own_strategy(context.settings.strategy):
        return own_exchange(str(context.settings.strategy))(context)
    return EXCHANGES.get(str(context.settings.strategy), Exchange)(context)
