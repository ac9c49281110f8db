"""Two ranks with NCCL on one GPU, which NCCL refuses unless it takes them for two machines.

    python -m benchmarks.two_ranks vit.py --strategy fsdp --setup 2_1 ...

Each rank is started by a torchrun of its own and reaches the other over a socket of this machine.
This shows that exchanges work on a real device; as the ranks share it, their times say nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from harness.train.run.warm import free_port

ONE_GPU = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


def main(argv: list[str]) -> int:
    where = ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
             f"--node_rank={rank}", *where, *argv],
            env={**os.environ, **ONE_GPU, "NCCL_HOSTID": f"node{rank}"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(0.1)
        for rank in ranks if any(codes) else ():
            rank.terminate()
        return max((abs(rank.wait(40)) for rank in ranks), default=0)
    finally:
        for rank in ranks:
            rank.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
