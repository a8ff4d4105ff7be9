"""Checkpoints across ranks: before anything is restored, all ranks agree that together they hold one whole checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradcomp.collectives import Group
from gradcomp.errors import ConfigError, MismatchError
from gradcomp.memory import Memory

STATE_FORMAT = 1


def agree_on_states(group: Group, memory: Memory, states: Sequence[Mapping[str, Any]]) -> tuple[int, bool]:
    """Check what every rank is about to load. Collective.

    Args:
        states: what this rank loads, each from ``Handle.state_dict()``.

    Returns:
        The step at which the checkpoint was saved, and whether every rank restores its own state of the same world size.

    Raises:
        ConfigError, MismatchError: on every rank, when states are damaged, missing, doubled, of different steps, or do not
            fit the model.
    """
    problem = _problem_with(memory, states)
    brought = [(s["world"], s["rank"], s["step"]) for s in states] if problem is None else []
    everyone = group.gather_object((problem, brought), "handle.load_state_dict()")
    problems = [f"rank {rank}: {said}" for rank, (said, _) in enumerate(everyone) if said is not None]
    if problems:
        raise ConfigError("load_state_dict: " + "; ".join(problems))
    items = [item for _, brought in everyone for item in brought]
    if len({(world, step) for world, _, step in items}) != 1:
        raise MismatchError(f"load_state_dict: states of different (world size, rank, step) were passed: {items}")
    world, _, step = items[0]
    if sorted(rank for _, rank, _ in items) != list(range(world)):
        raise ConfigError(
            f"load_state_dict: allowed is the state of each of the {world} ranks that saved, once, over all ranks; got those "
            f"of ranks {sorted(rank for _, rank, _ in items)}. Save handle.state_dict() on every rank"
        )
    own = all(len(theirs) == 1 and theirs[0][1] == rank for rank, (_, theirs) in enumerate(everyone))
    return step, own and world == group.world


def _problem_with(memory: Memory, states: Sequence[Mapping[str, Any]]) -> str | None:
    for state in states:
        said = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        if said != STATE_FORMAT:
            return f"format={said!r}: allowed is {STATE_FORMAT}; is this a gradcomp state_dict?"
        if not isinstance(state.get("step"), int) or not isinstance(state.get("layout"), list):
            return "state_dict is incomplete or damaged; allowed is what handle.state_dict() returned"
        try:
            memory.check(state)
        except ConfigError as error:
            return str(error)
    return None
