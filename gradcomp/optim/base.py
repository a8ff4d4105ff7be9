"""What the optimizers share: steps, clipping, weights, bias correction, checkpoints.

The exchange is that of the DDP hook: a :class:`~gradcomp.registration.Handle` over the same engine, schedules and memory.
One handle all-reduces gradients exactly, the other one compresses momentum. An optimizer writes what it wants averaged
into the buckets, and nothing of its state changes before all ranks know that all of them were finite.

**Parameters that go uncompressed** (by the compressor's traits and ``rules``: for 1-bit vectors, small ones, embeddings)
travel in the same payload, but as *gradients*: they go on as with plain Adam or LAMB, with a living variance. So rows of an
embedding that first occur late are no problem. In compressed parameters, elements whose variance is exactly zero when it
is frozen have never had a gradient; 1-bit cannot send zeros, so they are not updated from then on (the originals asked
the user for a mask). Embeddings are recognised if the module is known: pass ``module=`` or call ``attach``.

**Weight decay** is decoupled, as in AdamW and in the removed optimizers. **Clipping** (``max_grad_norm``): in exact steps
the norm of the averaged gradient of all parameters. In compressed steps nobody knows that gradient; there each rank first
clips its own gradient to ``sqrt(N) max_grad_norm`` (so that no outlier gets into momentum and residuals), and the averaged
momentum, and the averaged gradient of the uncompressed parameters, are each clipped to ``max_grad_norm`` (a bound
which momentum of clipped gradients always keeps).

**Gradients** that are None count as zero, because ranks may differ in which are. **Precision**: states are fp32;
bf16 and fp16 parameters get an fp32 master copy.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, ParamsT

from gradcomp.compressors.base import require
from gradcomp.errors import ConfigError, GradcompError, UnsupportedError
from gradcomp.optim.buckets import Buckets, Member, Source, leave_gradients_local
from gradcomp.registration import Handle
from gradcomp.registry import Spec, format_spec
from gradcomp.rules import RuleLike
from gradcomp.stats import Stats

STATE_FORMAT = 1
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class ExchangingOptimizer(Optimizer):
    """Base of the optimizers; see the module's docstring.

    Args:
        params: parameters, groups, or named parameters. A group with ``non_freeze=True`` is never compressed.
        defaults: of the groups.
        max_grad_norm: see above; 0 for none.
        process_group: over which to average; default: the DDP module's, else the default group.
        module: the model, plain or DDP (see :meth:`attach`).
        compressor: for momentum; any spec. ``onebit`` is what the papers use.
        rules: which parameters get another compressor, or ``"none"``.
        bucket_cap_mb: one exchange per so many megabytes of fp32 momentum.
        schedule, backend: as for :func:`gradcomp.register`.
        cuda_aware, comm_backend_name: of the removed optimizers; accepted and ignored, with a warning.
    """

    _step_supports_amp_scaling = True  # GradScaler calls step() on every rank, whether or not it found inf

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        max_grad_norm: float = 0.0,
        process_group: dist.ProcessGroup | None = None,
        module: nn.Module | None = None,
        compressor: Spec = "onebit",
        rules: Iterable[RuleLike] | None = None,
        bucket_cap_mb: float = 25.0,
        schedule: str = "auto",
        backend: str = "auto",
        amsgrad: bool = False,
        cuda_aware: bool | None = None,
        comm_backend_name: str | None = None,
    ) -> None:
        require(not amsgrad, "amsgrad", amsgrad, "False: its maximum needs a variance that goes on")
        require(bucket_cap_mb > 0, "bucket_cap_mb", bucket_cap_mb, "a positive number")
        require(max_grad_norm >= 0, "max_grad_norm", max_grad_norm, "a number of at least 0 (0: no clipping)")
        require(defaults["lr"] >= 0, "lr", defaults["lr"], "a number of at least 0")
        require(defaults["eps"] > 0, "eps", defaults["eps"], "a positive number")
        require(defaults["weight_decay"] >= 0, "weight_decay", defaults["weight_decay"], "a number of at least 0")
        require(all(0 <= b < 1 for b in defaults["betas"]), "betas", defaults["betas"], "two numbers in [0, 1)")
        ignored = {"cuda_aware": cuda_aware, "comm_backend_name": comm_backend_name}
        given = ", ".join(name for name, value in ignored.items() if value is not None)
        if given:
            warnings.warn(f"gradcomp: {given}: ignored, the process group decides the transport", stacklevel=3)
        self.max_grad_norm = float(max_grad_norm)
        self.skipped_steps = 0
        self._compressor = format_spec(compressor)
        self._rules = list(rules or ())
        self._cap = int(bucket_cap_mb * 2**20 / 4)
        self._options: dict[str, Any] = {"schedule": schedule, "backend": backend}
        self.waiting = False
        """While set, :meth:`step` does nothing: a trainer that steps its optimizer while it builds itself sets it."""
        self.residuals_in_state = True
        """Unset where a trainer saves one rank's state for all, and :attr:`momentum_handle`'s of every rank elsewhere."""
        self._process_group = process_group
        self._names: dict[int, str] = {}
        self._embeddings: set[int] = set()
        self._buckets: Buckets | None = None
        self._steps, self._calls = 0, 0
        self._given: set[int] = set()
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                real = parameter.is_floating_point() and not parameter.is_sparse
                require(real, "params", parameter.dtype, "real floating-point parameters")
        if module is not None:
            self.attach(module)

    # ---------------------------------------------------------------- what a user calls
    def attach(
        self,
        module: nn.Module,
        *,
        masters: Mapping[int, Tensor] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Learn names and embeddings from the model; if it is a DDP module, make it leave gradients local.

        For that DDP gets a communication hook that passes buckets through. Call it on all ranks before the first step.

        Args:
            module: the model, plain or DDP.
            masters: what a trainer has put into the parameter groups instead, by the parameters' ids.
            process_group: over which to average, if it is not yet known.

        Raises:
            UnsupportedError: the DDP module already has a hook. GradcompError: too late.
        """
        if self._buckets is not None:
            raise GradcompError("attach() must be called before the first step and before load_state_dict()")
        if isinstance(module, DistributedDataParallel):
            leave_gradients_local(module)
            self._process_group = self._process_group or module.process_group
            module = module.module
        self._process_group = self._process_group or process_group
        stepped = {key: id(master) for key, master in (masters or {}).items()}
        for name, parameter in module.named_parameters():
            key = stepped.get(id(parameter), id(parameter))
            self._names[key] = name.replace("_orig_mod.", "")  # of torch.compile
            self._given.add(key)
        weights = [id(m.weight) for m in module.modules() if isinstance(m, _EMBEDDINGS)]
        self._embeddings |= {stepped.get(key, key) for key in weights}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Exchange and update. All ranks must call it; a step that is not finite on some rank is left out on all.

        Raises:
            MismatchError, ExchangeError: as in backward() under :func:`gradcomp.register`.
        """
        loss = None
        if self.waiting:
            return loss
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._set_up()
        self._exchange.check_local_gradients()
        self._calls += 1
        if self._advance(self._steps + 1):
            self._steps += 1
        else:
            self.skipped_steps += 1
        return loss

    def stats(self) -> Stats:
        """Bytes and times since construction, of this rank. ``raw_bytes``: an fp32 all-reduce of all gradients each step."""
        self._set_up()
        return self._exchange.stats(self._calls, self.skipped_steps)

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer, with this rank's residuals under ``gradcomp``: every rank saves its own."""
        own = {
            "format": STATE_FORMAT,
            "algorithm": type(self).__name__,
            "step": self._steps,
            "progress": self._progress(),
            "exchange": self.momentum_handle.state_dict() if self._buckets and self.residuals_in_state else None,
        }
        return {**super().state_dict(), "gradcomp": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore. All ranks must call it, each with the state that it saved; then training goes on bit for bit.

        With other ranks' states (one for all, another world size) residuals start at zero, with a warning.

        Raises:
            ConfigError: not a state of this optimizer.
        """
        own = state_dict.get("gradcomp", {})
        said = (own.get("format"), own.get("algorithm"))
        wanted = (STATE_FORMAT, type(self).__name__)
        require(
            said == wanted, "state_dict['gradcomp']", said, f"{wanted}: what this optimizer's state_dict() returned"
        )
        super().load_state_dict({"state": state_dict["state"], "param_groups": state_dict["param_groups"]})
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, ours, strict=True):  # torch has cast them to the parameter's dtype
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][key] = value.to(parameter.device, torch.float32, copy=True)
        self._set_up()
        self._steps = int(own["step"])
        self._restore(own["progress"])
        exchange = own["exchange"]
        where = None if exchange is None else (exchange["world"], exchange["rank"])
        everyone = self._exchange.compressed.group.gather_object(where, "load_state_dict()")
        if not any(everyone):  # saved before the first step
            return
        wanted_ranks = [(self._exchange.world, rank) for rank in range(self._exchange.world)]
        if None not in everyone and sorted(everyone) == wanted_ranks:
            self._exchange.compressed.load_state_dict(exchange)
        else:
            warnings.warn(
                f"gradcomp: residuals start at zero: the states passed are of (world size, rank) {everyone}; each rank must "
                "load what it saved",
                stacklevel=2,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch; only before the first step."""
        if getattr(self, "_buckets", None) is not None:
            raise GradcompError("add_param_group() must be called before the first step: buckets are fixed by then")
        super().add_param_group(param_group)
        self._given.update(id(parameter) for parameter in self.param_groups[-1]["params"])

    @property
    def momentum_handle(self) -> Handle:
        """The handle of the compressed exchange, which holds the residuals. Collective, at the first call."""
        self._set_up()
        return self._exchange.compressed

    def get_grads_for_reduction(self) -> None:
        """DeepSpeed's engine asks for the gradients that it shall average: it must not.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"DeepSpeed's engine is about to average the gradients, which {type(self).__name__} exchanges itself: call "
            "gradcomp.integrations.deepspeed.initialize() instead of deepspeed.initialize()"
        )

    def close(self) -> None:
        """Stop the worker threads of the ``thread`` schedule."""
        if self._buckets is not None:
            self._buckets.close()

    # ---------------------------------------------------------------- what an algorithm defines
    _eps_inside_sqrt = False

    @abstractmethod
    def _advance(self, t: int) -> bool:
        """Do step ``t`` (from 1); False if it was left out because some rank was not finite."""

    @abstractmethod
    def _progress(self) -> dict[str, Any]:
        """Plain numbers that belong into a checkpoint, besides the step and what is in ``self.state``."""

    @abstractmethod
    def _restore(self, progress: Mapping[str, Any]) -> None:
        """Inverse of :meth:`_progress`."""

    def _describe(self) -> str:
        """What all ranks must agree on."""
        shared = {key: value for key, value in self.defaults.items() if key != "lr"}
        return f"{type(self).__name__} {self._compressor} {self._cap} {self.max_grad_norm} {shared}"

    # ---------------------------------------------------------------- what an algorithm uses
    def _exchange_gradients(self) -> bool:
        """Exact mean of the gradients in all views, clipped by their global norm."""
        factor = self._factor(clip=False)
        ok = self._exchange.exchange(self._exchange.exact, lambda member: self._write_gradient(member, factor))
        if ok:
            self._exchange.clip(self.max_grad_norm)
        return ok

    def _exchange_momentum(self) -> bool:
        """Views: mean momentum ``b1 m + (1 - b1) g``, compressed, or the exact mean gradient of exact members; clipped."""
        factor = self._factor(clip=True)

        def write(member: Member) -> None:
            self._write_gradient(member, factor)
            if not member.exact:
                weight = 1 - self.param_groups[member.group]["betas"][0]
                torch.lerp(self.state[member.parameter]["exp_avg"], member.view, weight, out=member.view)

        ok = self._exchange.exchange(self._exchange.compressed, write)
        if ok:
            self._exchange.clip(self.max_grad_norm, exact=True)
            self._exchange.clip(self.max_grad_norm, exact=False)
        return ok

    def _factor(self, clip: bool) -> float:
        """By what this rank's gradients are multiplied: unscaled and, with ``clip``, clipped; NaN if the scaler found inf."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is not None and float(found) > 0:
            return math.nan
        factor = 1.0 if scale is None else 1.0 / float(scale)
        if clip and self.max_grad_norm:
            limit, norm = self.max_grad_norm * self._exchange.world**0.5, factor * self._local_norm()
            factor *= limit / norm if norm > limit else 1.0
        return factor

    def _local_norm(self) -> float:
        grads = [m.parameter.grad for m in self._members if m.parameter.grad is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads if g.numel()]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def _write_gradient(self, member: Member, factor: float) -> None:
        gradient = member.parameter.grad
        if gradient is None:
            member.view.zero_() if math.isfinite(factor) else member.view.fill_(factor)
            return
        if gradient.is_sparse:
            raise UnsupportedError(f"{member.name} has a sparse gradient; use Embedding(sparse=False)")
        member.view.copy_(gradient)
        if factor != 1.0:
            member.view.mul_(factor)

    def _momentum_of_gradient(self, member: Member) -> None:
        """``m`` and ``v`` of Adam from the mean gradient in the view."""
        beta1, beta2 = self.param_groups[member.group]["betas"]
        state = self.state[member.parameter]
        state["exp_avg"].mul_(beta1).add_(member.view, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(member.view, member.view, value=1 - beta2)

    def _correction(self, member: Member, which: int, count: int) -> float:
        """Adam's bias correction ``1 - beta**count``."""
        group = self.param_groups[member.group]
        return 1.0 - group["betas"][which] ** count if group["bias_correction"] else 1.0

    def _denominator(self, member: Member, variance: Tensor, count: int) -> Tensor:
        """``sqrt(v') + eps``."""
        eps = self.param_groups[member.group]["eps"]
        value = variance / self._correction(member, 1, count)
        return value.add_(eps).sqrt_() if self._eps_inside_sqrt else value.sqrt_().add_(eps)

    def _bound(self, member: Member, momentum: Tensor, variance_updates: int) -> Tensor:
        """``momentum`` as received, limited in place to ``c sqrt(v')``, ``c = max(3, (1 - b1) / sqrt(1 - b2))``.

        Adam's own momentum cannot exceed that with its usual betas [Kingma and Ba 2014, arXiv 1412.6980, section 2.1].
        1-bit sends all elements of a block with the same magnitude; where the variance is far smaller than the rest of its
        block's (units that hardly ever fire, rare tokens), dividing by it would throw the parameter away. Where v is zero,
        nothing moves.
        """
        beta1, beta2 = self.param_groups[member.group]["betas"]
        limit = self.state[member.parameter]["exp_avg_sq"] / (1 - beta2**variance_updates)
        limit.sqrt_().mul_(max(3.0, (1 - beta1) / math.sqrt(1 - beta2)))
        return momentum.clamp_(-limit, limit)

    def _move(self, member: Member, t: int, variance_updates: int) -> None:
        """AdamW's step: ``x <- x - lr (m' / (sqrt(v') + eps) + weight_decay x)``."""
        group, state = self.param_groups[member.group], self.state[member.parameter]
        lr, weights = float(group["lr"]), self._weights(member)
        if group["weight_decay"]:
            weights.mul_(1 - lr * group["weight_decay"])
        denominator = self._denominator(member, state["exp_avg_sq"], variance_updates)
        weights.addcdiv_(state["exp_avg"], denominator, value=-lr / self._correction(member, 0, t))
        self._store(member, weights)

    def _weights(self, member: Member) -> Tensor:
        """The parameter, or the fp32 master copy of a low-precision one."""
        parameter = member.parameter
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        state = self.state[parameter]
        master: Tensor | None = state.get("master")
        if master is None or not torch.equal(master.to(parameter.dtype), parameter):  # someone else wrote it
            master = state["master"] = parameter.to(torch.float32, copy=True).contiguous()
        return master

    def _store(self, member: Member, weights: Tensor) -> None:
        if weights is not member.parameter:
            member.parameter.copy_(weights)

    # ---------------------------------------------------------------- once
    @property
    def _exchange(self) -> Buckets:
        assert self._buckets is not None
        return self._buckets

    @property
    def _members(self) -> list[Member]:
        return self._exchange.members

    def _set_up(self) -> None:
        """Fix names and buckets, and make the handles. Collective, at the first step."""
        if self._buckets is not None:
            return
        if not dist.is_initialized():
            raise UnsupportedError(
                f"{type(self).__name__} averages over a process group: call torch.distributed.init_process_group() first"
            )
        now = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        if not now <= self._given:
            raise UnsupportedError(
                f"the trainer has replaced the parameters of {type(self).__name__} by others (flat shards of ZeRO, master "
                "copies), which gradcomp does not know; with DeepSpeed call gradcomp.integrations.deepspeed.initialize() "
                "at stage 0, with others use plain DDP"
            )
        sources = []
        for number, group in enumerate(self.param_groups):
            given = group.get("param_names")
            for place, p in enumerate(group["params"]):
                if p.requires_grad:
                    name = self._names.get(id(p)) or (given[place] if given else f"{number}.{place}")
                    kept = bool(group.get("non_freeze"))
                    sources.append(Source(p, number, name, id(p) in self._embeddings, kept))
        require(bool(sources), "params", [], "at least one parameter that requires a gradient")
        ranks = self._process_group or dist.group.WORLD
        assert ranks is not None
        self._buckets = Buckets(sources, ranks, self._compressor, self._rules, self._cap, self._describe, self._options)
        for member in self._members:
            for key in ("exp_avg", "exp_avg_sq"):
                if key not in self.state[member.parameter]:
                    self.state[member.parameter][key] = torch.zeros_like(member.view)


def check_whole(field: str, value: object, least: int) -> None:
    """Require a whole number of at least ``least``."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not whole:
        raise ConfigError(f"{field}={value!r}: allowed is a whole number of at least {least}")
