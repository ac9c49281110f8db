"""What tables say of devices: how much of them is used, how long, and what they take."""

from __future__ import annotations

from collections.abc import Collection

MFU, BUSY = "mfu", "gpu_utilisation_percent"
TFLOPS, ENERGY, JOULES = "tflops_per_s", "energy_j", "joules_per_sample"
FIELDS = (TFLOPS, MFU, BUSY, ENERGY, JOULES)
HEADINGS = {
    TFLOPS: "TFLOP/s",
    MFU: "MFU",
    BUSY: "GPU busy %",
    ENERGY: "energy J",
    JOULES: "J/sample",
}
DEFINITIONS = {
    TFLOPS: "TFLOP/s: 10^12 operations a second of the model, padding included",
    MFU: "MFU: share of what the devices can do at most",
    BUSY: "GPU busy: of the time, however little it computes",
    ENERGY: "energy J: of the devices alone",
    JOULES: "J/sample: of the devices alone",
}


def usual(known: Collection[str]) -> list[str]:
    """The columns where these are known. MFU and GPU utilisation are shown together or not at all:
    neither says anything without the other.
    """
    pair = [MFU, BUSY] if MFU in known or BUSY in known else []
    return [*pair, *([JOULES] if JOULES in known else [])]


def paired(names: list[str]) -> list[str]:
    """The names of columns with the other one beside the first of these two."""
    found = [name for name in names if name in (MFU, BUSY)]
    if not found:
        return names
    at = names.index(found[0])
    rest = [name for name in names[at:] if name not in found]
    return [*names[:at], MFU, BUSY, *rest]
