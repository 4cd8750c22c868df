"""Other libraries' smaller KV, in an interpreter of their own: one order and one answer a line, arrays in files.

    python _references_peer.py      {"do": "quantise", ...} in, {"stored_nbytes": ...} out; both JSON

It imports nothing of this project. Its environment, on a machine without CUDA:

    python -m venv references && references/bin/pip install torch setuptools wheel
    references/bin/pip install kvpress==0.5.5 optimum-quanto==0.2.7
    references/bin/pip install --no-build-isolation hqq==0.2.8.post1
"""

# ruff: noqa: E402
# pyright: reportMissingImports=false

import json
import os
import sys
import time
from importlib.metadata import version

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the libraries print is not an answer

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer


class Session:
    """What is kept between orders: the model that kvpress reads prefixes with."""

    def open(self, model: str) -> dict:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        return {name: version(name) for name in ("torch", "transformers", "kvpress", "optimum-quanto", "hqq")}

    def quantise(self, library: str, bits: int, source: str, target: str) -> dict:
        """The KV of a prefix into transformers' quantised cache, all layers, and out of it."""
        torch.set_num_threads(1)
        kv, found = np.load(source), {"stored_nbytes": 0, "encode_seconds": 0.0, "decode_seconds": 0.0}
        _quantise_layer(library, bits, *kv[:, 0])  # what is built or imported at first use is not measured
        for layer in range(kv.shape[1]):
            kv[:, layer], cost = _quantise_layer(library, bits, *kv[:, layer])
            found = {name: found[name] + cost[name] for name in found}
        np.save(target, kv)
        return found

    def press(self, press: str, removed: float, tokens: list[int], target: str) -> dict:
        """Prefill with one of kvpress's methods; what it leaves of the KV."""
        import kvpress

        torch.set_num_threads(os.cpu_count() or 1)
        cache = DynamicCache()
        with torch.no_grad(), getattr(kvpress, f"{press}Press")(compression_ratio=removed)(self.model):
            self.model.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        parts = [[getattr(layer, name)[0].float().numpy() for layer in cache.layers] for name in ("keys", "values")]
        np.save(target, np.array(parts))
        return {}


def _quantise_layer(library: str, bits: int, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, dict]:
    """keys, values: (heads, tokens, head size)."""
    # Groups of 64 values in a row: transformers' default for quanto, and what its documentation advises for HQQ.
    layer = (
        QuantoQuantizedLayer(nbits=bits, axis_key=0, axis_value=0)
        if library == "quanto"
        else HQQQuantizedLayer(nbits=bits, axis_key=1, axis_value=1)
    )
    whole = [torch.from_numpy(part)[None].bfloat16() for part in (keys, values)]
    start = time.thread_time()
    layer.update(*whole)
    middle = time.thread_time()
    stored = layer._quantized_keys, layer._quantized_values
    back = [layer._dequantize(part) for part in stored]
    cost = {"decode_seconds": time.thread_time() - middle, "encode_seconds": middle - start}
    return np.stack([part[0].float().numpy() for part in back]), cost | {"stored_nbytes": sum(map(_nbytes, stored))}


def _nbytes(stored) -> int:
    """Bytes of all plain tensors in a quantised tensor, however it is wrapped; sizes and flags are not counted."""
    if isinstance(stored, tuple):  # HQQ's packed tensor with a dictionary
        return sum(map(_nbytes, stored))
    if isinstance(stored, dict):
        return sum(_nbytes(part) for part in stored.values() if isinstance(part, torch.Tensor))
    if hasattr(stored, "__tensor_flatten__"):
        return sum(_nbytes(getattr(stored, name)) for name in stored.__tensor_flatten__()[0])
    return stored.nbytes


def main() -> None:
    session = Session()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(session, order.pop("do"))(**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()


if __name__ == "__main__":
    main()
