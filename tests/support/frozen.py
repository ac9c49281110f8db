"""The last that the server of ranks loads: what each of them would load by itself, and then no
collection of a rank looks through what is loaded.

The Trainer collects all garbage when training begins, which takes longer than a toy's training.
"""

import gc
import importlib

from PIL import Image

Image.init()
for module in (
    "torch.profiler", "torch.utils.data.distributed", "transformers.models.bert.modeling_bert",
    "transformers.models.vit.modeling_vit", "rich._emoji_codes",
):  # fmt: skip
    importlib.import_module(module)

gc.collect()
gc.freeze()
