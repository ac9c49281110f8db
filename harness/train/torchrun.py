"""torchrun that lets nobody in: its flags, its ranks, but narrow() first (rendezvous.py).

python -m harness.train.torchrun --standalone --nproc_per_node=2 bert.py --setup 1_2
"""

from __future__ import annotations

import os
import sys

from torch.distributed import run

from harness.core.settings import UserError
from harness.train.rendezvous import narrow


def main() -> int:
    narrow()
    if "--standalone" in sys.argv:
        os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")
    try:
        run.main()
    except UserError as error:
        print(f"torchrun: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
