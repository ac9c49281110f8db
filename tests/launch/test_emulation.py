"""Emulated nodes for real: namespaces, packets, who may have them, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.core.links import Link, link_of
from harness.core.provenance import RELAY
from harness.core.settings import UserError
from harness.launch.netns import holder
from harness.launch.netns.emulation import EmulatedNodes
from harness.launch.netns.relay import open_device
from tests.support.emulated import INSIDE, echoing, pings
from tests.support.sweeps import ROOT, gone, wait_for

MANY = 50  # round trips


def interfaces(nodes: EmulatedNodes, node: int) -> dict[str, Any]:
    command = [*nodes.enter(node), "ip", "-j", "address"]
    listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {link["ifname"]: link for link in listed}


@pytest.mark.process
@pytest.mark.root
def test_a_node_has_its_address_and_no_way_out() -> None:
    with EmulatedNodes.open(2, Link()) as nodes:
        relays = [node.environment.get(RELAY) for node in nodes.nodes]  # told to one of them
        assert relays == [str(nodes.holder.pid), None]
        for number, node in enumerate(nodes.nodes):
            inside = interfaces(nodes, number)
            assert set(inside) == {"lo", "link0"}
            assert "UP" in inside["lo"]["flags"] and "UP" in inside["link0"]["flags"]
            assert node.name == f"node{number}" and inside["link0"]["mtu"] == 1500
            (address,) = inside["link0"]["addr_info"]  # no IPv6 that chatters
            assert address["local"] == node.address and address["prefixlen"] == 24
        out = [*nodes.enter(0), sys.executable, "-c",
               "import socket; socket.create_connection(('192.0.2.1', 80))"]  # fmt: skip
        refused = subprocess.run(out, capture_output=True, text=True)
        assert "Network is unreachable" in refused.stderr  # at once, not after minutes
        assert nodes.congestion_control
        assert nodes.priority in ("realtime", "nice -10", "usual")


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_eight_nodes_are_as_far_from_each_other_as_they_should_be() -> None:
    network = link_of("3+3+2:within=1ms:between=40ms:a-b=10ms")
    with EmulatedNodes.open(8, network) as nodes, echoing(nodes, *range(8)):
        for source in range(8):
            targets = [node for node in range(8) if node != source]
            for target, ms in zip(targets, pings(nodes, source, *targets, count=5), strict=True):
                asked = 2 * network.between(source, target).delay_ms
                if ms >= 1.25 * asked + 3:  # a busy machine delayed all of them
                    ms = min(ms, *pings(nodes, source, target, count=50))
                assert asked <= ms < 1.25 * asked + 3, (source, target)


@pytest.mark.process
@pytest.mark.root
def test_a_link_changes_and_a_cable_is_pulled_while_programs_run() -> None:
    with EmulatedNodes.open(3, link_of("none")) as nodes, echoing(nodes, 1, 2):
        # The least of many: of a few, a busy machine may delay each.
        assert pings(nodes, 0, 1, count=MANY)[0] < 10
        nodes.change(link_of("15ms"))
        assert pings(nodes, 0, 1)[0] >= 30
        nodes.change(link_of("none"))
        before = nodes.counters()
        nodes.cut(1)
        assert pings(nodes, 0, 1, count=1) == [None]
        assert pings(nodes, 0, 2, count=MANY)[0] < 10
        nodes.join(1)
        assert pings(nodes, 0, 1, count=MANY)[0] < 10
        after = nodes.counters()
        # Two were lost; one to warm up and many came back, each its number and its headers.
        assert after[0][1]["lost"] - before[0][1]["lost"] == 2
        assert after[0][1]["packets"] - before[0][1]["packets"] == MANY + 1
        digits = sum(len(str(number)) for number in range(MANY + 1))
        assert after[1][0]["bytes"] - before[1][0]["bytes"] == (MANY + 1) * 28 + digits
        assert after[1][2]["packets"] == 0


@pytest.mark.process
@pytest.mark.root
def test_a_loss_is_a_loss_of_single_packets() -> None:
    with EmulatedNodes.open(2, link_of("loss20%")) as nodes:
        counter = subprocess.Popen([*nodes.enter(1), *INSIDE, "count"], cwd=ROOT,
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert counter.stdout is not None
        counter.stdout.readline()
        address = nodes.nodes[1].address
        flood = [*nodes.enter(0), *INSIDE, "flood", address, "2000", "0.00005"]
        subprocess.run(flood, cwd=ROOT, check=True)
        arrived = json.loads(counter.communicate(timeout=120)[0])
        # Five times the statistical error.
        assert abs(arrived - 1600) < 5 * (2000 * 0.2 * 0.8) ** 0.5


def networks_of(pid: int) -> set[str]:
    """The network namespaces that a process holds open, and its own."""
    files = [*Path(f"/proc/{pid}/fd").iterdir(), Path(f"/proc/{pid}/ns/net")]
    return {name for name in map(os.readlink, files) if name.startswith("net:")}


def networks_of_all(processes: Iterable[psutil.Process]) -> set[str]:
    found = set()
    for process in processes:
        with suppress(OSError):
            found |= networks_of(process.pid)
    return found


def networks_of_children() -> set[str]:
    """Of all processes that this one has started, and that those have started."""
    return networks_of_all(psutil.Process().children(recursive=True))


def namespaces_alive() -> set[str]:
    return networks_of_all(psutil.process_iter())


OWNER = """
import sys, time
from harness.launch.netns.emulation import EmulatedNodes
from harness.core.links import link_of
nodes = EmulatedNodes.open(4, link_of("1ms"))
print(nodes.holder.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.process
@pytest.mark.root
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_an_owner_that_was_killed(end: int) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    holder = psutil.Process(int(owner.stdout.readline()))
    held = networks_of(holder.pid) - {os.readlink("/proc/self/ns/net")}
    assert len(held) >= 4 and held <= namespaces_alive()
    owner.send_signal(end)
    owner.wait()
    assert gone([holder])
    # Devices live in the namespaces, and a namespace that nobody holds is no more.
    assert wait_for(lambda: not held & namespaces_alive())
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith("link0")]


@pytest.mark.root
def test_nothing_is_left_after_closing() -> None:
    here = os.readlink("/proc/self/ns/net")
    with EmulatedNodes.open(2, Link()) as nodes:
        holder = nodes.holder
        held = networks_of(holder.pid) - {here}  # others on this machine may have some, too
        ours = networks_of_children() - {here}
        assert len(held) >= 2 and held <= ours <= namespaces_alive()
    assert holder.returncode is not None
    assert wait_for(lambda: not ours & namespaces_alive())


@pytest.mark.root
def test_a_network_that_has_ended_is_one_line() -> None:
    nodes = EmulatedNodes.open(2, Link())
    nodes.holder.kill()
    with pytest.raises(UserError, match=r"^the emulated network has ended \(code -9\)$"):
        nodes.cut(0)


@pytest.mark.root
def test_a_network_that_ended_before_it_is_asked_is_one_line() -> None:
    """A closed pipe would be taken for a reader that has seen enough, and so for success."""
    nodes = EmulatedNodes.open(2, Link())
    nodes.holder.kill()
    nodes.holder.wait()
    with pytest.raises(UserError, match=r"^the emulated network has ended \(code -9\)$"):
        nodes.counters()


# Everything of this happens in a mount namespace of its own: the machine's device stays as it is.
# Where the interpreter lies in a closed home, it is shown at the same place of an open one.
AS_USER = """
set -e
mount -t tmpfs none /dev/net
mknod -m "$MODE" /dev/net/tun c 10 200
if [ -n "$HOME_OF_PYTHON" ]; then
  kept=$(mktemp -d)
  mount --bind "$PREFIX" "$kept"
  mount -t tmpfs -o mode=755 none "$HOME_OF_PYTHON"
  mkdir -p "$PREFIX"
  mount --bind "$kept" "$PREFIX"
  umount "$kept"; rmdir "$kept"
fi
exec setpriv --reuid=12345 --regid=12345 --clear-groups "$@"
"""
USER = """
import json, os, subprocess, sys
from harness.launch.netns.emulation import EmulatedNodes
from harness.core.links import link_of
from harness.core.settings import UserError
from tests.support.emulated import echoing, pings
try:
    with EmulatedNodes.open(2, link_of("5ms")) as nodes, echoing(nodes, 1):
        who = subprocess.run([*nodes.enter(0), "id", "-u"], capture_output=True, text=True)
        print(json.dumps([pings(nodes, 0, 1, count=50)[0], who.stdout.strip()]))
except UserError as error:
    print(error)
"""


def as_user(mode: str) -> str:
    prefix = Path(sys.base_prefix)
    closed = [str(p) for p in (*reversed(prefix.parents), prefix) if not p.stat().st_mode & 1]
    env = {**os.environ, "MODE": mode, "PREFIX": str(prefix), "PYTHONDONTWRITEBYTECODE": "1",
           "HOME_OF_PYTHON": closed[0] if closed else ""}  # fmt: skip
    command = ["unshare", "--mount", "bash", "-c", AS_USER, "bash", sys.executable, "-c", USER]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_an_ordinary_user_has_nodes_of_his_own() -> None:
    ms, who = json.loads(as_user("666"))
    assert 10 <= ms < 20
    assert who == "12345"  # the same user inside, whose files stay his


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_a_device_that_is_closed_to_users_is_one_line() -> None:
    assert as_user("600").endswith(
        ": /dev/net/tun may not be opened: chmod 666 /dev/net/tun, as root"
    )


@pytest.mark.process
@pytest.mark.root
def test_no_permission_for_namespaces_is_one_line() -> None:
    # Somebody without the right to make namespaces, where no more users' namespaces are allowed.
    inside = (
        "echo 0 > /proc/sys/user/max_user_namespaces; "
        'exec setpriv --inh-caps=-sys_admin --bounding-set=-sys_admin "$@"'
    )
    code = (
        "from harness.launch.netns import holder\nfrom harness.core.settings import UserError\n"
        "try:\n    holder.become_owner()\nexcept UserError as error:\n    print(error)"
    )
    command = ["unshare", "--user", "--map-root-user", "bash", "-c", inside, "bash"]
    done = subprocess.run([*command, sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                          text=True)  # fmt: skip
    assert done.stdout.startswith("no permission to make network namespaces (No space left"), done
    assert "start as root" in done.stdout and done.stdout.count("\n") == 1


def test_what_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^/nothing/tun is missing: modprobe tun, as root$"):
        open_device("link0", "/nothing/tun")
    (tmp_path / "tun").touch()
    with pytest.raises(UserError, match=r"tun: Inappropriate ioctl.*: modprobe tun, as root$"):
        open_device("link0", str(tmp_path / "tun"))
    monkeypatch.setattr(holder.sys, "platform", "darwin")
    with pytest.raises(UserError, match="which only Linux has"):
        holder.become_owner()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="nsenter is missing: install util-linux"):
        EmulatedNodes.open(2, Link())


def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> bool:
        raise OSError(30, "Read-only file system", "/proc/sys/net/ipv4/tcp_rmem")

    monkeypatch.setattr(holder, "_receive", lambda: {"count": 2})
    monkeypatch.setattr(holder, "become_owner", refused)
    assert holder.main([str(os.getppid())]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error.startswith("no emulated nodes here: [Errno 30] Read-only file system: '/proc")


def test_numbers_of_nodes_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="201 emulated nodes: 1 to 200 are possible"):
        EmulatedNodes.open(201, Link())
    with pytest.raises(UserError, match="has 3 nodes in its places, and the set-up 2"):
        EmulatedNodes.open(2, link_of("2+1:between=1ms"))
