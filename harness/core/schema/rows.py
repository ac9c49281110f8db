"""The rows and small files that a run writes, field by field: type, range, unit, and meaning."""

# Formatted by hand: the formatter would give each bracket of the long meanings a line of its own.
# fmt: off

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from harness.core.schema.fields import (
    Amount,
    Bytes,
    Count,
    Gain,
    Gib,
    Joules,
    Percent,
    PerSecond,
    Positive,
    Ratio,
    Seconds,
    Share,
    Tflop,
    TflopPerSecond,
    Unix,
    Value,
)
from harness.core.schema.telemetry import GpuTelemetry, NodeTelemetry, RankTelemetry

FINISHED = "finished"
OUTCOMES = {
    FINISHED: "trained to the end",
    "oom": "out of memory, on a device or in the machine",
    "diverged": "the loss, the gradient or the evaluation loss was no longer finite",
    "timeout": "stopped from outside because it took too long",
    "interrupted": "stopped by SIGTERM or SIGINT, or killed without leaving a reason",
    "failed": "anything else; `reason` says what",
}
Outcome = Annotated[str, Value(choices=tuple(OUTCOMES))]

# Quality fields, on whichever data set the record names.
Loss = Annotated[float, Value("nats")]
WEIGHTED = Annotated[Share, "mean over the classes, weighted by their number of samples in the "
                            "evaluation set"]
MACRO = Annotated[Share, "unweighted mean over the classes that occur in the evaluation set or "
                          "the predictions"]


class EpochRow(TypedDict):
    """A row per epoch, written by rank 0 when the epoch's evaluation has ended."""

    epoch: Annotated[Amount,
        "epochs trained when the row was written; a fraction where `--max_steps` ended the run"]
    updates: Annotated[Count, "updates since the run began, those that fp16 skipped among them"]
    samples: Annotated[Count | None,
        "distinct training samples of this epoch: those fed twice are counted once; null where "
        "LogCallback alone was given a stream, whose length nobody knows, or a sampler of batches "
        "of its own or that repeats samples"]
    fed_samples: Annotated[Count | None,
        "samples fed to the model, counted from the tensors; more than `samples` with "
        "`--tail pad`; null as `samples`"]
    effective_batch: Annotated[Positive,
        "samples of one update: per_gpu_batch x grad_acc x processes (x GPUs for dp), as they are "
        "when the epoch ends"]
    learning_rate: Annotated[Amount | None, "of the epoch's last update"]
    train_loss: Annotated[Loss | None,
        "mean over all samples fed on all ranks in this epoch, with dropout on and the weights "
        "changing; of the loss that was trained on, also where that is not the cross-entropy of "
        "`eval_loss` (`--label_smoothing_factor`, a model's own); of LogCallback alone from the "
        "Trainer's log, and null where that does not cover exactly the epoch, as where it was "
        "resumed inside it, or is no such mean (below)"]
    grad_norm: Annotated[Ratio | None,
        "mean over the updates of the gradient norm before clipping; with local_sgd and diloco "
        "each rank has its own and all count; null without clipping, and if all were skipped"]
    clipped_share: Annotated[Share | None,
        "share of the updates that were made whose gradient was clipped"]
    skipped_updates: Annotated[Amount | None,
        "updates that fp16 skipped because the gradient overflowed; 0 in other formats; null "
        "without clipping"]
    epoch_time_s: Annotated[Seconds | None,
        "the training part of the epoch on rank 0's clock: includes data loading and the first "
        "steps (compilation), excludes evaluation and saving; summed over all attempts; null, as "
        "other sums over the epoch, where LogCallback alone was resumed inside it, and where peers "
        "trained while the one that records was away"]
    train_samples_per_s: Annotated[PerSecond | None, "`timed_samples` / `timed_s`"]
    train_samples_per_s_per_gpu: Annotated[PerSecond | None, "that / number of devices"]
    timed_steps: Annotated[Count,
        "timed steps: all but the first `timing_warmup_steps` of a process; of a stream that "
        "LogCallback alone was given not the epoch's last, whose batch may be short"]
    timed_samples: Annotated[Amount | None,
        "distinct samples in the timed steps; null where workers load such a stream, and where "
        "peers trained while the one that records was away"]
    timed_s: Annotated[Seconds,
        "sum of the times of the timed steps; a step lasts from the end of one update to the end "
        "of the next"]
    step_time_median_s: Annotated[Seconds | None, "median step time on rank 0"]
    step_time_p95_s: Annotated[Seconds | None,
        "the step time that 95 % of the steps on rank 0 do not exceed"]
    data_wait_share: Annotated[Share | None,
        "share of the epoch's training that rank 0 spent waiting for the next batches, after the "
        "log entry where there is one (records from before 2026-11-27 include what log entries "
        "wait for)"]
    tflops_per_s: NotRequired[Annotated[TflopPerSecond | None,
        "floating-point operations of the timed steps on all ranks / `timed_s`, including padding "
        "and samples fed twice; null where they cannot be counted (below)"]]
    tflops_per_s_without_padding: NotRequired[Annotated[TflopPerSecond | None,
        "the same for the tokens of the texts alone; images have no padding"]]
    mfu: NotRequired[Annotated[Ratio | None,
        "model FLOPs utilisation: `tflops_per_s` / (devices x peak of one device in the run's "
        "number format); null where the peak is unknown. `gpu.utilisation_percent` beside it says "
        "how long a device was busy, not how much it computed"]]
    tokens_per_s: NotRequired[Annotated[PerSecond | None,
        "tokens of the texts, without padding, in the timed steps / `timed_s`; null for images"]]
    padding_share: NotRequired[Annotated[Share | None,
        "share of padding among the tokens processed in the timed steps; null for images"]]
    peak_memory_gib_per_rank: Annotated[list[Gib] | None,
        "on a GPU, torch's peak allocation in this epoch; on a CPU, the peak resident memory of "
        "the process so far; for dp, whose one rank has several GPUs, a list by GPU"]
    reserved_memory_gib_per_rank: NotRequired[Annotated[list[Gib] | None,
        "likewise, the most that torch's allocator reserved on each GPU, free blocks included; "
        "null on a CPU"]]
    comm_exposed_share: NotRequired[Annotated[Share | None,
        "share of the timed steps in which gradients, or the loss of a log entry, were being "
        "exchanged and nothing was being computed, without waiting for slower ranks (below); ddp "
        "with several processes only"]]
    compute_skew: NotRequired[Annotated[Ratio | None,
        "`compute_s` of the slowest rank / the median over the ranks; null where a rank does not "
        "know it, or there is only one"]]
    slowest_rank: NotRequired[Annotated[Count | None,
        "the rank that computed longest; there is always one: `compute_skew` says whether it "
        "matters"]]
    payload_bytes: Annotated[Bytes | None,
        "bytes that all ranks handed to the backend in the epoch's training, after `--compress`: "
        "for ddp, and for local_sgd and diloco on one node with `--sync_scope node`, the "
        "gradient bytes of an update x updates x ranks; 0 for one process; null where unknown, as "
        "for fsdp and dp"]
    network_sent_bytes: Annotated[Bytes | None,
        "bytes that the network interfaces of all nodes sent in the same time; null on one node, "
        "and where they sent less than 10 kB of what was handed over: then something else "
        "carried it"]
    peers: NotRequired[Annotated[Count,
        "with `--strategy hivemind` only: peers that contributed samples to the updates of this "
        "epoch"]]
    failed_averages: NotRequired[Annotated[Count,
        "with `--strategy hivemind` only: averaging rounds that peers had to skip although other "
        "peers were present, summed over the peers; 0 where all is well"]]
    gpu: NotRequired[Annotated[GpuTelemetry | None,
        "all devices of the run on all nodes, during the epoch's training (below); null where "
        "training uses no NVIDIA device, and where a node is not sampled"]]
    node: NotRequired[Annotated[NodeTelemetry | None, "the same for the nodes themselves"]]
    others_cpu_share: NotRequired[Annotated[Share | None,
        "share of the cores' time that went to anything but this run during the epoch's training: "
        "other programs, the kernel's own work, other guests of a virtual machine's host; of the "
        "machine where it was the largest; null where a node is not sampled or an epoch too short"]]
    energy_j: NotRequired[Annotated[Joules | None,
        "energy that all devices of the run used, by the driver's own counter between the start "
        "and the end of the epoch's training, saving in between included; an epoch that was "
        "interrupted counts what was used up to its checkpoint and from there on; null where one "
        "device does not report it"]]
    eval_loss: NotRequired[Annotated[Loss | None,
        "cross-entropy, mean over the evaluation set, each sample once; with local_sgd and diloco "
        "of the weights of the last exchange, as all quality"]]
    accuracy: NotRequired[Annotated[Share, "share of the evaluation set classified correctly"]]
    top5_accuracy: NotRequired[Annotated[Share,
        "share whose class is among the five most likely; only with more than five classes"]]
    precision: NotRequired[WEIGHTED]
    recall: NotRequired[WEIGHTED]
    f1: NotRequired[WEIGHTED]
    precision_macro: NotRequired[MACRO]
    recall_macro: NotRequired[MACRO]
    f1_macro: NotRequired[MACRO]
    eval_samples: NotRequired[Annotated[Count | None,
        "size of the evaluation set; of several ones (LogCallback alone) all together"]]
    eval_time_s: NotRequired[Annotated[Seconds | None,
        "from the end of the epoch's training to the end of its evaluation, on all sets, and what "
        "evaluations inside the epoch took (LogCallback alone)"]]
    eval_samples_per_s: NotRequired[Annotated[PerSecond | None,
        "`eval_samples` by the time of the evaluation that the metrics are of"]]
    attempt: Annotated[Count, "the attempt that wrote the row"]
    checksum: NotRequired[Annotated[str,
        "of the row's other fields: a row that was changed is not believed"]]
    wall_s: Annotated[Seconds | None,
        "time since the run began, everything included, summed over all attempts; null where it "
        "went on from an attempt that is not recorded here, as with LogCallback in a new folder"]
    measuring_s: Annotated[Seconds | None,
        "what of it the record itself took so far: to measure links, what the exchange adds, the "
        "processor, passes that are not compiled, and to count FLOPs; of earlier attempts as far "
        "as they say. In no other time. Null where it is not known, as in records from before "
        "2026-11-28: readers take `took_s` of environment.json"]
    unix: Annotated[Unix, "when the row was written"]


class RankRow(TypedDict):
    """A row per epoch, written by each rank into a file of its own."""

    epoch: Annotated[Amount, "as in epochs.jsonl"]
    rank: Annotated[Count, "0 to processes - 1"]
    checksum: NotRequired[Annotated[str, "as in epochs.jsonl"]]
    epoch_time_s: Annotated[Seconds,
        "the training part of the epoch on this rank's clock, in the attempt that ended it"]
    step_time_median_s: Annotated[Seconds | None, "as in epochs.jsonl, on this rank's clock"]
    step_time_p95_s: Annotated[Seconds | None, "as in epochs.jsonl, on this rank's clock"]
    data_wait_s: Annotated[Seconds,
        "time that this rank spent waiting for its batches, after the log entry where there is one "
        "(records from before 2026-11-27 include what log entries wait for)"]
    compute_s: NotRequired[Annotated[Seconds | None,
        "of the timed steps: their time without waiting for batches and without "
        "`comm_exposed_s`; null where the time of the exchange is not known: with several "
        "processes for every strategy but ddp, and for dp"]]
    comm_exposed_s: NotRequired[Annotated[Seconds | None,
        "of the timed steps: from the moment when this rank's last local gradient was ready to "
        "the end of the backward pass, in which DDP completes the exchange, and before log entries "
        "the wait for the loss of the other ranks (records from before 2026-11-27 have it in "
        "`data_wait_s`); null without DDP"]]
    comm_wait_s: NotRequired[Annotated[Seconds | None,
        "the part of `comm_exposed_s` beyond the smallest of all ranks at the same update: here "
        "this rank waited for slower ones. Where sums are sent directly, a difference of up to one "
        "round trip at an update is none, unless the ranks' sums over the epoch differ as well"]]
    peak_memory_gib: Annotated[Gib | None,
        "as in epochs.jsonl, of this rank; for dp the largest of its GPUs"]
    reserved_memory_gib: NotRequired[Annotated[Gib | None,
        "as in epochs.jsonl, of this rank; for dp the largest of its GPUs"]]
    user_s: Annotated[Seconds,
        "processor time of this rank's process in user mode, from opening the run to the end of "
        "the epoch's training; worker processes that load data count once they have ended"]
    system_s: Annotated[Seconds, "likewise, in system mode"]
    payload_bytes: Annotated[Bytes | None,
        "as in epochs.jsonl, of this rank; in an epoch begun by other processes, what those had "
        "handed over is counted with rank 0"]
    network_sent_bytes: Annotated[Bytes | None,
        "as in epochs.jsonl, of this rank's node, with its first rank; null with the others"]
    timed_tflop: NotRequired[Annotated[Tflop | None,
        "operations of this rank's timed steps, counted as in epochs.jsonl"]]
    timed_tflop_without_padding: NotRequired[Annotated[Tflop | None, "likewise, without padding"]]
    timed_tokens: NotRequired[Annotated[Count | None,
        "tokens of the texts in the timed steps, without padding; null for images"]]
    timed_padded_tokens: NotRequired[Annotated[Count | None,
        "tokens in the timed steps, with padding; null for images"]]
    eval_samples: NotRequired[Annotated[Count,
        "samples of the evaluation set that this rank evaluated, without those that fill up its "
        "last batch: over all ranks each sample once"]]
    eval_accuracy: NotRequired[Annotated[Share | None,
        "quality on these samples; its mean over the ranks, weighted by `eval_samples`, is that "
        "of the epoch; null for a rank without samples"]]
    eval_top5_accuracy: NotRequired[Annotated[Share | None,
        "quality on these samples; its mean over the ranks, weighted by `eval_samples`, is that "
        "of the epoch; null for a rank without samples"]]
    telemetry: NotRequired[Annotated[RankTelemetry | None,
        "on the first rank of a node, and on each peer of hivemind: its devices and the node, as "
        "in `gpu` and `node` of epochs.jsonl; null where the sampler has died"]]


CPU_OF_ATTEMPT = Annotated[list[Seconds] | None,
    "processor time that it used, by rank; where several processes were interrupted, up to the "
    "last epoch that all of them completed; null before that"]


class AttemptStart(TypedDict):
    """The start of an attempt."""

    event: Annotated[Literal["start"], "`start` or `end`"]
    attempt: Annotated[Positive, "number of the attempt, from 1; null at an end before training "
                                 "began"]
    unix: Annotated[Unix, "when; at the end of a killed attempt, its last sign of life, null "
                          "without one"]
    from_update: Annotated[Count, "the update from which it continued"]
    processes: Annotated[Positive, "how many took part"]
    effective_batch: Annotated[Positive | None, "samples of one update"]
    per_gpu_batch: Annotated[Positive | None,
        "samples per process and forward pass, as they were run: fewer than the setting says "
        "after `--auto_batch`, or while nodes are missing"]
    restarts: Annotated[Count,
        "how often torchrun's agent on rank 0's node had restarted its processes; nodes that join "
        "are not counted"]
    gap_s: Annotated[Seconds | None,
        "from the last sign of life of the attempt before to the opening of the run, where the "
        "same launcher started both; null elsewhere"]
    counted_unix: Annotated[Unix | None,
        "when the checkpoint from which it continued was complete; null without one, and where "
        "that is not known, as of LogCallback alone"]
    lost_s: Annotated[Seconds | None,
        "what the interruption of the attempt before cost: its time after the checkpoint from "
        "which this one continued (or all of it), `gap_s`, and the time from opening the run until "
        "training went on; and the time of earlier attempts that counted until now, if that "
        "checkpoint is older than the one of the attempt before; null for the first, and where "
        "`from_update` is not 0 and `counted_unix` not known"]
    redone_updates: Annotated[Count | None,
        "updates after `from_update` that had counted when the attempt before ended, whichever "
        "attempt had made them, and that are made again; at least, where that end is "
        "`as_reported`, and null where it had reported none of them; null for the first, and where "
        "unknown"]
    checksum: NotRequired[Annotated[str, "as in epochs.jsonl"]]


class AttemptEnd(TypedDict):
    """The end of an attempt; for a killed one, its last report (there is one per second)."""

    event: Annotated[Literal["end"], "`start` or `end`"]
    attempt: Annotated[Positive | None, "number of the attempt, from 1; null at an end before "
                                        "training began"]
    outcome: Annotated[Outcome, "how it ended"]
    reason: Annotated[str | None, "why; null for a finished one"]
    unix: Annotated[Unix | None, "when; at the end of a killed attempt, its last sign of life, "
                                 "null without one"]
    update: Annotated[Count | None, "the last update it completed"]
    as_reported: NotRequired[Annotated[bool,
        "true where it was killed: `update` and the times are those that it had last reported, up "
        "to a second before"]]
    per_gpu_batch: Annotated[Positive | None,
        "samples per process and forward pass, as they were run; null where that is not known"]
    in_step: Annotated[bool | None,
        "whether that was at a training step, not loading, evaluating or saving; null: unknown"]
    wall_s: Annotated[Seconds | None,
        "how long it took; null where a killed process had reported nothing"]
    measuring_s: Annotated[Seconds | None,
        "what of it the record itself took, as in epochs.jsonl; null where that is not known"]
    user_s_per_rank: CPU_OF_ATTEMPT
    system_s_per_rank: CPU_OF_ATTEMPT
    checksum: NotRequired[Annotated[str, "as in epochs.jsonl"]]


OF_LAST_EPOCH = "of the last epoch, on the evaluation set"
OF_TEST_SET = ("of the test set, used once at the end; only of finished runs with "
               "`--validation_split`")
OF_PROCESSOR = ("processor time in user and in system mode, of all ranks and attempts, from "
                "opening the run to its end; a killed attempt counts as far as it had reported; "
                "null if unknown")


class SummaryRecord(TypedDict):
    """What became of the run, whether it finished or not."""

    schema: Annotated[Literal[1],
        "version of these definitions; records of different versions are not compared"]
    outcome: Annotated[Outcome, "see Outcomes"]
    reason: Annotated[str | None, "that of the rank that failed first; null for a finished run"]
    epochs_done: Annotated[Amount | None, "rows in `epochs.jsonl`"]
    updates: Annotated[Count | None, "updates of the run"]
    samples: Annotated[Count | None, "sum of `samples` over the epochs"]
    train_loss: NotRequired[Annotated[Loss | None, OF_LAST_EPOCH]]
    eval_loss: NotRequired[Annotated[Loss | None, OF_LAST_EPOCH]]
    accuracy: NotRequired[Annotated[Share | None, OF_LAST_EPOCH]]
    top5_accuracy: NotRequired[Annotated[Share | None, OF_LAST_EPOCH]]
    precision: NotRequired[Annotated[Share | None, OF_LAST_EPOCH]]
    recall: NotRequired[Annotated[Share | None, OF_LAST_EPOCH]]
    f1: NotRequired[Annotated[Share | None, OF_LAST_EPOCH]]
    precision_macro: NotRequired[Annotated[Share | None, OF_LAST_EPOCH]]
    recall_macro: NotRequired[Annotated[Share | None, OF_LAST_EPOCH]]
    f1_macro: NotRequired[Annotated[Share | None, OF_LAST_EPOCH]]
    best_metric: Annotated[str | None,
        "the metric by which `--best_metric` selects the best epoch on the evaluation set"]
    best_value: Annotated[float | None, "its best value"]
    best_epoch: Annotated[Amount | None, "the epoch that has it, the earlier one of equals"]
    test_loss: NotRequired[Annotated[Loss | None, OF_TEST_SET]]
    test_accuracy: NotRequired[Annotated[Share, OF_TEST_SET]]
    test_top5_accuracy: NotRequired[Annotated[Share, OF_TEST_SET]]
    test_precision: NotRequired[Annotated[Share, OF_TEST_SET]]
    test_recall: NotRequired[Annotated[Share, OF_TEST_SET]]
    test_f1: NotRequired[Annotated[Share, OF_TEST_SET]]
    test_precision_macro: NotRequired[Annotated[Share, OF_TEST_SET]]
    test_recall_macro: NotRequired[Annotated[Share, OF_TEST_SET]]
    test_f1_macro: NotRequired[Annotated[Share, OF_TEST_SET]]
    test_samples: NotRequired[Annotated[Count, "size of the test set, likewise"]]
    test_epoch: NotRequired[Annotated[Amount | None,
        "the epoch whose weights were tested: the best one with `--save best`, else the last"]]
    train_samples_per_s: Annotated[PerSecond | None, "over the timed steps of all epochs"]
    train_samples_per_s_per_gpu: Annotated[PerSecond | None, "that / number of devices"]
    train_time_s: Annotated[Seconds | None, "sum of `epoch_time_s`; null where one is unknown"]
    eval_time_s: Annotated[Seconds | None, "sum of `eval_time_s`"]
    save_time_s: NotRequired[Annotated[Seconds,
        "time spent writing checkpoints in the last attempt"]]
    wall_s: Annotated[Seconds | None,
        "everything, from opening the run to its end, summed over all attempts; a killed attempt "
        "counts as far as it had reported; null where that is less than the training took, and "
        "where the run went on from an attempt that is not recorded here, as with LogCallback in a "
        "new folder"]
    restarts: Annotated[Count,
        "attempts that the launcher itself started, after a process or a node was lost or one had "
        "joined"]
    lost_s: Annotated[Seconds | None,
        "sum over the rows of attempts.jsonl; 0 for a run that was not interrupted; null where an "
        "interruption does not know it"]
    redone_updates: Annotated[Count | None,
        "likewise; at least, where an attempt was killed"]
    goodput_share: Annotated[Share | None,
        "`train_time_s` / (`wall_s` + the sum of `gap_s`): the share of its time in which the run "
        "made updates that count. Lost updates, evaluation, saving, loading and waiting for nodes "
        "do not count; null where a killed attempt had reported nothing"]
    user_s: Annotated[Seconds | None, OF_PROCESSOR]
    system_s: Annotated[Seconds | None, OF_PROCESSOR]
    user_s_per_rank: Annotated[list[Seconds] | None,
        "the same by rank; that of a node is the sum of its ranks; null where attempts had "
        "different numbers of processes"]
    system_s_per_rank: Annotated[list[Seconds] | None,
        "the same by rank; that of a node is the sum of its ranks; null where attempts had "
        "different numbers of processes"]
    payload_bytes: Annotated[Bytes | None, "sum over the epochs; null where one is unknown"]
    network_sent_bytes: Annotated[Bytes | None, "sum over the epochs; null where one is unknown"]
    energy_j: Annotated[Joules | None, "sum over the epochs; null where one is unknown"]
    joules_per_sample: Annotated[Joules | None,
        "`energy_j` / `samples`: of devices alone, without processors, memory and fans, evaluation "
        "and saving"]
    tflops_per_s: Annotated[TflopPerSecond | None,
        "mean over the timed seconds of all epochs; null where an epoch does not know it"]
    mfu: Annotated[Ratio | None,
        "mean over the timed seconds of all epochs; null where an epoch does not know it"]
    gpu_utilisation_percent: Annotated[Percent | None,
        "mean over the timed seconds of all epochs of `gpu.utilisation_percent.mean`"]
    attempts: NotRequired[Annotated[Positive, "attempts of the run"]]
    peak_memory_gib: Annotated[Gib | None,
        "the largest of all ranks (for dp of all GPUs) and epochs"]
    reserved_memory_gib: Annotated[Gib | None,
        "the largest of all ranks (for dp of all GPUs) and epochs"]
    comm_share: Annotated[Gain | None,
        "what the exchange adds to a step, as a share of the step: `comm_probe.comm_share` of "
        "environment.json; null where it was not measured"]
    comm_exposed_share: Annotated[Share | None,
        "mean over the epochs, weighted by `timed_s`; null where one is unknown"]
    compute_skew: Annotated[Ratio | None,
        "mean over the epochs, weighted by `timed_s`; null where one is unknown"]
    trainer_train_samples_per_second: NotRequired[Annotated[PerSecond | None,
        "the Trainer's own figure, which includes evaluation, saving and warm-up; for comparison "
        "only; null where the last attempt trained nothing"]]
    checksum: NotRequired[Annotated[str, "as in epochs.jsonl"]]


class ReportedProgress(TypedDict):
    """How far an attempt is, as it reports it."""

    attempt: Annotated[Positive, "number of the attempt"]
    epoch: Annotated[Amount | None, "epochs trained, with their fraction"]
    update: Annotated[Count, "the last update it completed"]
    updates: Annotated[Count, "updates planned"]
    loss: Annotated[float | None, "the last that was logged"]
    wall_s: Annotated[Seconds, "since this attempt opened the run"]
    measuring_s: Annotated[Seconds, "what of it the record itself took"]
    user_s_per_rank: CPU_OF_ATTEMPT
    system_s_per_rank: CPU_OF_ATTEMPT


class ProgressRecord(ReportedProgress):
    """Where an attempt is; written once per second and as an epoch ends, removed at the end."""

    unix: Annotated[Unix, "when it was written"]
    checksum: NotRequired[Annotated[str, "as in epochs.jsonl"]]


class FailureRecord(TypedDict):
    """Why a rank failed."""

    rank: Annotated[Count, "the rank that writes"]
    outcome: Annotated[Outcome, "see Outcomes"]
    reason: Annotated[str, "the error"]
    unix: Annotated[Unix, "when"]
    in_step: NotRequired[Annotated[bool | None,
        "whether it was at a training step, not loading, evaluating or saving; null: unknown"]]


class PeerRecord(TypedDict):
    """What one process of a hivemind run has contributed so far; one record for each process."""

    rank: Annotated[Count, "its rank"]
    from_epoch: Annotated[Amount, "the first epoch in which it took part"]
    to_epoch: Annotated[Amount, "the last epoch in which it took part"]
    before: NotRequired[Annotated[Any,
        "this record without the epoch `to_epoch`, in case its row is never written; null if it "
        "took part in none before"]]
    samples: Annotated[Amount, "samples that went into updates"]
    fed: Annotated[Amount, "samples fed, those thrown away included"]
    loss: Annotated[Any, "sum of the losses of its samples"]
    loss_samples: NotRequired[Annotated[Amount,
        "the samples of that sum: those fed to the end of the last epoch that it reported"]]
    payload: Annotated[Amount, "bytes that it handed over"]
    network: Annotated[Amount, "bytes that its node sent"]
    failed_averages: Annotated[Amount, "averaging rounds that it had to skip"]
