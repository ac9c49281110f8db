"""Strategies: how processes take part in a run (session.py, one folder up) and what they exchange
(base.py), each behind one contract.

Sharding is in sharding.py; verify.py proves that what runs is what was asked for.
"""

from functools import cache
from importlib import import_module
from typing import Any

from harness.core.records import RunFolder
from harness.core.settings import NodeError, Settings
from harness.core.strategies import STRATEGIES, own_strategy, strategy_of
from harness.core.tasks import module_from
from harness.core.topology import World
from harness.train.context import Context
from harness.train.session import Session
from harness.train.strategy.base import Exchange


def class_of(named: str) -> Any:
    """The class that MODULE:CLASS names. Its module may need a package that others do not."""
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)


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
        own_exchange(str(settings.strategy))  # refuses a wrong class before anything loads
    if named := strategy_of(settings).session:
        session: Session = class_of(named)(settings, world, folder)
        return session
    return Session(world)


def exchange_of(context: Context) -> Exchange:
    strategy = strategy_of(context.settings)
    own = own_strategy(strategy.name)
    kind: type[Exchange] = own_exchange(strategy.name) if own else class_of(strategy.exchange)
    return kind(context)
