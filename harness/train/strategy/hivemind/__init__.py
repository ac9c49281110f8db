"""Peers that find each other and average, without a process group: hivemind.

Its own messages would bury the one line that matters; its daemon reads the same variable.
"""

import os

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
