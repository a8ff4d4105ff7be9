"""Which compressor serves which parameter at which step: the spec, rules and warm-up of one handle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch

from gradcomp import wire
from gradcomp.bucket import ParameterTable
from gradcomp.compressors.base import require
from gradcomp.errors import ConfigError
from gradcomp.registry import Spec, format_spec, parse_spec, without_unasked_feedback
from gradcomp.rules import Choice, Rule, RuleLike, as_rules, choose

SpecLike: TypeAlias = "Spec | Callable[[int], Spec]"
"""A spec string, a config object, or a pure function from the step to one (the same on all ranks)."""


class Selection:
    """What a user asked for, checked; never changed, only replaced.

    Args:
        spec: compressor, or a function from the step to one.
        rules: see :class:`gradcomp.Rule`.
        warmup_steps: the first steps are exchanged uncompressed.
        table: the model's parameters.
        lean: error feedback is off unless a spec names it or is a config object.
        step: from which on it is to be used.

    Raises:
        ConfigError, UnsupportedError: a bad option, or nothing would be compressed.
    """

    def __init__(
        self,
        spec: SpecLike,
        rules: Iterable[RuleLike] | None,
        warmup_steps: int,
        table: ParameterTable,
        lean: bool,
        step: int = 0,
    ) -> None:
        whole = isinstance(warmup_steps, int) and warmup_steps >= 0
        require(whole, "warmup_steps", warmup_steps, "a whole number of at least 0")
        self._spec, self._warmup, self._table, self._lean = spec, warmup_steps, table, lean
        self._choices: dict[str, Mapping[str, Choice]] = {}
        self.rules: tuple[Rule, ...] = as_rules(rules)
        if lean:
            self.rules = tuple(replace(rule, spec=without_unasked_feedback(rule.spec)) for rule in self.rules)
        self._check_coverage(self.spec_at(step))

    def changed(self, spec: SpecLike, rules: Iterable[RuleLike] | None, step: int) -> Selection:
        """The same with another spec and, unless None, other rules, from ``step`` on."""
        return Selection(spec, self.rules if rules is None else rules, self._warmup, self._table, self._lean, step)

    def spec_at(self, step: int) -> str:
        """The canonical spec of a step, warm-up aside."""
        spec = self._spec(step) if callable(self._spec) else self._spec
        return format_spec(without_unasked_feedback(spec) if self._lean else spec)

    def active_at(self, step: int) -> tuple[str, Mapping[str, Choice] | None]:
        """What is used in a step: the spec and each parameter's choice; in warm-up "none" and None."""
        spec = self.spec_at(step)
        compressor, config = parse_spec(spec)
        if step < max(self._warmup, compressor.start_step(config)):
            return "none", None
        return spec, self.choices(spec)

    def choices(self, spec: str) -> Mapping[str, Choice]:
        """What each parameter uses under ``spec``, by name."""
        if spec not in self._choices:
            choices = choose(self._table.whole.values(), spec, self.rules)
            if self._table.scatters:
                for chosen in {choice.spec for choice in choices.values()}:
                    compressor, config = parse_spec(chosen)
                    compressor.check_scatter(config)
            self._choices[spec] = choices
        return self._choices[spec]

    def _check_coverage(self, spec: str) -> None:
        """Refuse to do nothing silently: if nothing would be compressed, the rules or the spec must have said so."""
        choices = self.choices(spec)
        if spec == "none" or any(choice.bypassed is None or choice.by_rule for choice in choices.values()):
            return
        reasons = ", ".join(sorted({choice.bypassed or "" for choice in choices.values()}))
        raise ConfigError(
            f"spec={spec!r}: no parameter would be compressed ({reasons}); allowed is a spec that fits the model, 'none', or "
            "rules that name the parameters, such as rules=[('*', 'int8')]"
        )

    def describe(self) -> str:
        """For comparison between ranks."""
        spec = "a function of the step" if callable(self._spec) else self.spec_at(0)
        table = [(p.name, p.shape, str(p.dtype)) for p in self._table.whole.values()]
        rules = [repr(rule) for rule in self.rules]
        return f"{spec!r}, warm-up {self._warmup}, rules {rules}, model of {len(table)} parameters ({wire.checksum(table):#010x})"

    def warn_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of a combination that is known to converge badly."""
        compressor, _ = parse_spec(self.spec_at(0))
        names = [base.__name__.lower() for base in type(optimizer).__mro__]
        adaptive = any(word in name for name in names for word in ("adam", "lamb", "rmsprop", "adagrad"))
        if compressor.traits.strongly_biased and adaptive:
            warnings.warn(
                f"gradcomp: {compressor.name} gradients under {type(optimizer).__name__} converge worse than uncompressed ones: "
                "what compression gets wrong goes into the second moment as well (measured: README, 'What compression costs'). "
                "int8 and int4 do not have this problem.",
                stacklevel=7,  # the call of gradcomp.register()
            )
