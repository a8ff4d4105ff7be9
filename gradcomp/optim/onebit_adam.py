"""1-bit Adam: Adam whose variance serves, once it has settled, as a fixed preconditioner of compressed momentum.

Per step t with this rank's gradient ``g_i`` (N ranks, C the two-phase 1-bit exchange with error feedback):

    warm-up, t <= T:   g = mean g_i;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    afterwards:        m <- C(mean of b1 m + (1 - b1) g_i);      v stays v_T
    always:            x <- x - lr (m' / (sqrt(v') + eps) + weight_decay x)

``m' = m / (1 - b1^t)``, ``v' = v / (1 - b2^min(t, T))`` with ``bias_correction`` (the warm-up then is AdamW); without, m and v
themselves, as in DeepSpeed's OnebitAdam, which accepted the flag and ignored it.

After the freeze every element of the received momentum is limited to what Adam itself could reach under this variance,
``|m| <= c sqrt(v')`` with ``c = max(3, (1 - b1) / sqrt(1 - b2))`` [Kingma and Ba 2014, section 2.1]. The paper divides by
whatever v is, and diverges on networks with units that hardly ever fire (``benchmarks/accuracy.py``, images).

Momentum is linear in the gradients, so error feedback repairs what its compression loses; the variance is not, so it must
not see compressed gradients. Volume of the whole run, of fp32, with a warm-up fraction w: ``w + (1 - w) / 28`` (1 bit and
a 256th of an fp32 scale per element). Memory per parameter: 4 bytes each of m, v and bucket, residuals 8 (1 + 1/N).

[Tang et al. 2021, arXiv 2102.02888, algorithm 1]
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from gradcomp.optim.buckets import Member
from gradcomp.optim.freeze import TwoStageOptimizer


class OneBitAdam(TwoStageOptimizer):
    """See the module's docstring.

    Args:
        params: parameters, groups or named parameters.
        lr, betas, eps, weight_decay: as of ``torch.optim.AdamW``.
        freeze_step: steps of warm-up, or ``"auto"``; 15 to 25 % of the run, and more than the learning rate's warm-up.
        options: ``lr_warmup_steps``, ``freeze_threshold``, ``eps_inside_sqrt``, see
            :class:`~gradcomp.optim.freeze.TwoStageOptimizer`;
            ``max_grad_norm``, ``module``, ``process_group``, ``compressor``, ``rules``, ``bucket_cap_mb``, ``schedule``, see
            :class:`~gradcomp.optim.base.ExchangingOptimizer`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        freeze_step: int | str = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay
        }  # fmt: skip
        super().__init__(params, defaults, freeze_step=freeze_step, **options)

    def _update_exact(self, member: Member, t: int) -> None:
        self._momentum_of_gradient(member)
        self._move(member, t, t)

    def _update_frozen(self, member: Member, t: int, frozen_at: int) -> None:
        self.state[member.parameter]["exp_avg"].copy_(member.view)
        self._move(member, t, frozen_at)
