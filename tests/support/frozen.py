"""The last that the server of ranks loads: no collection of a rank looks through what is loaded.

The Trainer collects all garbage when training begins, which takes longer than a toy's training.
The processor is calibrated once a session, however busy it is: beside other programs what was
measured is not cached, and each rank would measure it again, for seconds.
"""

import gc

from harness.train.measure import calibration

calibration.OWN_SHARE = 0

gc.collect()
gc.freeze()
