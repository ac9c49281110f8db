"""python -m harness store PORT: where the nodes of an elastic run meet, so that each may be lost.

Without it the first node holds the rendezvous, and the run ends with that node.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed import DistNetworkError, TCPStore


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not argv[0].isdigit() or not 0 < int(argv[0]) < 65536:
        print("usage: python -m harness store PORT, for example 29400", file=sys.stderr)
        return 2
    port = int(argv[0])
    try:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except DistNetworkError:
        print(f"harness store: error: port {port} is taken: use another", file=sys.stderr)
        return 2
    try:
        print(
            f"torchrun --rdzv_backend=c10d --rdzv_endpoint=THIS_MACHINE:{store.port} "
            "--rdzv_conf=is_host=0,... meets here; one store for one start",
            flush=True,
        )
        signal.pause()
    except KeyboardInterrupt:
        return 130
    return 0
