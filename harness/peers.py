"""--strategy hivemind in words: what goes with it, and where a run is found that is joined."""

from __future__ import annotations

import re
from collections.abc import Mapping

from harness.settings import Settings, UserError

INSTALL = "pip install -r requirements-hivemind.txt"
# As libp2p writes the address of a peer.
PEER_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/,]+/(tcp|udp)/\d+(/[a-z0-9-]+)*/p2p/\w+")
# Optimizers whose state can be made before the first step, as peers need it to exchange it.
PEER_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
# Schedules that do not follow from the number of the update.
BLIND_SCHEDULES = ("reduce_lr_on_plateau", "greedy")


def addresses_to_join(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """The addresses of a run of peers, from the flag or the variable; none for a new run."""
    given = settings.initial_peers or environ.get("INITIAL_PEERS", "")
    found = [address.strip() for address in given.split(",") if address.strip()]
    for address in found:
        if not PEER_ADDRESS.fullmatch(address):
            raise UserError(
                f"--initial_peers {address}: not an address such as "
                "/ip4/10.0.0.1/tcp/40123/p2p/12D3KooW..., which a run prints when it starts"
            )
    return found


def check_peers(settings: Settings) -> None:
    """What peers that come and go cannot do together."""
    addresses_to_join(settings, {})
    passed = dict(settings.trainer)
    if settings.precision == "fp16":
        raise UserError(
            "--strategy hivemind does not go with --precision fp16, whose scale each process "
            "looks for by itself: use bf16"
        )
    if settings.batchnorm == "sync":
        raise UserError(
            "--batchnorm sync does not go with --strategy hivemind: peers do not compute in step; "
            "their statistics are averaged with the weights"
        )
    if settings.local_updates and settings.compress == "int8":
        raise UserError(
            "--compress int8 does not go with --local_updates: weights are what is averaged, and "
            "8 bits lose what an update changes; use fp16"
        )
    if "save_steps" in passed:
        raise UserError(
            "--save_steps does not go with --strategy hivemind: checkpoints are made where all "
            "peers have the same weights, at the end of an epoch"
        )
    if settings.tail == "pad":
        raise UserError(
            "--tail pad does not go with --strategy hivemind: each peer takes the samples in an "
            "order of its own, without an end; use --tail cut"
        )
    if (optim := passed.get("optim", PEER_OPTIMIZERS[0])) not in PEER_OPTIMIZERS:
        raise UserError(
            f"--optim {optim} does not go with --strategy hivemind: a peer that joins takes the "
            f"state over, which works with {', '.join(PEER_OPTIMIZERS)}"
        )
    if (schedule := passed.get("lr_scheduler_type")) in BLIND_SCHEDULES:
        raise UserError(
            f"--lr_scheduler_type {schedule} does not go with --strategy hivemind: each peer must "
            "know the learning rate from the number of the update"
        )
