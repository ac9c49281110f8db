"""environment.json, its first fields: the machine, and how the run was launched there."""

# Formatted by hand: the formatter would give each bracket of the long meanings a line of its own.
# fmt: off

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from harness.core.schema.fields import Amount, Count, Gib, Positive, Share, Value


class LaunchRecord(TypedDict):
    sweep: Annotated[str | None, "name of the sweep; null for `harness nodes`"]
    launcher: Annotated[str, Value(choices=("local", "netns", "ssh", "slurm")),
        "`netns` runs emulated nodes"]
    emulator: Annotated[str | None, Value(choices=("relay",)),
        "what carries the packets between emulated nodes: `relay`, a process of this project; null "
        "between real ones"]
    link: Annotated[Any, "the link asked for between the nodes; null without one"]
    processes_per_core: Annotated[Amount | None,
        "processes of all nodes / cores of the machine that they share; above 1 they slow each "
        "other down; null on GPUs and on machines elsewhere"]
    processes_per_gpu: NotRequired[Annotated[Amount,
        "of `harness nodes --oversubscribe` where nodes share GPUs: processes of all nodes / GPUs"]]
    start: Annotated[str, Value(choices=("warm", "cold", "slurm")),
        "`warm`: in processes forked from one that had loaded everything; `cold`: by torchrun; "
        "`slurm`: by torchrun in a job of a cluster"]
    packed: Annotated[bool,
        "whether other runs of the sweep were allowed on other devices at the same time, which "
        "disturbs"]
    cpu_busy_share: Annotated[Share | None,
        "what others used shortly before: share of all cores; null with `--isolation off`, and "
        "over ssh, where the hosts are asked once, before the first run"]
    gpu_processes: Annotated[Count | None,
        "what others used shortly before: processes on the GPUs; null likewise"]


class TcpRecord(TypedDict):
    """TCP settings of rank 0's node; if nodes are emulated, of the emulated node."""

    congestion_control: Annotated[str, "how TCP finds its rate, such as `cubic` or `bbr`"]
    slow_start_after_idle: Annotated[bool,
        "whether a connection that has rested begins with ten segments again "
        "(`net.ipv4.tcp_slow_start_after_idle`); `bbr` does not, whatever this is"]


class MachineRecord(TypedDict):
    """The machine and its software, as each run finds them at its start."""

    machine: Annotated[str,
        "a label for this kind of machine; results of unlike machines are never averaged"]
    cpu: Annotated[str | None, "processor"]
    cpu_cores: Annotated[Positive | None, "logical cores"]
    memory_gib: Annotated[Gib | None, "memory"]
    gpus: Annotated[list[str] | None, "names of the visible GPUs; empty without any"]
    driver: Annotated[str | None, "version of the NVIDIA driver; null without one"]
    cuda: Annotated[str | None, "version; null without it"]
    nccl: Annotated[str | None, "version; null without it"]
    threads: Annotated[Positive | None, "torch's threads per process"]
    python: Annotated[str | None, "version of the interpreter"]
    system: Annotated[str | None, "kernel"]
    tcp: NotRequired[Annotated[TcpRecord | None,
        "settings of the kernel for exchanges between nodes; null where it does not say"]]
    versions: Annotated[dict[str, str | None] | None, "versions of packages"]
    commit: Annotated[str | None, "of this project's checkout; null outside one"]
    dirty: Annotated[bool | None, "whether its files differ from the commit; null outside one"]
    command: Annotated[str | None,
        "the command line, with the home folder written as ~, hosts and secrets as \\*\\*\\*"]
    launch: Annotated[LaunchRecord | None,
        "how `python -m harness sweep` or `nodes` started the run; null for a run started alone"]
    variables: Annotated[dict[str, str] | None,
        "those environment variables, of a fixed list, that change what is measured"]
