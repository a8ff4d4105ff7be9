"""Ways into DeepSpeed, what is refused, and the canary: DeepSpeed still moves gradients by the methods that are replaced."""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed_workers as ds
import pytest
import torch
import torch.distributed as dist
from deepspeed_workers import settings
from workers import Battery, Net, batch

import gradcomp
from gradcomp.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.timeout(300)


def refusal(call: Callable[[], Any]) -> str:
    """The error's type and text."""
    try:
        with ds.quiet():
            call()
    except (ConfigError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


# ---------------------------------------------------------------- canary
MOVES: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: configuration, collective, the method from which it is called
    "zero0": (settings(0), "all_reduce", "allreduce_bucket"),
    "zero0 bf16": (settings(0, "bf16"), "all_reduce", "allreduce_bucket"),
    "zero0 fp16": (settings(0, "fp16"), "all_reduce", "allreduce_bucket"),
    "BF16_Optimizer": (settings(1, "bf16", data_types={"grad_accum_dtype": "fp32"}), "all_reduce", "allreduce_bucket"),
    "zero1": (settings(1, gradient_accumulation_steps=2), "all_reduce", "average_tensor"),
    "zero2": (settings(2, gradient_accumulation_steps=2), "all_reduce", "average_tensor"),
    "zero2 all-reduce": (settings(2, zero={"reduce_scatter": False}), "all_reduce", "gradient_reduction_w_predivide"),
    "zero2 to owners": (settings(2, zero={"use_multi_rank_bucket_allreduce": False}), "reduce", "average_tensor"),
    "zero2 not contiguous": (settings(2, zero={"contiguous_gradients": False}), "all_reduce", "allreduce_bucket"),
    "zero3": (settings(3, gradient_accumulation_steps=2), "reduce_scatter_tensor", "__avg_scatter_grads"),
    "zero3 all-reduce": (settings(3, zero={"reduce_scatter": False}), "all_reduce", "__avg_scatter_contiguous_grads"),
}


@contextmanager
def watched(seen: Counter[tuple[str, tuple[str, ...]]]) -> Any:
    """Count collectives of more than a few floating-point elements, with DeepSpeed's methods on the stack."""
    import deepspeed.comm.comm as comm

    originals = {
        name: getattr(dist, name) for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "all_to_all_single")
    }
    backend = comm.cdb
    scatter = backend.reduce_scatter_function

    def spy(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in [*args, *kwargs.values()] if isinstance(value, torch.Tensor)]
            if max((t.numel() for t in tensors), default=0) > 500 and tensors[0].is_floating_point():
                frames = [f.name for f in traceback.extract_stack() if "/deepspeed/runtime/" in f.filename]
                seen[name, tuple(frames)] += 1
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(dist, name, spy(name, original))
    backend.reduce_scatter_function = spy("reduce_scatter_tensor", scatter)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
        backend.reduce_scatter_function = scatter


def trace(rank: int, world: int, name: str) -> list[tuple[str, tuple[str, ...], int]]:
    """DeepSpeed alone: which collectives carry gradients, called from where, in two steps."""
    engine = ds.make_engine(MOVES[name][0])
    seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
    with watched(seen):
        ds.train(engine, range(2), rank)
    return [(op, frames, count) for (op, frames), count in seen.items()]


# ---------------------------------------------------------------- ways in
BLOCK = {
    "compressor": "int8:block=128",
    "rules": [["layers.0.*", "none"], {"spec": "fp16", "ndim": 1}],
    "warmup_steps": 1,
}


def ways(rank: int, world: int) -> dict[str, Any]:
    """The same run by each way in."""
    import deepspeed

    from gradcomp.integrations import deepspeed as ours

    rules = [("layers.0.*", "none"), gradcomp.Rule(spec="fp16", ndim=1)]
    found: dict[str, Any] = {}

    def finish(name: str, engine: Any) -> None:
        ds.train(engine, range(3), rank)
        found[name] = (ds.digest(engine), engine.gradcomp.stats().spec, engine.gradcomp.stats().compressed_steps)

    engine = ds.make_engine(settings(2))
    gradcomp.register(engine, "int8:block=128", rules=rules, warmup_steps=1)
    finish("register", engine)
    finish("initialize, block", ds.make_engine({**settings(2), "gradcomp": BLOCK}, initialize=ours.initialize))
    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps({**settings(2), "gradcomp": BLOCK}))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    with ds.quiet():
        four = ours.initialize(model=model, optimizer=optimizer, config=str(path))
    finish("initialize, file", four[0])
    stock = deepspeed.initialize
    with ours.patched_initialize():
        finish("patched, block", ds.make_engine({**settings(2), "gradcomp": BLOCK}))
    with ours.patched_initialize("int8:block=128", rules=rules, warmup_steps=1):
        finish("patched, arguments", ds.make_engine(settings(2)))
    return {"found": found, "four": [type(each).__name__ for each in four], "restored": deepspeed.initialize is stock}


def detached(rank: int, world: int) -> dict[str, Any]:
    """After detach() DeepSpeed is as it was."""
    results = {}
    for stage in (0, 2, 3):
        plain, engine = ds.make_engine(settings(stage)), ds.make_engine(settings(stage))
        before = {k: v for k, v in vars(engine).items() if callable(v)}.keys(), vars(engine.optimizer).keys()
        handle, _ = ds.attach(engine, "int8")
        inside = engine.gradcomp is handle
        handle.detach()
        after = {k: v for k, v in vars(engine).items() if callable(v)}.keys(), vars(engine.optimizer).keys()
        for each in (plain, engine):
            ds.train(each, range(2), rank)
        results[stage] = (inside, before == after, ds.digest(plain) == ds.digest(engine), handle.stats().steps)
    return results


# ---------------------------------------------------------------- refused
class Zen:
    """Stands for a section of the configuration that is present."""

    device = "cpu"


def refused(rank: int, world: int) -> dict[str, str]:
    """Settings of real engines; those that need a GPU, a compiler or other hardware to be built are put into the config."""
    engine = ds.make_engine(settings(2))
    config, zero = engine._config, engine._config.zero_config
    answers = {}

    def put(name: str, owner: Any, field: str, value: Any) -> None:
        old = getattr(owner, field)
        object.__setattr__(owner, field, value) if owner is not engine else vars(engine).__setitem__(field, value)
        answers[name] = refusal(lambda: gradcomp.register(engine, "int8"))
        object.__setattr__(owner, field, old) if owner is not engine else vars(engine).__setitem__(field, old)

    put("deepcompile", config.compile_config, "deepcompile", True)
    put("zenflow", zero, "zenflow", Zen())
    nvme, super_offload = Zen(), Zen()
    nvme.device = "nvme"
    super_offload.super_offload = True  # type: ignore[attr-defined]
    put("nvme", zero, "offload_optimizer", nvme)
    put("superoffload", zero, "offload_optimizer", super_offload)
    put("qgZ", zero, "zero_quantized_gradients", True)
    put("hpZ", zero, "zero_hpz_partition_size", 2)
    put("sum", engine, "gradient_average", False)
    put("prescale", config, "prescale_gradients", True)
    put("predivide", config, "gradient_predivide_factor", 2.0)
    put("communication type", config, "communication_data_type", torch.float16)
    put("autocast", config, "torch_autocast_enabled", True)
    put("sequence parallel", engine, "sequence_parallel_size", 2)
    put("backward allreduce", engine, "enable_backward_allreduce", False)

    class Another(type(engine.optimizer)):  # type: ignore[misc]
        """What ZenFlow and SuperOffload do."""

    kind = type(engine.optimizer)
    engine.optimizer.__class__ = Another
    answers["subclass"] = refusal(lambda: gradcomp.register(engine, "int8"))
    engine.optimizer.__class__ = kind
    answers["scaler"] = refusal(lambda: gradcomp.register(engine, scaler=torch.amp.GradScaler("cpu")))
    answers["schedule"] = refusal(lambda: gradcomp.register(engine, schedule="thread"))
    gradcomp.register(engine, "int8")
    answers["twice"] = refusal(lambda: gradcomp.register(engine, "int8"))
    third = ds.make_engine(settings(3))
    for spec in ("topk", "powersgd"):
        answers[spec] = refusal(lambda spec=spec: gradcomp.register(third, spec))  # type: ignore[misc]
    return answers


def pipeline(rank: int, world: int) -> str:
    """A real pipeline engine of one stage."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    with ds.quiet():
        model = PipelineModule(
            layers=[torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)], num_stages=1, loss_fn=torch.nn.MSELoss()
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(0))[0]
    return refusal(lambda: gradcomp.register(engine, "int8"))


def other_versions(rank: int, world: int) -> dict[str, str]:
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine, answers = ds.make_engine(settings(1)), {}
    for version in ((0, 19, 7), (0, 20, 0), (1, 0, 0)):
        real = deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__
        deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__ = version
        answers[".".join(map(str, version))] = refusal(lambda: gradcomp.register(engine, "int8"))
        deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__ = real
    stock = DeepSpeedEngine.allreduce_bucket
    DeepSpeedEngine.allreduce_bucket = lambda self, bucket, group: None
    answers["signature"] = refusal(lambda: gradcomp.register(engine, "int8"))
    DeepSpeedEngine.allreduce_bucket = stock
    del DeepSpeedEngine.clip_fp32_gradients
    answers["gone"] = refusal(lambda: gradcomp.register(engine, "int8"))
    return answers


def past_us(rank: int, world: int, stage: int) -> str:
    """A DeepSpeed that has come to move gradients by a method that gradcomp does not replace."""
    engine = ds.make_engine(settings(stage))
    ds.attach(engine, "int8")
    for owner in (engine, engine.optimizer):
        for name in list(vars(owner)):
            if (
                callable(vars(owner)[name])
                and name not in ("step", "gradcomp")
                and vars(owner)[name].__module__.startswith("gradcomp")
            ):
                del vars(owner)[name]
    return refusal(lambda: ds.train(engine, range(1), rank))


def bad_blocks(rank: int, world: int) -> dict[str, str]:
    from gradcomp.integrations import deepspeed as ours

    blocks = {
        "field": {"compresor": "int8"}, "type": {"warmup_steps": "soon"}, "not an object": "int8", "spec": {"compressor": "int9"},
        "rule": {"rules": [{"spec": "none", "dims": 1}]},
    }  # fmt: skip
    return {
        name: refusal(
            lambda block=block: ds.make_engine({**settings(1), "gradcomp": block}, initialize=ours.initialize)
        )  # type: ignore[misc]
        for name, block in blocks.items()
    }


RUN = Battery(
    2,
    {
        "start": (ds.start, ()),
        **{("canary", name): (trace, (name,)) for name in MOVES},
        "ways": (ways, ()),
        "detached": (detached, ()),
        "refused": (refused, ()),
        "bad blocks": (bad_blocks, ()),
        **{("past us", stage): (past_us, (stage,)) for stage in (0, 1, 2, 3)},
        "pipeline": (pipeline, ()),
        "other versions": (other_versions, ()),  # damages DeepSpeed: last
    },
    timeout=280,
)


@pytest.mark.parametrize("name", list(MOVES))
def test_canary_deepspeed_moves_gradients_by_the_methods_that_are_replaced(name: str) -> None:
    """Fails, naming the methods, when a new DeepSpeed moves gradients another way. Then integrations/deepspeed must follow."""
    config, collective, method = MOVES[name]
    for rank in RUN["canary", name]:
        assert rank, f"{name}: no gradients were seen to move: another collective carries them"
        for op, frames, _ in rank:
            assert op == collective, f"{name}: gradients travel in {op}, called by {' > '.join(frames)}"
            assert method in frames, f"{name}: {op} is not called from {method} but by {' > '.join(frames)}"
        calls = sum(count for _, _, count in rank)
        micro = config["gradient_accumulation_steps"]
        assert calls % (2 * micro if name in ("zero2", "zero3") else 2) == 0, f"{name}: {calls} calls in 2 steps"


def test_every_way_in_does_the_same() -> None:
    for result in RUN["ways"]:
        assert len(result["found"]) == 5
        assert len(set(result["found"].values())) == 1, result["found"]
        assert next(iter(result["found"].values()))[1:] == ("int8:block=128", 2)
        assert result["four"] == ["DeepSpeedEngine", "DeepSpeedZeroOptimizer", "NoneType", "NoneType"]
        assert result["restored"]


def test_detach_gives_deepspeed_back() -> None:
    for result in RUN["detached"]:
        assert result == dict.fromkeys((0, 2, 3), (True, True, True, 0))


REASONS = {
    "deepcompile": "compile.deepcompile", "zenflow": "zero_optimization.zenflow", "nvme": "device='nvme'",
    "superoffload": "super_offload", "qgZ": "zero_quantized_gradients", "hpZ": "zero_hpz_partition_size", "sum": "use 'mean'",
    "prescale": "prescale_gradients", "predivide": "gradient_predivide_factor", "communication type": "communication_data_type",
    "autocast": "torch_autocast", "sequence parallel": "sequence parallelism", "backward allreduce": "enable_backward_allreduce",
    "subclass": "Another (ZenFlow, SuperOffload, or another subclass)", "scaler": "allowed is None with DeepSpeed",
    "schedule": "'auto' or 'inline'", "twice": "already has a handle", "topk": "topk", "powersgd": "powersgd",
}  # fmt: skip


@pytest.mark.parametrize("name", list(REASONS))
def test_refused_with_the_reason_on_all_ranks(name: str) -> None:
    answers = [result[name] for result in RUN["refused"]]
    assert REASONS[name] in answers[0]
    assert answers[0].startswith(("UnsupportedError: ", "ConfigError: "))
    assert len(set(answers)) == 1


def test_the_pipeline_engine_is_refused() -> None:
    for answer in RUN["pipeline"]:
        assert answer.startswith(
            "UnsupportedError: PipelineEngine (pipeline or hybrid engine) reduces gradients by its own"
        )


def test_other_versions_are_refused() -> None:
    for answers in RUN["other versions"]:
        for version in ("0.19.7", "0.20.0", "1.0.0"):
            assert "tested are 0.19.8 up to, not including, 0.20.0" in answers[version]
        assert (
            "DeepSpeedEngine.allreduce_bucket (self, bucket, group) instead of (self, bucket, dp_group, dp_world_size)"
            in (answers["signature"])
        )
        assert "DeepSpeedEngine.clip_fp32_gradients is gone" in answers["gone"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_first_step_without_compression_is_an_error(stage: int) -> None:
    method = {0: "engine.allreduce_bucket", 3: "optimizer.__avg_scatter_grads"}.get(stage, "optimizer.average_tensor")
    for answer in RUN["past us", stage]:
        assert f"step 0: no gradient came to gradcomp, so nothing was compressed: {method} was not called" in answer


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("field", "gradcomp.compresor='int8'"),
        ("type", "gradcomp.warmup_steps='soon'"),
        ("not an object", "allowed is an object"),
        ("spec", "int9"),
        ("rule", "dims"),
    ],
)
def test_a_bad_block_of_the_configuration_is_named(name: str, text: str) -> None:
    for answers in RUN["bad blocks"]:
        assert text in answers[name]


def test_nothing_of_deepspeed_is_imported_with_gradcomp() -> None:
    """And a model of no trainer is refused with what is allowed."""
    with pytest.raises(UnsupportedError, match="or a DeepSpeed engine, got Net"):
        gradcomp.register(Net())
    source = inspect.getsource(sys.modules["gradcomp.integrations.dispatch"])
    assert "import deepspeed" not in source


# ---------------------------------------------------------------- the documentation
def snippets() -> list[str]:
    """The Python and diff snippets of the DeepSpeed section of integrations/README.md."""
    text = (Path(__file__).parent.parent / "integrations" / "README.md").read_text()
    section = text.partition("\n## DeepSpeed\n")[2].partition("\n## ")[0]
    found = []
    for kind, body in re.findall(r"```(python|diff)\n(.*?)```", section, re.DOTALL):
        lines = body.splitlines()
        found.append("\n".join(x if kind == "python" else x[1:] for x in lines if kind == "python" or x[:1] != "-"))
    return found


def run_snippet(rank: int, world: int, code: str) -> float:
    """Run a snippet, then train two steps if it has not; returns how many times fewer bytes were sent."""
    import deepspeed

    with ds.quiet():
        warnings.filterwarnings("ignore", message="gradcomp: cuda_aware")
        model, engines = Net(), []
        old = {
            "type": "OneBitAdam",
            "params": {"lr": 4e-4, "freeze_step": 1, "weight_decay": 0.01, "cuda_aware": False},
        }
        path = Path(tempfile.mkdtemp()) / "old.json"
        path.write_text(json.dumps(settings(0, optimizer=old)))
        names: dict[str, Any] = {
            "torch": torch, "gradcomp": gradcomp, "model": model, "config": settings(2), "print": lambda *args: None,
            "loader": [batch(step, rank) for step in range(2)], "loss_fn": torch.nn.functional.mse_loss,
            "train": lambda: engines.append(ds.make_engine(settings(1))),
        }  # fmt: skip
        exec(compile(code.replace('"old.json"', repr(str(path))), "snippet", "exec"), names)
        engine = engines[0] if engines else names["engine"]
        if not engine.global_steps:
            ds.train(engine, range(4), rank)
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        return float(engine.gradcomp.stats().ratio)


SNIPPETS = snippets()
README_RUN = Battery(
    2, {"start": (ds.start, ()), **{n: (run_snippet, (code,)) for n, code in enumerate(SNIPPETS)}}, timeout=280
)


def test_the_documentation_has_its_snippets() -> None:
    assert len(SNIPPETS) == 3


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_documented_snippets_run_and_save_bytes(number: int) -> None:
    assert all(ratio > 1.5 for ratio in README_RUN[number])
