"""What a step would take on a link: a formula without fitted constants, so that everyone can check it."""

from __future__ import annotations

EFFICIENCY = 0.85
"""Share of the nominal speed that TCP reaches with large messages."""

LATENCY = 0.3e-3
"""Seconds per collective: a tiny all-reduce of 2 ranks with gloo over a switched 1 Gb/s link."""

LINKS = (1.0, 10.0, 25.0)
"""Gb/s."""

FORMULA = (
    f"predicted step = compute + encode + decode + bytes / ({EFFICIENCY:g} x link) + {1e3 * LATENCY:g} ms x collectives"
)


def predicted_seconds(compute: float, codec: float, wire_bytes: float, collectives: float, gigabits: float) -> float:
    """Seconds of a step on a link of ``gigabits`` per second. Predicted, not measured; no overlap is assumed.

    ``compute + codec + wire_bytes / (0.85 * link) + 0.3 ms * collectives``: forward, backward and optimizer without
    communication; host time to encode and decode; the bytes that a rank sends, at 85 % of the link's speed; and a latency
    for each collective.

    Args:
        compute: seconds of a step that exchanges nothing.
        codec: seconds of encoding and decoding per step.
        wire_bytes: bytes that one rank sends per step.
        collectives: collectives per step.
        gigabits: nominal speed of the link, each way.
    """
    return compute + codec + 8 * wire_bytes / (EFFICIENCY * gigabits * 1e9) + LATENCY * collectives


def break_even_gigabits(
    codec: float, wire_bytes: float, collectives: float, base_codec: float, base_bytes: float, base_collectives: float
) -> float | None:
    """The link speed below which a compressor's predicted step is shorter than the baseline's.

    None: on no link (it sends no less, or is no faster on any); infinity: on every link. By the same formula: the time
    that the bytes saved take must exceed the time that is added.
    """
    saved = base_bytes - wire_bytes
    added = codec - base_codec + LATENCY * (collectives - base_collectives)
    if saved <= 0:
        return None
    return float("inf") if added <= 0 else 8 * saved / (EFFICIENCY * 1e9 * added)
