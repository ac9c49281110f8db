"""What the words of tables and reports mean."""

from __future__ import annotations

from harness.core.records import SUMMARY
from harness.read.compare.compare import OF_UNCERTAIN, TOO_UNCERTAIN
from harness.read.measures import BANDWIDTH, RTT
from harness.read.records.baseline import POINTS, RATE, STRONG, WEAK
from harness.read.statistics import Noise
from harness.read.tables.columns import BUSY, ENERGY, JOULES, MFU, TFLOPS

EFFECTIVE_BATCH = "samples of one update over all processes"
SAMPLES_PER_S = "samples/s: training only, all processes, first steps left out"
WEAK_SCALING = "weak X_N/(N X_1) of samples/s at equal batch per device"
# Below the table of a sweep, each only where its column is shown.
OF_COLUMNS = {
    "effective_batch": f"batch: {EFFECTIVE_BATCH}",
    RATE: f"{SAMPLES_PER_S}, harmonic mean",
    "train_time_s": "train s: without evaluation and saving",
    "wall_s": "wall s: everything",
    "peak_memory_gib": "peak GiB: on a CPU of the whole process, with freed memory that the C "
    "library keeps",
    POINTS: "acc. points: percentage points of accuracy",
    "payload_mb_per_update": "payload: what the strategy hands over to be sent",
    "network_mb_per_update": "sent: what left the nodes' interfaces",
    TFLOPS: "TFLOP/s: 10^12 operations a second of the model, padding included",
    MFU: "MFU: share of what the devices can do at most (a CPU in products of matrices, which "
    "convolutions may exceed)",
    BUSY: "GPU busy: of the time, however little it computes",
    ENERGY: "energy J: of the devices alone",
    JOULES: "J/sample: of the devices alone",
    RTT: "round trip ms: measured between nodes before training, of the slowest pair",
    BANDWIDTH: "link Mbit/s: likewise, one way between two nodes",
}
OF_SCALING = {WEAK: WEAK_SCALING, STRONG: "strong T_1/(N T_N) of train s at equal batch"}
OF_LAST_EPOCH = (
    "accuracy, f1, eval loss and own metrics: of the last epoch, though --save best may have kept "
    f"the weights of an earlier one (best_epoch in {SUMMARY})"
)

# Below a table of runs.
OF_RUNS = (
    f"batch: {EFFECTIVE_BATCH}; {SAMPLES_PER_S}; wall s: everything from start to end, earlier "
    "attempts included"
)
OF_IMPORTED = (
    "imported: what others have measured, read from their files; as their source says it, "
    "on machines that are not known here"
)

# At the end of a report: what all its tables use; each table defines its own words besides.
OF_REPORT = {
    "samples/s": "training samples of the timed steps over all processes, divided by their time; "
    "evaluation, saving and the first steps are left out.",
    "training time": "the training part of all epochs, without evaluation and saving.",
    "wall time": "everything from the start of a run to its end, all attempts added up.",
    "accuracy, top-5, loss": "of the last epoch, over the whole evaluation set, each sample once; "
    "by node, of the node's share of the set.",
    "effective batch": f"{EFFECTIVE_BATCH}.",
    "±": "sample standard deviation over the seeds; bands and bars in figures are 95 % intervals "
    "of the mean (Student's t), points are single runs.",
    "scaling efficiency": f"{WEAK_SCALING}, strong "
    "T_1/(N T_N) of training time at equal effective batch; in figures 1 is one device, and what "
    "has no run on one is not drawn; in tables 1 is the baseline, and N counts its devices as one.",
    "time to accuracy": "wall time, but for what the record took to measure, and training time, "
    "to the end of the first epoch that reaches the target; a miss is infinite, and is counted.",
    "where the time went": "of the median rank, means over the seeds; what the records do not "
    "separate is one part.",
}
# Where a section has a hypothesis.
OF_HYPOTHESIS = {
    "hypothesis": "free text of the sweep file. What it says in numbers (expect) holds where the "
    "whole 95 % interval is within its bounds, does not hold where all of it is outside, and is "
    "open in between."
}
# Where a section has text of this pattern.
IF_USED = {
    r"\b\d+_\d+\b": (
        "set-up 1_2", "one node with two processes; a word behind it names the link between nodes."
    ),
    Noise.UNKNOWN: (
        Noise.UNKNOWN, "a side has too few runs that count for an interval: the difference may be "
        "chance."
    ),
    TOO_UNCERTAIN: (TOO_UNCERTAIN, f"{OF_UNCERTAIN.partition(': ')[2]}."),
    Noise.NO_SPREAD: (
        Noise.NO_SPREAD, "all seeds differ from the baseline by the same amount: it may be chance, "
        "and more seeds tell."
    ),
}  # fmt: skip
