"""What the fork server of warm.py loads when it starts: everything that a run needs."""

import gc
import importlib
import os
import traceback

from harness.core.process import PARENT, end_with_parent

# The server ends with its launcher, and the ranks end with the server. Before anything else,
# because loading takes seconds.
end_with_parent(int(os.environ[PARENT]))

gc.disable()  # collecting would take a fifth of the time that follows
warm = importlib.import_module("harness.train.run.warm")
for script in os.environ.get(warm.SCRIPTS, "").split():
    try:
        importlib.import_module(script)
    except Exception:  # of a user's script: a process that needs it fails with the same error
        traceback.print_exc()
for module in warm.LOADED_LATER:
    importlib.import_module(module)

# Garbage collection in the ranks then skips what is loaded here, and its pages stay shared.
gc.collect()
gc.freeze()
gc.enable()
