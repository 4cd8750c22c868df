"""What every test may rely on: a fixed vLLM environment, and nothing written outside temporary folders."""

import os

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
