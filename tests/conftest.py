"""What every test may rely on: a fixed vLLM environment, and nothing written outside temporary folders."""

import os

import pytest

# Read by vLLM when it is first imported. Single-process mode starts an engine in seconds and lets a test look inside.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    NUMBA_THREADING_LAYER="omp",
)
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def whole_chunks(monkeypatch):
    """Hits and stores of whole chunks alone, for tests that count chunks."""
    monkeypatch.setenv("KVWORKBENCH_PARTIAL_HITS", "false")
