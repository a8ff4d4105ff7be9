"""What was measured, or is assumed, of a link and of codecs: :class:`Network`, :class:`Codec`, and the profile file.

``gradcomp probe`` writes a profile; without one :func:`assumed_network` and :func:`assumed_codec` state the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gradcomp.compressors.base import require
from gradcomp.errors import ConfigError
from gradcomp.planner.volume import nic_bytes
from gradcomp.registry import format_spec, parse_spec

FORMAT = 1

KINDS = ("AllReduce", "AllToAll", "AllGather", "ReduceScatter")


def messages(kind: str, ranks: int) -> int:
    """Latencies in a row: 2 (N - 1) for a ring all-reduce, N - 1 for the others."""
    return (2 if kind == "AllReduce" else 1) * (ranks - 1)


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one kind of collective by bytes that a rank sends: measured points, joined by straight lines.

    ``residual``: largest relative deviation of the points from the line ``fixed + per_byte * bytes``, which serves beyond
    the points and for other links. ``issue``: seconds that the host is busy with starting one.
    """

    points: tuple[tuple[float, float], ...]
    fixed: float
    per_byte: float
    residual: float
    issue: float = 0.0

    @staticmethod
    def fit(points: Sequence[tuple[float, float]], issue: float = 0.0) -> Curve:
        """``per_byte``: between the two largest sizes, where bandwidth is all that counts; ``fixed``: the line through the two
        smallest, at no bytes. One line through all would be wrong on links that let a short message through at once (the
        buffers of switches, token buckets).

        Raises:
            ConfigError: fewer than two sizes.
        """
        points = sorted(points)
        require(len({x for x, _ in points}) >= 2, "points", len(points), "measurements of at least two sizes")

        def slope(low: tuple[float, float], high: tuple[float, float]) -> float:
            return (high[1] - low[1]) / (high[0] - low[0])

        (x0, y0), (xn, yn) = points[0], points[-1]
        per_byte = slope(points[-2], points[-1])
        if per_byte <= 0:  # noise: then what the largest took in all
            per_byte = yn / xn
        fixed = max(0.0, y0 - x0 * min(per_byte, max(0.0, slope(points[0], points[1]))))
        residual = max(abs(fixed + per_byte * x - y) / y for x, y in points)
        return Curve(tuple(points), fixed, per_byte, residual, issue)

    def seconds(self, nbytes: float) -> float:
        """Time of a collective in which a rank sends ``nbytes``."""
        first, last = self.points[0], self.points[-1]
        if nbytes <= first[0]:
            return first[1]  # nothing is faster than the smallest message
        if nbytes >= last[0]:
            return last[1] + self.per_byte * (nbytes - last[0])
        for (x0, y0), (x1, y1) in zip(self.points, self.points[1:], strict=False):
            if nbytes <= x1:
                return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)
        raise AssertionError("points are sorted")


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The link of one node: alpha-beta per collective, or measured curves.

    ``gigabits``: nominal speed each way, of the NIC that ``gpus_per_node`` GPUs share; ``efficiency``: share of it that
    payload reaches; ``latency``: seconds per message. With ``curves`` (measured on ``measured_ranks``) those decide.

    Time of a collective: ``latency * messages + NIC bytes / (efficiency * link)`` (Hockney 1994's model; messages: 2 (N - 1)
    for a ring all-reduce, else N - 1).
    """

    gigabits: float
    efficiency: float
    latency: float
    gpus_per_node: int = 1
    curves: Mapping[str, Curve] | None = None
    measured_ranks: int = 0

    def seconds(self, kind: str, sent: float, ranks: int) -> float:
        """Time of a collective of ``kind`` in which each rank sends ``sent`` bytes."""
        if ranks == 1 or not sent:
            return 0.0
        if self.curves is not None and kind in self.curves:
            curve = self.curves[kind]
            more = messages(kind, ranks) / messages(kind, self.measured_ranks)
            return curve.seconds(sent) + (more - 1) * curve.fixed
        carried = nic_bytes(kind, sent, ranks, self.gpus_per_node)
        return self.latency * messages(kind, ranks) + 8 * carried / (self.efficiency * self.gigabits * 1e9)

    def issue(self, kind: str) -> float:
        """Seconds that the host is busy with starting a collective of ``kind``; 0 if not measured."""
        return self.curves[kind].issue if self.curves is not None and kind in self.curves else 0.0

    def at(self, gigabits: float) -> Network:
        """The same network at another nominal speed: a measured one keeps its latency and its efficiency."""
        if self.curves is None:
            return replace(self, gigabits=gigabits)
        factor = self.gigabits / gigabits
        curves = {}
        for kind, curve in self.curves.items():
            points = tuple((x, max(curve.fixed + (y - curve.fixed) * factor, 1e-9)) for x, y in curve.points)
            curves[kind] = Curve(points, curve.fixed, curve.per_byte * factor, curve.residual, curve.issue)
        return replace(self, gigabits=gigabits, curves=curves)


def framing(mtu: int, rdma: bool) -> float:
    """Payload per byte on the wire. TCP over Ethernet: (MTU - 52) / (MTU + 38), RoCEv2: MTU / (MTU + 82).

    52: IPv4 and TCP headers with timestamps; 38: preamble, Ethernet header, checksum, gap; 82: those, IPv4, UDP,
    InfiniBand transport header and checksum (RFC 894, RFC 7323, InfiniBand Architecture annex 17).
    """
    return mtu / (mtu + 82) if rdma else (mtu - 52) / (mtu + 38)


_TCP_STACK = 0.85 / framing(1500, rdma=False)
"""What remains of the payload rate after the TCP stack: gloo reaches 84 to 95 % of a 1 Gb/s link; 85 % is assumed."""
_RDMA_STACK = 0.95
"""Assumed, not measured."""
TCP_LATENCY, RDMA_LATENCY = 100e-6, 5e-6
"""Seconds per message, assumed: a tiny all-reduce takes 0.3 ms on 2 ranks with gloo, 1.3 ms on 4 (2 and 6 messages)."""


def assumed_network(
    gigabits: float, *, mtu: int = 1500, rdma: bool = False, gpus_per_node: int = 1,
    latency: float | None = None, efficiency: float | None = None,
) -> Network:  # fmt: skip
    """A link by its nominal speed: 85 % of it for TCP at MTU 1500, more with jumbo frames or RDMA."""
    if efficiency is None:
        efficiency = min(0.97, (_RDMA_STACK if rdma else _TCP_STACK) * framing(mtu, rdma))
    latency = latency if latency is not None else RDMA_LATENCY if rdma else TCP_LATENCY
    return Network(gigabits=gigabits, efficiency=efficiency, latency=latency, gpus_per_node=gpus_per_node)


@dataclass(frozen=True, slots=True)
class Codec:
    """Host (or device) time of one compressor around its collectives.

    ``segments``: (fixed seconds, seconds per element of the bucket) before the first collective, between each two, and after
    the last. ``source``: where the numbers are from.
    """

    segments: tuple[tuple[float, float], ...]
    source: str

    def seconds(self, elements: float, index: int) -> float:
        """Time of segment ``index`` for a bucket of ``elements``."""
        fixed, each = self.segments[min(index, len(self.segments) - 1)]
        return fixed + each * elements

    def total(self, elements: float, buckets: int = 1) -> float:
        """All segments, for ``elements`` in ``buckets``."""
        return sum(fixed * buckets + each * elements for fixed, each in self.segments)


# Seconds per element of one CPU core in large fp32 buckets: before, between and after the collectives, plus 50 us per segment.
# Measured (the middle of three probes): 2 ranks on 2 cores of an AMD EPYC (Zen 4), numba kernels, torch 2.13.0, 2026-11-30.
_CPU = {
    "none": (0.39e-9, 0.31e-9),
    "fp16": (0.71e-9, 0.44e-9, 0.59e-9),
    "bf16": (0.78e-9, 0.42e-9, 0.57e-9),
    "int8": (0.47e-9, 0.25e-9, 0.35e-9),
    "int4": (0.63e-9, 0.43e-9, 0.28e-9),
    "onebit": (0.55e-9, 0.26e-9, 0.26e-9),
    "topk": (1.11e-9, 0.35e-9),
    "powersgd": (0.60e-9, 0.32e-9, 0.58e-9),
}
_CPU_FIXED = 50e-6
# Bytes of device memory per element: computed from what each fused kernel reads and writes; nothing was measured on a GPU.
_GPU_BYTES = {
    "none": (8.0, 4.0),
    "fp16": (6.0, 4.0, 6.0),
    "bf16": (6.0, 4.0, 6.0),
    "int8": (5.02, 4.0, 5.02),
    "int4": (13.0, 6.0, 4.52),
    "onebit": (12.13, 4.0, 4.13),
    "topk": (12.08, 4.2),
    "powersgd": (12.0, 8.0, 8.0),
}
_GPU_FIXED = 20e-6
GPU_BANDWIDTH = 0.8 * 1.5e12
"""Bytes per second that kernels reach: 80 % of an A100's 1.5 TB/s, assumed."""


def assumed_codec(spec: str, device: str) -> Codec:
    """Stated defaults; a compressor that is not built in is taken to be as slow as the slowest one."""
    name = parse_spec(spec)[0].name
    if device == "cpu":
        rates = _CPU.get(name, _CPU["topk"])
        source = "measured on one core of an AMD EPYC (Zen 4)"
        return Codec(tuple((_CPU_FIXED, rate) for rate in rates), source)
    table = _GPU_BYTES.get(name, (44.0, 8.0, 8.0))
    return Codec(
        tuple((_GPU_FIXED, nbytes / GPU_BANDWIDTH) for nbytes in table), "computed from memory traffic, not measured"
    )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What ``gradcomp probe`` measured on ``ranks`` ranks. Times in seconds.

    ``compute``: forward, backward and optimizer of the user's own step, if it was given.
    """

    ranks: int
    backend: str
    device: str
    gigabits: float
    collectives: Mapping[str, Curve]
    codecs: Mapping[str, Codec]
    compute: Mapping[str, float] | None = None
    machine: Mapping[str, Any] | None = None

    def network(self, gpus_per_node: int = 1) -> Network:
        """The measured link."""
        curve = self.collectives["AllReduce"]
        efficiency = 8 / (curve.per_byte * self.gigabits * 1e9)
        return Network(
            gigabits=self.gigabits, efficiency=min(1.0, efficiency), latency=curve.fixed / messages("AllReduce", self.ranks),
            gpus_per_node=gpus_per_node, curves=self.collectives, measured_ranks=self.ranks,
        )  # fmt: skip

    def codec(self, spec: str) -> Codec:
        """The measured codec; that of the same compressor with other options, or the default, if it was not measured."""
        wanted = format_spec(spec)
        if wanted in self.codecs:
            return self.codecs[wanted]
        name = parse_spec(wanted)[0].name
        near = next((codec for other, codec in self.codecs.items() if parse_spec(other)[0].name == name), None)
        return near or assumed_codec(wanted, self.device)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        value = {
            "format": FORMAT,
            "ranks": self.ranks,
            "backend": self.backend,
            "device": self.device,
            "gigabits": self.gigabits,
            "collectives": {kind: asdict(curve) for kind, curve in self.collectives.items()},
            "codecs": {spec: asdict(codec) for spec, codec in self.codecs.items()},
            "compute": self.compute,
            "machine": self.machine,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Profile:
        """Read what :meth:`save` wrote.

        Raises:
            ConfigError: no such file, or another format.
        """
        allowed = "a file that `gradcomp probe` of this version wrote"
        try:
            value = json.loads(path.read_text())
            require(value.get("format") == FORMAT, "profile", str(path), allowed)
            pairs = [(kind, c) for kind, c in value["collectives"].items()]
            return Profile(
                ranks=int(value["ranks"]), backend=value["backend"], device=value["device"],
                gigabits=float(value["gigabits"]),
                collectives={
                    kind: Curve(**{**known, "points": tuple((x, y) for x, y in known["points"])}) for kind, known in pairs
                },
                codecs={
                    spec: Codec(tuple((a, b) for a, b in c["segments"]), c["source"])
                    for spec, c in value["codecs"].items()
                },
                compute=value["compute"], machine=value["machine"],
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"profile={str(path)!r}: allowed is {allowed} ({error})") from error
