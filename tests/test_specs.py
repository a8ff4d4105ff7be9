"""Spec strings, the registry, third-party compressors and rules."""

import dataclasses
from importlib.metadata import EntryPoint

import pytest
import torch

import gradcomp
from gradcomp import ConfigError, registry
from gradcomp.bucket import Parameter
from gradcomp.collectives import AllReduce
from gradcomp.compressors.base import Exchange, Part, Traits
from gradcomp.compressors.topk import TopKConfig
from gradcomp.rules import Rule, as_rules, choose
from gradcomp.testing import check_compressor


@pytest.mark.parametrize("name", gradcomp.compressor_names())
def test_round_trip_of_every_field(name: str) -> None:
    compressor, config = gradcomp.parse_spec(name)
    assert gradcomp.format_spec(config) == name
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        other = {bool: lambda v: not v, int: lambda v: v * 2 + (v == 0), float: lambda v: v / 2 if v <= 1 else v * 2}
        for kind, change in other.items():
            if type(value) is kind:
                changed = dataclasses.replace(config, **{field.name: change(value)})
                text = gradcomp.format_spec(changed)
                assert text != name
                assert gradcomp.parse_spec(text) == (compressor, changed)


def test_string_and_config_are_the_same() -> None:
    assert gradcomp.parse_spec("topk:ratio=0.02, values=fp16")[1] == TopKConfig(ratio=0.02, values="fp16")
    assert gradcomp.format_spec(TopKConfig(ratio=0.02, values="fp16")) == "topk:ratio=0.02,values=fp16"
    assert gradcomp.parse_spec("topk:k=none")[1].k is None


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("int9", ["int9", "int8", "powersgd", "did you mean"]),
        ("int8:blok=3", ["blok", "block", "stochastic", "did you mean"]),
        ("int8:block=100", ["block=100", "power of two from 32 to 65536"]),
        ("int8:block=many", ["block='many'", "a whole number"]),
        ("int8:stochastic=yes", ["stochastic='yes'", "true or false"]),
        ("int8:block", ["block=value"]),
        ("int8:block=64,block=64", ["once"]),
        ("topk:ratio=0", ["ratio=0.0", "above 0, at most 1"]),
        ("topk:ratio=1.5", ["ratio=1.5"]),
        ("topk:k=0", ["k=0", "at least 1"]),
        ("topk:values=int8", ["values='int8'", "'fp32' or 'fp16'"]),
        ("topk:index=int64", ["index='int64'"]),
        ("topk:select=best", ["select='best'"]),
        ("powersgd:rank=0", ["rank=0", "1 to 1024"]),
        ("powersgd:rank=2.5", ["rank='2.5'", "a whole number"]),
        ("powersgd:min_rate=0.5", ["min_rate=0.5"]),
        ("powersgd:start_step=-1", ["start_step=-1"]),
        ("fp16:accumulate=fp64", ["accumulate='fp64'", "'fp32' or 'wire'"]),
        ("none:x=1", ["no options"]),
    ],
)
def test_bad_specs_name_field_value_and_what_is_allowed(spec: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        gradcomp.parse_spec(spec)
    for word in [*words, spec]:
        assert word in str(raised.value)


def test_a_spec_must_be_a_string_or_config() -> None:
    with pytest.raises(ConfigError, match="allowed is a string"):
        gradcomp.parse_spec(8)
    with pytest.raises(ValueError, match="block"):  # ConfigError is a ValueError
        gradcomp.parse_spec("int8:block=1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundConfig:
    digits: int = 3


class Rounding(gradcomp.Compressor):
    """A third-party compressor: sums values rounded to a number of digits."""

    name = "rounding"
    Config = RoundConfig
    traits = Traits(
        summary="rounds", reference="-", collectives="all-reduce", bits=32, memory=0, linear=False, biased=False
    )

    def __init__(self, config: RoundConfig, part: Part) -> None:
        super().__init__(config, part)
        self.digits = config.digits

    def reduce(self) -> Exchange:
        values = self.part.gather()
        values.copy_(values.round(decimals=self.digits)).div_(self.part.world)
        yield AllReduce(values, final=True)
        self.part.ok = bool(values.isfinite().all())
        self.part.scatter(values)


def test_third_party_compressor_is_tested_by_being_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    gradcomp.register_compressor(Rounding)
    assert "rounding" in gradcomp.compressor_names()
    assert gradcomp.format_spec("rounding:digits=5") == "rounding:digits=5"
    check_compressor("rounding:digits=4")
    with pytest.raises(ConfigError, match="name='rounding'"):
        gradcomp.register_compressor(type("Other", (Rounding,), {}))
    with pytest.raises(ConfigError, match="frozen dataclass"):
        gradcomp.register_compressor(type("Odd", (Rounding,), {"name": "odd", "Config": int}))
    with pytest.raises(ConfigError, match="name='int8'"):
        gradcomp.register_compressor(type("Taken", (Rounding,), {"name": "int8"}))


def test_plugins_load_on_use_and_cannot_break_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    good = EntryPoint("plugged", f"{__name__}:Rounding", "gradcomp.compressors")
    bad = EntryPoint("broken", "no.such.module:Thing", "gradcomp.compressors")
    wrong = EntryPoint("wrong", "json:dumps", "gradcomp.compressors")
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    monkeypatch.setattr(registry, "entry_points", lambda group: [good, bad, wrong])
    assert {"plugged", "broken", "int8"} <= set(gradcomp.compressor_names())
    assert gradcomp.parse_spec("plugged:digits=2")[1] == RoundConfig(digits=2)
    with pytest.raises(ConfigError, match=r"broken.*failed to load"):
        gradcomp.parse_spec("broken")
    with pytest.raises(ConfigError, match="not a gradcomp Compressor"):
        gradcomp.parse_spec("wrong")
    assert gradcomp.parse_spec("int8")


def parameters() -> list[Parameter]:
    f32 = torch.float32
    return [
        Parameter("embed.weight", 64000, (1000, 64), f32, embedding=True),
        Parameter("layer.weight", 64 * 64, (64, 64), f32),
        Parameter("layer.bias", 64, (64,), f32),
        Parameter("norm.weight", 4096, (4096,), f32),
        Parameter("tiny.weight", 16, (4, 4), f32),
        Parameter("phase", 4096, (64, 64), torch.complex64),
    ]


@pytest.mark.parametrize(
    ("spec", "compressed"),
    [
        ("none", set()),
        ("fp16", {"embed.weight", "layer.weight", "layer.bias", "norm.weight", "tiny.weight"}),
        ("int8", {"embed.weight", "layer.weight", "norm.weight"}),
        ("int4", {"embed.weight", "layer.weight"}),
        ("topk", {"embed.weight", "layer.weight"}),
        ("onebit", {"layer.weight"}),
        ("powersgd", {"layer.weight"}),
        ("powersgd:min_rate=9", set()),
    ],
)
def test_default_rules_follow_the_traits(spec: str, compressed: set[str]) -> None:
    choices = choose(parameters(), spec, ())
    assert {name for name, choice in choices.items() if choice.bypassed is None} == compressed
    assert choices["phase"].bypassed


def test_first_matching_rule_wins_over_the_defaults() -> None:
    rules = as_rules(
        [("embed*", "int8"), Rule(spec="fp16", ndim=1, max_numel=64), Rule(spec="topk", min_numel=4000), ("*", "none")]
    )
    specs = {name: choice.spec for name, choice in choose(parameters(), "onebit", rules).items()}
    assert specs == {
        "embed.weight": "int8", "layer.weight": "topk", "layer.bias": "fp16", "norm.weight": "topk",
        "tiny.weight": "none", "phase": "none",
    }  # fmt: skip


def test_rules_by_dtype() -> None:
    rule = Rule(spec="none", dtype=torch.bfloat16)
    assert rule.matches(Parameter("a", 4, (4,), torch.bfloat16))
    assert not rule.matches(Parameter("a", 4, (4,), torch.float32))


def test_bad_rules_fail_when_they_are_written() -> None:
    with pytest.raises(ConfigError, match="int9"):
        Rule(spec="int9")
    with pytest.raises(ConfigError, match=r"pair \(name pattern, spec\)"):
        as_rules(["int8"])  # type: ignore[list-item]
