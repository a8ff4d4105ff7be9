"""What a user reads."""

import dataclasses

import pytest

from gradcomp import Stats


def sample(**changes: object) -> Stats:
    values: dict[str, object] = {
        "spec": "onebit", "schedule": "pipeline:depth=1", "backend": "numba", "rank": 0, "world_size": 2, "steps": 10,
        "compressed_steps": 8, "skipped_steps": 1, "raw_bytes": 40_000_000, "wire_bytes": 5_000_000,
        "raw_bytes_per_step": 4_000_000, "wire_bytes_per_step": 125_000, "collectives": 20, "encode_seconds": 0.1,
        "exchange_seconds": 0.2, "decode_seconds": 0.05, "residual_norm": 3.0, "residual_ratio": 1.5, "saturations": 2,
        "memory_bytes": 8_000_000, "bypassed": {"a.bias": "vector", "b.bias": "vector", "emb": "embedding"},
    }  # fmt: skip
    return Stats(**{**values, **changes})  # type: ignore[arg-type]


def test_ratios() -> None:
    stats = sample()
    assert stats.ratio == 8.0
    assert stats.ratio_per_step == 32.0
    assert sample(wire_bytes=0, raw_bytes=0, wire_bytes_per_step=0).ratio_per_step == 1.0


def test_it_is_frozen_and_a_dict() -> None:
    stats = sample()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.steps = 3  # type: ignore[misc]
    assert stats.as_dict()["ratio"] == 8.0
    assert stats.as_dict()["bypassed"]["emb"] == "embedding"


def test_text_says_what_matters() -> None:
    text = str(sample())
    for word in ("onebit", "pipeline:depth=1", "numba", "5 MB instead of 40 MB: 8.0x", "32.0x", "2 vector", "1 embedding",
                 "1 non-finite", "encode 10.00", "1.50 of the gradient's norm", "8 MB of memory"):  # fmt: skip
        assert word in text, word


def test_tensorboard_sink(tmp_path: object) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        sample().write_to(writer)
    written: dict[str, float] = {}

    class Sink:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            written[tag] = scalar_value
            assert global_step == 10

    sample().write_to(Sink())
    assert written["gradcomp/ratio"] == 8.0
    assert written["gradcomp/wire_bytes"] == 5e6
    assert "gradcomp/spec" not in written
