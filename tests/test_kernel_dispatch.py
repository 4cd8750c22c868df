"""The package itself: what it imports, what it refuses, and how work is spread over threads."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from kernels import dispatch, threads
from kernels.timing import time_against_copy


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_importing_operations_loads_no_compiler():
    code = (
        "import sys, kernels.quantize, kernels.slots, kernels.rotate, kernels.entropy, kernels.byteplanes;"
        "import kernels.exponents;"
        "print([m for m in ('numba', 'triton', 'torch') if m in sys.modules])"
    )
    assert python(code).stdout.strip() == "[]"


def test_the_other_distribution_is_refused(tmp_path):
    info = tmp_path / "kernels-0.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.getcwd()]))
    result = python("import kernels", PYTHONPATH=path)
    assert result.returncode != 0
    assert "pip uninstall kernels" in result.stderr.splitlines()[-1]


def test_it_has_no_version():
    """transformers takes any `kernels` with a version for Hugging Face's."""
    import kernels

    assert not hasattr(kernels, "__version__")


def test_dispatch_lists_what_there_is():
    def _double_reference(values):
        return values * 2

    double = dispatch.dispatch(_double_reference, check=lambda values: None, numba="math:sqrt")
    assert double.__name__ == "double"
    assert list(double.impls) == ["reference", "numba"] and len(double.impls) == 2
    assert double(4, impl="reference") == 8 and double(4) == 2.0
    with pytest.raises(ValueError, match="double: no implementation 'gpu'; there are reference, numba"):
        double(4, impl="gpu")


def test_every_unit_is_done_once():
    done = np.zeros(1000, np.int64)
    seen = set()

    def kernel(first, last, step):
        seen.add(threading.get_ident())
        done[first:last] += step

    threads.run_units(kernel, 1000, 1 << 24, 1)
    assert (done == 1).all()
    threads.run_units(kernel, 1000, 10, 1)
    threads.run_units(kernel, 0, 1 << 24, 1)
    assert (done == 2).all()


def test_an_error_in_a_thread_reaches_the_caller():
    def kernel(first, last):
        raise RuntimeError(f"unit {first}")

    with pytest.raises(RuntimeError, match="unit"):
        threads.run_units(kernel, 100, 1 << 24)


def test_the_limit_is_kept_and_given_back():
    before = threads.num_threads()
    with threads.thread_limit(1):
        assert threads.num_threads() == 1
    assert threads.num_threads() == before
    with pytest.raises(ValueError, match="at least one"), threads.thread_limit(0):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_its_own_threads():
    code = """
import os
from kernels import threads
with threads.thread_limit(2):
    threads.run_units(lambda first, last: None, 8, 1 << 24)
    child = os.fork()
    threads.run_units(lambda first, last: None, 8, 1 << 24)
if child == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code).stdout.strip() == "7"


def test_timing_compares_with_a_copy():
    source, target = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    timing = time_against_copy(lambda: [np.copyto(target, source) for _ in range(8)], 1 << 20)
    assert timing.nbytes == 1 << 20 and timing.seconds > timing.copy_seconds
    assert 0.02 < timing.copy_fraction < 0.9
    assert timing.bytes_per_second == pytest.approx((1 << 20) / timing.seconds)
