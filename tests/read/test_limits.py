"""Whether an exchange waits for the rate of its link or for its delay, by its closed form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.collectives import GLOO, Shape, Wire, allreduce
from harness.core.links import link_of
from harness.read.explain import causes
from harness.read.explain.context import BOTH, limit_of, run_context
from harness.read.explain.time_breakdown import COMMUNICATION, COMPUTE
from harness.read.records.selection import read_group
from tests.support.explained import CONTEXT, breakdown
from tests.support.paired import written as record_of

# 0.41 MB over 20 ms and 200 Mbit/s each way, as the probe measures them: the bytes take 17.2 ms.
NEAR = replace(CONTEXT, nodes=2, payload_bytes=412_712.0, rtt_ms=41.2, bandwidth_mbit=192.0)
# Over 80 ms and 50 Mbit/s: all of them take 69 ms.
FAR = replace(NEAR, nodes=4, processes=4, emulated=True, rtt_ms=160.4, bandwidth_mbit=47.5)

LIMITS: dict[str, tuple[Any, float, str | None]] = {
    "one delay and all bytes": (replace(NEAR, exchange="direct"), 0.0321, BOTH),
    "of which most overlap computing": (replace(NEAR, exchange="direct"), 0.02, BOTH),
    "more bytes": (replace(NEAR, exchange="direct", payload_bytes=1e6), 0.06, "rate"),
    "two delays, a quarter of the bytes twice": (replace(FAR, exchange="direct"), 0.2, "delay"),
    "one delay": (replace(FAR, exchange="all_to_all"), 0.186, BOTH),
    "all bytes on each of real links": (
        replace(FAR, exchange="all_to_all", emulated=False), 0.29, "rate"
    ),
    "one process of each node sends": (
        replace(NEAR, exchange="direct", processes=4, payload_bytes=2e5), 0.03, "delay"
    ),
    "the ring of gloo": (replace(NEAR, backend="gloo"), 0.15, "delay"),
    "a ring over a slow link": (replace(NEAR, bandwidth_mbit=10.0), 0.4, "rate"),
    "NCCL waits for fewer round trips": (
        replace(NEAR, backend="nccl", payload_bytes=25e6), 1.1, "rate"
    ),
    "many pieces of gloo": (replace(FAR, payload_bytes=25e6), 7.0, BOTH),
    "codes": (replace(FAR, compress="int8", payload_bytes=1e5), 0.7, "delay"),
    "factors": (replace(NEAR, compress="powersgd:2", payload_bytes=1e5), 0.3, "delay"),
    "neither": (replace(NEAR, exchange="direct"), 0.4, None),
    "no rate": (replace(NEAR, bandwidth_mbit=None), 0.2, None),
    "no delay": (replace(NEAR, rtt_ms=None), 0.02, "rate"),
    "nothing exposed": (NEAR, 0.0, None),
    # Of other strategies nobody knows how many exchanges an update makes, and so what delays cost.
    "layer by layer": (replace(NEAR, strategy="fsdp"), 0.2, None),
    "bytes of layers": (replace(NEAR, strategy="fsdp"), 0.03, "rate"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_what_limits_an_exchange(name: str) -> None:
    context, took_s, limit = LIMITS[name]
    assert limit_of(context, took_s) == limit


def test_how_an_exchange_went_is_recorded(tmp_path: Path) -> None:
    for way in ("direct", "backend"):
        observed = {"observed": {"backend": "gloo", "device": "cpu"}}
        record_of(tmp_path / way, "vit", ["--exchange", way], (2, 1), observed, {})
        context = run_context(read_group("RUN", str(tmp_path / way), None), None)
        assert (context.exchange, context.backend) == (way, "gloo")


def test_the_limit_in_words() -> None:
    run = breakdown(parts={COMPUTE: 0.5, COMMUNICATION: 0.5})

    def text_of(**more: Any) -> str:
        words, change = causes.communication(run, replace(CONTEXT, **more))
        return f"{words}; {change}"

    # 25 MB over 1000 Mbit/s are 0.2 s; gloo waits for 12.7 round trips, twice as long.
    link = {"nodes": 2, "payload_bytes": 25e6, "rtt_ms": 40.0, "requested_link": "20ms"}
    cost = allreduce(GLOO, 25e6, Shape(2), Wire(0.02, 125e6))
    assert cost.wire_s == 0.2 and cost.waits_s + cost.slack_s == pytest.approx(12.7 * 0.04)
    assert "The delay is the limit" in text_of(**link, bandwidth_mbit=1000.0)
    assert "--exchange" not in text_of(**link, bandwidth_mbit=1000.0)
    for way in ("auto", "direct"):
        text = text_of(**link, bandwidth_mbit=1000.0, other_exchange=way)
        assert f", or --exchange {way}. --compress" in text
    both = text_of(**link, bandwidth_mbit=500.0, other_exchange="auto")
    assert "The rate and the delay are limits" in both
    assert both.endswith("or --exchange auto, or smaller gradients: --compress")
    assert "The rate is the limit" in text_of(**link, bandwidth_mbit=190.0)
    assert "--compress" in text_of(**link, bandwidth_mbit=190.0)
    assert "--compress" not in text_of(**link, bandwidth_mbit=190.0, compress="bf16")
    assert "limit" not in text_of(**link)
    assert "diloco or local_sgd" in text_of(nodes=1) and "--sync_scope" not in text_of(nodes=1)
    assert "local_sgd" in text_of(**link) and "--sync_scope" not in text_of(**link)
    sharded = text_of(nodes=2, strategy="fsdp")
    assert "--grad_acc" not in sharded and "a larger --per_gpu_batch" in sharded
    assert "25 MB per update" in text_of(**link) and "requested: 20ms" in text_of(**link)


@pytest.mark.parametrize(("text", "said"), [
    ("20ms/loss3%", "lose 3 % of its packets"),
    ("20ms/jitter2.5ms", "have a jitter of 2.5 ms"),
    ("20ms/jitter2ms/loss0.1%", "lose 0.1 % of its packets and to have a jitter of 2 ms"),
    ("1+1+1:within=none:between=20ms:a-c=mobile",
     "lose up to 0.5 % of its packets and to have a jitter of up to 10 ms"),
    ("20ms", None),
    ("none", None),
])  # fmt: skip
def test_a_link_that_was_asked_to_disturb_packets_is_named(
    tmp_path: Path, text: str, said: str | None
) -> None:
    facts = {"launch": {"launcher": "netns", "link": link_of(text).facts(3)}}
    record_of(tmp_path / "run", "vit", [], (3, 1), facts, {})
    context = run_context(read_group("RUN", str(tmp_path), None), None)
    run = breakdown(parts={COMPUTE: 0.5, COMMUNICATION: 0.5})
    words, _ = causes.communication(run, context)
    assert words.endswith(f". The link was asked to {said}" if said else "(50 %)")
