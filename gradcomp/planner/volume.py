"""Bytes per rank and optimizer step: pure formulas, and the library's own exchange where it compresses.

Symbols: n parameters, N ranks, f = (N - 1) / N, b_g and b_w bytes per gradient and weight, G micro-steps per optimizer
step. All volumes are bytes that one rank *sends* per optimizer step. Ring all-reduce of M bytes: ``2 f M``; reduce-scatter,
all-gather, all-to-all of M: ``f M`` (Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations
in MPICH", sections 3 and 4; ZeRO: Rajbhandari et al. 2019, arXiv 1910.02054, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.registry import parse_spec


def share(ranks: int) -> float:
    """f = (N - 1) / N: the part of a collective's data that leaves a rank."""
    return (ranks - 1) / ranks


def all_reduce(nbytes: float, ranks: int) -> float:
    """``2 f M``, ring."""
    return 2 * share(ranks) * nbytes


def scatter(nbytes: float, ranks: int) -> float:
    """``f M``: reduce-scatter, all-to-all, or all-gather of M bytes in all."""
    return share(ranks) * nbytes


def gather_payloads(payload: float, ranks: int) -> float:
    """``(N - 1) m``: an all-gather in which every rank contributes m bytes; grows with N (Top-K)."""
    return (ranks - 1) * payload


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How a trainer moves gradients and weights in one optimizer step.

    ``gradients``: ``all-reduce`` or ``reduce-scatter``; ``each_micro_step``: they move in every micro-step, not once per step.
    ``gathers``: all-gathers of the weights, per micro-step if ``gathers_each_micro_step``. ``sharded``: what is divided among
    the ranks, of ``optimizer``, ``gradients``, ``weights``. ``local_steps``: H, optimizer steps between two exchanges.
    ``weight_spec``: how weights are gathered; empty: as they are.
    """

    name: str
    title: str
    gradients: str = "all-reduce"
    each_micro_step: bool = False
    gathers: int = 0
    gathers_each_micro_step: bool = False
    sharded: frozenset[str] = frozenset()
    local_steps: int = 1
    trainer: str = "deepspeed"
    weight_spec: str = ""

    def weight_bytes(self, width: float) -> float:
        """Bytes per weight when gathered: ``width``, or what the compressor's payload has per element."""
        return parse_spec(self.weight_spec)[0].traits.bits / 8 if self.weight_spec else width

    def gradient_rounds(self, micro_steps: int) -> float:
        """Exchanges of all gradients per optimizer step."""
        return (micro_steps if self.each_micro_step else 1) / self.local_steps

    def weight_rounds(self, micro_steps: int) -> int:
        """All-gathers of all weights per optimizer step."""
        return self.gathers * (micro_steps if self.gathers_each_micro_step else 1)

    def plain_bytes(self, n: float, ranks: int, b_g: float, b_w: float, micro_steps: int = 1) -> float:
        """Bytes without compression: ``rounds_g (2f or f) b_g n + rounds_w f b_w n``.

        DDP 2f b_g n; ZeRO-1 f b_g n + f b_w n; ZeRO-2 G f b_g n + f b_w n; ZeRO-3 and FSDP G f n (2 b_w + b_g), and
        G f n (b_w + b_g) if weights stay after forward; DiLoCo 2f b_g n / H. As DeepSpeed runs stages 1 and 2 (see
        :data:`SCHEMES`) the gradients count twice.
        """
        once = all_reduce(b_g * n, ranks) if self.gradients == "all-reduce" else scatter(b_g * n, ranks)
        return self.gradient_rounds(micro_steps) * once + self.weight_rounds(micro_steps) * scatter(b_w * n, ranks)


_STATES = frozenset({"optimizer"})
_GRADIENTS = _STATES | {"gradients"}
_ALL = _GRADIENTS | {"weights"}

SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="ddp", title="DDP", trainer="ddp"),
        # DeepSpeed 0.19.8 all-reduces gradients at stages 1 and 2 by default (`reduce_scatter: true` with multi-rank buckets:
        # stage_1_and_2.py, allreduce_bucket), where the paper reduce-scatters: 1.5 times DDP's bytes instead of 1.
        Scheme(name="zero1", title="ZeRO-1", gathers=1, sharded=_STATES),
        Scheme(name="zero2", title="ZeRO-2", each_micro_step=True, gathers=1, sharded=_GRADIENTS),
        Scheme(
            name="zero3", title="ZeRO-3", gradients="reduce-scatter", each_micro_step=True, gathers=2,
            gathers_each_micro_step=True, sharded=_ALL,
        ),
        Scheme(
            name="fsdp2", title="FSDP2", gradients="reduce-scatter", each_micro_step=True, gathers=2,
            gathers_each_micro_step=True, sharded=_ALL, trainer="fsdp2",
        ),
        Scheme(
            name="fsdp2-keep", title="FSDP2, kept", gradients="reduce-scatter",
            each_micro_step=True, gathers=1, gathers_each_micro_step=True, sharded=_ALL, trainer="fsdp2",
        ),
        Scheme(
            name="fsdp2-int8", title="FSDP2, int8 weights", gradients="reduce-scatter", each_micro_step=True, gathers=2,
            gathers_each_micro_step=True, sharded=_ALL, trainer="fsdp2", weight_spec="int8",
        ),
        Scheme(
            name="zero1-paper", title="ZeRO-1, paper", gradients="reduce-scatter", gathers=1, sharded=_STATES,
            trainer="none",
        ),
        Scheme(
            name="zero2-paper", title="ZeRO-2, paper", gradients="reduce-scatter", each_micro_step=True,
            gathers=1, sharded=_GRADIENTS, trainer="none",
        ),
        Scheme(
            name="zero++", title="ZeRO++", gradients="reduce-scatter", each_micro_step=True, gathers=2,
            gathers_each_micro_step=True, sharded=_ALL,
        ),
        Scheme(name="diloco", title="DiLoCo", local_steps=100, trainer="none"),
    )
}  # fmt: skip


def zero_plus_plus(n: float, ranks: int, gpus_per_node: int = 1, hpz: bool = True, micro_steps: int = 1) -> float:
    """Bytes of ZeRO++ that a rank sends to other *nodes* and its own: ``G f n (1 + 1 + 0.5)``.

    int8 weights gathered in forward and in backward (qwZ), int4 gradients in a hierarchical all-to-all (qgZ). With hpZ the
    second gather stays in the node, so where nodes have several GPUs it is left out: G f n (1 + 0.5). Wang et al. 2023,
    arXiv 2306.10209, section 3.
    """
    gathers = 1 if hpz and gpus_per_node > 1 else 2
    return micro_steps * share(ranks) * n * (gathers * 1 + 0.5)


def sent_bytes(kind: str, nbytes: float, backend: str) -> float:
    """What a backend really sends for a collective that needs ``nbytes``.

    gloo (torch 2.13) reduce-scatters by an all-reduce of everything, so twice as much: measured at the network interface
    (tests/test_planner_ranks.py).
    """
    return 2 * nbytes if backend == "gloo" and kind == "ReduceScatter" else nbytes


def nic_bytes(kind: str, sent: float, ranks: int, gpus_per_node: int) -> float:
    """What one node's NIC sends, when each of its g GPUs sends ``sent`` bytes in a flat collective over all N ranks.

    A ring visits every node once, so its NIC carries what one rank sends. In an all-to-all every GPU writes to all
    others: of ``(N - 1)/N M`` per GPU the part ``(N - g)/N M`` leaves the node, g times over.
    """
    g = gpus_per_node
    if kind != "AllToAll" or g == 1:
        return sent
    return g * sent * (ranks - g) / (ranks - 1)


def hierarchical_nic_bytes(nbytes: float, ratio: float, nodes: int) -> float:
    """NIC bytes per node if gradients were reduce-scattered in the node, compressed between nodes, gathered in the node.

    ``2 (L - 1)/L M / ratio`` for L nodes: each of the g GPUs exchanges its M / g.
    """
    return 2 * (nodes - 1) / nodes * nbytes / ratio


def local_steps(n: float, ranks: int, nbytes: float, steps: int) -> float:
    """DiLoCo (Douillard et al. 2023, arXiv 2311.08105): ``2 f b n / H`` per inner step."""
    return all_reduce(nbytes * n, ranks) / steps


def useful_ratio(comm_seconds: float, hidden_seconds: float) -> float:
    """The compression ratio beyond which nothing is gained: what remains of communication then fits behind backward.

    ``T_comm / T_backward``, at least 1 (Agarwal et al. 2021, arXiv 2103.00543, section 3).
    """
    return max(1.0, comm_seconds / hidden_seconds) if hidden_seconds > 0 else float("inf")
