"""A SLURM cluster of two nodes on this machine, for the tests. Needs root and slurm-wlm, munge.

    python -m tests.support.slurm_cluster        starts one, prints what to export, ends with Ctrl-C

Both nodes are daemons on this machine. They live in a PID namespace of their own: whatever becomes
of the tests, no daemon and no job outlives them. Names of nodes are known inside alone.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
START_S = 30.0

CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=10
MinJobAge={min_job_age}
MaxArraySize=20
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 State=UP
PartitionName=short Nodes=n1 MaxTime=1 State=UP
"""
# In the namespaces: names of nodes, then the daemons; jobs that were killed need somebody to wait.
INSIDE = """
mount --bind {folder}/hosts /etc/hosts
munged --foreground --force --socket={folder}/munge.socket --key-file={folder}/munge.key \\
  --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/seed &
slurmctld -D -c -f {folder}/slurm.conf &
slurmd -D -N n1 -f {folder}/slurm.conf &
slurmd -D -N n2 -f {folder}/slurm.conf &
while :; do wait; sleep 1; done
"""


def missing() -> str | None:
    """What of a cluster is not installed here; None if nothing."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    absent = [name for name in NEEDED if shutil.which(name, path=path) is None]
    return f"needs {', '.join(absent)}: apt-get install slurm-wlm munge" if absent else None


@contextmanager
def cluster(min_job_age: int = 300, address: str = "127.0.0.1") -> Iterator[dict[str, str]]:
    """The variables with which sbatch and the others find it, while it lives.

    min_job_age: for how many seconds it remembers a job that has ended. address: of both nodes, as
    their names say it to runs.
    """
    with tempfile.TemporaryDirectory(prefix="harness-slurm-") as name:
        folder = Path(name)
        _write(folder, min_job_age, address)
        words = [
            *(sys.executable, "-m", "harness.core.process", str(os.getpid())),
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-c", INSIDE.format(folder=shlex.quote(name))),
        ]
        with (folder / "daemons.log").open("wb") as log:
            process = subprocess.Popen(
                words,
                env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            variables = {"SLURM_CONF": str(folder / "slurm.conf")}
            _wait_until_up(variables, folder)
            yield variables
        finally:
            process.kill()
            process.wait()


def _write(folder: Path, min_job_age: int, address: str) -> None:
    folder.chmod(0o755)
    (folder / "state").mkdir()
    for node in ("n1", "n2"):
        (folder / node).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    # By its own name torchrun finds that it is on the first node.
    names = f"n1 n2 {socket.gethostname()}"
    hosts = Path("/etc/hosts").read_text()
    (folder / "hosts").write_text(f"{address} {names}\n{hosts}")
    config = CONFIG.format(
        folder=folder, host=socket.gethostname(), ports=_free_ports(3), min_job_age=min_job_age
    )
    (folder / "slurm.conf").write_text(config)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _wait_until_up(variables: dict[str, str], folder: Path) -> None:
    until = time.monotonic() + START_S
    command = ["sinfo", "--noheader", "--Node", "--partition=all", "--format=%T"]
    while time.monotonic() < until:
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True
        )
        if done.stdout.split() == ["idle", "idle"]:
            return
        time.sleep(0.2)
    logs = "\n".join(
        f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        for log in sorted(folder.glob("*.log"))
    )
    raise RuntimeError(f"the cluster did not come up: {done.stdout} {done.stderr}\n{logs}")


if __name__ == "__main__":
    with cluster() as found:
        print(" ".join(f"export {name}={value}" for name, value in found.items()), flush=True)
        signal.pause()


# What torchrun prints of a rank that failed.
TORCHRUN = """interrupted: an earlier start
Failures:
[1]:
  time      : {now}
  host      : n2
  rank      : 1 (local_rank: 0)
  exitcode  : -9 (pid: 12)
  error_file: <N/A>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
