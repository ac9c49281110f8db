"""Who may have emulated nodes, and what the others are told: one line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core.links import Link, link_of
from harness.core.settings import UserError
from harness.launch.netns import holder
from harness.launch.netns.carriers import open_device
from harness.launch.netns.emulation import EmulatedNodes

ROOT = Path(__file__).resolve().parents[2]

# ---- an ordinary user ----

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
from tests.launch.test_emulation import echoing, pings
try:
    with EmulatedNodes.open(2, link_of("5ms")) as nodes, echoing(nodes, 1):
        who = subprocess.run([*nodes.enter(0), "id", "-u"], capture_output=True, text=True)
        print(json.dumps([nodes.emulator, pings(nodes, 0, 1)[0], who.stdout.strip()]))
except UserError as error:
    print(error)
"""


def as_user(mode: str) -> str:
    prefix = Path(sys.base_prefix)
    closed = [str(p) for p in (*reversed(prefix.parents), prefix) if not p.stat().st_mode & 1]
    env = {**os.environ, "MODE": mode, "PREFIX": str(prefix), "PYTHONDONTWRITEBYTECODE": "1",
           "HOME_OF_PYTHON": closed[0] if closed else ""}  # fmt: skip
    command = ["unshare", "--mount", "bash", "-c", AS_USER, "bash", sys.executable, "-c", USER]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_an_ordinary_user_has_nodes_of_his_own() -> None:
    emulator, ms, who = json.loads(as_user("666"))
    assert emulator == "relay" and 10 <= ms < 20
    assert who == "12345"  # the same user inside, whose files stay his


@pytest.mark.process
@pytest.mark.root
@pytest.mark.slow
def test_a_device_that_is_closed_to_users_is_one_line() -> None:
    said = as_user("600")
    assert said.endswith(": /dev/net/tun may not be opened: chmod 666 /dev/net/tun, as root")


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


# ---- mistakes that need no namespace ----


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
