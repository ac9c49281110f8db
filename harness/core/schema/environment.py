"""settings.json, environment.json and sweep.json, field by field."""

# Formatted by hand: the formatter would give each bracket of the long meanings a line of its own.
# fmt: off

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from harness.core.schema.fields import (
    Amount,
    Bytes,
    Count,
    Field,
    Gain,
    GigabytePerSecond,
    Kind,
    Mbit,
    Milliseconds,
    Operations,
    PerSecond,
    Positive,
    Seconds,
    Share,
    TflopPerSecond,
    Unix,
    Value,
    Watts,
)
from harness.core.schema.machine import MachineRecord
from harness.core.settings import UNRECORDED, flag_fields, options_off
from harness.core.tasks import names


class CommProbeRecord(TypedDict):
    with_s: Annotated[list[Seconds],
        "of each pair of passes forward and backward over one batch, with fsdp of all passes of an "
        "update: how long the one that exchanges gradients took, until the last rank had finished"]
    without_s: Annotated[list[Seconds], "likewise, the one that exchanges nothing"]
    step_s: Annotated[Seconds | None,
        "`step_time_median_s` of the first epoch that ended after the probe; null before"]
    comm_share: Annotated[Gain | None,
        "median difference of the pairs / `step_s`: 1 - step time without exchange / step time "
        "with it. Near 0 it may be negative: then noise exceeds what the exchange adds; null "
        "before, and where it exceeds the whole step: then the machine was disturbed"]
    took_s: Annotated[Seconds, "total time of the probe; part of `wall_s` and of no other time"]


class ExchangeEstimates(TypedDict, total=False):
    """Estimated time of one exchange by each way, from the measured link."""

    backend: Annotated[Seconds, "as measured, corrected for the bytes that are sent"]
    direct: Annotated[Seconds, "to those who add a part, and back: two delays; one of two nodes"]
    all_to_all: Annotated[Seconds, "of more than two nodes: one delay, and more bytes"]


class PaddingRead(TypedDict):
    train_batch: Annotated[Positive, "texts padded together in training"]
    eval_batch: Annotated[Positive | None, "in evaluation; null: texts of one length, unpadded"]


class ObservedRecord(TypedDict, total=False):
    strategy: Annotated[str, "how the trained model was really wrapped or sharded"]
    world: Annotated[Positive, "processes of the group"]
    backend: Annotated[str | None, "its backend; null for one process"]
    device: Annotated[str, "rank 0's device"]
    own_model: Annotated[str, "class of an own model, with `--model` if it has a configuration"]
    devices: Annotated[Positive, "GPUs of one process; for dp only"]
    parameters: Annotated[Count, "tensors of the model"]
    sharded_parameters: Annotated[Count, "how many of them are split"]
    batchnorm_layers: Annotated[Count, "layers of the model with BatchNorm, of any kind"]
    parameter_bytes: Annotated[Bytes, "of the whole model"]
    trained_bytes: Annotated[Bytes,
        "of its trained parameters, over all ranks; with `--lora` those of adapters and head"]
    parameter_bytes_per_rank: Annotated[Bytes, "on rank 0"]
    dtype: Annotated[str, "number format in which the first layer computed"]
    compiled_graphs: Annotated[Count,
        "with `--torch_compile`: graphs that torch compiled for rank 0 during training"]
    compiled_in_updates: Annotated[list[Count],
        "with `--torch_compile`: the updates in which it compiled (the first 50 of them); those "
        "after `timing_warmup_steps` are part of the rates"]
    compile_s: Annotated[Seconds,
        "with `--torch_compile`: how much longer those updates took than the median of the others; "
        "absent without others"]
    compiled_pass_s: Annotated[Seconds,
        "with `--torch_compile` and one process: median of up to three passes forward and backward "
        "over one batch, after three updates without compiling; absent with `--comm_probe off`, "
        "where passes are slow (two updates take 10 s), or memory lacks for those that are not "
        "compiled. On a CPU they are part of peak memory"]
    eager_pass_s: Annotated[Seconds, "likewise, of the same model and batch without compiled code"]
    find_unused_parameters: Annotated[bool,
        "with ddp: whether DDP looks for parameters without a gradient in every update, as it must "
        "for a model whose loss does not depend on all of them"]
    gradient_hook: Annotated[str | None,
        "what DDP calls to exchange gradients instead of its default, such as "
        "`DirectGradients.hook` with `--exchange direct`; null for the default, and without DDP"]
    exchange: Annotated[str,
        "with ddp, local_sgd and diloco: the way that their sums took, `backend`, `direct` or "
        "`all_to_all`; `--exchange auto` has chosen it, and an attempt that goes on keeps it"]
    exchange_estimates_s: Annotated[ExchangeEstimates,
        "with `--exchange auto` over a link of 1 ms or more there and back: what it was chosen by"]
    exchange_early_s: Annotated[Seconds,
        "of sums sent directly over a link: the round trip by which ranks may differ at an update "
        "for the delay alone, and which `comm_wait_s` leaves out; where it is absent, as the round "
        "trip is not known, readers do not know how long ranks waited for slower ones"]
    padding: Annotated[str,
        "of texts, the layout of a batch: `packed`, all tokens in one row, with attention by "
        "`runs` of equal length (CPU; in half precision the row is filled up to a multiple of 32 "
        "tokens), by torch's `kernel` for texts of any length (CUDA in half "
        "precision) or `padded` for itself alone; `parts`, at most four of similar length, fed "
        "one after the other; or `batch`, padded to the longest. Loss and gradient are the same "
        "up to rounding; dropout draws different masks. A model whose scores depend on padding "
        "has `batch`, and so has one that does not compute in float64, where this is tried"]
    padding_reason: Annotated[str | None,
        "why it is not the layout before it in this list: what about the model, the device or a "
        "setting rules that out; null for the kernel"]
    loss_of_batch: Annotated[str,
        "of a model with layers or a loss of its own that reads texts: that a trial found the loss "
        "of a batch not to be the mean of those of its texts; absent where it is, and where it "
        "cannot be tried. More ranks, or `--grad_acc`, are then another training"]
    reads_padding: Annotated[PaddingRead,
        "of a model that reads texts: that a trial found its scores to depend on padding, and so "
        "on which texts are padded together; absent where they do not, and where it cannot be "
        "tried (with fsdp, less than rounding). Another split of a batch is another training"]
    shares: Annotated[list[Positive],
        "with `--balance`: samples of each rank in a forward pass, which make `per_gpu_batch` on "
        "average"]
    decayed_tensors: Annotated[Count, "tensors with weight decay"]
    decayed_vectors: Annotated[Count, "those among them with one dimension"]
    muon_matrices: Annotated[Positive, "with `--muon`: the matrices that Muon trains"]
    sync_every: Annotated[Positive,
        "with local_sgd and diloco: updates between two exchanges"]
    sync_first: Annotated[Count,
        "likewise: updates that all make together before they train separately"]
    sync_scope: Annotated[str, "likewise: which units train separately in between"]
    units: Annotated[Positive, "likewise: how many units there are"]
    exchanges: Annotated[Count,
        "likewise: exchanges that took place, each fragment counted by itself; a run whose "
        "exchanges are not those that were asked for is not recorded"]
    first_exchange_update: Annotated[Count | None,
        "likewise: the update after which the first exchange took effect"]
    exchanged_bytes: Annotated[Bytes,
        "likewise: what a unit hands over when all weights are exchanged once, as it is sent"]
    kept_bytes: Annotated[Bytes,
        "likewise: the most memory that a rank needs for this beyond what ddp needs"]
    fragments: Annotated[Positive, "with diloco: parts that are exchanged one after the other"]
    overlap: Annotated[Count, "with diloco: updates until an exchange takes effect"]


class CalibrationRecord(TypedDict):
    """The most that the first node's processor can do, measured on each machine by a process with
    the number of threads of a training process, and cached for six hours."""

    fp32_tflops: Annotated[TflopPerSecond | None,
        "of the product of two matrices of 1024 x 1024, or of 256 x 256 where such a product takes "
        "over 10 ms; null, and not cached, where the threads had less than nine tenths of their "
        "processor time in each repetition: other programs or a quota took it, or the product used "
        "fewer threads"]
    bf16_tflops: Annotated[TflopPerSecond | None, "likewise"]
    memory_gb_per_s: Annotated[GigabytePerSecond, "read and written by a large copy"]
    threads: Annotated[Positive, "torch's threads"]
    unix: Annotated[Unix | None,
        "when the products and the copy were measured, at most six hours before the run; null "
        "where that is not known"]
    bf16_gain: Annotated[Amount | None,
        "how many times as fast the passes of one batch of this run's model are with `--precision "
        "bf16`, in a few passes before training; null for another precision than fp32, where "
        "products are not at least 1.3 times as fast in bf16, where it cannot be tried or two "
        "passes of each take longer than 3 s, and where other programs disturbed them: they gain "
        "more than the products do, or 1.25 times as much or as little as in processor time"]


class FlopsRecord(TypedDict):
    how: Annotated[str | None, Value(choices=("closed form", "counted")),
        "how the operations of a sample are known (below)"]
    missing: Annotated[str | None, "why they are not known; null if they are"]
    per_sample: Annotated[Operations | None, "of the forward and the backward pass, see above"]
    per_token: Annotated[Operations | None, "of the forward and the backward pass, see above"]
    per_pair_of_tokens: Annotated[Operations | None,
        "of the forward and the backward pass, see above"]
    peak_tflops_per_gpu: Annotated[TflopPerSecond | None,
        "dense peak of one device in the run's number format, the mean over ranks, on CPUs over "
        "nodes; null where unknown, as where other programs kept a node's processor busy"]
    peak_from: Annotated[str | None, Value(choices=("table", "calibration", "flag")),
        "its source: the table in harness/train/measure/flops.py, from data sheets; on a CPU "
        "`cpu_calibration`, of a process; or the flag `--peak_tflops`"]


class LinkPair(TypedDict):
    """What was measured between the first ranks of two nodes; null where time ran out."""

    nodes: Annotated[list[Count], "the two nodes"]
    rtt_min_ms: Annotated[Milliseconds | None, "round trip of 32 bytes: minimum of up to 20"]
    rtt_median_ms: Annotated[Milliseconds | None, "round trip of 32 bytes: median of up to 20"]
    bandwidth_mbit: Annotated[Mbit | None,
        "size of a transfer from the lower node to the other / (time until it is acknowledged - "
        "minimum round trip); null where that transfer was too short to tell: less than a round "
        "trip long, or than 6 with less than 2^20 bytes, which wait for TCP to open its window"]
    transfer_bytes: Annotated[Bytes | None, "size of that transfer"]


class MeasuredLinks(TypedDict):
    """What is measured between nodes, by a run or by `python -m harness link`."""

    asked: Annotated[Any,
        "what the launcher was asked for: `delay_ms` one way, `rate_mbit`, `jitter_ms`, `loss`, as "
        "far as given; for unequal links a list with the two `nodes` of each; null where nothing "
        "was"]
    interface: Annotated[str | None,
        "of rank 0's node: named by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, else that of the "
        "process's TCP connections, without those to the launcher; null if these use none or "
        "several"]
    pairs: Annotated[list[LinkPair],
        "for each pair of `nodes` its `rtt_min_ms`, `rtt_median_ms`, `bandwidth_mbit` and "
        "`transfer_bytes`; of more than 8 nodes, each with node 0 only"]
    rtt_min_ms: Annotated[Milliseconds | None, "of the slowest pair"]
    rtt_median_ms: Annotated[Milliseconds | None, "of the slowest pair"]
    bandwidth_mbit: Annotated[Mbit | None,
        "of the slowest pair whose rate is known; null where none is, or where a much more distant "
        "pair's is not. On more than two distant nodes, records from before 2026-11-27 may count a "
        "first transfer, which waited for TCP's window, and so hold too low a rate"]
    took_s: Annotated[Seconds, "total time of measuring; part of `wall_s` and of no other time"]
    warning: Annotated[str | None, "how a link differs from the one asked for (below)"]


class LinkRecord(MeasuredLinks):
    gradient_bytes: Annotated[Bytes, "of the model: size of its trainable weights"]
    allreduce_bytes: Annotated[Bytes | None,
        "what was all-reduced over all ranks, as one tensor: the gradient's size, or 2^29 bytes if "
        "that is less, or what time allowed"]
    allreduce_s: Annotated[Seconds | None, "how long that took on rank 0"]
    allreduce_algbw_mbit: Annotated[Mbit | None, "size / time"]
    allreduce_busbw_mbit: Annotated[Mbit | None,
        "that times 2(n-1)/n for n ranks: what each rank's link carried"]


class DataRecord(TypedDict, total=False):
    dataset: Annotated[str | None, "where the samples come from"]
    test_from: Annotated[str, "where the test set comes from"]
    input_columns: Annotated[list[str], "columns that are fed"]
    label_column: Annotated[str, "column of the class"]
    classes: Annotated[Positive, "number of classes"]
    majority_share: Annotated[Share,
        "share of the largest class among the samples of an evaluation: the accuracy of naming it "
        "for every sample"]
    train_samples: Annotated[Count | None, "training samples used"]
    available_samples: Annotated[Count,
        "training samples that the data have, where `--train_size` draws fewer"]
    left_out_samples: Annotated[Count, "training samples left out because they fill no whole batch"]
    test_samples: Annotated[Count | None, "test samples"]
    validation_samples: Annotated[Count, "validation samples; only with `--validation_split`"]
    validation_from: Annotated[str, "where they come from; only with `--validation_split`"]
    alike_classes: Annotated[list[str],
        "classes whose names differ in case, blanks or the form of a number (`1`, `1.0`) alone, "
        "with their samples; left out without any"]
    rare_classes: Annotated[list[str],
        "classes with less than a fiftieth of the mean number of samples of a class, with theirs; "
        "left out without any"]
    untrained_classes: Annotated[list[str],
        "classes of test or validation samples that no training sample has, with these samples; "
        "left out without any"]
    blank_texts: Annotated[list[str],
        "how many rows of each split have a text that is empty or blanks alone, and which are the "
        "first; left out without any"]
    unused_test_splits: Annotated[list[str],
        "splits named as test sets that are not used because they give no class; left out without "
        "any"]
    empty_test_splits: Annotated[list[str], "those of them that have no rows; left out without any"]
    test_samples_in_training: Annotated[Count,
        "test samples whose input (text or image, to the byte) is that of a training sample"]
    validation_samples_in_training: Annotated[Count,
        "likewise of the validation samples; only with `--validation_split`"]
    data_checksum: Annotated[str | None,
        "SHA-256 (16 digits) over the classes and the content of all samples; in the published "
        "records of sets of 4,000 samples or more, over the content of evenly spaced ones"]
    max_length: Annotated[Positive, "of texts: longest allowed, in tokens"]
    mean_tokens: Annotated[Amount, "of texts: mean over all, in tokens"]
    truncated_texts: Annotated[Count | None,
        "of texts: how many of all were longer and have been cut off; null with a tokenizer that "
        "is written in Python, which does not tell"]
    image_shape: Annotated[list[Positive], "of images: channels, height, width"]
    resized_by: Annotated[str | None, "of images: what resized them"]
    sixteen_bit_images: Annotated[Count,
        "grey images with 16 bits, whose values were divided by 257"]
    pixels_on: Annotated[str, Value(choices=("device", "host")),
        "of images: where batches are gathered; `device` if the array fits into a quarter of the "
        "GPU's free memory"]


class InputRecord(TypedDict):
    files: Annotated[Count, "number of files"]
    bytes: Annotated[Bytes, "their sizes together"]
    checksum: Annotated[str, "SHA-256 (16 digits) over their names and content"]


class InputsRecord(TypedDict):
    """Inputs that may change under the same command; a finished run is reused only if none did."""

    dataset: Annotated[InputRecord | None, "local files of the data set; null for one of the Hub"]
    model: Annotated[InputRecord | None, "local files of the model; null for one of the Hub"]
    script: NotRequired[Annotated[InputRecord | None,
        "a script of your own and what it imports from its folder, without comments; null for one "
        "of ours"]]
    strategy: NotRequired[Annotated[InputRecord | None,
        "likewise the file of a strategy of your own; null for one of ours"]]
    code: Annotated[str, "checksum of the scripts and of harness/core and harness/train"]
    link: NotRequired[Annotated[str | None,
        "between the nodes of `python -m harness nodes`; null for a run outside them"]]


class SetupRecord(TypedDict):
    """Who takes part, and what is planned."""

    nodes: Annotated[Positive, "nodes that really took part"]
    processes_per_node: Annotated[Positive, "processes on each of them"]
    effective_batch: Annotated[Positive | None, "as in epochs.jsonl, planned"]
    updates: Annotated[Count | None, "as in epochs.jsonl, planned"]


class MeasuredRecord(TypedDict):
    """What training and its measures find out beside the rows of epochs."""

    first_learning_rate: NotRequired[Annotated[Amount | None,
        "of the first update: 0 where there is a warm-up"]]
    timing_warmup_steps: NotRequired[Annotated[Count,
        "first steps of a process that are not timed: 10, or a fifth of an epoch if that is less"]]
    comm_probe: NotRequired[Annotated[CommProbeRecord | None,
        "what the exchange adds to a step, measured once after the steps that are not timed "
        "(below); null where it was not"]]
    comm_probe_missing: NotRequired[Annotated[str | None, "why not; null where it was"]]
    telemetry_hz: NotRequired[Annotated[PerSecond, "readings of devices and nodes per second"]]
    telemetry_missing: NotRequired[Annotated[dict[str, str],
        "what is not read, and why, by the name of the reading"]]
    idle_power_w: NotRequired[Annotated[Watts | None,
        "what all devices of the run together draw before training: the smallest reading since "
        "the run was opened, before anything is on them; null where unknown"]]
    cpu_calibration: NotRequired[Annotated[CalibrationRecord | None,
        "what the processor can do at most; null where a GPU trains"]]
    flops: NotRequired[Annotated[FlopsRecord, "operations of a sample, and peak of a device"]]


class KnownRecord(TypedDict):
    """What is known of model, links, data and files, each as soon as it is."""

    observed: NotRequired[Annotated[ObservedRecord, "what was really built, seen on rank 0"]]
    link: NotRequired[Annotated[LinkRecord | None,
        "what the links between nodes carry, measured before the first step (below); null for one "
        "node"]]
    data: NotRequired[Annotated[DataRecord, "the samples"]]
    inputs: NotRequired[Annotated[InputsRecord, "local files and code that the numbers come from"]]


class EnvironmentRecord(MachineRecord, SetupRecord, MeasuredRecord, KnownRecord):
    """Where the run took place and what was checked at its start."""


NOTHING, UNMEASURED = KnownRecord(), MeasuredRecord()


def environment_record(
    machine: MachineRecord, nodes: int, processes_per_node: int, effective_batch: int | None,
    updates: int | None, opened: KnownRecord = NOTHING, built: KnownRecord = NOTHING,
    measured: MeasuredRecord = UNMEASURED,
) -> EnvironmentRecord:
    """The content of environment.json, for all that write one.

    opened: what is known when the run is opened; built: once the model is made; measured: later.
    """
    return {
        **machine,
        **opened,
        "nodes": nodes,
        "processes_per_node": processes_per_node,
        **built,
        "effective_batch": effective_batch,
        "updates": updates,
        **measured,
    }


class ImportedRecord(TypedDict):
    source: Annotated[str,
        "who made it and where (`--source`), else the format; `machine` is then `imported:` and "
        "this, so that it is never averaged with runs measured here, nor with those of another "
        "source. A column `imported` in `load()` and `load_runs()`, null for runs measured here"]
    format: Annotated[str, Value(choices=("callback-text", "trainer-state")),
        "`callback-text` has a list per line and the settings in the file's name; `trainer-state` "
        "is a trainer_state.json"]
    file: Annotated[str, "name of the file"]
    sha256: Annotated[str, "checksum of its content: a file is imported once"]
    begins: Annotated[str | None,
        "checksum of the first timed entry of a trainer_state.json: two states of one run are not "
        "two runs"]
    source_numbers: Annotated[dict[str, Any],
        "numbers of the source that have no counterpart here, under their own names: "
        "`train_runtime` includes evaluation and saving"]
    notes: Annotated[list[str], "in what its definitions may differ"]


class SettingsRecord(TypedDict, total=False):
    """Every setting, and the Trainer's arguments; the flags' own fields are those of Settings."""

    schema: Annotated[Literal[1], "version of these definitions"]
    script: Annotated[str, f"`{names('` or `')}`"]
    trainer: Annotated[dict[str, Any], "flags that were passed through to the Trainer"]
    training_arguments: Annotated[dict[str, Any],
        "every argument of the Trainer as resolved, without paths, secrets and names of projects; "
        "once training has begun"]
    imported: Annotated[ImportedRecord, "of imported runs only"]


# Kind of a flag -> kind of its value in settings.json.
FLAG_KINDS = {
    "text": Kind(str), "bool": Kind(bool), "seed": Kind(int, Value(minimum=0)),
    "count": Kind(int, Value(minimum=1)), "natural": Kind(int, Value(minimum=0)),
    "share": Kind(float, Value(minimum=0, maximum=1)), "positive": Kind(float, Value(minimum=0)),
    "rate": Kind(float, Value("1/s", minimum=0)), "seconds": Kind(float, Value("s", minimum=0)),
    "size": Kind(object),
}


def setting_fields() -> dict[str, Field]:
    """A field of settings.json for each flag, from the flag's own definition."""
    declared = {}
    for name, flag in flag_fields().items():
        if name not in UNRECORDED:
            about = flag.metadata
            kind = FLAG_KINDS[about["kind"]]
            choices = about["choices"] if name != "strategy" else ()  # it may also be FILE.py:CLASS
            if name == "epochs":  # LogCallback alone may record a fraction
                kind = FLAG_KINDS["positive"]
            value = Value(kind.value.unit, kind.value.minimum, kind.value.maximum, choices)
            meaning = about["help"].replace("|", "or")
            required = name not in options_off()
            declared[name] = Field(name, Kind(kind.base, value, True), meaning, required)
    return declared


class PlannedRunRecord(TypedDict):
    label: Annotated[dict[str, Any], "its value on each axis, and its seed"]
    path: Annotated[str | None, "its folder, relative to output_dir"]
    skipped: Annotated[str | None, "why it was not run; null for a run that was not skipped"]


# Measures an expectation may bound, by ratio or in points; a user's own metric has unknown scale.
BY_RATIO = ("train_samples_per_s", "epoch_time_s", "peak_memory_gib", "tta_wall_s", "tta_train_s")
EXPECTED_MEASURES = (*BY_RATIO, "accuracy", "f1", "test_accuracy", "test_f1")


class ExpectedRecord(TypedDict):
    of: Annotated[dict[str, Any], "values of some axes: the way to run that it is about"]
    against: Annotated[dict[str, Any] | None, "those it is compared with; null for the baseline"]
    measure: Annotated[str, Value(choices=EXPECTED_MEASURES), "what is compared"]
    at_least: Annotated[float | None,
        "a ratio above 0, or of a share percentage points; null for no lower bound"]
    at_most: Annotated[float | None, "null for no upper bound"]


class SweepRecord(TypedDict):
    """The plan that joins runs into one sweep; written by the launcher."""

    schema: Annotated[Literal[1], "version of these definitions"]
    name: Annotated[str, "of the sweep"]
    question: Annotated[str | None, "what it answers"]
    hypothesis: Annotated[str | None, "what was expected, written down before the runs"]
    expect: Annotated[list[ExpectedRecord],
        "what it says in numbers: for each `of`, `against`, `measure`, `at_least`, `at_most`"]
    changed_after: NotRequired[Annotated[str | None,
        "how many runs had finished when `hypothesis` or `expect` was first changed"]]
    file: Annotated[str, "the file that plans it"]
    tiny: Annotated[bool, "whether at laptop size"]
    command: Annotated[str, "the command line"]
    axes: Annotated[list[str],
        "what varies, in order; never `seed` or `repeat`, which repeat a measurement"]
    baseline: Annotated[dict[str, Any] | None, "values of some axes"]
    target: Annotated[dict[str, Any] | None,
        "`metric`, a field of epochs.jsonl, and `value`; a loss is reached from above"]
    hold: Annotated[str | None, Value(choices=("per_gpu_batch", "effective_batch")),
        "what stays the same where the number of processes varies"]
    lr_rule: Annotated[str | None, Value(choices=("none", "linear", "sqrt")),
        "how the learning rate follows the batch"]
    columns: Annotated[list[str] | None, "names of columns to show instead of the usual ones"]
    per_node: Annotated[bool, "whether each node has a row below that of its group"]
    runs: Annotated[list[PlannedRunRecord], "for each run its `label`, `path` and `skipped`"]
