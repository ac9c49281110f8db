"""torchrun behind a rendezvous that strangers cannot join: the same flags, after harden().

python -m harness.train.torchrun --standalone --nproc_per_node=2 bert.py --setup 1_2
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
import time
from functools import partial

from harness.core.process import complain, install_quit_handlers
from harness.core.settings import UserError

REFUSED = 2  # how a script ends whose command cannot run; it has said why, in one line
ELASTIC = "torch.distributed.elastic"
# Messages of the agent's log that tell a user nothing, by logger. At a normal end the first node,
# which has the store, may be gone before the others look.
HIDDEN = {
    "agent.server.api": "exit barrier",
    "multiprocessing.api": rf"closing signal|failed \(exitcode: {REFUSED}\)",
    "multiprocessing.errors.error_handler": "no error file defined for parent",
}
SAMPLER_FIRST_S = 5.0  # the only rank's own sampler can record why it ends, this launcher cannot


def main() -> int:
    install_quit_handlers()
    gc.disable()  # collecting would take a fifth of the time that follows
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from harness.train.agent import ending_stopped_ranks
    from harness.train.rendezvous import harden
    from harness.train.stopped import hang_after_of

    gc.freeze()
    gc.enable()
    for name, hidden in HIDDEN.items():
        logging.getLogger(f"{ELASTIC}.{name}").addFilter(partial(_is_shown, re.compile(hidden)))
    if "--standalone" in sys.argv:
        os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")
    try:
        harden()
        with ending_stopped_ranks(hang_after_of(sys.argv), SAMPLER_FIRST_S):
            run.main()
    except UserError as error:
        return complain("torchrun", error)
    except RendezvousError as error:
        why = " ".join(f"{error} {error.__cause__ or ''}".split())
        complain("torchrun", f"the processes cannot meet: {why:.400}")
        return 1
    except ChildFailedError as failed:
        launched = json.loads(os.environ.get("HARNESS_LAUNCH") or "{}")
        speaker = failed.failures.get(0)  # other ranks leave it to rank 0 to say why
        if speaker and speaker.exitcode == REFUSED and not launched.get("sweep"):
            return REFUSED  # a sweep reads the ranks
        # The ranks and their reasons, without torchrun's own frames; times for whoever reads them
        # in another zone (launch/agents.py).
        os.environ["TZ"] = "UTC0"
        time.tzset()
        print(f"{failed.format_msg()}\n(times are those of UTC)", file=sys.stderr)
        return 1
    except SignalException as stopped:
        print(f"torchrun: stopped by {stopped.sigval.name}", file=sys.stderr)
        return 128 + int(stopped.sigval)
    return 0


def _is_shown(hidden: re.Pattern[str], record: logging.LogRecord) -> bool:
    return hidden.search(record.getMessage()) is None


if __name__ == "__main__":
    sys.exit(main())
