"""Two hosts on this machine: network namespaces, each with an sshd and a disk of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.calibrated import copy_calibration
from tests.support.sweeps import ROOT, command, wait_for

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
NUMBER = os.getpid() % 250  # of the network: others may test beside us

SERVER = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {keys}
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PrintMotd no
MaxStartups 50
SetEnv HOME={folder} HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"""
CLIENT = """
Host {name}
  HostName {address}
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
"""


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    namespace: str
    folder: Path

    @property
    def checkout(self) -> Path:
        return self.folder / "harness"

    def processes(self) -> list[psutil.Process]:
        """All that run there, but the server."""
        words = ["ip", "netns", "pids", self.namespace]
        pids = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
        found = []
        for pid in map(int, pids):
            try:
                process = psutil.Process(pid)
                words = command(process).split()
                if "-D" not in words and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def sessions(self) -> list[psutil.Process]:
        return [p for p in self.processes() if p.name() == "sshd"]

    def called(self, part: str) -> list[psutil.Process]:
        return [p for p in self.processes() if part in command(p)]


@dataclass(frozen=True)
class Machines:
    a: Host
    b: Host
    folder: Path
    config: Path

    @property
    def way(self) -> list[str]:
        """Each host has a home folder of its own."""
        return ["--checkout", "~/harness", "--ssh", f"ssh -F {self.config}"]

    @property
    def flags(self) -> list[str]:
        """Of a sweep that runs on both."""
        return ["--launcher", "ssh", "--hosts", "a,b", *self.way]


@contextmanager
def hosts(folder: Path) -> Iterator[Machines]:
    """Both, until the end of the block."""
    folder.chmod(0o755)
    bridge, network = f"hb{NUMBER}", f"10.213.{NUMBER}"
    key = folder / "key"
    _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    names = {name: f"{network}.{i}" for i, name in enumerate("ab", 2)}
    made = [Host(n, address, f"{bridge}{n}", folder / n) for n, address in names.items()]
    servers: list[subprocess.Popen[bytes]] = []
    try:
        _do("ip", "link", "add", bridge, "type", "bridge")
        _do("ip", "address", "add", f"{network}.1/24", "dev", bridge)
        _do("ip", "link", "set", bridge, "up")
        for host in made:
            _connect(host, bridge)
            _check_out(host)
            servers.append(_serve(host, key))
        config = folder / "config"
        _describe(made, config, key)
        wait_for(lambda: all(_answers(host, config) for host in made), 60)
        yield Machines(made[0], made[1], folder, config)
    finally:
        for server in servers:
            server.kill()
            server.wait()
        for host in made:
            for process in host.processes():
                process.kill()
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False)
        subprocess.run(["ip", "link", "delete", bridge], check=False)


def _connect(host: Host, bridge: str) -> None:
    outer = f"{host.namespace}v"
    inside = ["ip", "-n", host.namespace]
    _do("ip", "netns", "add", host.namespace)
    _do("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _do("ip", "link", "set", outer, "master", bridge, "up")
    _do(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
    _do(*inside, "link", "set", "eth0", "up")
    _do(*inside, "link", "set", "lo", "up")


def _check_out(host: Host) -> None:
    """A clone with what is not committed yet, so that it is this code that is tested."""
    host.folder.mkdir()
    _do("git", "clone", "-q", "--shared", str(ROOT), str(host.checkout))
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.split():
        (host.checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, host.checkout / name)
    for compiled in ROOT.glob("harness/**/*.pyc"):  # beside their sources, of the same time
        there = host.checkout / compiled.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(compiled, there)
    copy_calibration(host.folder / ".cache" / "huggingface")
    (host.checkout / ".venv").symlink_to(sys.prefix)


def _serve(host: Host, key: Path) -> subprocess.Popen[bytes]:
    Path("/run/sshd").mkdir(exist_ok=True)
    _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.folder / "host_key"))
    config = host.folder / "sshd_config"
    keys = key.with_suffix(".pub")
    config.write_text(SERVER.format(address=host.address, folder=host.folder, keys=keys))
    with (host.folder / "sshd.log").open("wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", host.namespace, str(SSHD), "-D", "-e", "-f", str(config)],
            stdout=log,
            stderr=log,
        )


def _describe(made: list[Host], config: Path, key: Path) -> None:
    known, text = "", ""
    for host in made:
        public = (host.folder / "host_key.pub").read_text()
        known += f"{host.address} {public}"
        text += CLIENT.format(name=host.name, address=host.address, key=key, folder=config.parent)
    (config.parent / "known_hosts").write_text(known)
    config.write_text(text)


def _answers(host: Host, config: Path) -> bool:
    done = subprocess.run(
        ["ssh", "-F", str(config), "-o", "BatchMode=yes", host.name, "true"], capture_output=True
    )
    return done.returncode == 0


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
