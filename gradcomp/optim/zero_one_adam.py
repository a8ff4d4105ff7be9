"""0/1 Adam: no full-precision warm-up stage, and later whole rounds without communication.

The variance is updated, from exact gradients, only in the steps ``T_v``: the j-th and the next one are ``2^(j // k)`` steps
apart (k = ``var_update_scaler``), and from ``var_freeze_step`` on it is frozen. In between, momentum is exchanged with 1 bit,
as in 1-bit Adam. After ``var_freeze_step`` the ranks take local steps and meet only every ``h`` steps; h doubles
every ``local_step_scaler`` steps up to ``local_step_clipper`` (the paper's H):

    t in T_v:            g = mean g_i;  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  x <- x - lr m' / (sqrt(v') + eps)
    other t <= freeze:   m <- C(mean of b1 m + (1 - b1) g_i);                               x <- x - lr m' / (sqrt(v') + eps)
    later, local:        m_i <- b1 m_i + (1 - b1) g_i;  u_i <- u_i + lr_t m_i';  x_i = a - u_i / (sqrt(v') + eps)
    later, meeting:      m <- C(mean of u_i / G), G = sum of lr_t / (1 - b1^t) since the last meeting (if G = 0: of m_i)
                         a <- a - G m / (sqrt(v') + eps);  x <- a;  u_i <- 0

``a`` is the parameter at the last meeting, kept so that all ranks return to the same bits. Between two meetings the ranks'
parameters differ: evaluate and save after :meth:`ZeroOneAdam.synchronize`, or after a step for which ``in_sync``.
The paper exchanges u; here it is u / G, a momentum, so that residuals keep their unit through all stages (C is equivariant
to the scale) and shrink with the learning rate. DeepSpeed's ZeroOneAdam compressed gradients, not momentum, before the
freeze, and reset residuals at it. In steps of T_v the exact mean gradient updates momentum too, so no second exchange
is needed. Weight decay is decoupled: ``a`` shrinks by the sum of ``lr weight_decay``. ``v'`` is corrected by the number of
updates of v.

Received momentum is limited as in 1-bit Adam. Uncompressed parameters are plain Adam up to the freeze and take part in local
steps, exactly averaged, afterwards.
In local steps a rank whose gradient is not finite adds nothing to its u; the others cannot know.

Memory per parameter: as 1-bit Adam, and after the freeze 8 bytes for a and u.

[Lu et al. 2022, arXiv 2202.06009, algorithm 1]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gradcomp.optim.base import ExchangingOptimizer, check_whole
from gradcomp.optim.buckets import Member


class ZeroOneAdam(ExchangingOptimizer):
    """See the module's docstring.

    Args:
        params: parameters, groups or named parameters.
        lr, betas, eps, weight_decay: as of ``torch.optim.AdamW``.
        var_freeze_step: the last step that may update the variance; usually the end of the learning rate's warm-up.
        var_update_scaler: k above: so many updates before their distance doubles.
        local_step_scaler: steps after which the distance of meetings doubles.
        local_step_clipper: the largest distance of meetings; 1 for no local steps.
        options: see :class:`~gradcomp.optim.base.ExchangingOptimizer`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        **options: Any,
    ) -> None:
        check_whole("var_freeze_step", var_freeze_step, 1)
        check_whole("var_update_scaler", var_update_scaler, 1)
        check_whole("local_step_scaler", local_step_scaler, 1)
        check_whole("local_step_clipper", local_step_clipper, 1)
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self._eps_inside_sqrt = eps_inside_sqrt
        self._variance_updates = 0
        self._pending: list[list[float]] = []
        """Per group, since the last meeting: sum of lr / (1 - b1^t), and of lr."""
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay
        }  # fmt: skip
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, **options)

    # ---------------------------------------------------------------- policies
    def updates_variance(self, t: int) -> bool:
        """Whether step ``t`` (from 1) is in T_v."""
        since, k = t - 1, self.var_update_scaler
        gap = 1 << ((since // k + 1).bit_length() - 1)
        return t <= self.var_freeze_step and (since - k * (gap - 1)) % gap == 0

    def meets(self, t: int) -> bool:
        """Whether the ranks exchange anything in step ``t``."""
        since = t - self.var_freeze_step - 1
        if since < 0:
            return True
        period, within = divmod(since, self.local_step_scaler)
        distance = min(self.local_step_clipper, 1 << min(period, 62))
        return (within + 1) % distance == 0 or within + 1 == self.local_step_scaler

    @property
    def in_sync(self) -> bool:
        """Whether all ranks hold the same parameters now."""
        return not any(total for totals in self._pending for total in totals)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Meet now, between steps: before evaluating or saving parameters. All ranks must call it."""
        if not self.in_sync:
            self._meet()

    # ---------------------------------------------------------------- steps
    def _advance(self, t: int) -> bool:
        if t > self.var_freeze_step:
            return self._advance_locally(t)
        exact = self.updates_variance(t)
        if not (self._exchange_gradients() if exact else self._exchange_momentum()):
            return False
        self._variance_updates += exact
        for member in self._members:
            if exact or member.exact:
                self._momentum_of_gradient(member)
            else:
                state = self.state[member.parameter]
                state["exp_avg"].copy_(self._bound(member, member.view, self._variance_updates))
            self._move(member, t, self._updates_of(member, t))
        return True

    def _updates_of(self, member: Member, t: int) -> int:
        return min(t, self.var_freeze_step) if member.exact else self._variance_updates

    def _advance_locally(self, t: int) -> bool:
        self._pending = self._pending or [[0.0, 0.0] for _ in self.param_groups]
        factor = self._factor(clip=True)
        finite = math.isfinite(factor) and math.isfinite(self._local_norm())
        for totals, group in zip(self._pending, self.param_groups, strict=True):
            correction = 1.0 - group["betas"][0] ** t if group["bias_correction"] else 1.0
            totals[0] += float(group["lr"]) / correction
            totals[1] += float(group["lr"])
        meeting = self.meets(t)
        for member in self._members:
            group, state = self.param_groups[member.group], self.state[member.parameter]
            if "anchor" not in state:
                weights = self._weights(member)
                state["anchor"] = state.pop("master", None)
                if state["anchor"] is None:
                    state["anchor"] = weights.to(torch.float32, copy=True).contiguous()
                state["accumulator"] = torch.zeros_like(member.view)
            if finite:
                self._write_gradient(member, factor)
                state["exp_avg"].lerp_(member.view, 1 - group["betas"][0]).mul_(state["exp_avg_sq"] > 0)
                size = float(group["lr"]) / self._correction(member, 0, t)
                state["accumulator"].add_(state["exp_avg"], alpha=size)
            if not meeting:
                self._place(member, state["accumulator"], 1.0)
        return self._meet() if meeting else True

    def _place(self, member: Member, amount: Tensor, size: float) -> Tensor:
        """The parameter becomes ``(1 - decay) a - size * amount / (sqrt(v') + eps)``, which is returned in fp32."""
        state, lr_sum = self.state[member.parameter], self._pending[member.group][1]
        decay = lr_sum * self.param_groups[member.group]["weight_decay"]
        weights: Tensor = state["anchor"] * (1.0 - decay)
        updates = self._updates_of(member, self.var_freeze_step)
        weights.addcdiv_(amount, self._denominator(member, state["exp_avg_sq"], updates), value=-size)
        member.parameter.copy_(weights)
        return weights

    def _meet(self) -> bool:
        def write(member: Member) -> None:
            state, total = self.state[member.parameter], self._pending[member.group][0]
            if total:
                torch.div(state["accumulator"], total, out=member.view)
            else:
                member.view.copy_(state["exp_avg"])

        ok = self._exchange.exchange(self._exchange.compressed, write)
        if ok:
            self._exchange.clip(self.max_grad_norm, exact=True)
            self._exchange.clip(self.max_grad_norm, exact=False)
        for member in self._members:
            state = self.state[member.parameter]
            if not ok:  # a local state overflowed: the same way out on all ranks
                member.view.zero_()
            if not member.exact:
                self._bound(member, member.view, self._variance_updates)
            state["exp_avg"].copy_(member.view)
            state["anchor"] = self._place(member, member.view, self._pending[member.group][0])
            state["accumulator"].zero_()
        self._pending = [[0.0, 0.0] for _ in self.param_groups]
        return ok

    def _progress(self) -> dict[str, Any]:
        return {"variance_updates": self._variance_updates, "pending": [list(totals) for totals in self._pending]}

    def _restore(self, progress: Mapping[str, Any]) -> None:
        self._variance_updates = int(progress["variance_updates"])
        self._pending = [list(totals) for totals in progress["pending"]]

    def _describe(self) -> str:
        policy = self.var_freeze_step, self.var_update_scaler, self.local_step_scaler, self.local_step_clipper
        return f"{super()._describe()} {policy}"
