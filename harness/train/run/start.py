"""Open a run: make its TrainingArguments, lock its folder, and look for an earlier record of it."""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import datasets
import torch
import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars as disable_hub_progress_bars
from transformers import HfArgumentParser, TrainingArguments, set_seed
from transformers import logging as transformers_logging
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import enable_full_determinism

from harness.core import attempts
from harness.core.command_line import refuse, trainer_argv
from harness.core.identity import EVAL_BATCH, number, run_path
from harness.core.process import end_at_once, end_work, warn
from harness.core.provenance import changed_inputs, inputs, recorded_inputs, strategy_code
from harness.core.records import FINISHED, RunFolder
from harness.core.records.disk import check_writable
from harness.core.records.locks import Lock
from harness.core.records.summary import larger_is_better, metric_name
from harness.core.rules import fit_to_world
from harness.core.settings import Settings, UserError
from harness.core.strategies import own_strategy, strategy_of
from harness.core.topology import accumulated, effective_batch, world_of
from harness.train.context import Context
from harness.train.devices import choose_gpus, refuse_impossible, trains_on_one
from harness.train.measure.environment import launch
from harness.train.measure.telemetry import start_sampler, uuids
from harness.train.patches import check_patched
from harness.train.rendezvous import bind_to_loopback, harden
from harness.train.run.checkpoints import follow_rank0
from harness.train.run.elastic import launch_of, warn_of_restarts
from harness.train.run.lifecycle import Lifecycle
from harness.train.run.publish import check_hub, publish
from harness.train.session import Session, broadcast, end_group, gather
from harness.train.stopped import UntilMet
from harness.train.strategy import session_of


def quiet(bars: bool) -> None:
    """The libraries' own messages would bury the one line that matters."""
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    # transformers would have the Hub convert weights that it finds pickled.
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    transformers_logging.disable_progress_bar()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not bars:
        datasets.disable_progress_bars()
        disable_hub_progress_bars()
    # accelerate then takes as many threads as the node has cores; the record has their number.
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    # The Trainer passes this argument by its older name, which means the same.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)


def leave(code: int) -> NoReturn:
    """End the script without Python's teardown: now and then a gloo thread that still runs aborts
    the process there, and a finished run would end with an error.
    """
    atexit._run_exitfuncs()
    end_at_once(code)


def arguments_of(settings: Settings, folder: Path, session: Session) -> TrainingArguments:
    """The TrainingArguments of this process."""
    if not strategy_of(settings).needs_launcher:
        # Hide torchrun with one process: the Trainer would wrap the model in DDP all the same.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    args = training_arguments(session.own_settings(settings), folder, session.world.size)
    session.restrict(args)
    if args.device.type not in ("cpu", "cuda"):
        raise UserError(f"a run is on CUDA or the CPU, not on {args.device.type}: use --use_cpu")
    if trains_on_one(settings) and args.n_gpu > 1:
        check_patched(transformers, "so that one GPU trains", [(args, "_n_gpu")])
        args._n_gpu = 1  # the others stay visible if the driver does not tell which GPUs there are
    return args


def remove_log_folder() -> None:
    """Remove the folder that torchrun makes for each rank's output and leaves, if it is empty.

    Done at the start, so that no folder is left of a rank that is killed, either; a forked rank
    tells its errors there.
    """
    if multiprocessing.parent_process() is not None:
        return
    own = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent
    folders = [own, *own.parents][:4]  # of the rank, the attempt, the run, and torchrun
    with suppress(OSError):  # until one that has something in it
        for folder in folders if folders[-1].name.startswith("torchelastic_") else []:
            folder.rmdir()


class _Parser(HfArgumentParser):
    """Raises the error that argparse would print with its whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.replace("argument ", "", 1))


def training_arguments(settings: Settings, folder: Path, world: int) -> TrainingArguments:
    """Our arguments, then those that were passed through; the two share no flag."""
    passed, cuda = settings.passed, torch.cuda.is_available()
    trackers = passed.get("report_to")
    if isinstance(trackers, tuple):  # the Trainer's parser takes one alone
        others = tuple(pair for pair in settings.trainer if pair[0] != "report_to")
        settings = replace(settings, trainer=others)
    ours = _our_arguments(settings, folder, passed, cuda)
    argv = [w for k, v in ours.items() if k not in passed for w in (f"--{k}", str(v))]
    try:
        (args,) = _Parser(TrainingArguments).parse_args_into_dataclasses(
            [*argv, *trainer_argv(settings)]
        )
    except (ValueError, ImportError) as error:
        raise UserError(" ".join(str(error).split())) from None
    if args.world_size != world:
        raise UserError(
            f"{world} processes were started, but the Trainer sees {args.world_size}: "
            "leave out --use_cpu and --ddp_backend"
        )
    args.push_to_hub = False  # publish() uploads once, at the end; the Trainer would at every save
    # Copies from pinned memory run while the host goes on.
    args.accelerator_config.non_blocking = cuda and args.dataloader_pin_memory
    if isinstance(trackers, tuple):
        args.report_to = list(trackers)
    _check_trackers(args.report_to)
    return args


def _our_arguments(
    settings: Settings, folder: Path, passed: dict[str, Any], cuda: bool
) -> dict[str, Any]:
    """What our settings are in TrainingArguments; what was passed through wins."""
    ours: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": settings.per_gpu_batch,
        "per_device_eval_batch_size": settings.eval_batch or EVAL_BATCH,
        "gradient_accumulation_steps": settings.grad_acc,
        "num_train_epochs": settings.epochs,
        "learning_rate": number(settings.lr),
        "seed": settings.seed,
        "dataloader_num_workers": settings.num_workers,
        "logging_steps": settings.log_every,
        "logging_nan_inf_filter": False,
        "eval_strategy": "epoch",
        "remove_unused_columns": False,
        "label_names": "labels",
        "average_tokens_across_devices": False,
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": cuda,
        "bf16": settings.precision == "bf16",
        "fp16": settings.precision == "fp16",
        **_saving(settings, passed),
    }
    if not cuda and "use_cpu" not in passed:
        # Without it, torchrun on a machine without GPU starts as many separate trainings, and a
        # Mac computes on its GPU, which has no float64.
        ours["use_cpu"] = True
    if cuda:  # also in half precision, where --torch_compile would set it
        ours["tf32"] = settings.precision == "tf32"
    if settings.num_workers > 0:
        ours["dataloader_persistent_workers"] = True
        if sys.platform == "linux":
            # Also in a process that a fork server started: the fork server would start the workers,
            # too, each with imports of its own, and they would outlive this process.
            ours["dataloader_multiprocessing_context"] = "fork"
    return ours


def _check_trackers(names: list[str]) -> None:
    """Check now; the Trainer would check only after the data and the model have been loaded."""
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise UserError(f"--report_to {name}: expected {', '.join(INTEGRATION_TO_CALLBACK)}")
        if name not in get_available_reporting_integrations():
            raise UserError(f"--report_to {name} needs its package: pip install {name}")


def _saving(settings: Settings, passed: dict[str, Any]) -> dict[str, Any]:
    if settings.save == "none":
        return {"save_strategy": "no"}
    kept: dict[str, Any] = {"save_strategy": "steps" if "save_steps" in passed else "epoch"}
    if settings.save == "best":
        kept |= {
            "load_best_model_at_end": True,
            "metric_for_best_model": metric_name(settings.best_metric),
            "greater_is_better": larger_is_better(settings.best_metric),
        }
    return kept


def _open(settings: Settings) -> tuple[Context, Lock | None, UntilMet]:
    """Check that the run can be made here, and lock its folder on rank 0."""
    world = world_of(os.environ)
    quiet(bars=world.rank == 0 and sys.stderr.isatty())
    try:
        gpus = choose_gpus(settings, world)
        settings = fit_to_world(settings, world, gpus)
        refuse_impossible(settings, cuda=gpus > 0)
        folder = RunFolder(Path(settings.output_dir) / run_path(settings))
        if world.rank == 0:
            check_writable(Path(settings.output_dir))
            check_hub(settings)
        harden()
        bind_to_loopback(os.environ)
        session = session_of(settings, world, folder)
        hang_after_s = settings.hang_after if session.ends_when_silent else 0.0
        meeting = UntilMet(hang_after_s, world.rank, world.rank // world.per_node)
        if world.size > 1 and hang_after_s:
            meeting.start()
        world = session.world
        args = arguments_of(settings, folder.path, session)
        lock = _locked(folder, wait_s=30 if world.elastic else 5) if world.rank == 0 else None
    except UserError as error:
        refuse(settings.script, error, world.rank == 0 or not world.launched)
    return Context(settings, world, args, folder, session, launch_of(world)), lock, meeting


def _exchange_facts(context: Context) -> list[dict[str, Any]]:
    """What the ranks have to know of each other, in one exchange. Rank 0 says whether the run is
    finished; with --rerun its earlier record is set aside.
    """
    devices = uuids(context.args.n_gpu) if context.settings.telemetry_hz else []
    own = {"process": (devices, os.getpid()), "finished": False, "folder_gone": False}
    if context.is_rank0:
        own["finished"] = _finished_or_set_aside(context)
        own["folder_gone"] = not context.folder.path.exists()
    return gather(own)


def _finished_or_set_aside(context: Context) -> bool:
    folder, elastic = context.folder, context.launch
    before = RunFolder.at(folder.path).outcome()
    resumes = bool(os.environ.pop(attempts.RESUMES, None)) or attempts.is_resumed(
        folder, elastic.unix if elastic else None
    )
    if elastic is not None:
        warn_of_restarts(context.settings)
    if context.settings.rerun and not resumes:
        if folder.path.exists():
            print(f"the earlier record is kept in {folder.set_aside()}")
        return False
    return before == FINISHED


def _require_one_strategy(context: Context) -> None:
    """Refuse a user's strategy whose file differs: each node reads it from its own disk."""
    if not own_strategy(context.settings.strategy):
        return
    first, *others = gather(strategy_code(context.settings))
    unlike = [rank for rank, code in enumerate(others, 1) if code != first]
    if unlike:
        reason = UserError(
            f"--strategy {context.settings.strategy}: the file on rank {unlike[0]} (node "
            f"{unlike[0] // context.world.per_node}) is not that of rank 0: copy it to every node"
        )
        refuse(context.settings.script, reason, context.is_rank0)


def _refuse_changed_inputs(context: Context) -> None:
    """A finished run is only reused with the inputs that it was measured with."""
    folder, change, unlike = context.folder, "", ""
    if (now := context.inputs) is not None:  # on rank 0
        run = RunFolder.at(folder.path)  # it may be in an archive
        earlier = recorded_inputs(run)
        change = changed_inputs(earlier, now)
        if earlier.get("code", now["code"]) != now["code"]:
            unlike = "with other code than now, "
        environment: Mapping[str, Any] = run.read_environment() or {}
        threads = environment.get("threads")
        of_cpu = context.args.device.type == "cpu"
        if of_cpu and threads not in (None, torch.get_num_threads()):
            unlike += f"measured with OMP_NUM_THREADS={threads}, "
        asked, recorded = context.settings, run.read_settings() or {}
        # Both are part of a run's name only if they choose the weights that are tested.
        if (metric := recorded.get("best_metric", asked.best_metric)) != asked.best_metric:
            unlike += f"its best epoch is by --best_metric {metric}, "
        if asked.save == "best" != recorded.get("save", "best"):
            unlike += "without --save best, "
    if change := broadcast(change):
        reason = UserError(
            f"{folder.path} is finished, but {change}: --rerun measures again and keeps the "
            "earlier record; another --output_dir keeps both"
        )
        refuse(context.settings.script, reason, context.is_rank0)
    if context.is_rank0:
        print(f"already finished: {folder.path} ({unlike}--rerun measures again)")


def start(settings: Settings) -> Lifecycle | None:
    """Open a run; None if it has been finished before."""
    end_work()
    if not gc.isenabled():  # command_line() disabled it
        gc.freeze()  # what is loaded stays: no collection looks at it again
        gc.enable()
    remove_log_folder()
    context, lock, meeting = _open(settings)
    if context.is_rank0:  # the inputs as they are now, before they are read
        earlier = attempts.failures_of(context.folder)
        try:
            found = inputs(context.settings)
        except UserError as error:
            refuse(context.settings.script, error)
        context = replace(context, inputs=found, earlier_failures=earlier)
    settings, world, args = context.settings, context.world, context.args
    _require_one_strategy(context)
    ranks = _exchange_facts(context)
    if ranks[0]["finished"]:
        _refuse_changed_inputs(context)
        meeting.close()
        context.session.already_finished()
        if lock is not None:
            lock.release()
        end_group()
        publish(context)
        return None
    if not context.session.open():
        return None
    processes = [rank["process"] for rank in ranks]
    sampler = start_sampler(settings.telemetry_hz, world, processes, _watch(context))
    # Nothing is written before the ranks exchange again.
    follow_rank0(context.folder, world, ranks[0]["folder_gone"])
    _take_smaller_batch(context)
    # Before the model is made: its head's weights are drawn with this seed, equal on all ranks.
    (enable_full_determinism if args.full_determinism else set_seed)(settings.seed)
    return Lifecycle(replace(context, sampler=sampler), lock, meeting)


def _watch(context: Context) -> dict[str, Any] | None:
    """How the sampler ends the only rank of a torchrun launch if that rank is stopped; else None.

    A shell may stop a process and go on with it later, and launchers of sweeps watch their ranks
    themselves.
    """
    settings, world = context.settings, context.world
    is_single = world.launched and world.size == 1 and context.session.ends_when_silent
    if not (is_single and settings.hang_after) or launch().get("sweep"):
        return None
    resumes = context.launch is not None and context.launch.restarts_left > 0
    folder = str(context.folder.path.absolute())
    of_sampler = {"hang_after_s": settings.hang_after, "folder": folder, "resumes": resumes}
    return {**of_sampler, "launcher": os.getppid()}


def _take_smaller_batch(context: Context) -> None:
    """After a lack of memory, with --auto_batch: all ranks take rank 0's recorded batch."""
    args, settings = context.args, context.settings
    if not settings.auto_batch:
        return
    folder = context.folder
    half = attempts.batch_to_try(folder, settings) if context.is_rank0 else None
    batch = broadcast(half or (attempts.last_batch(folder, settings) if context.is_rank0 else None))
    if batch >= args.per_device_train_batch_size:
        return
    own = effective_batch(args.per_device_train_batch_size, args.gradient_accumulation_steps, 1)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = accumulated(own, batch)
    if context.is_rank0:
        warn(
            f"--auto_batch: --per_gpu_batch {args.per_device_train_batch_size} "
            f"--grad_acc {args.gradient_accumulation_steps} instead of {settings.per_gpu_batch} "
            f"and {settings.grad_acc}, which ran out of memory"
        )


def _locked(folder: RunFolder, wait_s: float) -> Lock:
    """Lock the folder, because two processes that write one record would spoil it.

    wait_s: a process that was just killed needs a moment to end; one that is cut off from the
    network ends when its collectives time out.
    """
    lock = Lock(folder.lock("run"))
    if not lock.take_again(wait_s):
        raise UserError(f"{folder.path} is being measured by {lock.holder()}: wait until it ends")
    return lock
