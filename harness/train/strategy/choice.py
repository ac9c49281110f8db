"""--exchange auto: how sums are exchanged, chosen by the link that was measured before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from harness.core.collectives import (
    ALL_TO_ALL,
    BACKEND,
    DIRECT,
    FAR_S,
    GLOO,
    Shape,
    Wire,
    allreduce,
    fastest,
    ways,
)
from harness.core.links import least_rate_of
from harness.core.schema.environment import ExchangeEstimates, LinkRecord, ObservedRecord
from harness.core.strategies import SENT_DIRECTLY, is_apart, is_coded, strategy_of
from harness.core.topology import World
from harness.train.context import HALF_PRECISION, Context
from harness.train.session import broadcast
from harness.train.strategy.base import Exchange
from harness.train.strategy.coded import CODECS


def set_way(exchange: Exchange, link: LinkRecord | None) -> ObservedRecord:
    """Set the way of the exchange, the same on all ranks; returns what the record says about it.

    With auto, the record says by what the way was chosen; on rank 0 also by how much ranks may
    differ because of the delay alone. An attempt that goes on keeps the way of the attempt before,
    to whose bits it adds.
    """
    context, settings = exchange.context, exchange.context.settings
    if not strategy_of(settings).direct or context.world.size == 1:
        return {}
    way: ObservedRecord = {"exchange": settings.exchange}
    if settings.exchange == "auto":
        rank0 = context.is_rank0
        way = broadcast((_before(context) or _chosen(context, link)) if rank0 else None)
    exchange.way = way["exchange"]
    early = early_s(exchange, link)
    return {**way, "exchange_early_s": early} if early else way


def early_s(exchange: Exchange, link: LinkRecord | None) -> float:
    """How much less one rank may wait than another because of the delay alone, on rank 0.

    A direct message is under way while its receiver still computes: a rank that is ready later, by
    up to the delay, waits that much less, and the other rank that much longer.
    """
    known = link is not None and exchange.way in SENT_DIRECTLY
    return (link["rtt_min_ms"] or 0.0) / 1000 if link is not None and known else 0.0


def _before(context: Context) -> ObservedRecord | None:
    if context.checkpoint is None:
        return None
    record = context.folder.read_environment()
    observed: ObservedRecord = (record.get("observed") if record is not None else None) or {}
    known = (BACKEND, *SENT_DIRECTLY) if dist.get_backend() == GLOO else (BACKEND,)
    if (way := observed.get("exchange")) not in known:
        return None
    kept: ObservedRecord = {"exchange": way}
    if expected := observed.get("exchange_estimates_s"):
        kept["exchange_estimates_s"] = expected
    return kept


def _chosen(context: Context, link: LinkRecord | None) -> ObservedRecord:
    far = link is not None and (link["rtt_min_ms"] or 0.0) >= 1000 * FAR_S
    if link is None or not far or dist.get_backend() != GLOO or not link["allreduce_s"]:
        return {"exchange": BACKEND}
    settings = context.settings
    share = 0.5 if settings.compress in HALF_PRECISION else 1.0
    apart = is_apart(settings)
    coded = is_coded(settings.compress, apart)
    if coded:
        share = CODECS[settings.compress].bits / 32
    size = share * link["gradient_bytes"] / (settings.fragments or 1)
    expected = estimates(link, context.world, size, coded, apart)
    kept: ExchangeEstimates = {"backend": expected[BACKEND], "direct": expected[DIRECT]}
    if ALL_TO_ALL in expected:
        kept["all_to_all"] = expected[ALL_TO_ALL]
    return {"exchange": fastest(expected), "exchange_estimates_s": kept}


def estimates(
    link: Mapping[str, Any], world: World, size: float, coded: bool = False, apart: bool = False
) -> dict[str, float]:
    """Estimated seconds by way to exchange `size` bytes, at the slowest pair's delay and rate.

    One process of each node sends; with the backend all do, unless nodes train apart. Where the
    rate is unknown, bytes cost nothing.
    """
    rate = link["bandwidth_mbit"] or least_rate_of(link)
    wire = Wire(link["rtt_min_ms"] / 2000, (rate or math.inf) * 1e6 / 8)
    processes, nodes = Shape(world.nodes, world.per_node), Shape(world.nodes)
    # An emulated node has a link to each other node; a real node sends all bytes over one link.
    of_pairs = link["asked"] is not None
    measured = allreduce(GLOO, link["allreduce_bytes"], processes, wire)
    longer = None if coded else link["allreduce_s"] / measured.alone_s
    return ways(size, nodes if apart else processes, wire, of_pairs, longer)
