"""The last that the server of ranks loads: what each of them would load by itself, and then no
collection of a rank looks through what is loaded.

The Trainer collects all garbage when training begins, which takes longer than a toy's training.
"""

import gc
import importlib

from harness.train.run.warm import LOADED_LATER

for module in LOADED_LATER:
    importlib.import_module(module)

gc.collect()
gc.freeze()
