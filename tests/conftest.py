"""What holds for every test: a quiet, deterministic, single-threaded machine, and a reason for a skipped GPU test."""

import os

# Before torch is imported, here or in a process that a test starts. One thread per process: the tests start several
# ranks on few cores. The loopback interface: gloo otherwise asks the resolver for the host's name, which may fail.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where torch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    reason = "torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
