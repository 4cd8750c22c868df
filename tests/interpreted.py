"""Import before any kernel: Triton kernels run in Triton's interpreter where there is no GPU, else on the GPU."""

import os

import pytest

torch = pytest.importorskip("torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before @triton.jit runs
pytest.importorskip("triton")
