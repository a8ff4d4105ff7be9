"""What :func:`~gradcomp.integrations.deepspeed.attach` refuses, and the parts of DeepSpeed that it relies on.

DeepSpeed's versions differ in which method moves the gradients, so nothing is assumed: the version, the exact classes and
the parameters of every method that is replaced or called are compared with those that were tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import deepspeed
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from gradcomp.collectives import Group
from gradcomp.errors import UnsupportedError

TESTED = ((0, 19, 8), (0, 20, 0))
"""Versions from the first to below the second."""

SIGNATURES: dict[type[Any], dict[str, str]] = {
    DeepSpeedEngine: {
        "allreduce_bucket": "self, bucket, dp_group, dp_world_size",
        "buffered_allreduce_fallback": "self, grads, elements_per_buffer",
        "step": "self, lr_kwargs",
        "save_checkpoint": "self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters",
        "load_checkpoint": "self, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, "
        "load_module_only, custom_load_fn",
        "was_step_applied": "self",
        "clip_fp32_gradients": "self",
        "is_deepcompile_enabled": "self",
    },
    DeepSpeedZeroOptimizer: {
        "average_tensor": "self, tensor, communication_data_type",
        "gradient_reduction_w_predivide": "self, tensor, communication_data_type",
        "allreduce_bucket": "self, bucket, communication_data_type, rank, log, divide, process_group",
        "independent_gradient_partition_epilogue": "self",
    },
    DeepSpeedZeroOptimizer_Stage3: {
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads": "self, params_to_reduce, communication_data_type",
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads": "self, buffer_to_reduce, communication_data_type",
        "_get_param_partition_group": "self, param",
        "independent_gradient_partition_epilogue": "self",
    },
    BF16_Optimizer: {"get_grads_for_reduction": "self"},
}
"""Class, method, parameters: what is replaced or relied on."""


def check_installation() -> None:
    """Raise UnsupportedError unless this DeepSpeed is one that was tested."""
    version = deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__
    first, end = TESTED
    if not first <= version < end:
        raise UnsupportedError(
            f"DeepSpeed {deepspeed.__version__}: tested are {_dotted(first)} up to, not including, {_dotted(end)}, because other "
            f"versions move gradients by other methods; pip install 'deepspeed>={_dotted(first)},<{_dotted(end)}'"
        )
    changed = [
        f"{kind.__name__}.{name} {found} instead of ({parameters})"
        for kind, methods in SIGNATURES.items()
        for name, parameters in methods.items()
        if (found := signature_of(kind, name)) != f"({parameters})"
    ]
    if changed:
        raise UnsupportedError(
            f"DeepSpeed {deepspeed.__version__} has other methods than gradcomp knows: {'; '.join(changed)}; use deepspeed=="
            f"{_dotted(first)}"
        )


def signature_of(kind: type[Any], name: str) -> str:
    """The names of a method's parameters, in brackets; "is gone" without such a method."""
    method = getattr(kind, name, None)
    if method is None:
        return "is gone"
    while "func" in method.__code__.co_freevars:  # deepspeed.utils.instrument_w_nvtx leaves no other trace of it
        method = method.__closure__[method.__code__.co_freevars.index("func")].cell_contents
    return f"({', '.join(inspect.signature(method).parameters)})"


def agree_on_engine(engine: Any) -> int:
    """Refuse what gradients would go past, or what would be averaged differently; returns the stage that reduces.

    That is the ZeRO stage, but 0 for ``BF16_Optimizer``, whose gradients the engine reduces. Collective, so that no rank
    waits for one that refuses.

    Raises:
        UnsupportedError: all reasons at once, each with what to do instead.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise UnsupportedError(
            f"attach() needs the engine that deepspeed.initialize() returned, got {type(engine).__name__}"
        )
    stage = 0

    def check() -> str:
        nonlocal stage
        stage = _check(engine)
        return f"ZeRO {stage}"

    Group(engine.seq_data_parallel_group).agree(check, "gradcomp and DeepSpeed")
    return stage


def _check(engine: Any) -> int:
    check_installation()
    if type(engine) is not DeepSpeedEngine:
        raise UnsupportedError(
            f"{type(engine).__name__} (pipeline or hybrid engine) reduces gradients by its own schedule, past gradcomp; use "
            "plain data parallelism or ZeRO, deepspeed.initialize() with an nn.Module that is no PipelineModule"
        )
    if engine.optimizer is None:
        raise UnsupportedError(
            "this engine has no optimizer, so it reduces no gradients: give deepspeed.initialize() one"
        )
    problems = list(_settings(engine))
    optimizer, stage = engine.optimizer, int(engine.zero_optimization_stage())
    wanted: tuple[type[Any], ...]
    if type(optimizer) is BF16_Optimizer:
        stage = 0
    elif stage:
        wanted = (DeepSpeedZeroOptimizer_Stage3,) if stage == 3 else (DeepSpeedZeroOptimizer,)
        if type(optimizer) not in wanted:
            problems.append(
                f"{type(optimizer).__name__} (ZenFlow, SuperOffload, or another subclass) has methods of its own for "
                f"gradients: turn that feature off, so that ZeRO {stage} runs with {wanted[0].__name__}"
            )
    elif type(optimizer).__module__.startswith("deepspeed.runtime") and type(optimizer) not in (
        FP16_Optimizer,
        FP16_UnfusedOptimizer,
    ):
        problems.append(f"{type(optimizer).__name__} is not known to gradcomp at stage 0")
    if problems:
        raise UnsupportedError("gradcomp cannot work with this DeepSpeed configuration: " + "; ".join(problems))
    return stage


def _settings(engine: Any) -> Iterator[str]:
    """Configuration that the exchange would ignore, and features that reduce gradients elsewhere."""
    config, zero = engine._config, engine._config.zero_config
    if engine.is_deepcompile_enabled():
        yield "compile.deepcompile: gradients are reduced inside the compiled graph; set it to false"
    if zero.zenflow is not None:
        yield "zero_optimization.zenflow: reduces only selected gradients, by its own methods; remove it"
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, name)
        if offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme":
            yield f"zero_optimization.{name}.device='nvme': its swapper takes the gradients; use 'cpu'"
        if getattr(offload, "super_offload", False):
            yield f"zero_optimization.{name}.super_offload: its optimizer reduces by its own methods; set it to false"
    if engine.zero_optimization_stage() == 3 and zero.offload_optimizer is not None:
        device = str(getattr(zero.offload_optimizer.device, "value", zero.offload_optimizer.device))
        if device == "cpu" and getattr(zero.offload_optimizer, "ratio", 1.0) < 1.0:
            yield "zero_optimization.offload_optimizer.ratio < 1 (Twin-Flow): not tested; use 1.0"
    if zero.zero_quantized_gradients:
        yield "zero_optimization.zero_quantized_gradients: quantises gradients itself; remove it, or gradcomp"
    if zero.zero_hpz_partition_size > 1:
        yield "zero_optimization.zero_hpz_partition_size > 1: gradients have a second partitioning; set it to 1"
    if not engine.gradient_average:
        yield "gradient_allreduce_op='sum': gradcomp averages; use 'mean'"
    if config.prescale_gradients or config.gradient_predivide_factor != 1.0:
        yield "prescale_gradients, gradient_predivide_factor: compressed sums are formed in fp32; remove both"
    if config.communication_data_type is not None:
        yield (
            f"communication_data_type={config.communication_data_type}: the compressor decides what travels; remove it, or use "
            "the compressor 'fp16' or 'bf16'"
        )
    if engine.torch_autocast_enabled():
        yield "torch_autocast: its communication types differ by parameter; use the sections 'bf16' or 'fp16'"
    if engine.sequence_parallel_size > 1:
        yield f"sequence parallelism of {engine.sequence_parallel_size}: averages over another number of ranks; not supported"
    if engine.autotp_size() > 1:
        yield f"tensor_parallel.autotp_size={engine.autotp_size()}: not tested; use 1"
    if getattr(engine, "_autoep_folding_spec", None) is not None:
        yield "AutoEP: its experts have partition groups of their own; use deepspeed.moe.layer.MoE at stages 0 to 2"
    if engine.has_moe_layers and engine.zero_optimization_stage() in (1, 2) and not zero.contiguous_gradients:
        yield "MoE with zero_optimization.contiguous_gradients=false: experts would be averaged over all ranks; set it to true"
    if not engine.enable_backward_allreduce:
        yield "engine.enable_backward_allreduce=False: something else reduces the gradients"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
