"""Peers that find each other and average, without a process group: hivemind.

The libraries' messages would bury the one line that matters: hivemind's and its daemon's, which
reads the same variable, and asyncio's about connections that a killed peer leaves behind.
"""

import logging
import os

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
logging.getLogger("asyncio").setLevel(logging.CRITICAL)
