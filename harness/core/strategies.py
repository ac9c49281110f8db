"""The ways to spread one training over devices: ours by name, a user's own as FILE.py:CLASS."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.core.collectives import BACKEND, MEANS
from harness.core.settings import NodeError, Settings, flag_fields, parse_setup
from harness.core.tasks import parsed


@dataclass(frozen=True)
class Strategy:
    """The properties of a strategy that launching, training and reading share."""

    name: str
    what: str
    exchanges: str  # what goes over the wire, and when
    processes: str  # one | many | peers (many that need no launcher: they find each other)
    wrapper: str = "DDP"  # of the model while it trains: DDP, FSDP, DataParallel or nothing
    # The class of what it exchanges (train/strategy/base.py), as MODULE:CLASS; that of the session
    # (train/session.py) where its processes are no ranks of one process group.
    exchange: str = "harness.train.strategy.base:Exchange"
    session: str | None = None
    each_update: bool = False  # all processes exchange together, and one pass can do without
    needs_gpu: bool = False
    compress: tuple[str, ...] = ()  # compressions of what it sends, besides none
    direct: bool = False  # parts may be sent straight to those who add them (--exchange)
    # Its own flags with their defaults; fit_to_world() derives those that are None.
    own: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False  # weights differ between processes from one exchange to the next
    idle_alone: bool = False  # one process trains as with ddp
    why_no_lora: str = ""  # that it does not go with --lora
    package: str | None = None  # one of OPTIONAL that it needs

    @property
    def splits_batch(self) -> bool:
        """Whether its one process spreads a batch over all GPUs that it sees."""
        return self.wrapper == "DataParallel"

    @property
    def shards(self) -> bool:
        """Whether each process holds only a part of every weight."""
        return self.wrapper == "FSDP"

    @property
    def reduces_gradients(self) -> bool:
        """Whether DDP averages the gradients of all processes in each backward pass."""
        return self.wrapper == "DDP" and self.each_update

    @property
    def exchanges_nothing(self) -> bool:
        """Whether there is one process on one device."""
        return self.processes == "one" and not self.splits_batch

    @property
    def can_pad(self) -> bool:
        """Whether the last batch of an epoch may be filled up (--tail pad)."""
        return not self.splits_batch and not self.has_peers

    @property
    def needs_launcher(self) -> bool:
        """Whether its processes find each other only through a launcher, such as torchrun."""
        return self.processes == "many"

    @property
    def has_peers(self) -> bool:
        """Whether its processes find each other without a launcher, and may join, leave, be lost
        and miss epochs, of which their records then have no row.
        """
        return self.processes == "peers"


def own_strategy(name: object) -> tuple[Path, str] | None:
    """File and class of a user's own strategy; None for one of ours."""
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", str(name))
    return (Path(match[1]), match[2]) if match else None


class _Strategies(dict[str, Strategy]):
    """Our strategies; another name is looked up in the file that it names, which is not run."""

    def __missing__(self, name: str) -> Strategy:
        if (own := own_strategy(name)) is None:
            raise KeyError(name)
        file, wanted = own
        if not file.is_file():
            raise NodeError(f"--strategy {name}: there is no file {file}")
        classes = [node for node in parsed(file).body if isinstance(node, ast.ClassDef)]
        body = next((node.body for node in classes if node.name == wanted), None)
        if body is None:
            there = ", ".join(node.name for node in classes) or "none"
            raise NodeError(f"--strategy {name}: {file} has no class {wanted}; there is {there}")
        apart = any(ast.unparse(line) == "apart = True" for line in body)
        return Strategy(name, "a class of the user's", "what the class sends", "many", apart=apart)


# Of one process, of one on several GPUs, and of several processes; the first and the last unless
# --strategy names another one.
SINGLE, DP, DDP = "single", "dp", "ddp"
# Flags of the optimizer: of strategies in which each process has whole matrices and keeps its
# optimizer's state for itself.
OF_OPTIMIZER = {"muon": False}
# Flags of strategies whose units train apart from one exchange to the next.
PERIOD = {"sync_every": 10, "sync_first": 0, "sync_scope": None, **OF_OPTIMIZER}
STRATEGIES = _Strategies({each.name: each for each in (
    Strategy(
        SINGLE, "one process on one device", "nothing", "one", wrapper="nothing",
        own=OF_OPTIMIZER),
    Strategy(
        DP, "nn.DataParallel: one process, the batch split over the GPUs of one machine",
        "weights and outputs, every step", "one", wrapper="DataParallel", needs_gpu=True,
        exchange="harness.train.strategy.builtin:DataParallelExchange", own=OF_OPTIMIZER,
        why_no_lora="which sends all weights to each GPU in every step, trained or not"),
    Strategy(
        DDP, "DistributedDataParallel: a whole model per process",
        "gradients, every step, while the backward pass runs", "many", each_update=True,
        exchange="harness.train.strategy.compress:DdpExchange",
        compress=("bf16", "fp16", "int8", "int4", "powersgd"), direct=True, own=OF_OPTIMIZER),
    Strategy(
        "fsdp", "fully_shard (FSDP2): weights, gradients and optimizer split over the processes",
        "weights before, gradients after use, every step", "many", wrapper="FSDP",
        each_update=True, exchange="harness.train.strategy.builtin:FsdpExchange",
        why_no_lora="which gathers all weights in every step, trained or not"),
    Strategy(
        "local_sgd",
        "nodes (or ranks) train apart, and their weights are averaged every sync_every updates",
        "weights, every sync_every updates", "many",
        exchange="harness.train.strategy.local_sgd:LocalSgd",
        compress=("bf16", "int8", "int4"), direct=True, own=PERIOD, apart=True, idle_alone=True),
    Strategy(
        "diloco",
        "nodes (or ranks) train apart; every sync_every updates an outer Nesterov step is made "
        "with the average of what they changed",
        "what changed, every sync_every updates", "many",
        exchange="harness.train.strategy.diloco:Diloco",
        compress=("bf16", "int8", "int4"), direct=True, apart=True,
        own={**PERIOD, "outer_lr": 0.7, "outer_momentum": 0.9, "fragments": 1, "overlap": 0}),
    Strategy(
        "hivemind", "peers that come and go, over the internet; together they fill one batch",
        "gradients, every target_batch samples of all peers", "peers", wrapper="nothing",
        exchange="harness.train.strategy.hivemind.exchange:PeersExchange",
        session="harness.train.strategy.hivemind.session:Peers",
        compress=("fp16", "int8"), package="hivemind",
        own={"target_batch": None, "local_updates": False, "initial_peers": None},
        why_no_lora="whose peers would have to agree on the frozen weights, which they do not "
        "exchange"),
)})  # fmt: skip


def usual_strategy(processes: int) -> str:
    return DDP if processes > 1 else SINGLE


def choices_of(flag: str) -> tuple[str, ...]:
    """The values that a flag accepts; empty for one with values of another kind."""
    return tuple(STRATEGIES) if flag == "strategy" else flag_fields()[flag].metadata["choices"]


# Strategies whose processes exchange at every update, all of them together.
EACH_UPDATE = tuple(name for name, strategy in STRATEGIES.items() if strategy.each_update)

# Compressions whose codes each process makes itself, as one row; bf16 and fp16 are torch's hooks.
GRADIENT_CODES = ("int8", "int4")


def is_coded(compress: str, apart: bool) -> bool:
    """Whether codes are sent, for which the backend's all-reduce is not used."""
    return compress in GRADIENT_CODES or (apart and compress != "none")


# Ways of --exchange that do not use the backend.
SENT_DIRECTLY = tuple(MEANS)
# Flags that have a meaning with some strategies only.
OF_ONE_STRATEGY = ("compress", *dict.fromkeys(n for s in STRATEGIES.values() for n in s.own))
# Those that say how processes exchange, and mean nothing for one process alone.
OF_EXCHANGE = tuple(name for name in OF_ONE_STRATEGY if name not in OF_OPTIMIZER)


def is_off(value: Any) -> bool:
    """Whether a strategy's flag has its off value; 0, such as a momentum, is a value in use."""
    return value is None or value is False or value == "none"


def recorded_strategy(settings: Mapping[str, Any]) -> Strategy:
    """The strategy of a record. Of one that is not ours the file need not be here."""
    name = str(settings.get("strategy"))
    return STRATEGIES.get(name) or Strategy(name, "unknown", "unknown", "many")


def strategy_of(settings: Settings) -> Strategy:
    return STRATEGIES[settings.strategy or SINGLE]


def is_apart(settings: Settings) -> bool:
    """Whether weights differ between processes from one exchange to the next."""
    return strategy_of(settings).apart


def usual_scope(nodes: int) -> str:
    """What trains apart unless --sync_scope says: every node, or the processes of a single one."""
    return "node" if nodes > 1 else "rank"


def with_exchange(settings: Settings) -> Settings:
    """Set --exchange auto to backend where it has no choice, so that one run has one name."""
    if settings.exchange != "auto" or chooses_exchange(vars(settings)):
        return settings
    return replace(settings, exchange=BACKEND)


def chooses_exchange(settings: Mapping[str, Any]) -> bool:
    """Whether --exchange auto has more than one way to choose from."""
    if settings["setup"] is None or not sends_directly(settings):
        return False
    nodes, per_node, _ = parse_setup(settings["setup"])
    apart = STRATEGIES[settings["strategy"] or SINGLE].apart
    # If several processes of a node sent, they would share its link.
    one_sends = (
        settings["sync_scope"] == "node" if apart else settings["compress"] not in GRADIENT_CODES
    )
    return nodes > 1 and (per_node == 1 or one_sends)


def sends_directly(settings: Mapping[str, Any]) -> bool:
    """Whether --exchange direct is possible with the strategy and its compression."""
    direct = STRATEGIES[settings["strategy"] or SINGLE].direct
    return direct and not str(settings["compress"]).startswith("powersgd")
