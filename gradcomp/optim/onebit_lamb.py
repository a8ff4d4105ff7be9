"""1-bit LAMB: LAMB whose layer-wise coefficients go on adapting although the momentum is compressed.

LAMB scales each layer's update ``u = m' / (sqrt(v') + eps) + weight_decay x`` by ``c = clamp(|x| / |u|, min_coeff, max_coeff)``.
Warm-up is LAMB with exact gradients, and keeps per layer an average ``c_avg <- b3 c_avg + (1 - b3) c`` (b3 = ``coeff_beta``).
After the freeze at T, m comes from the compressed exchange and v stays v_T, as in 1-bit Adam. Layer-wise ratios would
be wrong under a frozen v, so they are corrected by how far the variance has moved since, which is estimated from the momenta:

    g   = (m_t - b1 m_(t-1)) / (1 - b1)                  the mean gradient, as far as it came through
    w  <- b2 w + (1 - b2) g^2                            a fresh variance, w_T = v_T
    r   = max over the layer of (sqrt(v_T') + eps) / (sqrt(w') + eps)
    r  <- r q + 1 - q,  q = min(1, |m part of u| / |u|)  only the m part of u depends on v
    r   clamped to [factor_min, factor_max], then to within factor_threshold of the previous r, relatively
    x  <- x - lr r c_avg u

The originals also scale momenta of all layers to the same size before they are compressed, because they shared one scale;
here each block of 256 elements of one parameter has its own, and C is equivariant to it, so nothing is gained by that. The
first coefficient starts ``c_avg`` (there it started from 0). Bias correction as in 1-bit Adam. Memory per parameter: as
1-bit Adam, and 4 bytes for w.

[Li et al. 2021, arXiv 2104.06069]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gradcomp.compressors.base import require
from gradcomp.optim.buckets import Member
from gradcomp.optim.freeze import TwoStageOptimizer


class OneBitLamb(TwoStageOptimizer):
    """See the module's docstring.

    Args:
        params: parameters, groups or named parameters.
        lr, betas, eps, weight_decay: as of LAMB.
        freeze_step: steps of warm-up, or ``"auto"``; at least ``1 / (1 - coeff_beta)``.
        max_coeff, min_coeff: bounds of the coefficient in warm-up (and of uncompressed parameters always).
        coeff_beta: of its average.
        factor_max, factor_min, factor_threshold: bounds of the factor r, and of its relative change in a step.
        options: as of :class:`~gradcomp.optim.OneBitAdam`.
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
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **options: Any,
    ) -> None:
        require(0 < min_coeff <= max_coeff, "min_coeff", min_coeff, "a positive number up to max_coeff")
        require(0 <= coeff_beta < 1, "coeff_beta", coeff_beta, "a number in [0, 1)")
        require(
            0 < factor_min <= 1 <= factor_max, "factor_min, factor_max", (factor_min, factor_max), "0 < min <= 1 <= max"
        )
        require(0 < factor_threshold < 1, "factor_threshold", factor_threshold, "a number between 0 and 1")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "max_coeff": max_coeff, "min_coeff": min_coeff,
        }  # fmt: skip
        self.coeff_beta, self.factor_threshold = coeff_beta, factor_threshold
        self.factor_max, self.factor_min = factor_max, factor_min
        self._coefficients: dict[str, float] = {}
        super().__init__(params, defaults, freeze_step=freeze_step, **options)

    def get_lamb_coeffs(self) -> list[float]:
        """The coefficients of the last step, per parameter."""
        return list(self._coefficients.values())

    def _update_exact(self, member: Member, t: int) -> None:
        self._momentum_of_gradient(member)
        group, state = self.param_groups[member.group], self.state[member.parameter]
        _, update = self._parts(member, self._denominator(member, state["exp_avg_sq"], t), t)
        weight_norm, update_norm = float(torch.linalg.vector_norm(self._weights(member))), _norm(update)
        coefficient = 1.0
        if weight_norm and update_norm:
            coefficient = min(max(weight_norm / update_norm, group["min_coeff"]), group["max_coeff"])
            average = state.get("lamb_coeff_freeze", coefficient)
            state["lamb_coeff_freeze"] = self.coeff_beta * average + (1 - self.coeff_beta) * coefficient
        self._coefficients[member.name] = coefficient
        weights = self._weights(member).add_(update, alpha=-float(group["lr"]) * coefficient)
        self._store(member, weights)

    def _update_frozen(self, member: Member, t: int, frozen_at: int) -> None:
        group, state = self.param_groups[member.group], self.state[member.parameter]
        beta1, beta2 = group["betas"]
        gradient = (member.view - state["exp_avg"] * beta1).div_(1 - beta1)
        fresh = state.setdefault("exp_avg_sq_fresh", state["exp_avg_sq"].clone())
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"].copy_(member.view)

        denominator = self._denominator(member, state["exp_avg_sq"], frozen_at)
        part, update = self._parts(member, denominator, t)
        ratio = denominator / self._denominator(member, fresh, t)
        factor = float(ratio.max()) if ratio.numel() else 1.0
        size = _norm(update)
        if group["weight_decay"] and size:
            share = min(1.0, part / size)
            factor = factor * share + 1.0 - share
        state["last_factor"] = factor = self._bounded(factor, state.get("last_factor", 1.0))
        coefficient = state.get("lamb_coeff_freeze", 1.0) * factor
        self._coefficients[member.name] = coefficient
        weights = self._weights(member).add_(update, alpha=-float(group["lr"]) * coefficient)
        self._store(member, weights)

    def _bounded(self, factor: float, previous: float) -> float:
        factor = min(max(factor, self.factor_min), self.factor_max)
        return min(max(factor, previous * (1 - self.factor_threshold)), previous * (1 + self.factor_threshold))

    def _parts(self, member: Member, denominator: Tensor, t: int) -> tuple[float, Tensor]:
        """The norm of the momentum's part of the update, and the update with weight decay."""
        decay = self.param_groups[member.group]["weight_decay"]
        update = (self.state[member.parameter]["exp_avg"] / denominator).div_(self._correction(member, 0, t))
        if not decay:
            return 0.0, update
        part = _norm(update)
        return part, update.add_(self._weights(member), alpha=decay)


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))
