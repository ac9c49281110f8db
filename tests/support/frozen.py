"""The last that the server of ranks loads: what each of them would load by itself, and then no
collection of a rank looks through what is loaded.

The Trainer collects all garbage when training begins, which takes longer than a toy's training.
"""

import gc
import importlib

from harness.core.schema.checks import RECORDS
from harness.core.schema.fields import fields_of
from harness.train.run.warm import LOADED_LATER

for module in LOADED_LATER:
    importlib.import_module(module)

for record in RECORDS.values():
    inner = [*fields_of(record.declared).values()]
    while inner:
        if (declared := inner.pop().kind.record) is not None:
            inner += fields_of(declared).values()

gc.collect()
gc.freeze()
