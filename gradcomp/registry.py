"""Compressors by name, and spec strings: ``"topk:ratio=0.01,values=fp16"`` <-> ``TopKConfig(ratio=0.01, values="fp16")``.

Third-party compressors are found by the entry-point group ``gradcomp.compressors`` (name -> Compressor subclass) when
their name is used, so a broken plug-in cannot break ``import gradcomp``; or added by :func:`register_compressor`.
"""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from gradcomp.compressors.base import Compressor
from gradcomp.errors import ConfigError

Spec: TypeAlias = "str | object"
"""A spec string or a config object."""

_BUILTIN = {
    "none": "none:NoCompression",
    "fp16": "cast:Fp16",
    "bf16": "cast:Bf16",
    "int8": "quantize:Int8",
    "int4": "quantize:Int4",
    "onebit": "onebit:OneBit",
    "topk": "topk:TopK",
    "powersgd": "powersgd:PowerSGD",
}
_GROUP = "gradcomp.compressors"
_loaded: dict[str, type[Compressor]] = {}


def register_compressor(compressor: type[Compressor]) -> type[Compressor]:
    """Add a compressor under its ``name``; usable as a class decorator.

    Raises:
        ConfigError: the name is taken, or ``Config`` is not a frozen dataclass.
    """
    name = compressor.name
    if name in _BUILTIN or _loaded.get(name, compressor) is not compressor:
        raise ConfigError(f"name={name!r}: allowed is a name that no other compressor has")
    if not (is_dataclass(compressor.Config) and compressor.Config.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ConfigError(f"{compressor.__name__}.Config={compressor.Config!r}: allowed is a frozen dataclass")
    _loaded[name] = compressor
    return compressor


def compressor_names() -> list[str]:
    """All names that :func:`get_compressor` accepts; plug-ins are listed without being imported."""
    return [*_BUILTIN, *sorted(({e.name for e in entry_points(group=_GROUP)} | set(_loaded)) - set(_BUILTIN))]


def get_compressor(name: str) -> type[Compressor]:
    """The compressor class of that name.

    Raises:
        ConfigError: no such compressor, or its plug-in cannot be loaded.
    """
    if name in _loaded:
        return _loaded[name]
    if name in _BUILTIN:
        module, _, attribute = _BUILTIN[name].partition(":")
        found = getattr(import_module(f"gradcomp.compressors.{module}"), attribute)
    else:
        plugins = {entry.name: entry for entry in entry_points(group=_GROUP)}
        if name not in plugins:
            close = get_close_matches(name, compressor_names(), 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(f"compressor={name!r}: allowed are {', '.join(compressor_names())}{hint}")
        try:
            found = plugins[name].load()
        except Exception as error:
            raise ConfigError(
                f"compressor={name!r}: its plug-in {plugins[name].value} failed to load: {error!r}"
            ) from error
        if not (isinstance(found, type) and issubclass(found, Compressor)):
            raise ConfigError(f"compressor={name!r}: {plugins[name].value} is not a gradcomp Compressor class")
    _loaded[name] = found
    return _loaded[name]


def parse_spec(spec: Spec) -> tuple[type[Compressor], Any]:
    """A spec string or config object as (compressor class, checked config).

    Raises:
        ConfigError: names the unknown or out-of-range field, its value and what is allowed.
    """
    if not isinstance(spec, str):
        for name in compressor_names():
            compressor = get_compressor(name)
            if type(spec) is compressor.Config:
                return compressor, spec
        raise ConfigError(
            f"spec={spec!r}: allowed is a string such as 'int8:block=128' or a compressor's Config object"
        )
    name, _, options = spec.strip().partition(":")
    compressor = get_compressor(name.strip())
    kinds = get_type_hints(compressor.Config)
    known = [field.name for field in fields(compressor.Config)]
    values: dict[str, Any] = {}
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, equals, text = (part.strip() for part in option.partition("="))
        if key not in known:
            close = get_close_matches(key, known, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            allowed = ", ".join(known) or "no options"
            raise ConfigError(f"spec={spec!r}: {name} has no option {key!r}; allowed are {allowed}{hint}")
        if not equals or key in values:
            raise ConfigError(f"spec={spec!r}: {key!r} must be given once, as {key}=value")
        values[key] = _convert(spec, key, text, kinds[key])
    try:
        return compressor, compressor.Config(**values)
    except ConfigError as error:
        raise ConfigError(f"spec={spec!r}: {error}") from None


def format_spec(spec: Spec) -> str:
    """The canonical spec string: options in declaration order, defaults left out. Inverse of :func:`parse_spec`."""
    compressor, config = parse_spec(spec)
    options = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is MISSING or value != field.default:
            options.append(f"{field.name}={_text(value)}")
    return compressor.name + (":" + ",".join(options) if options else "")


def parse_specs(text: str, canonical: bool = True) -> tuple[str, ...]:
    """``"none,topk:ratio=0.02,values=fp16,int8"`` as canonical specs, or as written; ``"all"`` is every compressor.

    A comma separates specs and also the options of one spec: a part that is an option belongs to the spec before it.

    Raises:
        ConfigError: an unknown compressor or option, one given twice, or none at all.
    """
    if text.strip() == "all":
        return tuple(compressor_names())
    specs: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, _ = part.partition("=")
        if equals and ":" not in name and specs:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    checked = [format_spec(spec) for spec in specs]
    if not checked or len(set(checked)) < len(checked):
        raise ConfigError(
            f"compressors={text!r}: allowed are different specs, separated by commas, or 'all'; known are "
            f"{', '.join(compressor_names())}"
        )
    return tuple(checked if canonical else specs)


def without_unasked_feedback(spec: Spec) -> Spec:
    """``spec`` with error feedback off, unless it is a string that names ``error_feedback`` or a config object."""
    if not isinstance(spec, str):
        return spec
    _, config = parse_spec(spec)
    if "error_feedback" in spec or not getattr(config, "error_feedback", False):
        return spec
    return format_spec(replace(config, error_feedback=False))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _convert(spec: str, key: str, text: str, kind: Any) -> object:
    """``text`` as the field's annotated type."""
    if get_origin(kind) in (Union, types.UnionType):
        if text == "none" and type(None) in get_args(kind):
            return None
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        return text  # __post_init__ checks the value and lists the choices
    if kind is bool:
        if text in ("true", "false"):
            return text == "true"
        raise ConfigError(f"spec={spec!r}: {key}={text!r}: allowed is true or false")
    try:
        return kind(text)
    except ValueError:
        words = {int: "a whole number", float: "a number"}
        raise ConfigError(f"spec={spec!r}: {key}={text!r}: allowed is {words.get(kind, kind.__name__)}") from None
