"""FSDP2 on two ranks: compressed reduce-scatter and all-gather, FSDP2's own settings, faults, refusals, checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
from fsdp_refusals import REFUSALS, raises
from workers import Battery

import gradcomp
from gradcomp.integrations.dcp import HandleState

ROOT = Path(__file__).resolve().parent.parent
STEPS = 40
RATE = {"lr": 0.02}
RUNS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "native": (None, {}),
    "native, slow": (None, RATE),
    "int8": ("int8", {}),
    "int4": ("int4", {}),
    "fp16": ("fp16", {}),
    "onebit": ("onebit", {"warmup_steps": 8, **RATE}),
    "onebit with feedback": ("onebit:error_feedback=true", {"warmup_steps": 8, **RATE}),
}
SETTINGS = (
    "default", "divide 1.0", "divide 2.0", "sum", "sum, divide 1.0", "reduce bf16", "reduce fp16", "param bf16",
    "reshard True", "reshard False", "rows of columns",
)  # fmt: skip
FEEDBACK = ("int8:error_feedback=true", "int4:error_feedback=true", "onebit:error_feedback=true")
RESUMED = ("int8:error_feedback=true", "onebit", "onebit:error_feedback=true")


def snippets() -> list[str]:
    """The Python and diff snippets of the FSDP2 section of integrations/README.md."""
    section = re.search(r"\n## FSDP2\n(.*?)\n## ", (ROOT / "integrations" / "README.md").read_text(), re.DOTALL)
    assert section is not None
    found = []
    for kind, body in re.findall(r"```(python|diff)\n(.*?)```", section[1], re.DOTALL):
        lines = body.splitlines()
        if kind == "diff":
            lines = [line[1:] for line in lines if not line.startswith("-")]
        found.append("\n".join(lines))
    return found


TWO = Battery(
    2,
    {
        **{("run", name): (cases.train, (spec, STEPS, options)) for name, (spec, options) in RUNS.items()},
        **{(spec, how): (cases.gradients, (spec, how)) for spec in ("none", "int8") for how in SETTINGS},
        **{("accumulated", sync): (cases.accumulated, ("none", sync)) for sync in (False, True)},
        ("accumulated", "int8"): (cases.accumulated, ("int8", False)),
        "unused": (cases.unused, ("int8",)),
        **{("conserved", spec): (cases.conserved, (spec, False)) for spec in FEEDBACK},
        ("conserved", "twice"): (cases.conserved, ("int4:error_feedback=true", True)),
        **{("nonfinite", spec): (cases.nonfinite, (spec,)) for spec in ("int8", "int4:error_feedback=true")},
        "interrupted": (cases.interrupted, ("int4:error_feedback=true",)),
        "compiled": (cases.compiled, ("int8",)),
        "checkpointed": (cases.checkpointed, ("int8",)),
        "freezing": (cases.freezing, ("int4:error_feedback=true",)),
        "alone": (cases.alone, ()),
        **{("gathered", dtype): (cases.gathered, (dtype, STEPS)) for dtype in (None, "bfloat16")},
        "both": (cases.both, (STEPS,)),
        **{("resumed", spec): (cases.resumed, (spec,)) for spec in RESUMED},
        **{("snippet", number): (cases.snippet, (code,)) for number, code in enumerate(snippets())},
        **{("raises", how): (raises, (how,)) for how in REFUSALS},
    },
    timeout=400,
)


def same(results: list[Any]) -> Any:
    """The result, which all ranks must agree on."""
    assert all(result == results[0] for result in results)
    return results[0]


# ---------------------------------------------------------------- training
@pytest.mark.parametrize("name", [name for name in RUNS if "native" not in name])
def test_ranks_end_with_the_same_parameters(name: str) -> None:
    assert len({result["digest"] for result in TWO["run", name]}) == 1


@pytest.mark.parametrize("name", ["int8", "fp16", "int4"])
def test_the_loss_is_that_of_uncompressed_training(name: str) -> None:
    assert TWO["run", name][0]["loss"] == pytest.approx(TWO["run", "native"][0]["loss"], rel=0.01)


def test_onebit_after_a_warm_up_trains_at_a_moderate_rate() -> None:
    native = TWO["run", "native, slow"][0]["loss"]
    assert TWO["run", "onebit with feedback"][0]["loss"] < 1.2 * native
    assert TWO["run", "onebit"][0]["loss"] < 2 * native, "without feedback it still trains, from 0.36"


def test_int8_sends_3_9_times_fewer_bytes_and_onebit_25_times() -> None:
    stats = TWO["run", "int8"][0]["stats"]
    assert 3.85 < stats["ratio"] < 3.95
    assert stats["steps"] == stats["compressed_steps"] == STEPS
    assert 20 < TWO["run", "onebit"][0]["stats"]["ratio_per_step"] < 29


def test_error_feedback_is_off_unless_asked_for() -> None:
    assert TWO["run", "onebit"][0]["stats"]["memory_bytes"] == 0
    assert TWO["run", "int4"][0]["stats"]["spec"] == "int4:error_feedback=false"
    weights = (32 + 4) * cases.WIDTH + 3 * cases.WIDTH**2
    assert 8 * weights <= TWO["run", "onebit with feedback"][0]["stats"]["memory_bytes"] < 1.02 * 8 * weights


# ---------------------------------------------------------------- settings of FSDP2
@pytest.mark.parametrize("how", SETTINGS)
def test_uncompressed_gradients_are_those_of_fsdp2(how: str) -> None:
    rounding = 0.02 if "bf16" in how or "fp16" in how else 1e-6
    assert TWO["none", how][0]["error"] <= rounding


@pytest.mark.parametrize("how", SETTINGS)
def test_int8_gradients_are_close_to_those_of_fsdp2(how: str) -> None:
    result = TWO["int8", how][0]
    assert 1e-4 < result["error"] < 0.03
    assert result["stats"]["ratio"] > (1.7 if "reduce" in how else 3.5)


@pytest.mark.parametrize("sync", [False, True])
def test_accumulation_and_clipping(sync: bool) -> None:
    result = TWO["accumulated", sync][0]
    assert result["error"] < 1e-6
    assert result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-6)
    assert result["steps"] == (6 if sync else 3)


def test_accumulated_and_clipped_int8_gradients() -> None:
    results = TWO["accumulated", "int8"]
    assert len({result["digest"] for result in results}) == 1
    assert len({result["norms"][1] for result in results}) == 1
    assert results[0]["error"] < 0.03


def test_unused_parameters_take_part_with_zeros() -> None:
    for result in TWO["unused"]:
        assert max(result["errors"]) < 0.03
        assert result["steps"] == 4


@pytest.mark.parametrize("key", [*FEEDBACK, "twice"])
def test_error_feedback_loses_nothing(key: str) -> None:
    for result in TWO["conserved", key]:
        assert result["lost"] < 1e-5 < 100 * result["lost"] < result["without"] or result["lost"] < 1e-7
        assert result["steps"] == 4
        assert result["held"]


# ---------------------------------------------------------------- faults
@pytest.mark.parametrize("spec", ["int8", "int4:error_feedback=true"])
def test_an_inf_reaches_all_ranks_and_changes_nothing(spec: str) -> None:
    for result in TWO["nonfinite", spec]:
        assert not result["finite"], "not one shard of a poisoned bucket may stay finite"
        assert not result["norm"]
        assert result["kept"]
        assert result["held"] == (5 if "feedback" in spec else 0)
        assert result["unchanged"]
        assert result["skipped"] == 1
        assert all(loss < 10 for loss in result["losses"])


def test_an_exception_in_backward_leaves_no_trace() -> None:
    for result in TWO["interrupted"]:
        assert result == {"error": 0.0, "steps": 3, "skipped": 0}


SAID = {
    "topk": "UnsupportedError: topk does not fit a reduce-scatter",
    "powersgd": "UnsupportedError: powersgd does not fit a reduce-scatter",
    "pipeline": "ConfigError: schedule='pipeline': allowed is 'auto' or 'inline'",
    "plain model": "call torch.distributed.fsdp.fully_shard on it first",
    "different models": "MismatchError: gradcomp registration: all ranks must pass the same arguments",
    "frozen on one rank": "MismatchError",
    "unstable layout": "UnsupportedError: set_reduce_scatter_unused_params(False) was called after registration",
    "separate group": "UnsupportedError: set_separate_reduce_scatter_group() was called after registration",
    "reentrant": "use_reentrant=False",
    "twice": "is registered already; to change the compressor call handle.set()",
    "custom": "already has a custom reduce-scatter",
    "process group's memory": "set_allocate_memory_from_process_group_for_comm",
    "two meshes": "has 2 parameter groups",
    "native hybrid": "register_hsdp",
    "replicate": "replicate()",
    "unequal replicas": "MismatchError: register_hsdp: the replicas start with different parameters, 10 of 10",
    "wrong group": "replicate_group must hold the ranks with the same shard",
    "int4 weights": "ConfigError: spec='int4': allowed is 'int8'",
    "weights twice": "already has a custom all-gather",
}


@pytest.mark.parametrize("how", REFUSALS)
def test_what_cannot_work_is_refused_on_all_ranks_alike(how: str) -> None:
    assert SAID[how] in same(TWO["raises", how])


# ---------------------------------------------------------------- with other parts of torch
def test_compiled_and_eager_training_are_the_same() -> None:
    for results in TWO["compiled"]:
        losses, stats = results["eager"]
        for how in ("before", "after"):
            assert results[how][0] == pytest.approx(losses, rel=1e-5)
            assert results[how][1]["wire_bytes"] == stats["wire_bytes"] > 0


def test_activation_checkpointing_changes_nothing() -> None:
    plain, checkpointed = same(TWO["checkpointed"])
    assert plain == checkpointed


def test_freezing_and_changing_the_compressor_between_steps() -> None:
    for result in TWO["freezing"]:
        assert result["set"] == "onebit:error_feedback=false"
        assert result["error"] < 1e-6
        assert result["steps"] == 7


def test_a_mesh_of_one_rank() -> None:
    for result in TWO["alone"]:
        assert result["bytes"] == 0
        assert result["losses"][0] > 0


@pytest.mark.parametrize("spec", RESUMED)
def test_a_run_resumed_from_a_distributed_checkpoint_is_the_uninterrupted_one(spec: str) -> None:
    result = same(TWO["resumed", spec])
    assert result["resumed"] == result["straight"]
    assert result["step"] == 3
    assert result["held"] == (5 if "feedback" in spec else 0)


# ---------------------------------------------------------------- parameters
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_in_int8(dtype: str | None) -> None:
    results = TWO["gathered", dtype]
    assert len({result["digest"] for result in results}) == 1, "all ranks compute with the same weights"
    for result in results:
        assert result["losses"][True] == pytest.approx(result["losses"][False], rel=0.01)
        assert 1e-4 < result["error"]["weight"] < (0.012 if dtype else 1 / 250)
        assert result["error"]["bias"] <= (0.004 if dtype else 0.0), "vectors travel as they are"
        assert result["ratio"] > (1.9 if dtype else 3.7)
        assert not result["finite"], "a NaN in one shard is seen by all"


def test_gradients_and_weights_in_int8() -> None:
    results = TWO["both"]
    assert len({result["digest"] for result in results}) == 1
    assert results[0]["loss"] == pytest.approx(TWO["run", "native"][0]["loss"], rel=0.01)
    assert min(results[0]["ratios"]) > 3.7


def test_options_are_checked() -> None:
    with pytest.raises(gradcomp.ConfigError, match="saved_world_size=0: allowed is a whole number of at least 1"):
        HandleState(None, saved_world_size=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", range(len(snippets())))
def test_the_documentation_runs_as_written(number: int) -> None:
    assert all(sent > 0 for sent in TWO["snippet", number])


def test_the_documentation_has_an_example_of_each_function() -> None:
    text = "".join(snippets())
    assert all(
        name in text for name in ("gradcomp.register(", "register_hsdp(", "register_all_gather(", "HandleState(")
    )
