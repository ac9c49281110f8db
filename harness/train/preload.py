"""What the fork server of warm.py loads when it starts: everything that a run needs."""

import importlib
import os
import traceback

from harness.parent import end_with_parent

SCRIPTS = "HARNESS_PRELOAD"  # names, in the environment: a fork server takes no arguments

end_with_parent()  # with its launcher, and the ranks with it

for script in os.environ.get(SCRIPTS, "").split():
    try:
        importlib.import_module(script)
    except Exception:
        traceback.print_exc()  # a process that needs it fails with the same
