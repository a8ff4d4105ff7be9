"""Rules: which parameter gets which compressor. First match wins; then the compressor's own defaults; then the spec.

By default small parameters (under 1024 elements), vectors (norms, biases) and embeddings go uncompressed where the
compressor would serve them badly; its traits say which of them (casts compress everything, int8 all but small ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

from gradcomp.bucket import Parameter
from gradcomp.errors import ConfigError
from gradcomp.registry import Spec, format_spec, parse_spec

RuleLike: TypeAlias = "Rule | tuple[str, Spec]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Parameters that match all given conditions use ``spec`` ("none": uncompressed).

    ``name``: a pattern such as ``"*.embed*"`` (fnmatch, case-sensitive) against the parameter's full name; ``ndim``;
    ``dtype``; ``min_numel`` and ``max_numel``, inclusive.
    """

    spec: Spec
    name: str = "*"
    ndim: int | None = None
    dtype: torch.dtype | None = None
    min_numel: int = 0
    max_numel: int | None = None

    def __post_init__(self) -> None:
        """Check the spec now, not in the middle of a step."""
        parse_spec(self.spec)

    def matches(self, parameter: Parameter) -> bool:
        """Whether the rule applies."""
        return (
            fnmatchcase(parameter.name, self.name)
            and self.ndim in (None, len(parameter.shape))
            and self.dtype in (None, parameter.dtype)
            and self.min_numel <= parameter.numel
            and (self.max_numel is None or parameter.numel <= self.max_numel)
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What a parameter uses: a canonical spec, and why it is not compressed (None if it is)."""

    spec: str
    bypassed: str | None = None
    by_rule: bool = False


def as_rules(rules: Iterable[RuleLike] | None) -> tuple[Rule, ...]:
    """Accept :class:`Rule` objects and ``(pattern, spec)`` pairs.

    Raises:
        ConfigError: something else.
    """
    checked = []
    for rule in rules or ():
        if isinstance(rule, Rule):
            checked.append(rule)
        elif isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str):
            checked.append(Rule(name=rule[0], spec=rule[1]))
        else:
            raise ConfigError(f"rules: {rule!r}: allowed is gradcomp.Rule(...) or a pair (name pattern, spec)")
    return tuple(checked)


def choose(parameters: Iterable[Parameter], spec: Spec, rules: Sequence[Rule]) -> dict[str, Choice]:
    """Decide for every parameter, in order."""
    compressor, config = parse_spec(spec)
    canonical = format_spec(config)
    return {parameter.name: _choose(parameter, compressor, config, canonical, rules) for parameter in parameters}


def _choose(parameter: Parameter, compressor: Any, config: Any, canonical: str, rules: Sequence[Rule]) -> Choice:
    if not parameter.dtype.is_floating_point:
        return Choice("none", f"dtype {str(parameter.dtype).removeprefix('torch.')}")
    for rule in rules:
        if rule.matches(parameter):
            chosen = format_spec(rule.spec)
            return Choice(chosen, f"rule {rule.name!r}" if chosen == "none" else None, by_rule=True)
    if canonical == "none":
        return Choice("none", "the spec is none")
    reason = compressor.bypass(config, parameter)
    return Choice("none", reason) if reason else Choice(canonical)
