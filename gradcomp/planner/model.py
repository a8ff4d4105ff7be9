"""What is trained, as shapes: the bytes of a compressor depend on them, not on the number of parameters alone.

A model is a list of *units* (what FSDP wraps: usually a layer) in declaration order. Transformers are described as LLaMA's
(Touvron et al. 2023, arXiv 2302.13971): per layer four attention matrices, three of the gated MLP, two norms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gradcomp.bucket import Parameter
from gradcomp.compressors.base import require

_ASPECT = 128  # hidden size per layer, as in LLaMA 7B, 13B and 33B
_VOCABULARY = 32000
_SMALL = 50_000_000
"""Below this a transformer's vocabulary would be most of it: fewer parameters are taken to be square matrices."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter's shape; ``embedding``: its rows are looked up."""

    name: str
    shape: tuple[int, ...]
    embedding: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """Shapes by unit, in declaration order.

    ``wanted``: the number of parameters that was asked for; bytes and times of the shapes are scaled to it, because no
    round hidden size gives exactly 7e9. ``hidden``, ``heads``, ``layers``, ``vocabulary`` (0 if unknown) are for the estimate
    of activation memory only.
    """

    units: tuple[tuple[Tensor, ...], ...]
    wanted: float | None = None
    hidden: int = 0
    heads: int = 0
    layers: int = 0
    vocabulary: int = 0
    title: str = "model"

    @cached_property
    def shaped(self) -> int:
        """Elements in the shapes."""
        return sum(tensor.numel for unit in self.units for tensor in unit)

    @property
    def numel(self) -> float:
        """Parameters."""
        return self.wanted if self.wanted is not None else float(self.shaped)

    @property
    def scale(self) -> float:
        """Parameters wanted per parameter in the shapes."""
        return self.numel / self.shaped

    @cached_property
    def largest_unit(self) -> float:
        """Parameters of the largest unit: what FSDP and ZeRO-3 hold whole at a time."""
        return self.scale * max(sum(tensor.numel for tensor in unit) for unit in self.units)

    def parameters(self, dtype: torch.dtype) -> list[Parameter]:
        """All parameters in declaration order, as the engine describes them."""
        return [Parameter(t.name, t.numel, t.shape, dtype, t.embedding) for unit in self.units for t in unit]

    @staticmethod
    def of(module: torch.nn.Module) -> Model:
        """The shapes of a real module: its trainable parameters; a unit for each child of a ModuleList."""
        embeddings = {
            id(child.weight)
            for child in module.modules()
            if isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        }
        tensors = [
            Tensor(name, tuple(p.shape), id(p) in embeddings)
            for name, p in module.named_parameters()
            if p.requires_grad
        ]
        units = [tuple(members) for _, members in itertools.groupby(tensors, key=lambda tensor: _layer(tensor.name))]
        return Model(tuple(units), title=type(module).__name__)


def _layer(name: str) -> str:
    """The part of a parameter's name up to the first number: its layer."""
    parts = name.split(".")
    digits = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: digits[0] + 1]) if digits else ""


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    vocabulary: int = _VOCABULARY,
    tied: bool = False,
    wanted: float | None = None,
    title: str | None = None,
) -> Model:
    """A LLaMA-like transformer. Parameters: ``layers (2 h^2 + 2 h h_kv + 3 h f + 2 h) + (1 or 2) V h + h``.

    ``h``: hidden size, ``h_kv``: that of keys and values (less with grouped-query attention), ``f``: of the MLP (8/3 h unless
    given), ``V``: vocabulary.

    Raises:
        ConfigError: a size below 1, heads that do not divide the hidden size.
    """
    for field, value in (("layers", layers), ("hidden", hidden), ("vocabulary", vocabulary)):
        require(isinstance(value, int) and value >= 1, field, value, "a whole number of at least 1")
    heads = heads or max(1, hidden // 128)
    require(hidden % heads == 0, "heads", heads, f"a divisor of the hidden size {hidden}")
    kv = hidden * (kv_heads or heads) // heads
    f = intermediate or _mlp(hidden)

    def layer(i: int) -> Iterator[Tensor]:
        for name, shape in (
            ("q", (hidden, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, hidden)),
            ("gate", (f, hidden)), ("up", (f, hidden)), ("down", (hidden, f)),
            ("norm1", (hidden,)), ("norm2", (hidden,)),
        ):  # fmt: skip
            yield Tensor(f"layers.{i}.{name}.weight", shape)

    units: list[tuple[Tensor, ...]] = [(Tensor("embed.weight", (vocabulary, hidden), embedding=True),)]
    units += [tuple(layer(i)) for i in range(layers)]
    last = (Tensor("norm.weight", (hidden,)),) + (() if tied else (Tensor("head.weight", (vocabulary, hidden)),))
    made = Model((*units, last), wanted, hidden, heads, layers, vocabulary)
    title = title or f"transformer, {layers} layers of {hidden}, vocabulary {vocabulary}"
    return Model(made.units, wanted, hidden, heads, layers, vocabulary, f"{_count(made.numel)} parameters: {title}")


def from_parameters(count: float) -> Model:
    """A model of ``count`` parameters: LLaMA's proportions (layers = hidden / 128), or square matrices if it is small.

    Raises:
        ConfigError: fewer than 1000 or more than 1e13.
    """
    require(1e3 <= count <= 1e13, "params", count, "a number from 1e3 to 1e13, such as 7e9")
    if count < _SMALL:
        side = min(1024, math.isqrt(int(count)))
        units = tuple((Tensor(f"{i}.weight", (side, side)),) for i in range(max(1, round(count / side**2))))
        return Model(units, count, title=f"{_count(count)} parameters: matrices of {side} x {side}")
    hidden, layers = min(
        (
            (h, layers)
            for h in _hidden_sizes()
            for layers in range(max(2, round(0.8 * h / _ASPECT)), round(1.25 * h / _ASPECT) + 1)
        ),
        key=lambda size: abs(math.log(_shaped(*size) / count)),
    )
    best = transformer(layers=layers, hidden=hidden)
    shape = f"transformer, {best.layers} layers of {best.hidden} (shapes assumed)"
    return Model(
        best.units, count, best.hidden, best.heads, best.layers, best.vocabulary, f"{_count(count)} parameters: {shape}"
    )


def _shaped(hidden: int, layers: int) -> int:
    """Parameters of :func:`transformer` with its defaults."""
    return layers * (4 * hidden**2 + 3 * hidden * _mlp(hidden) + 2 * hidden) + 2 * _VOCABULARY * hidden + hidden


def _mlp(hidden: int) -> int:
    return -(-8 * hidden // 3 // 64) * 64


def _hidden_sizes() -> Sequence[int]:
    return [*range(256, 2048, 128), *range(2048, 8192, 512), *range(8192, 65536, 2048)]


def from_config(config: Mapping[str, Any]) -> Model:
    """From the fields of a Hugging Face ``config.json`` (or the same words without prefix: layers, hidden, heads, ...).

    Raises:
        ConfigError: layers or hidden size are missing.
    """

    def find(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    layers, hidden = find("num_hidden_layers", "n_layer", "layers"), find("hidden_size", "n_embd", "hidden")
    for field, value in (("num_hidden_layers", layers), ("hidden_size", hidden)):
        require(
            isinstance(value, int), field, value, "a whole number; the config must say how many layers, and how wide"
        )
    return transformer(
        layers=layers, hidden=hidden,
        heads=find("num_attention_heads", "n_head", "heads"), kv_heads=find("num_key_value_heads", "kv_heads"),
        intermediate=find("intermediate_size", "n_inner", "intermediate"),
        vocabulary=find("vocab_size", "vocabulary") or _VOCABULARY,
        tied=bool(find("tie_word_embeddings", "tied") or False),
    )  # fmt: skip


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"
