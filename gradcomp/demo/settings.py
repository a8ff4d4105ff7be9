"""What the demo trains, and how: the learning rate was tuned for the uncompressed run and is the same for all."""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.compressors.base import require
from gradcomp.registry import parse_spec

TASKS = ("text", "images")
OPTIMIZERS = ("sgd", "adamw")
MAX_RANKS = 64
MIN_STEPS = 5

# Peak learning rates, chosen in uncompressed runs only; for text with SGD, 0.3 would give a loss 0.4 % lower, 0.1 one
# 1.6 % higher. None is tuned for a compressor.
_LEARNING_RATE = {
    ("text", "sgd"): 0.2,
    ("text", "adamw"): 2e-3,
    ("images", "sgd"): 0.2,
    ("images", "adamw"): 2e-3,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One comparison: the same model, data, seed and learning rate for every spec of ``compressors``."""

    compressors: tuple[str, ...]
    task: str = "text"
    ranks: int = 2
    steps: int = 120
    seed: int = 0
    schedule: str = "auto"
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.task in TASKS, "task", self.task, " or ".join(TASKS))
        require(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, " or ".join(OPTIMIZERS))
        require(
            2 <= self.ranks <= MAX_RANKS,
            "ranks",
            self.ranks,
            f"a whole number from 2 to {MAX_RANKS} (a single rank exchanges nothing)",
        )
        require(self.steps >= MIN_STEPS, "steps", self.steps, f"a whole number of at least {MIN_STEPS}")
        require(0 <= self.seed < 2**32, "seed", self.seed, "a whole number from 0 to 2**32 - 1")

    @property
    def learning_rate(self) -> float:
        """The peak; it rises over the first quarter of the steps and then falls linearly to zero."""
        return _LEARNING_RATE[self.task, self.optimizer]

    @property
    def batch(self) -> int:
        """Sequences or images per rank and step."""
        return 4 if self.task == "text" else 32

    def learning_rate_factor(self, step: int) -> float:
        """Of the peak, at ``step``."""
        rise = max(1, self.steps // 4)
        return min((step + 1) / rise, (self.steps - step) / (self.steps - rise))

    def warmup_steps(self, spec: str) -> int:
        """Steps that are exchanged uncompressed first: a tenth for 1-bit and Top-K, as is usual, none for others."""
        return self.steps // 10 if parse_spec(spec)[0].traits.strongly_biased else 0

    def rules(self, spec: str) -> list[tuple[str, str]]:
        """1-bit and Top-K lose most in the output layer, so that goes at int8 (README, "What compression costs")."""
        return [("head.weight", "int8")] if parse_spec(spec)[0].traits.strongly_biased else []

    def evaluation_steps(self) -> set[int]:
        """After how many steps to evaluate: denser at the start, for a logarithmic axis."""
        return {max(1, round(self.steps * part)) for part in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)}

    def describe_optimizer(self) -> str:
        """Optimizer and learning rate in words."""
        kind = "SGD, momentum 0.9" if self.optimizer == "sgd" else "AdamW"
        return f"{kind}, peak learning rate {self.learning_rate:g}, gradients clipped to norm 1"
