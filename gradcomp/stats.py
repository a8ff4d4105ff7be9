"""What was sent, how long it took, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from gradcomp.schedule import Timings


@dataclass(slots=True)
class Counters:
    """Running totals of one handle."""

    steps: int = 0
    raw_bytes: int = 0
    last_raw_bytes: int = 0
    last_wire_bytes: int = 0
    skipped_steps: int = 0
    compressed_steps: int = 0
    saturated: int = 0
    gradient_norm: float = 0.0
    timings: Timings = field(default_factory=Timings)


class Sink(Protocol):
    """Anything with TensorBoard's ``add_scalar`` (``torch.utils.tensorboard.SummaryWriter``)."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Record one number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """A snapshot of one rank. Bytes are what this rank put on the network since registration.

    ``raw_bytes``: what an uncompressed ring all-reduce in the gradients' dtypes would have sent, 2 (N-1)/N times the
    gradients. ``wire_bytes``: what was sent. ``*_per_step``: of the last step. Seconds are host time in all steps:
    encoding (with the owners' averaging), blocked on collectives, decoding. ``residual_norm``: L2 norm of what error
    feedback holds back on this rank; ``residual_ratio``: relative to the last sampled local gradient. ``saturations``:
    finite values that a cast clamped. ``skipped_steps``: steps in which a rank had inf or NaN; while DDP's gradients go
    uncompressed and no residual is held, only those for which ``last_step_finite`` was asked. ``memory_bytes``: residuals
    and warm starts. ``bypassed``: uncompressed parameters and why.
    """

    spec: str
    schedule: str
    backend: str
    rank: int
    world_size: int
    steps: int
    compressed_steps: int
    skipped_steps: int
    raw_bytes: int
    wire_bytes: int
    raw_bytes_per_step: int
    wire_bytes_per_step: int
    collectives: int
    encode_seconds: float
    exchange_seconds: float
    decode_seconds: float
    residual_norm: float
    residual_ratio: float
    saturations: int
    memory_bytes: int
    bypassed: Mapping[str, str]

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than uncompressed, over all steps (1.0 before anything was sent)."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def ratio_per_step(self) -> float:
        """The same for the last step (after warm-up, the steady state)."""
        return self.raw_bytes_per_step / self.wire_bytes_per_step if self.wire_bytes_per_step else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with both ratios."""
        return {**asdict(self), "ratio": self.ratio, "ratio_per_step": self.ratio_per_step}

    def write_to(self, sink: Sink, step: int | None = None, prefix: str = "gradcomp") -> None:
        """Write every number to a TensorBoard ``SummaryWriter`` (or anything with ``add_scalar``)."""
        for name, value in self.as_dict().items():
            if isinstance(value, (int, float)) and name not in ("rank", "world_size", "steps"):
                sink.add_scalar(f"{prefix}/{name}", float(value), self.steps if step is None else step)

    def __str__(self) -> str:
        reasons: dict[str, int] = {}
        for reason in self.bypassed.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "none"
        per_step = max(1, self.steps)
        return "\n".join(
            [
                f"gradcomp {self.spec} on rank {self.rank} of {self.world_size}: schedule {self.schedule}, "
                f"kernels {self.backend}",
                f"  steps      {self.steps} ({self.compressed_steps} compressed, {self.skipped_steps} non-finite)",
                f"  sent       {_size(self.wire_bytes)} instead of {_size(self.raw_bytes)}: {self.ratio:.1f}x fewer",
                f"  last step  {_size(self.wire_bytes_per_step)} instead of {_size(self.raw_bytes_per_step)}: "
                f"{self.ratio_per_step:.1f}x fewer",
                f"  ms a step  encode {1e3 * self.encode_seconds / per_step:.2f}, "
                f"exchange {1e3 * self.exchange_seconds / per_step:.2f}, "
                f"decode {1e3 * self.decode_seconds / per_step:.2f}",
                f"  residual   {self.residual_ratio:.2f} of the gradient's norm, {_size(self.memory_bytes)} of memory",
                f"  saturated  {self.saturations} values",
                f"  bypassed   {left_out}",
            ]
        )


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
