"""What the defaults are put in for, and what contradicts itself."""

from __future__ import annotations

import re
from dataclasses import replace

from harness.defaults import DEFAULTS, TINY
from harness.settings import Settings, UserError, parse_setup, share_of


def resolve(settings: Settings) -> Settings:
    """The same settings with the script's defaults, or the tiny ones, in place of None."""
    defaults = TINY[settings.script] if settings.tiny else DEFAULTS[settings.script]
    missing = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    return check(replace(settings, **missing))


def check(settings: Settings) -> Settings:
    """Refuse what contradicts itself, before anything is loaded."""
    if settings.setup is not None:
        parse_setup(settings.setup)
    if settings.max_length is not None and settings.max_length < 3:
        raise UserError(
            f"--max_length {settings.max_length}: must be at least 3 (start, word, end)"
        )
    if dict(settings.trainer).get("max_steps", 1) in (0, None):
        raise UserError("--max_steps 0: must be at least 1; leave it out to train whole epochs")
    if settings.strategy != "fsdp" and (settings.fsdp_shard != "full" or settings.fsdp_offload):
        asked = "fsdp_offload" if settings.fsdp_offload else "fsdp_shard grads"
        why = "" if settings.strategy in (None, "single", "dp", "ddp") else (
            f", which {settings.strategy} cannot be: each process needs all weights to go on alone"
        )  # fmt: skip
        raise UserError(f"--{asked} needs --strategy fsdp{why}")
    for name in ("test_split", "validation_split"):
        split = getattr(settings, name)
        if split is not None and share_of(split) is None and re.match(r"^-?[0-9.]", split):
            raise UserError(
                f"--{name} {split}: a share must lie between 0 and 1, for example 0.2; "
                "a split is named by its name"
            )
    if settings.validation_split == "train":
        raise UserError(
            "--validation_split train: a model is not chosen by what it was trained on; "
            "a share such as 0.1 holds out a part of train"
        )
    return settings
