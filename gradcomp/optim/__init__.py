"""Optimizers that exchange compressed momentum instead of gradients: successors of those that DeepSpeed removed.

``OneBitAdam``   Adam whose variance is frozen after a warm-up, then 1-bit momentum (arXiv 2102.02888)
``ZeroOneAdam``  the variance is updated ever more rarely, later whole rounds of communication are left out (2202.06009)
``OneBitLamb``   LAMB with layer-wise coefficients that go on adapting after the freeze (2104.06069)
"""

from gradcomp.optim.onebit_adam import OneBitAdam
from gradcomp.optim.onebit_lamb import OneBitLamb
from gradcomp.optim.zero_one_adam import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
