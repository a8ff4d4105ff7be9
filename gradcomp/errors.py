"""What gradcomp raises. Every message says what is wrong, where, and what to do."""


class GradcompError(RuntimeError):
    """Base class of every error that gradcomp raises on purpose."""


class ConfigError(GradcompError, ValueError):
    """An option is unknown or out of range: the message names the field, the value and what is allowed."""


class UnsupportedError(GradcompError):
    """A combination that cannot work is refused before any step is taken."""


class MismatchError(GradcompError):
    """The ranks disagree on format, compressor, bucket layout or step. Raised on every rank."""


class ExchangeError(GradcompError):
    """A collective failed: a rank died, raised an error, or did not take part within the process group's timeout."""
