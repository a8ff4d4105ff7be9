"""Where each ZeRO stage reduces gradients, and what stands there instead.

===== =========================== ============================================ ==================
stage optimizer                   replaced                                     exchange
===== =========================== ============================================ ==================
0     any; BF16_Optimizer (also   ``engine.allreduce_bucket``                  all-reduce, once
      at stage 1)                                                              a step
1, 2  DeepSpeedZeroOptimizer      ``average_tensor``, or ``allreduce_bucket``  all-reduce; at 2
                                  without contiguous gradients                 every micro-batch
3     DeepSpeedZeroOptimizer_-    ``__avg_scatter_grads`` and                  reduce-scatter,
      Stage3                      ``__avg_scatter_contiguous_grads``           every micro-batch
===== =========================== ============================================ ==================

A bucket in which nothing is compressed (warm-up, ``none``, rules) goes DeepSpeed's own way, so its bits are DeepSpeed's.
At stages 1 and 2 DeepSpeed, too, all-reduces whole buckets and lets every rank keep its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from gradcomp.bucket import Parameter, Slot, shard_slots
from gradcomp.registration import Handle

Piece = tuple[str, int, tuple[int, ...]]
"""Name, number of elements and shape of a parameter; padding has no name."""


class Overrides:
    """Attributes of single objects, replaced until :meth:`undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Put ``value`` into ``owner``'s own dictionary."""
        own = vars(owner)
        if name in own:
            self._undo.append(lambda old=own[name]: own.__setitem__(name, old))  # type: ignore[misc]
        else:
            self._undo.append(lambda: own.pop(name))
        own[name] = value

    def undo(self) -> None:
        """Restore everything, last first."""
        while self._undo:
            self._undo.pop()()


class Reducer:
    """The handles, by process group, and buckets on their way to them.

    Args:
        handle: for the data-parallel group.
        experts: for groups over which experts are averaged; without groups of one rank.
        parameters: all trained parameters by name.
    """

    def __init__(self, handle: Handle, experts: Sequence[Handle], parameters: dict[str, Parameter]) -> None:
        self.handles = [handle, *experts]
        self.world = handle.group.world
        self.parameters = parameters
        self._by_ranks = {ranks_of(each.group.process_group): each for each in self.handles}

    def serving(self, group: dist.ProcessGroup) -> Handle | None:
        """The handle of a group; None for one of a single rank, which has nothing to exchange."""
        return self._by_ranks.get(ranks_of(group)) if dist.get_world_size(group) > 1 else None

    def finish(self) -> None:
        """End a round of buckets."""
        for handle in self.handles:
            handle.finish()

    @torch.no_grad()
    def average(self, handle: Handle, pieces: Sequence[Piece], flat: Tensor) -> None:
        """Replace ``flat``, which holds ``pieces`` one after another, by the sum over the handle's group / all ranks.

        For experts these are different numbers.
        """

        def slots() -> list[Slot]:
            found, offset = [], 0
            for name, numel, shape in pieces:
                if name:
                    found.append(Slot(name, offset, numel, shape, _strides(shape)))
                offset += numel
            return found

        key = (flat.dtype, flat.numel(), *(name for name, _, _ in pieces))
        handle.submit(key, slots, flat, _nothing, False)
        if handle.group.world != self.world:
            flat.mul_(handle.group.world / self.world)

    @torch.no_grad()
    def scatter(self, handle: Handle, names: Sequence[str], gradients: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of the mean of each gradient; the last ranks' parts may be shorter, or empty."""
        world, rank = handle.group.world, handle.group.rank
        parameters = [self.parameters[name] for name in names]
        chunks = [math.ceil(gradient.numel() / world) for gradient in gradients]
        row = sum(chunks)
        buffer = gradients[0].new_zeros(world, row)
        start = 0
        for gradient, chunk in zip(gradients, chunks, strict=True):
            values, whole = gradient.reshape(-1), gradient.numel() // chunk if chunk else 0
            buffer[:whole, start : start + chunk] = values[: whole * chunk].view(whole, chunk)
            if whole < world:
                rest = values[whole * chunk :]
                buffer[whole, start : start + rest.numel()] = rest
            start += chunk
        out = buffer.new_zeros(row)
        handle.submit(
            (out.dtype, *names), lambda: shard_slots(parameters, world)[0], buffer.view(-1), _nothing, False, out
        )
        parts, start = [], 0
        for gradient, chunk in zip(gradients, chunks, strict=True):
            parts.append(out.narrow(0, start, max(0, min(chunk, gradient.numel() - rank * chunk))))
            start += chunk
        return parts


def describe_parameters(engine: Any) -> dict[str, Parameter]:
    """All trained parameters in declaration order; ``chunk`` is set at stage 3."""
    embeddings = {id(m.weight) for m in engine.module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    world = dist.get_world_size(engine.seq_data_parallel_group)
    found = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        numel, shape = (p.ds_numel, tuple(p.ds_shape)) if hasattr(p, "ds_id") else (p.numel(), tuple(p.shape))
        chunk = math.ceil(numel / world) if hasattr(p, "ds_id") else None
        name = clean(name)
        found[name] = Parameter(name, numel, shape, p.dtype, id(p) in embeddings, chunk)
    return found


def names_of(engine: Any) -> dict[int, str]:
    """Names by the parameters' ids."""
    return {id(p): clean(name) for name, p in engine.module.named_parameters()}


def clean(name: str) -> str:
    """Parameter names without what torch.compile and activation checkpointing put in between."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


# ---------------------------------------------------------------- stage 0
def replace_stage0(engine: Any, reducer: Reducer, overrides: Overrides) -> None:
    """The engine all-reduces, at the accumulation boundary, the gradients or BF16_Optimizer's fp32 sums of them."""
    stock, stock_fallback = engine.allreduce_bucket, engine.buffered_allreduce_fallback

    def allreduce_bucket(bucket: list[Tensor], dp_group: Any, dp_world_size: float | None = None) -> Tensor:
        handle = reducer.serving(dp_group)
        flat: Tensor = engine.flatten(bucket)
        if handle is not None:
            pieces = _stage0_pieces(engine, bucket)
            if handle.compresses(name for name, _, _ in pieces):
                reducer.average(handle, pieces, flat)
                return flat
            handle.count_uncompressed(flat.numel())
        averaged: Tensor = stock([flat], dp_group, dp_world_size)
        return averaged

    def buffered_allreduce_fallback(*args: Any, **kwargs: Any) -> None:
        stock_fallback(*args, **kwargs)
        reducer.finish()

    overrides.set(engine, "allreduce_bucket", allreduce_bucket)
    overrides.set(engine, "buffered_allreduce_fallback", buffered_allreduce_fallback)


def _stage0_pieces(engine: Any, bucket: Sequence[Tensor]) -> list[Piece]:
    """Whose gradients the tensors are, by where they lie in memory."""
    optimizer = engine.optimizer
    if type(optimizer) is BF16_Optimizer:
        names = names_of(engine)
        groups = dict(
            zip(map(Tensor.data_ptr, optimizer.fp32_groups_gradients_flat), optimizer.bf16_groups, strict=True)
        )
        pieces: list[Piece] = []
        for flat in bucket:
            members = groups[flat.data_ptr()]
            pieces += [(names[id(p)], p.numel(), tuple(p.shape)) for p in members]
            padding = flat.numel() - sum(p.numel() for p in members)
            if padding:
                pieces.append(("", padding, (padding,)))
        return pieces
    found = {}
    for name, p in engine.module.named_parameters():
        if p.grad is not None and not p.grad.is_sparse and p.grad.numel():
            found[p.grad.data_ptr()] = (clean(name), p.numel(), tuple(p.shape))
    return [found[tensor.data_ptr()] for tensor in bucket]


# ---------------------------------------------------------------- stages 1 and 2
def replace_stage12(engine: Any, reducer: Reducer, overrides: Overrides) -> None:
    """The optimizer all-reduces buckets of whole gradients, as backward or its end fills them."""
    optimizer, names = engine.optimizer, names_of(engine)
    stock, stock_predivide = optimizer.average_tensor, optimizer.gradient_reduction_w_predivide
    stock_bucket, stock_epilogue = optimizer.allreduce_bucket, optimizer.independent_gradient_partition_epilogue
    compressing = False

    def pieces_by_handle(parameters: Sequence[Any]) -> list[tuple[Handle | None, list[tuple[int, Piece]]]]:
        """The bucket's parameters with their offsets, for each process group that averages some of them."""
        parts: dict[int, tuple[Handle | None, list[tuple[int, Piece]]]] = {}
        offset = 0
        for p in parameters:
            group = optimizer.expert_dp_process_group[p.group_name] if is_moe_param(p) else optimizer.dp_process_group
            handle = reducer.serving(group)
            parts.setdefault(id(handle), (handle, []))[1].append((offset, (names[id(p)], p.numel(), tuple(p.shape))))
            offset += p.numel()
        return list(parts.values())

    def members(communication_data_type: torch.dtype) -> list[Any]:
        bucket = optimizer.ipg_buckets[communication_data_type]
        return [optimizer.bit16_groups[group][place] for group, place, _ in bucket.params]

    def average_tensor(tensor: Tensor, communication_data_type: torch.dtype) -> None:
        nonlocal compressing
        if not tensor.numel():
            return
        parts = pieces_by_handle(members(communication_data_type))
        if not any(handle is not None and handle.compresses(n for _, (n, _, _) in items) for handle, items in parts):
            for handle, items in parts:
                if handle is not None:
                    handle.count_uncompressed(sum(numel for _, (_, numel, _) in items))
            stock(tensor, communication_data_type)
            return
        # with reduce_scatter off, DeepSpeed hands the whole bucket to one method, on the stream that it reduces on
        configured, compressing = optimizer.reduce_scatter, True
        optimizer.reduce_scatter = False
        try:
            stock(tensor, communication_data_type)
        finally:
            optimizer.reduce_scatter, compressing = configured, False

    def gradient_reduction_w_predivide(tensor: Tensor, communication_data_type: torch.dtype) -> Tensor:
        if not compressing:
            reduced: Tensor = stock_predivide(tensor, communication_data_type)
            return reduced
        parts = pieces_by_handle(members(communication_data_type))
        for handle, items in parts:
            if len(parts) == 1 and handle is not None:
                reducer.average(handle, [piece for _, piece in items], tensor)
            elif handle is None:  # experts that no other rank has
                for offset, (_, numel, _) in items:
                    tensor[offset : offset + numel].div_(reducer.world)
            else:
                views = [tensor[offset : offset + numel] for offset, (_, numel, _) in items]
                flat = torch.cat(views)
                reducer.average(handle, [piece for _, piece in items], flat)
                for view, values in zip(views, torch.split(flat, [v.numel() for v in views]), strict=True):
                    view.copy_(values)
        return tensor

    def allreduce_bucket(
        bucket: list[Tensor],
        communication_data_type: torch.dtype,
        rank: int | None = None,
        log: Any = None,
        divide: bool = True,
        process_group: Any = None,
    ) -> Tensor:
        """Without contiguous gradients: a list of whole gradients, wherever they lie."""
        ipg = optimizer.ipg_buckets[communication_data_type]
        owners = dict(zip(map(Tensor.data_ptr, ipg.grads), members(communication_data_type), strict=True))
        pieces = [(names[id(p)], p.numel(), tuple(p.shape)) for p in (owners[t.data_ptr()] for t in bucket)]
        handle = reducer.serving(optimizer.dp_process_group)
        if handle is not None and handle.compresses(name for name, _, _ in pieces):
            flat: Tensor = optimizer.flatten(bucket)
            reducer.average(handle, pieces, flat)
            return flat
        if handle is not None:
            handle.count_uncompressed(sum(numel for _, numel, _ in pieces))
        averaged: Tensor = stock_bucket(bucket, communication_data_type, rank, log, divide, process_group)
        return averaged

    def independent_gradient_partition_epilogue() -> None:
        stock_epilogue()
        reducer.finish()

    if optimizer.contiguous_gradients:
        overrides.set(optimizer, "average_tensor", average_tensor)
        overrides.set(optimizer, "gradient_reduction_w_predivide", gradient_reduction_w_predivide)
    else:
        overrides.set(optimizer, "allreduce_bucket", allreduce_bucket)
    overrides.set(optimizer, "independent_gradient_partition_epilogue", independent_gradient_partition_epilogue)


# ---------------------------------------------------------------- stage 3
def replace_stage3(engine: Any, reducer: Reducer, overrides: Overrides) -> None:
    """The optimizer reduce-scatters each bucket: every rank gets its part of each gradient."""
    optimizer, names = engine.optimizer, names_of(engine)
    prefix = "_DeepSpeedZeroOptimizer_Stage3__"
    stock = getattr(optimizer, prefix + "avg_scatter_grads")
    stock_contiguous = getattr(optimizer, prefix + "avg_scatter_contiguous_grads")
    stock_epilogue = optimizer.independent_gradient_partition_epilogue

    def reduce(parameters: Sequence[Any]) -> list[Tensor] | None:
        handle = reducer.serving(optimizer._get_param_partition_group(parameters[0]))
        if handle is None:
            return None
        ours, gradients = [names[id(p)] for p in parameters], [p.grad for p in parameters]
        if not handle.compresses(ours):
            handle.count_uncompressed(sum(g.numel() for g in gradients), scatter=True)
            return None
        parts = reducer.scatter(handle, ours, gradients)
        return [part.to(optimizer.gradient_accumulation_dtype) for part in parts]

    def avg_scatter_grads(params_to_reduce: list[Any], communication_data_type: torch.dtype) -> list[Tensor]:
        parts = reduce(params_to_reduce)
        return stock(params_to_reduce, communication_data_type) if parts is None else parts

    def avg_scatter_contiguous_grads(buffer: Tensor, communication_data_type: torch.dtype) -> list[Tensor]:
        """With ``reduce_scatter: false``, where DeepSpeed all-reduces and wants parts of equal size."""
        parameters = optimizer.ipg_buckets[communication_data_type].params
        parts = reduce(parameters)
        if parts is None:
            return stock_contiguous(buffer, communication_data_type)  # type: ignore[no-any-return]
        sizes = [p.partition_numel() for p in parameters]
        return [nn.functional.pad(part, (0, size - part.numel())) for part, size in zip(parts, sizes, strict=True)]

    def independent_gradient_partition_epilogue() -> None:
        stock_epilogue()
        reducer.finish()

    overrides.set(optimizer, prefix + "avg_scatter_grads", avg_scatter_grads)
    overrides.set(optimizer, prefix + "avg_scatter_contiguous_grads", avg_scatter_contiguous_grads)
    overrides.set(optimizer, "independent_gradient_partition_epilogue", independent_gradient_partition_epilogue)


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a process group, which identify it: DeepSpeed makes several of the same ranks."""
    return tuple(dist.get_process_group_ranks(group))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _nothing() -> None:
    """The handle is synchronous: the bucket is read when submit() returns."""
