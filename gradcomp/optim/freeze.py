"""Two stages: exact steps until the variance has settled, then compressed momentum under the frozen variance.

When to freeze: after ``freeze_step`` steps, or, with ``"auto"``, by the criterion of the 1-bit Adam paper (arXiv
2102.02888): the variance has settled when ``|v_t|_1 / |v_(t-D)|_1 >= 0.96`` with ``D = 1 / (1 - b2)``, and not before the
learning rate's warm-up has ended. Here ``v`` is bias-corrected, since the raw one only rises in its first steps, and the
ratio must not exceed 1/0.96 either. The norm is taken ten times per ``D`` steps, and the ranks freeze when all agree.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from gradcomp.collectives import AllReduce
from gradcomp.compressors.base import require
from gradcomp.errors import ConfigError
from gradcomp.optim.base import ExchangingOptimizer, check_whole
from gradcomp.optim.buckets import Member

_PER_WINDOW = 10


class TwoStageOptimizer(ExchangingOptimizer):
    """Base of 1-bit Adam and 1-bit LAMB.

    Args:
        freeze_step: number of exact steps, or ``"auto"``. Zero is refused: a variance of zero gives NaN.
        lr_warmup_steps: ``"auto"`` does not freeze before this step.
        freeze_threshold: of the criterion.
        options: see :class:`ExchangingOptimizer`.
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        freeze_step: int | str,
        lr_warmup_steps: int = 0,
        freeze_threshold: float = 0.96,
        eps_inside_sqrt: bool = False,
        **options: Any,
    ) -> None:
        if freeze_step != "auto":
            whole = isinstance(freeze_step, int) and not isinstance(freeze_step, bool) and freeze_step >= 1
            if not whole:
                raise ConfigError(
                    f"freeze_step={freeze_step!r}: allowed is a whole number of at least 1 (without warm-up the variance is 0, "
                    "which gives NaN), or 'auto'"
                )
        check_whole("lr_warmup_steps", lr_warmup_steps, 0)
        require(0 < freeze_threshold < 1, "freeze_threshold", freeze_threshold, "a number between 0 and 1")
        self.freeze_step = freeze_step
        self.frozen_at: int | None = None
        """The last exact step, once it is past."""
        self._eps_inside_sqrt = eps_inside_sqrt
        self._not_before = lr_warmup_steps
        self._threshold = freeze_threshold
        self._norms: list[float] = []
        super().__init__(params, defaults, **options)

    @abstractmethod
    def _update_exact(self, member: Member, t: int) -> None:
        """The mean gradient is in the view."""

    @abstractmethod
    def _update_frozen(self, member: Member, t: int, frozen_at: int) -> None:
        """The mean momentum is in the view."""

    def _advance(self, t: int) -> bool:
        frozen_at = self.frozen_at
        if not (self._exchange_gradients() if frozen_at is None else self._exchange_momentum()):
            return False
        for member in self._members:
            if frozen_at is None or member.exact:
                self._update_exact(member, t)
            else:
                self._bound(member, member.view, frozen_at)
                self._update_frozen(member, t, frozen_at)
        if frozen_at is None and self._settled(t):
            self.frozen_at = t
        return True

    def _settled(self, t: int) -> bool:
        if isinstance(self.freeze_step, int):
            return t >= self.freeze_step
        beta2 = max(group["betas"][1] for group in self.param_groups)
        window = max(1, round(1 / (1 - beta2)))
        stride = max(1, window // _PER_WINDOW)
        if t % stride:
            return False
        norms = [self.state[m.parameter]["exp_avg_sq"].sum() / self._correction(m, 1, t) for m in self._members]
        self._norms.append(float(torch.stack(norms).sum()))
        lag = -(-window // stride)
        if len(self._norms) <= lag:
            return False
        self._norms = self._norms[-lag - 1 :]
        before, now = self._norms[0], self._norms[-1]
        settled = t >= self._not_before and 0 < self._threshold * before <= now <= before / self._threshold
        votes = torch.tensor([float(settled)], device=self._members[0].parameter.device)
        if self._exchange.world > 1:
            self._exchange.exact.group.run(AllReduce(votes))
        return int(votes) == self._exchange.world

    def _progress(self) -> dict[str, Any]:
        return {"frozen_at": self.frozen_at, "norms": list(self._norms)}

    def _restore(self, progress: Mapping[str, Any]) -> None:
        self.frozen_at, self._norms = progress["frozen_at"], list(progress["norms"])

    def _describe(self) -> str:
        return f"{super()._describe()} {self.freeze_step} {self._not_before} {self._threshold}"
