"""What the flags of a sweep choose for hosts behind ssh and for a cluster, and times as typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SECONDS = {"h": 3600, "m": 60, "s": 1}  # per unit of --timeout
CORES_OF_A_GPU = 4  # for its process, and for the threads of communication and of the backward pass
# Nobody can type a password, and a lost host must be noticed. Options in --ssh come before these
# and take precedence; those in ~/.ssh/config come after.
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "4",
}
NO_CHECKOUT = 91  # exit code of a command whose folder does not exist
SSH_FAILED = 255  # of ssh itself: no host, no access, connection lost


@dataclass(frozen=True)
class Host:
    """A machine, as ssh addresses it."""

    name: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"

    @property
    def arguments(self) -> list[str]:
        """The arguments of ssh that address the host."""
        port = [] if self.port is None else ["-p", str(self.port)]
        return [*port, f"{self.user}@{self.name}" if self.user else self.name]


@dataclass(frozen=True)
class Remote:
    """The choices for --launcher ssh; empty for every other launcher."""

    hosts: tuple[Host, ...] = ()
    checkout: str = ""
    python: str = ""
    master_addr: str | None = None
    interface: str | None = None
    ssh: tuple[str, ...] = ("ssh",)

    @property
    def folder(self) -> str:
        """The checkout, quoted for a shell except for a leading ~, which the shell expands."""
        home, slash, rest = self.checkout.partition("/")
        if not re.fullmatch(r"~[\w.-]*", home):
            return shlex.quote(self.checkout)
        return home + slash + (shlex.quote(rest) if rest else "")

    def in_checkout(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """A command for the shell on a host."""
        return f"cd {self.folder} || exit {NO_CHECKOUT}; exec " + shlex.join(
            ["env", *(f"{k}={v}" for k, v in environment.items()), *command]
        )

    def ssh_to(self, host: Host, command: str) -> list[str]:
        options = [word for k, v in OPTIONS.items() for word in ("-o", f"{k}={v}")]
        return [*self.ssh, "-T", *options, *host.arguments, command]


@dataclass(frozen=True)
class Slurm:
    """The user's choices for the cluster; none of them changes what is measured."""

    partition: str | None = None
    account: str | None = None
    gres: str = "gpu"
    cpus_per_gpu: int | None = None
    requeue: int = 0
    setup_script: str | None = None
    sbatch: tuple[str, ...] = ()
    detach: bool = False

    @property
    def cores(self) -> int:
        """Cores per device; without GPUs, one core stands for one device."""
        return self.cpus_per_gpu or (1 if self.gres == "none" else CORES_OF_A_GPU)


def as_typed(seconds: float) -> str:
    """A duration as --timeout takes it: 90s, 30m, 2h."""
    fitting = ((unit, size) for unit, size in SECONDS.items() if seconds % size == 0)
    unit, size = next(fitting, ("s", 1))
    return f"{seconds / size:.15g}{unit}"
