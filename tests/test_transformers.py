"""The Transformers Trainer: real runs on two CPU ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import trainers
import workers
from trainers import EXACT, LOGGED, STEPS, Task, name_of
from workers import Battery, all_specs

pytestmark = [
    pytest.mark.timeout(trainers.TIMEOUT + 20),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.24 needs Python 3.11"),
]


def collate(rows: Any) -> dict[str, Any]:
    x, y = zip(*rows, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


def run(rank: int, spec: Any, folder: str, *, load: str | None = None, model: Any = None, **options: Any) -> Any:
    """Train; returns the trainer. ``spec=None``: the Trainer of transformers itself."""
    trainers.as_launched(rank, trainers.WORLD)
    import transformers
    from accelerate.state import AcceleratorState

    from gradcomp.integrations.transformers import GradcompTrainer

    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]  # TrainingArguments pass settings on in the environment
    settings = {
        "use_cpu": True, "per_device_train_batch_size": trainers.ROWS, "max_grad_norm": options.pop("clip", 0.0),
        "gradient_accumulation_steps": options.pop("accumulate", 1), "num_train_epochs": 1,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    arguments = transformers.TrainingArguments(folder, **{**settings, **options})
    model = Task() if model is None else model
    common: dict[str, Any] = {"model": model, "args": arguments}
    if isinstance(model, Task):
        common |= {
            "train_dataset": trainers.data("batch"), "data_collator": collate, "optimizers": (trainers.sgd(model), None)
        }  # fmt: skip
    else:
        common["train_dataset"] = tokens()
    trainer: Any = transformers.Trainer(**common) if spec is None else GradcompTrainer(**common, compression=spec)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=load)
    return trainer


def tokens() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 8, (32, 1), generator=generator) + torch.arange(16)  # sequences to be continued
    return [{"input_ids": row, "labels": row} for row in rows]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def exact(rank: int, world: int, spec: str, options: dict[str, Any], folder: str) -> Any:
    """The Trainer's result and that of the same training in plain PyTorch."""
    with trainers.only_our_warnings() as said:
        trainer = run(rank, spec, folder, **options)
    sent = trainer.gradcomp.handle.stats().wire_bytes
    return workers.digest(trainer.model), trainers.plain(rank, spec, **options), sent, said


def resume(rank: int, world: int, spec: str, folder: str) -> Any:
    """Two epochs without and with an interruption in the second."""
    folder = f"{folder}/{spec}"
    with trainers.only_our_warnings() as said:
        whole = run(rank, spec, folder, num_train_epochs=2, save_strategy="steps", save_steps=STEPS + 2)
        second = run(rank, spec, folder, num_train_epochs=2, load=f"{folder}/checkpoint-{STEPS + 2}")
    sent = whole.gradcomp.handle.stats().wire_bytes
    digests = workers.digest(whole.model), workers.digest(second.model)
    return (losses(whole), losses(second)), digests, sent, said


def compiled(rank: int, world: int, spec: str, folder: str) -> Any:
    with trainers.only_our_warnings() as said:
        trainer = run(rank, spec, folder, num_train_epochs=2, torch_compile_backend="aot_eager")
    return workers.digest(trainer.model), losses(trainer), trainer.gradcomp.handle.stats().compressed_steps, said


def language_model(rank: int, world: int, folder: str) -> Any:
    """A Llama of 80 thousand parameters with the Trainer's own optimizer, clipping and scheduler."""
    results = {}
    trainers.as_launched(rank, world)
    with trainers.only_our_warnings() as said:
        for spec in (None, "none", "int8", "onebit"):
            options = {"num_train_epochs": 3, "learning_rate": 3e-3, "clip": 1.0, "lr_scheduler_type": "linear"}
            trainer = run(rank, spec, folder, model=llama(), **options)
            results[spec] = (losses(trainer), workers.digest(trainer.model), trainer.state.log_history)
    return results, said


def refusals(rank: int, world: int, folder: str) -> Any:
    trainers.as_launched(rank, world)
    import transformers

    from gradcomp.integrations.transformers import GradcompMixin, GradcompTrainer

    texts = {}
    with trainers.only_our_warnings() as said:
        run(rank, None, f"{folder}/without", save_strategy="steps", save_steps=2)
        run(rank, "onebit", f"{folder}/without", load=f"{folder}/without/checkpoint-2")
    texts["no state"] = " ".join(said)
    with trainers.only_our_warnings():
        texts["bad spec"] = trainers.error_of(lambda: run(rank, "int9", folder))
        texts["not cpu"] = trainers.error_of(lambda: run(rank, "int8", folder, use_cpu=False))
        arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to="none")
        arguments._n_gpu = 2
        texts["DataParallel"] = trainers.error_of(lambda: GradcompTrainer(Task(), arguments))

        class Alone(GradcompMixin):
            pass

        texts["no Trainer"] = trainers.error_of(lambda: Alone())

        arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to="none")
        sharded = GradcompTrainer(Task(), arguments, train_dataset=trainers.data("batch"), data_collator=collate)
        sharded.is_distributed_loading_by_transformers = True  # as with a model that from_pretrained distributes
        texts["not wrapped"] = trainers.error_of(sharded.train)
    return texts


@pytest.fixture(scope="module")
def battery(tmp_path_factory: pytest.TempPathFactory) -> Battery:
    folder = str(tmp_path_factory.mktemp("transformers"))
    return Battery(
        2,
        {
            **{("exact", name_of(case)): (exact, (*case, folder)) for case in EXACT},
            **{("resume", spec): (resume, (spec, folder)) for spec in all_specs()},
            **{("compiled", spec): (compiled, (spec, folder)) for spec in ("int8", "onebit")},
            "language model": (language_model, (folder,)),
            "documentation": (trainers.documented, ("Transformers Trainer", folder)),
            "refusals": (refusals, (folder,)),
        },
        timeout=trainers.TIMEOUT,
    )


@pytest.mark.parametrize("case", EXACT, ids=name_of)
def test_same_bits_as_plain_ddp(battery: Battery, case: Any) -> None:
    """Full precision and bf16, accumulation, clipping."""
    results = battery["exact", name_of(case)]
    for ours, plain, sent, said in results:
        assert ours == plain
        assert sent > 0
        assert said == []
    assert results[0][0] == results[1][0]


@pytest.mark.parametrize("spec", all_specs())
def test_resume_equals_no_interruption(battery: Battery, spec: str) -> None:
    """Each compressor, through the Trainer's checkpoint, in the middle of an epoch."""
    for (whole, resumed), (one, other), sent, said in battery["resume", spec]:
        assert len(whole) == 2 * STEPS
        assert whole == resumed
        assert one == other
        assert sent > 0
        assert said == []


@pytest.mark.parametrize("spec", ["int8", "onebit"])
def test_compiled(battery: Battery, spec: str) -> None:
    (one, losses, steps, said), (other, *_) = battery["compiled", spec]
    assert one == other
    assert steps == 2 * STEPS
    assert sum(losses[STEPS:]) < sum(losses[:STEPS])
    assert said == []


def test_language_model(battery: Battery) -> None:
    """``none`` changes no bit of the Trainer's own run; the others learn as well; their numbers are in the logs."""
    (results, said), (others, _) = battery["language model"]
    assert results[None][:2] == results["none"][:2]
    final = {spec: sum(losses[-2:]) / 2 for spec, (losses, *_) in results.items()}
    assert final["int8"] == pytest.approx(final["none"], rel=0.01)
    assert final["onebit"] < results["none"][0][0] * 0.9
    for spec, ratio in (("int8", 3.5), ("onebit", 8)):
        assert results[spec][1] == others[spec][1]
        rows = [row for row in results[spec][2] if "loss" in row]
        assert all(row.keys() >= LOGGED for row in rows)
        assert rows[-1]["gradcomp/ratio_per_step"] > ratio
        assert not LOGGED & results[spec][2][-1].keys()  # the summary of the run
    assert [text for text in said if "under AdamW converge worse" not in text] == []
    assert len(said) == 1  # of 1-bit gradients under AdamW


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("no state", "checkpoint-2 holds no state of gradcomp; compression starts afresh"),
        ("bad spec", "ConfigError: compressor='int9'"),
        ("not cpu", "UnsupportedError: 2 processes were started"),
        ("DataParallel", "UnsupportedError: one process with 2 GPUs uses DataParallel"),
        ("no Trainer", "UnsupportedError: GradcompMixin goes before a transformers.Trainer"),
        ("not wrapped", "UnsupportedError: no model was wrapped by accelerator.prepare()"),
    ],
)
def test_unsupported_is_said(battery: Battery, case: str, text: str) -> None:
    for texts in battery["refusals"]:
        assert text in texts[case]


def test_documentation_runs_as_written(battery: Battery) -> None:
    one, other = battery["documentation"]
    assert one == other
    assert [sent > 0 for sent, _ in one] == [True]
