"""The last that the server of ranks loads: no collection of a rank looks through what is loaded.

The Trainer collects all garbage when training begins, which takes longer than a toy's training.
"""

import gc

gc.collect()
gc.freeze()
