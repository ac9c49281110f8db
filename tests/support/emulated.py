"""What runs inside emulated nodes for the tests: programs that answer, and round trips to them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.launch.netns.emulation import EmulatedNodes
from tests.support.sweeps import ROOT

INSIDE = [sys.executable, "-m", "benchmarks.inside"]


@contextmanager
def echoing(nodes: EmulatedNodes, *which: int) -> Iterator[None]:
    servers = []
    for node in which:
        command = [*nodes.enter(node), *INSIDE, "echo"]
        servers.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE))
    try:
        for server in servers:
            assert server.stdout is not None
            server.stdout.readline()
        yield
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def pings(nodes: EmulatedNodes, source: int, *targets: int, count: int = 3) -> list[Any]:
    """The shortest round trip to each in ms, None where nothing came back."""
    addresses = ",".join(nodes.nodes[target].address for target in targets)
    command = [*nodes.enter(source), *INSIDE, "ping", addresses, str(count), "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    answered = [[ms for ms in of if ms is not None] for of in json.loads(done.stdout)]
    return [min(of) if of else None for of in answered]
