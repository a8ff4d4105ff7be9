"""The planner: which ZeRO stage, which compressor, or none, on this link.

``volume`` and ``memory`` are pure formulas; ``payload`` asks the library's exchange what it sends; ``timing`` runs the
library's schedules on a virtual clock; ``decide`` predicts, ranks and explains; ``profile`` and ``probe`` measure; ``report``,
``plot`` and ``paste`` say it; ``autotune`` does it to a live handle. README.md beside this file answers the usual questions.
"""

from gradcomp.planner.autotune import Autotune
from gradcomp.planner.decide import Plan, plan
from gradcomp.planner.model import Model, from_config, from_parameters, transformer
from gradcomp.planner.predict import Job, Row, predict
from gradcomp.planner.profile import Profile, assumed_network

__all__ = [
    "Autotune",
    "Job",
    "Model",
    "Plan",
    "Profile",
    "Row",
    "assumed_network",
    "from_config",
    "from_parameters",
    "plan",
    "predict",
    "transformer",
]
