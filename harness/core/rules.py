"""What contradicts itself, or cannot be done by the processes that were started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from harness.core.settings import Settings, UserError, parse_setup, share_of
from harness.core.strategies import (
    OF_ONE_STRATEGY,
    STRATEGIES,
    Strategy,
    is_off,
    why_a_gpu,
    why_not_elastic,
)
from harness.core.tasks import TASKS
from harness.core.topology import World, asked_processes, batch_of, effective_batch

# Flags of TrainingArguments that are not passed through: what to do instead, and why.
REFUSED = {
    "average_tokens_across_devices": "the mean over samples is always used (docs/traps.md)",
    "accelerator_config": "it changes how batches are split; use --tail and --per_gpu_batch",
    "auto_find_batch_size": "the batch is what is measured; name it with --per_gpu_batch",
    "batch_eval_metrics": "metrics are always counted batch by batch",
    "bf16": "use --precision bf16",
    "bf16_full_eval": "it leaves the weights in bfloat16 for good; use --precision bf16",
    "dataloader_drop_last": "it drops test samples too; --tail cut drops training samples only",
    "ddp_broadcast_buffers": "buffers are averaged before evaluation; see --batchnorm",
    "ddp_find_unused_parameters": "it is always off; these models use all their parameters",
    "deepspeed": "not a strategy of this harness; see --strategy",
    "do_eval": "evaluation runs after every epoch",
    "do_predict": "evaluation runs after every epoch",
    "do_train": "training always runs",
    "enable_jit_checkpoint": "runs stop and resume by themselves; see --save",
    "eval_strategy": "evaluation runs after every epoch",
    "eval_steps": "evaluation runs after every epoch",
    "eval_delay": "evaluation runs after every epoch",
    "eval_on_start": "evaluation runs after every epoch",
    "eval_use_gather_object": "it fails on the metrics of several ranks",
    "fp16": "use --precision fp16",
    "fp16_full_eval": "it leaves the weights in float16 for good; use --precision fp16",
    "fsdp": "use --strategy fsdp",
    "fsdp_config": "use --strategy fsdp with --fsdp_shard, --fsdp_offload, --precision",
    "greater_is_better": "it follows from --best_metric",
    "hub_token": "a token on the command line ends up in records; set HF_TOKEN instead",
    "ignore_data_skip": "a resumed run goes on with the samples it has not seen",
    "include_num_input_tokens_seen": "it synchronises every step",
    "label_names": "the label is named by --label_column",
    "load_best_model_at_end": "use --save best",
    "local_rank": "torchrun sets it",
    "logging_nan_inf_filter": "it hides a diverged run; NaN always ends a run here",
    "parallelism_config": "use --strategy",
    "prediction_loss_only": "the metrics are what is measured",
    "remove_unused_columns": "only the columns that the model reads are loaded",
    "restore_callback_states_from_checkpoint": "the records on disk are the state",
    "resume_from_checkpoint": "the same command resumes by itself; --rerun starts afresh",
    "save_only_model": "a run could not be resumed; use --save none",
    "save_strategy": "use --save none, last or best",
    "save_total_limit": "use --save last or best",
    "tf32": "use --precision tf32",
    "train_sampling_strategy": "it gives ranks different orders; samples are shuffled by --seed",
}


def resolve(settings: Settings) -> Settings:
    """The same settings with the script's defaults, or the tiny ones, in place of None."""
    task = TASKS[settings.script]
    defaults = task.tiny if settings.tiny else task.defaults
    missing = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    return check(replace(settings, **missing))


def check(settings: Settings) -> Settings:
    """Refuse what contradicts itself, before anything is loaded."""
    if settings.setup is not None:
        parse_setup(settings.setup)
    if settings.max_length is not None and settings.max_length < 3:
        raise UserError(
            f"--max_length {settings.max_length}: must be at least 3 (start, word, end)"
        )
    if dict(settings.trainer).get("max_steps", 1) in (0, None):
        raise UserError("--max_steps 0: must be at least 1; leave it out to train whole epochs")
    if settings.strategy != "fsdp" and (settings.fsdp_shard != "full" or settings.fsdp_offload):
        asked = "fsdp_offload" if settings.fsdp_offload else "fsdp_shard grads"
        why = "" if settings.strategy in (None, "single", "dp", "ddp") else (
            f", which {settings.strategy} cannot be: each process needs all weights to go on alone"
        )  # fmt: skip
        raise UserError(f"--{asked} needs --strategy fsdp{why}")
    for name in ("test_split", "validation_split"):
        split = getattr(settings, name)
        if split is not None and share_of(split) is None and re.match(r"^-?[0-9.]", split):
            raise UserError(
                f"--{name} {split}: a share must lie between 0 and 1, for example 0.2; "
                "a split is named by its name"
            )
    if settings.validation_split == "train":
        raise UserError(
            "--validation_split train: a model is not chosen by what it was trained on; "
            "a share such as 0.1 holds out a part of train"
        )
    return settings


# ----
# The processes that a launcher made, and whether they can do what is asked of them.


def place(settings: Settings, world: World, gpus: int | None = None) -> Settings:
    """Fill in strategy and set-up from the world, or refuse what does not fit it.

    gpus is the number of visible GPUs, once known: DataParallel uses that many in one process.
    """
    _check_elastic(settings, world)
    most = asked_processes(settings) if world.elastic else world.size
    strategy = settings.strategy or ("ddp" if most > 1 else "single")
    settings = _own_flags(replace(settings, strategy=strategy), STRATEGIES[strategy])
    if STRATEGIES[strategy].processes == "one" and world.size > 1:
        raise UserError(
            f"--strategy {strategy} runs in one process, but {world.size} were started: "
            f"use python {settings.script}.py, or --strategy ddp"
        )
    if STRATEGIES[strategy].processes == "many" and not world.launched:
        raise UserError(
            f"--strategy {strategy} needs processes that torchrun starts: "
            f"torchrun --standalone --nproc_per_node=2 {settings.script}.py ..."
        )
    nodes, per_node = world.nodes, world.per_node
    if STRATEGIES[strategy].processes == "peers":
        return _with_peers(settings, world)
    if STRATEGIES[strategy].needs_gpu:
        if gpus is None:
            # Not counted yet: whoever can see the GPUs calls again.
            return settings
        if gpus == 0:
            raise UserError(f"{why_a_gpu(settings)}: use ddp")
        per_node = gpus  # in one process
    if settings.setup is None:
        return replace(settings, setup=f"{nodes}_{per_node}")
    asked_nodes, asked_per_node, tag = parse_setup(settings.setup)
    comes_and_goes = world.elastic and STRATEGIES[strategy].processes == "many"
    fewer = comes_and_goes and nodes < asked_nodes
    if asked_per_node != per_node or (asked_nodes != nodes and not fewer):
        raise UserError(_mismatch(settings, world, strategy, nodes, per_node, tag))
    return settings


def _own_flags(settings: Settings, strategy: Strategy) -> Settings:
    """The strategy's own flags with their defaults; those of others would do nothing."""
    given = [n for n in OF_ONE_STRATEGY if not is_off(getattr(settings, n))]
    for name in given:
        of = [s.name for s in STRATEGIES.values() if name in s.own]
        if name != "compress" and strategy.name not in of:
            raise UserError(
                f"--{name} does nothing with --strategy {strategy.name}: it belongs to "
                f"{', '.join(of)}"
            )
    _check_compress(settings, strategy)
    _check_exchange(settings, strategy)
    if settings.compress == "powersgd:1":
        settings = replace(settings, compress="powersgd")  # one name for one training
    missing = {n: v for n, v in strategy.own.items() if n not in given}
    settings = replace(settings, **missing)
    every, parts, overlap = settings.sync_every, settings.fragments, settings.overlap
    if every and parts and every % parts:
        raise UserError(
            f"--fragments {parts}: --sync_every {every} cannot be divided by it; each fragment "
            "has its own update to be exchanged after"
        )
    if every and overlap is not None and overlap >= every:
        raise UserError(
            f"--overlap {overlap}: must be below --sync_every {every}, when the next one begins"
        )
    if settings.batchnorm == "sync" and strategy.apart:
        raise UserError(
            f"--batchnorm sync does not go with --strategy {strategy.name}: its statistics would "
            "be exchanged at every forward pass; use --batchnorm local"
        )
    if settings.elastic_batch == "scale" and strategy.apart:
        raise UserError(
            f"--elastic_batch scale does not go with --strategy {strategy.name}: no process can "
            "take over what another trained apart"
        )
    return settings


def _check_compress(settings: Settings, strategy: Strategy) -> None:
    kind, colon, rank = settings.compress.partition(":")
    if kind == "none" and not colon:
        return
    if not strategy.compress:
        able = [f"{s.name} ({', '.join(s.compress)})" for s in STRATEGIES.values() if s.compress]
        raise UserError(
            f"--compress {settings.compress} does not go with --strategy {strategy.name}, but with "
            f"{', '.join(able)}"
        )
    wrong_rank = colon and (kind != "powersgd" or not re.fullmatch("[1-9][0-9]*", rank))
    if kind not in strategy.compress or wrong_rank:
        ways = [f"{way}[:rank]" if way == "powersgd" else way for way in strategy.compress]
        raise UserError(
            f"--compress {settings.compress}: --strategy {strategy.name} has none, "
            f"{', '.join(ways)}"
        )
    if kind == "powersgd" and settings.precision == "fp16":
        raise UserError(
            "--compress powersgd does not go with --precision fp16: what it still owes of the "
            "gradients would be of another scale in the next update; use --precision bf16"
        )


def _check_exchange(settings: Settings, strategy: Strategy) -> None:
    """Sent straight to each other: sums of plain numbers, by processes that a launcher started."""
    if settings.exchange == "backend":
        return
    if not strategy.direct:
        able = [s.name for s in STRATEGIES.values() if s.direct]
        raise UserError(
            f"--exchange {settings.exchange} does not go with --strategy {strategy.name}, but with "
            f"{', '.join(able)}"
        )
    if settings.compress.startswith("powersgd"):
        raise UserError(
            f"--exchange {settings.exchange} does not go with --compress powersgd, whose sums are "
            "small and follow one another: use --compress bf16, or --exchange backend"
        )
    if strategy.apart and settings.compress != "none":
        raise UserError(
            f"--exchange {settings.exchange} does not go with --compress {settings.compress} of "
            f"{strategy.name}, which sends each part straight to the process that adds it by "
            "itself: leave --exchange out"
        )


def _with_peers(settings: Settings, world: World) -> Settings:
    """Without a launcher the set-up says how many peers are expected; they find each other."""
    check_peers(settings)
    if settings.setup is None:
        settings = replace(settings, setup=f"{world.nodes}_{world.per_node}")
    nodes, per_node, tag = parse_setup(str(settings.setup))
    if world.launched and (nodes, per_node) != (world.nodes, world.per_node):
        raise UserError(_mismatch(settings, world, "hivemind", world.nodes, world.per_node, tag))
    own = effective_batch(settings.per_gpu_batch or 1, settings.grad_acc, devices=1)
    target = batch_of(settings, nodes * per_node)
    if target < own:
        raise UserError(
            f"--target_batch {target}: one peer alone brings {own} samples at a time "
            f"(--per_gpu_batch {settings.per_gpu_batch} x --grad_acc {settings.grad_acc}); "
            "choose a larger target or a smaller batch"
        )
    return replace(settings, target_batch=target)


def _check_elastic(settings: Settings, world: World) -> None:
    """What a run needs that is to be the same one when nodes come and go."""
    if settings.elastic_batch == "scale" and "max_steps" in dict(settings.trainer):
        raise UserError(
            "--max_steps counts updates, and --elastic_batch scale changes what one is: "
            "use --epochs, or --elastic_batch hold"
        )
    if world.elastic and (reason := why_not_elastic(settings)):
        raise UserError(reason)
    if world.elastic and settings.setup is None:
        raise UserError(
            "torchrun --max_restarts needs --setup, the set-up that was asked for: what runs may "
            f"change; for example --setup {world.nodes}_{world.per_node}"
        )
    if world.elastic and settings.tail == "pad":
        raise UserError(
            "--tail pad does not go with torchrun --max_restarts: which samples are fed twice "
            "depends on the number of processes; use --tail cut"
        )


def _mismatch(
    settings: Settings, world: World, strategy: str, nodes: int, per_node: int, tag: str
) -> str:
    asked_nodes, asked_per_node, _ = parse_setup(str(settings.setup))
    right = "_".join([str(nodes), str(per_node), *([tag] if tag else [])])
    if strategy == "dp":
        return (
            f"--setup {settings.setup} does not fit: {per_node} GPU(s) are visible; "
            f"use --setup {right}, or set CUDA_VISIBLE_DEVICES"
        )
    command = (
        f"torchrun --standalone --nproc_per_node={asked_per_node}"
        if asked_nodes == 1
        else f"torchrun --nnodes={asked_nodes} --nproc_per_node={asked_per_node} ..."
    )
    ran = f"{nodes} node(s) of {per_node} process(es)" if world.launched else "one process"
    return (
        f"--setup {settings.setup} does not fit: {ran} runs here; "
        f"use --setup {right}, or start it with {command} {settings.script}.py"
    )


# ----
# --strategy hivemind in words: what goes with it, and where a run is found that is joined.

INSTALL = "pip install -r requirements-hivemind.txt"


# As libp2p writes the address of a peer.
PEER_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/,]+/(tcp|udp)/\d+(/[a-z0-9-]+)*/p2p/\w+")


# Optimizers whose state can be made before the first step, as peers need it to exchange it.
PEER_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")


# Schedules that do not follow from the number of the update.
BLIND_SCHEDULES = ("reduce_lr_on_plateau", "greedy")


def addresses_to_join(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """The addresses of a run of peers, from the flag or the variable; none for a new run."""
    given = settings.initial_peers or environ.get("INITIAL_PEERS", "")
    found = [address.strip() for address in given.split(",") if address.strip()]
    for address in found:
        if not PEER_ADDRESS.fullmatch(address):
            raise UserError(
                f"--initial_peers {address}: not an address such as "
                "/ip4/10.0.0.1/tcp/40123/p2p/12D3KooW..., which a run prints when it starts"
            )
    return found


def check_peers(settings: Settings) -> None:
    """What peers that come and go cannot do together."""
    addresses_to_join(settings, {})
    passed = dict(settings.trainer)
    if settings.precision == "fp16":
        raise UserError(
            "--strategy hivemind does not go with --precision fp16, whose scale each process "
            "looks for by itself: use bf16"
        )
    if settings.batchnorm == "sync":
        raise UserError(
            "--batchnorm sync does not go with --strategy hivemind: peers do not compute in step; "
            "their statistics are averaged with the weights"
        )
    if settings.local_updates and settings.compress == "int8":
        raise UserError(
            "--compress int8 does not go with --local_updates: weights are what is averaged, and "
            "8 bits lose what an update changes; use fp16"
        )
    if "save_steps" in passed:
        raise UserError(
            "--save_steps does not go with --strategy hivemind: checkpoints are made where all "
            "peers have the same weights, at the end of an epoch"
        )
    if settings.tail == "pad":
        raise UserError(
            "--tail pad does not go with --strategy hivemind: each peer takes the samples in an "
            "order of its own, without an end; use --tail cut"
        )
    if (optim := passed.get("optim", PEER_OPTIMIZERS[0])) not in PEER_OPTIMIZERS:
        raise UserError(
            f"--optim {optim} does not go with --strategy hivemind: a peer that joins takes the "
            f"state over, which works with {', '.join(PEER_OPTIMIZERS)}"
        )
    if (schedule := passed.get("lr_scheduler_type")) in BLIND_SCHEDULES:
        raise UserError(
            f"--lr_scheduler_type {schedule} does not go with --strategy hivemind: each peer must "
            "know the learning rate from the number of the update"
        )
