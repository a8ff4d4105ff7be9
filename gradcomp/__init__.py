"""gradcomp: compressed gradient exchange for data-parallel training over slow links.

One line after wrapping the model::

    handle = gradcomp.register(DistributedDataParallel(model), "int8")

See README.md for when that helps, ``gradcomp list`` for the compressors and ``gradcomp doctor`` for this machine.
"""

from gradcomp.compressors.base import Compressor
from gradcomp.errors import ConfigError, ExchangeError, GradcompError, MismatchError, UnsupportedError
from gradcomp.integrations.ddp import ddp_hook
from gradcomp.integrations.dispatch import register
from gradcomp.registration import Handle
from gradcomp.registry import compressor_names, format_spec, parse_spec, register_compressor
from gradcomp.rules import Rule
from gradcomp.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "Compressor",
    "ConfigError",
    "ExchangeError",
    "GradcompError",
    "Handle",
    "MismatchError",
    "Rule",
    "Stats",
    "UnsupportedError",
    "compressor_names",
    "ddp_hook",
    "format_spec",
    "parse_spec",
    "register",
    "register_compressor",
]
