"""``initialize()``: DeepSpeed's own, and compression as the JSON configuration says; a context for callers of DeepSpeed's.

The configuration's top level, which DeepSpeed leaves to others::

    "gradcomp": {"compressor": "int8", "rules": [["*.embed*", "none"]], "warmup_steps": 100}

and an optimizer that DeepSpeed removed, just as it was written for it::

    "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 23000}}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradcomp.errors import ConfigError
from gradcomp.integrations.deepspeed.attach import attach
from gradcomp.integrations.deepspeed.optimizers import OPTIMIZERS, attach_optimizer, build_optimizer, refuse_stage
from gradcomp.optim.base import ExchangingOptimizer
from gradcomp.registration import SpecLike
from gradcomp.rules import Rule

KEY = "gradcomp"
_original: Callable[..., Any] = deepspeed.initialize


class _RuleBlock(BaseModel):
    model_config = ConfigDict(extra="forbid")
    spec: str
    name: str = "*"
    ndim: int | None = None
    min_numel: int = 0
    max_numel: int | None = None


class _Block(BaseModel):
    """The block ``"gradcomp"`` of the JSON configuration; names and meaning of :func:`attach`'s arguments."""

    model_config = ConfigDict(extra="forbid")
    compressor: str = "int8"
    rules: list[tuple[str, str] | _RuleBlock] = Field(default_factory=list)
    warmup_steps: int = 0
    schedule: str = "auto"
    backend: str = "auto"

    def options(self) -> dict[str, Any]:
        rules = [Rule(**rule.model_dump()) if isinstance(rule, _RuleBlock) else rule for rule in self.rules]
        return {"spec": self.compressor, **self.model_dump(exclude={"compressor", "rules"}), "rules": rules}


def parse_block(block: Any) -> dict[str, Any]:
    """The arguments of :func:`attach` that a JSON block stands for.

    Raises:
        ConfigError: an unknown or bad field.
    """
    if not isinstance(block, Mapping):
        raise ConfigError(f'"{KEY}": {block!r}: allowed is an object, such as {{"compressor": "int8"}}')
    try:
        return _Block.model_validate(block).options()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in (KEY, *first["loc"]))
        allowed = ", ".join(_Block.model_fields)
        raise ConfigError(
            f"DeepSpeed configuration, {field}={first['input']!r}: {first['msg']}; allowed are the fields {allowed}"
        ) from None


def initialize(*args: Any, spec: SpecLike | None = None, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """As ``deepspeed.initialize``, with compressed gradients. Call it on all ranks.

    Args:
        args, kwargs: of ``deepspeed.initialize``.
        spec: compressor; else that of the configuration's block ``"gradcomp"``, else ``"int8"``. With one of gradcomp's
            optimizers (an object, or ``"type": "OneBitAdam"``, ``"ZeroOneAdam"`` or ``"OneBitLamb"`` in the configuration)
            the optimizer does all that is exchanged, and both must be absent.

    Returns:
        DeepSpeed's (engine, optimizer, dataloader, scheduler). ``engine.gradcomp`` is the handle (or the optimizer).

    Raises:
        ConfigError, UnsupportedError, MismatchError: as :func:`attach`.
    """
    return _initialize(_original, {} if spec is None else {"spec": spec}, args, kwargs)


@contextmanager
def patched_initialize(spec: SpecLike | None = None, **options: Any) -> Iterator[None]:
    """Within, ``deepspeed.initialize`` compresses: for Accelerate, the Transformers Trainer and others that call it.

    A name that was imported earlier (``from deepspeed import initialize``) is not reached; use :func:`attach` there.

    Args:
        spec, options: of :func:`attach`; without, the block ``"gradcomp"`` of the configuration counts, else ``"int8"``.
    """
    replaced = deepspeed.initialize
    given = {**({} if spec is None else {"spec": spec}), **options}

    def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        return _initialize(replaced, given, args, kwargs)

    deepspeed.initialize = initialize
    try:
        yield
    finally:
        deepspeed.initialize = replaced


def _initialize(
    stock: Callable[..., Any], given: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any, Any]:
    bound = inspect.signature(_original).bind(*args, **kwargs)
    arguments = bound.arguments
    config = _config(arguments)
    block = None if config is None else config.get(KEY)
    options = dict(given) if given or block is None else parse_block(block)
    wanted = (config or {}).get("optimizer") or {}
    client = arguments.get("optimizer")
    if client is None and wanted.get("type") in OPTIMIZERS:
        refuse_stage(wanted["type"], config or {})
        arguments["optimizer"] = build_optimizer(wanted["type"], wanted.get("params") or {})
    elif isinstance(client, ExchangingOptimizer):
        refuse_stage(type(client).__name__, config or {})
        client.waiting = True  # DeepSpeed's fp16 and bf16 optimizers step it, with zeros, when they are made
    result: tuple[Any, Any, Any, Any] = stock(*bound.args, **bound.kwargs)
    engine = result[0]
    if isinstance(getattr(engine, "basic_optimizer", None), ExchangingOptimizer):
        if given or block is not None:
            raise ConfigError(
                f'"{KEY}": {options!r}: allowed is nothing with {type(engine.basic_optimizer).__name__}, which exchanges '
                "compressed momentum instead of gradients; its compressor is a parameter of the optimizer"
            )
        attach_optimizer(engine)
    else:
        attach(engine, **options)
    return result


def _config(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration, where DeepSpeed looks for it; None if there is none, which DeepSpeed will say."""
    found = arguments.get("config") or arguments.get("config_params")
    if found is None:
        found = getattr(arguments.get("args"), "deepspeed_config", None)
    if found is None:
        return None
    loaded: dict[str, Any] = load_ds_config(found)
    return loaded


__all__ = ["initialize", "parse_block", "patched_initialize"]
