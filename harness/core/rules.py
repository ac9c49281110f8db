"""Every combination of settings, processes and devices that is refused, as tables of rules.

A rule is a condition and the message of the UserError raised if the condition holds. The condition
is a function of the settings s and the combination c that contains them; str.format fills both
into the message. Each table is checked in order and the first rule that holds gives the message,
so a rule may rely on those before it.

Two more kinds of mistakes are refused elsewhere: a text that its flag does not accept
(core/command_line.py), and what turns out to be wrong once a strategy or device is in use
(train/strategy/verify.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from harness.core.settings import BEST_METRICS, Settings, UserError, parse_setup, share_of
from harness.core.strategies import (
    DDP,
    EACH_UPDATE,
    OF_ONE_STRATEGY,
    SENT_DIRECTLY,
    STRATEGIES,
    Strategy,
    is_off,
    strategy_of,
    usual_scope,
    usual_strategy,
    with_exchange,
)
from harness.core.tasks import TASKS, task_of
from harness.core.topology import World, asked_processes, batch_of, own_batch


@dataclass(frozen=True)
class Combination:
    """Settings, and the processes and device with which they are to run."""

    settings: Settings
    world: World = field(default_factory=World)
    cuda: bool = True
    ampere: bool = True  # whether the GPU is of the Ampere generation or newer
    bf16: bool = True

    @property
    def strategy(self) -> Strategy:
        return strategy_of(self.settings)

    @property
    def compress(self) -> str:
        return self.settings.compress.partition(":")[0]

    @property
    def compressions(self) -> str:
        return ", ".join(self.strategy.compress).replace("powersgd", "powersgd[:rank]")

    @property
    def fsdp_flag(self) -> str:
        return "fsdp_offload" if self.settings.fsdp_offload else "fsdp_shard grads"

    @property
    def own_batch(self) -> int:
        """Samples that one peer contributes at a time."""
        return own_batch(self.settings)


Condition = Callable[[Settings, Combination], object]
Rule = tuple[Condition, str]


def broken(rules: tuple[Rule, ...], combination: Combination) -> str | None:
    """The message of the first rule that holds."""
    for holds, message in rules:
        if holds(combination.settings, combination):
            return message.format(s=combination.settings, c=combination)
    return None


def refuse(rules: tuple[Rule, ...], combination: Combination) -> None:
    if (message := broken(rules, combination)) is not None:
        raise UserError(message)


def _where(applies: Condition, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules, each restricted to cases to which a further condition applies."""
    return tuple(
        (lambda s, c, holds=holds: applies(s, c) and holds(s, c), text) for holds, text in rules
    )


def _flag_of_others(name: str) -> Rule:
    owners = ", ".join(strategy.name for strategy in STRATEGIES.values() if name in strategy.own)
    return (
        lambda s, c: name not in c.strategy.own and not is_off(getattr(s, name)),
        f"--{name} does nothing with --strategy {{c.strategy.name}}: it belongs to {owners}",
    )


def _not_a_share(name: str) -> Rule:
    def holds(s: Settings, _: Combination) -> bool:
        split = getattr(s, name)
        is_number = split is not None and re.match(r"^-?[0-9.]", split)
        return bool(is_number and share_of(split) is None)

    return holds, (
        f"--{name} {{s.{name}}}: a share must lie between 0 and 1, for example 0.2; "
        "a split is named by its name"
    )


def _one_column_for_both(name: str) -> Rule:
    return (
        lambda s, c: s.label_column in (getattr(s, name) or "").split(","),
        f"--label_column {{s.label_column}} and --{name} {{s.{name}}} both name the column "
        "{s.label_column}: classes and input need a column each",
    )


def _shards_without_fsdp(s: Settings, _: Combination) -> bool:
    return not strategy_of(s).shards and (s.fsdp_shard != "full" or s.fsdp_offload)


def _unknown_compression(s: Settings, c: Combination) -> bool:
    known = re.fullmatch("[a-z0-9]+|powersgd:[1-9][0-9]*", s.compress)
    return s.compress != "none" and not (known and c.compress in c.strategy.compress)


def _no_speeds(s: Settings, _: Combination) -> bool:
    balance = str(s.balance)
    if balance == "measured":
        return False
    return not SPEEDS.fullmatch(balance) or min(map(float, balance.split(","))) == 0


COMPRESSING = ", ".join(
    f"{name} ({', '.join(strategy.compress)})"
    for name, strategy in STRATEGIES.items()
    if strategy.compress
)
OWING = ("powersgd", "int8", "int4")  # compressions that carry over their error
SENDING_DIRECTLY = ", ".join(name for name, strategy in STRATEGIES.items() if strategy.direct)
# The address of a peer in libp2p's notation.
PEER_ADDRESS = re.compile(r"/(ip4|dns|dns4)/[^/,]+/(tcp|udp)/\d+(/[a-z0-9-]+)*/p2p/\w+")
ADAMW = ("adamw_torch", "adamw_torch_fused")
# Optimizers whose state can be created before the first step, so that peers can exchange it.
PEER_OPTIMIZERS = (*ADAMW, "sgd")
# Schedules whose learning rate does not follow from the number of the update alone.
BLIND_SCHEDULES = ("reduce_lr_on_plateau", "greedy")

# fmt: off

# Settings that contradict each other on any machine.
CONTRADICTIONS: tuple[Rule, ...] = (
    (lambda s, c: s.max_length is not None and s.max_length < 3,
     "--max_length {s.max_length}: must be at least 3 (start, word, end)"),
    (lambda s, c: s.passed.get("max_steps", 1) in (0, None),
     "--max_steps 0: must be at least 1; leave it out to train whole epochs"),
    (lambda s, c: c.strategy.shards and s.passed.get("optim") == "adafactor",
     "--optim adafactor does not go with --strategy {s.strategy}: it keeps rows and columns of "
     "whole tensors, and here each process has a part of them; use adamw_torch"),
    (lambda s, c: s.fsdp_offload and s.precision == "fp16",
     "--fsdp_offload does not go with --precision fp16: the loss scale of all ranks is agreed on "
     "by NCCL, which does not reach shards in CPU memory; use bf16 or fp32"),
    (lambda s, c: s.auto_batch and s.tail == "pad",
     "--auto_batch does not go with --tail pad: half of the batch may make another last update of "
     "an epoch; use --tail cut"),
    *_where(_shards_without_fsdp, (
        (lambda s, c: c.strategy.apart or c.strategy.has_peers,
         "--{c.fsdp_flag} needs --strategy fsdp, which {s.strategy} cannot be: each process needs "
         "all weights to go on alone"),
        (lambda s, c: True, "--{c.fsdp_flag} needs --strategy fsdp"),
    )),
    (lambda s, c: s.script in TASKS and s.best_metric not in BEST_METRICS,
     "--best_metric {s.best_metric}: expected one of " + ", ".join(BEST_METRICS) + "; a script of "
     "your own can have metrics of its own (docs/own-work.md)"),
    *map(_one_column_for_both, ("text_column", "image_column")),
    _not_a_share("test_split"),
    _not_a_share("validation_split"),
    (lambda s, c: s.validation_split == "train",
     "--validation_split train: a model is not chosen by what it was trained on; a share such "
     "as 0.1 holds out a part of train"),
)

FLAGS_OF_A_STRATEGY: tuple[Rule, ...] = (
    *(_flag_of_others(name) for name in OF_ONE_STRATEGY if name != "compress"),
    (lambda s, c: s.lora and c.strategy.why_no_lora,
     "--lora {s.lora} does not go with --strategy {c.strategy.name}, {c.strategy.why_no_lora}: "
     "use ddp, local_sgd, diloco or single"),
    (lambda s, c: s.muon and s.lora,
     "--lora {s.lora} does not go with --muon: Muon makes updates of full rank; leave one out"),
    (lambda s, c: s.muon and s.passed.get("optim", ADAMW[0]) not in ADAMW,
     "--optim {s.passed[optim]} does not go with --muon, beside which AdamW trains the rest: leave "
     "one out"),
    (lambda s, c: s.compress != "none" and not c.strategy.compress,
     "--compress {s.compress} does not go with --strategy {c.strategy.name}, but with "
     f"{COMPRESSING}"),
    (_unknown_compression,
     "--compress {s.compress}: --strategy {c.strategy.name} has none, {c.compressions}"),
    (lambda s, c: s.precision == "fp16" and c.compress in OWING and c.strategy.reduces_gradients,
     "--compress {c.compress} does not go with --precision fp16: the error that it carries over "
     "would have another scale in the next update; use --precision bf16"),
    (lambda s, c: s.precision == "fp16" and s.compress != "none" and s.sync_first,
     "--compress {s.compress} with --sync_first {s.sync_first} does not go with --precision fp16: "
     "what gradients carry over would have another scale in the next update; use --precision bf16"),
    *_where(lambda s, c: s.exchange in SENT_DIRECTLY, (
        (lambda s, c: not c.strategy.direct,
         "--exchange {s.exchange} does not go with --strategy {c.strategy.name}, but with "
         f"{SENDING_DIRECTLY}"),
        (lambda s, c: c.compress == "powersgd",
         "--exchange {s.exchange} does not go with --compress powersgd: use --compress bf16"),
    )),
)

# Checked once the strategy's own defaults are filled in.
OF_FRAGMENTS: tuple[Rule, ...] = (
    (lambda s, c: s.sync_every and s.sync_every % (s.fragments or 1),
     "--fragments {s.fragments}: --sync_every {s.sync_every} cannot be divided by it; each "
     "fragment is exchanged after an update of its own"),
)
SCHEDULES: tuple[Rule, ...] = (
    *OF_FRAGMENTS,
    (lambda s, c: s.sync_every and s.overlap is not None and s.overlap >= s.sync_every,
     "--overlap {s.overlap}: must be below --sync_every {s.sync_every}, when the next exchange "
     "begins"),
    *_where(lambda s, c: c.strategy.apart, (
        (lambda s, c: s.batchnorm == "sync",
         "--batchnorm sync does not go with --strategy {c.strategy.name}: its statistics would be "
         "exchanged at every forward pass; use --batchnorm local"),
        (lambda s, c: s.elastic_batch == "scale",
         "--elastic_batch scale does not go with --strategy {c.strategy.name}: no process can "
         "take over what another trained apart"),
    )),
)


SPEEDS = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?)+")

BALANCE: tuple[Rule, ...] = _where(lambda s, c: s.balance is not None, (
    (_no_speeds,
     "--balance {s.balance}: expected measured, or a number above 0 for each rank, such as 2,1"),
    (lambda s, c: not c.strategy.each_update,
     "--balance {s.balance} does not go with --strategy {s.strategy}, but with "
     f"{' and '.join(EACH_UPDATE)}, whose ranks make each update together"),
    (lambda s, c: c.world.size == 1,
     "--balance {s.balance}: one process has no other to share its batch with; leave it out"),
    (lambda s, c: s.balance != "measured" and len(str(s.balance).split(",")) != c.world.size,
     "--balance {s.balance}: {c.world.size} ranks were started, and each needs a number"),
    (lambda s, c: s.tail == "pad",
     "--balance {s.balance} does not go with --tail pad, whose last batches are not whole: use "
     "--tail cut"),
    (lambda s, c: s.auto_batch or c.world.elastic,
     "--balance {s.balance} does not go with --auto_batch or torchrun --max_restarts, which change "
     "what the shares are of"),
))

# Whether the processes that a launcher started can do what is asked of them.
NOT_ELASTIC: tuple[Rule, ...] = (
    (lambda s, c: c.strategy.apart,
     "--strategy {c.strategy.name} does not go with --max_restarts: no process can take over "
     "what another trained apart"),
    (lambda s, c: c.strategy.has_peers,
     "--strategy {c.strategy.name} does not need --max_restarts: its peers come and go by "
     "themselves"),
)

ELASTIC: tuple[Rule, ...] = (
    (lambda s, c: s.elastic_batch == "scale" and "max_steps" in s.passed,
     "--max_steps counts updates, and --elastic_batch scale changes what one is: use --epochs, "
     "or --elastic_batch hold"),
    *_where(lambda s, c: c.world.elastic, (
        *NOT_ELASTIC,
        (lambda s, c: s.setup is None,
         "torchrun --max_restarts needs --setup, the set-up that was asked for: what runs may "
         "change; for example --setup {c.world.nodes}_{c.world.per_node}"),
        (lambda s, c: s.tail == "pad",
         "--tail pad does not go with torchrun --max_restarts: which samples are fed twice "
         "depends on the number of processes; use --tail cut"),
    )),
)

PROCESSES: tuple[Rule, ...] = (
    (lambda s, c: c.strategy.processes == "one" and c.world.size > 1,
     "--strategy {s.strategy} runs in one process, but {c.world.size} were started: use python "
     "{s.script}.py, or --strategy ddp"),
    (lambda s, c: c.strategy.needs_launcher and not c.world.launched,
     "--strategy {s.strategy} needs processes that torchrun starts: torchrun --standalone "
     "--nproc_per_node=2 {s.script}.py ..."),
    (lambda s, c: c.strategy.splits_batch and s.tail == "pad",
     "--tail pad does not go with --strategy {s.strategy}: of a last batch that its GPUs share "
     "unequally, samples would count unequally; use --tail cut"),
)

# What peers that come and go cannot do together.
PEERS: tuple[Rule, ...] = (
    (lambda s, c: s.auto_batch,
     "--auto_batch does not go with --strategy {s.strategy}, whose peers do not start again "
     "together: use a smaller --per_gpu_batch with a larger --grad_acc"),
    (lambda s, c: s.precision == "fp16",
     "--strategy {s.strategy} does not go with --precision fp16, whose scale each process finds by "
     "itself: use bf16"),
    (lambda s, c: s.batchnorm == "sync",
     "--batchnorm sync does not go with --strategy {s.strategy}: peers do not compute in step; "
     "their statistics are averaged with the weights"),
    (lambda s, c: s.local_updates and s.compress == "int8",
     "--compress int8 does not go with --local_updates: weights are averaged, and 8 bits lose "
     "what an update changes; use fp16"),
    (lambda s, c: "save_steps" in s.passed,
     "--save_steps does not go with --strategy {s.strategy}: checkpoints are made where all peers "
     "have the same weights, at the end of an epoch"),
    (lambda s, c: s.tail == "pad",
     "--tail pad does not go with --strategy {s.strategy}: each peer takes the samples in an order "
     "of its own, without an end; use --tail cut"),
    (lambda s, c: s.passed.get("optim", PEER_OPTIMIZERS[0]) not in PEER_OPTIMIZERS,
     "--optim {s.passed[optim]} does not go with --strategy {s.strategy}: a peer that joins takes "
     f"the state over, which works with {', '.join(PEER_OPTIMIZERS)}"),
    (lambda s, c: s.passed.get("lr_scheduler_type") in BLIND_SCHEDULES,
     "--lr_scheduler_type {s.passed[lr_scheduler_type]} does not go with --strategy {s.strategy}: "
     "each peer must know the learning rate from the number of the update"),
    (lambda s, c: s.target_batch and s.target_batch < c.own_batch,
     "--target_batch {s.target_batch}: one peer alone brings {c.own_batch} samples at a time "
     "(--per_gpu_batch {s.per_gpu_batch} x --grad_acc {s.grad_acc}); choose a larger target or "
     "a smaller batch"),
)

WITHOUT_A_GPU: tuple[Rule, ...] = (
    (lambda s, c: c.strategy.needs_gpu,
     "--strategy {s.strategy} needs a GPU and this machine shows none"),
    (lambda s, c: s.precision == "fp16",
     "--precision fp16 needs a GPU: on a CPU it would silently run in fp32"),
    (lambda s, c: s.precision == "tf32",
     "--precision tf32 needs an NVIDIA GPU of the Ampere generation or newer"),
    (lambda s, c: s.batchnorm == "sync",
     "--batchnorm sync needs GPUs: torch has no synchronised BatchNorm on a CPU"),
    (lambda s, c: s.fsdp_offload,
     "--fsdp_offload needs a GPU: on a CPU the shards are in CPU memory already"),
)

# The device, which is known once torch is loaded.
DEVICE: tuple[Rule, ...] = (
    *_where(lambda s, c: not c.cuda, WITHOUT_A_GPU),
    (lambda s, c: s.exchange in SENT_DIRECTLY and c.cuda and not s.passed.get("use_cpu"),
     "--exchange {s.exchange} is for gloo, which CPUs use: leave it out on GPUs (NCCL), or add "
     "--use_cpu"),
    (lambda s, c: s.precision == "tf32" and not c.ampere,
     "--precision tf32 needs an NVIDIA GPU of the Ampere generation or newer"),
    (lambda s, c: s.precision == "bf16" and c.cuda and not c.bf16,
     "--precision bf16 is not supported by this GPU; use fp16 or fp32"),
)
# fmt: on


def resolve(settings: Settings) -> Settings:
    """The settings with the task's defaults (with --tiny, its small ones) in place of None.

    Refuses contradictory settings before anything is loaded.
    """
    task = task_of(settings.script)
    defaults = task.tiny if settings.tiny else task.defaults
    missing = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    settings = replace(settings, **missing)
    if settings.setup is not None:
        parse_setup(settings.setup)
    refuse(CONTRADICTIONS, Combination(settings))
    return settings


def fit_to_world(settings: Settings, world: World, gpus: int | None = None) -> Settings:
    """Fill in strategy and set-up from the processes started; refuse settings that do not fit them.

    gpus: the number of visible GPUs, once known; DataParallel uses them all in one process.
    """
    return with_exchange(_fitted(settings, world, gpus))


def _fitted(settings: Settings, world: World, gpus: int | None) -> Settings:
    refuse(ELASTIC, Combination(settings, world))
    most = asked_processes(settings) if world.elastic else world.size
    name = settings.strategy or usual_strategy(most)
    nodes = world.nodes if settings.setup is None else parse_setup(settings.setup)[0]
    settings = _with_own_defaults(replace(settings, strategy=name), nodes)
    strategy = strategy_of(settings)
    refuse(PROCESSES + BALANCE, Combination(settings, world))
    if strategy.has_peers:
        return _with_peers(settings, world)
    nodes, per_node = world.nodes, world.per_node
    if strategy.needs_gpu:
        if gpus is None:
            return settings  # not counted yet: fit_to_world() is called again once they are
        if gpus == 0:
            raise UserError(f"{why_a_gpu(settings)}: use ddp")
        per_node = gpus  # in one process
    if settings.setup is None:
        return replace(settings, setup=f"{nodes}_{per_node}")
    asked_nodes, asked_per_node, _ = parse_setup(settings.setup)
    comes_and_goes = world.elastic and strategy.needs_launcher
    fewer = comes_and_goes and nodes < asked_nodes
    if asked_per_node != per_node or (asked_nodes != nodes and not fewer):
        raise _mismatch(settings, world, per_node)
    return settings


def _with_own_defaults(settings: Settings, nodes: int) -> Settings:
    """The settings with the defaults of the strategy's own flags."""
    refuse(FLAGS_OF_A_STRATEGY, Combination(settings))
    if settings.compress == "powersgd:1":
        settings = replace(settings, compress="powersgd")  # two spellings of one training
    own = strategy_of(settings).own
    missing = {n: v for n, v in own.items() if is_off(getattr(settings, n))}
    settings = replace(settings, **missing)
    if "sync_scope" in own and settings.sync_scope is None:
        settings = replace(settings, sync_scope=usual_scope(nodes))
    refuse(SCHEDULES, Combination(settings))
    return settings


def _with_peers(settings: Settings, world: World) -> Settings:
    """fit_to_world() for hivemind, whose set-up says how many peers are expected."""
    addresses_to_join(settings, {})
    if settings.setup is None:
        settings = replace(settings, setup=f"{world.nodes}_{world.per_node}")
    refuse(PEERS, Combination(settings, world))
    nodes, per_node, _ = parse_setup(str(settings.setup))
    if world.launched and (nodes, per_node) != (world.nodes, world.per_node):
        raise _mismatch(settings, world, world.per_node)
    return replace(settings, target_batch=batch_of(settings, nodes * per_node))


def _mismatch(settings: Settings, world: World, per_node: int) -> UserError:
    """The error of a set-up that does not fit; per_node: processes, with dp the process's GPUs."""
    asked_nodes, asked_per_node, tag = parse_setup(str(settings.setup))
    right = f"{world.nodes}_{per_node}" + (f"_{tag}" if tag else "")
    if strategy_of(settings).splits_batch:
        return UserError(
            f"--setup {settings.setup} does not fit: {per_node} GPU(s) are visible; "
            f"use --setup {right}, or set CUDA_VISIBLE_DEVICES"
        )
    command = (
        f"torchrun --standalone --nproc_per_node={asked_per_node}"
        if asked_nodes == 1
        else f"torchrun --nnodes={asked_nodes} --nproc_per_node={asked_per_node} ..."
    )
    ran = f"{world.nodes} node(s) of {per_node} process(es)" if world.launched else "one process"
    return UserError(
        f"--setup {settings.setup} does not fit: {ran} runs here; "
        f"use --setup {right}, or start it with {command} {settings.script}.py"
    )


def addresses_to_join(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Addresses of the run to join, from --initial_peers or INITIAL_PEERS; none for a new run."""
    texts = settings.initial_peers or environ.get("INITIAL_PEERS", "")
    addresses = [address.strip() for address in texts.split(",") if address.strip()]
    for address in addresses:
        if not PEER_ADDRESS.fullmatch(address):
            raise UserError(
                f"--initial_peers {address}: not an address such as "
                "/ip4/10.0.0.1/tcp/40123/p2p/12D3KooW..., which a run prints when it starts"
            )
    return addresses


def why_not_elastic(settings: Settings) -> str | None:
    """Why a run cannot be restarted with another number of processes; None if it can."""
    return broken(NOT_ELASTIC, Combination(replace(settings, strategy=settings.strategy or DDP)))


def why_a_gpu(settings: Settings) -> str | None:
    """Which of these settings needs a GPU, as a message; None if none does."""
    return broken(WITHOUT_A_GPU, Combination(settings))
