"""A model as its cache and its prefill see it, from config.json alone: bytes of KV, parameters, FLOPs.

    config -> what each layer mixes (cost_layers.py) -> KVShape -> kv_bytes(tokens), prefill_flops(start, stop)

| layer                  | kept for a prompt of n tokens                                                    |
|------------------------|----------------------------------------------------------------------------------|
| MHA, GQA, MQA          | n x KV heads x (key size + value size)                                           |
| sliding or chunked     | the same of the last `window` tokens only                                        |
| MLA (DeepSeek)         | n x (latent rank + rotary size), one copy for all heads                          |
| state space, linear    | one state of fixed size, whatever n is                                           |

Biases and norms are left out of the counts of parameters: under 0.1 %.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cost_layers import Layer, first_of, read_layers
from workbench.errors import InvalidInputError

__all__ = ["DTYPE_BYTES", "KVShape", "Work"]

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "auto": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0,
               "fp8_e5m2": 1.0, "float8_e4m3fn": 1.0, "int8": 1.0, "int4": 0.5}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What computing a part of a prompt takes; numbers or arrays of one shape.

    Args:
        matmul_flops: In the weights' matrices and in recurrent scans: linear in the new tokens.
        attention_flops: Scores and weighted sums over the tokens before: quadratic in a prompt's length.
        weight_bytes: Weights read at least once; of experts only those that the tokens reach on average.
    """

    matmul_flops: Any
    attention_flops: Any
    weight_bytes: Any


@dataclass(frozen=True)
class KVShape:
    """Everything of a model that decides the size of its KV and the work of its prefill.

    Attributes:
        name: For people.
        layers: One `Layer` a layer, in order.
        hidden: Width.
        vocab: Rows of the embedding.
        tied: The output matrix is the embedding.
        value_bytes: Of one stored key or value.
        weight_value_bytes: Of one parameter; below 2 for quantised weights.
        max_tokens: The longest prompt the model is made for; 0 where the config does not tell.
    """

    name: str
    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    tied: bool = False
    value_bytes: float = 2.0
    weight_value_bytes: float = 2.0
    max_tokens: int = 0

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | str | Path, *, kv_dtype: str = "auto",
                       name: str = "") -> "KVShape":  # fmt: skip
        """Read a Hugging Face config; nothing is fetched.

        Args:
            config: The dictionary, config.json, or the folder that holds it.
            kv_dtype: Of the stored KV: "auto" for the model's own, or one of `DTYPE_BYTES`.
            name: For people; the config's own name or kind by default.

        Raises:
            InvalidInputError: No such file, not a config, a kind of layer that is not known, or an unknown dtype.
        """
        found = _loaded(config)
        text = found.get("text_config") or found.get("llm_config") or found
        if kv_dtype not in DTYPE_BYTES:
            raise InvalidInputError(f"kv_dtype is {kv_dtype!r}; one of {', '.join(DTYPE_BYTES)}")
        dtype = first_of(text, "dtype", "torch_dtype") or first_of(found, "dtype", "torch_dtype") or "bfloat16"
        own = DTYPE_BYTES.get(str(dtype).removeprefix("torch."), 2.0)
        quantised = found.get("quantization_config") or text.get("quantization_config") or {}
        return cls(
            name=name or Path(str(found.get("_name_or_path") or text.get("model_type") or "model")).name,
            layers=read_layers(text),
            hidden=int(first_of(text, "hidden_size", "n_embd", "d_model")),
            vocab=int(first_of(text, "vocab_size", "padded_vocab_size") or 0),
            tied=bool(text.get("tie_word_embeddings", found.get("tie_word_embeddings", False))),
            value_bytes=own if kv_dtype == "auto" else DTYPE_BYTES[kv_dtype],
            weight_value_bytes=_weight_bytes(quantised, own),
            max_tokens=int(first_of(text, "max_position_embeddings", "n_positions", "seq_length", "max_seq_len") or 0),
        )

    def kv_bytes(self, tokens: Any) -> Any:
        """Bytes kept for a prompt of so many tokens, states included; a number or an array."""
        n = np.asarray(tokens, np.float64)
        kept = sum(count * layer.kept_values(n) for layer, count in self._groups)
        states = sum(count * layer.state_bytes for layer, count in self._groups)
        return _plain(kept * self.value_bytes + states * (n > 0))

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token adds while the prompt is shorter than every window."""
        return sum(count * layer.cached_values for layer, count in self._groups) * self.value_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state: the same for every prompt, and of use only at the token they were saved at."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def parameters(self) -> int:
        """All parameters, embeddings included."""
        matrices = sum(count * (layer.parameters + layer.expert_parameters) for layer, count in self._groups)
        return matrices + self.hidden * self.vocab * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through, embeddings included."""
        active = sum(count * layer.active_parameters for layer, count in self._groups)
        return int(active) + self.hidden * self.vocab * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.weight_value_bytes

    def work(self, start: Any, stop: Any) -> Work:
        """Computing tokens start..stop - 1 of a prompt when the KV of all before is there, and the first answer token.

        Causal: each new token attends to itself and those before; kernels that compute the masked half, too, show it as
        a lower efficiency. A product counts 2 FLOPs.
        """
        first, last = np.asarray(start, np.float64), np.asarray(stop, np.float64)
        new = last - first
        head = 2.0 * self.hidden * self.vocab
        matmul = sum(count * layer.flops_per_token for layer, count in self._groups) * new + head
        attention = sum(count * layer.attention_flops(first, last) for layer, count in self._groups)
        touched = sum(count * layer.touched_parameters(new) for layer, count in self._groups) + self.hidden * self.vocab
        return Work(_plain(matmul), _plain(attention + 0.0 * new), _plain(touched * self.weight_value_bytes))

    @cached_property
    def _groups(self) -> list[tuple[Layer, int]]:
        return list(Counter(self.layers).items())


def _loaded(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(config, Mapping):
        found: Any = dict(config)
    else:
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"{path} is no config.json that can be read ({error})") from error
    if not isinstance(found, dict) or not any(
        "hidden_size" in part or "n_embd" in part or "d_model" in part
        for part in (found, found.get("text_config") or {}, found.get("llm_config") or {})
    ):
        raise InvalidInputError("the config names no hidden_size, n_embd or d_model: is it a language model's?")
    return found


def _weight_bytes(quantised: Mapping[str, Any], own: float) -> float:
    """Bytes of a parameter: 4-bit and 8-bit checkpoints say so in their quantization_config."""
    method = str(quantised.get("quant_method", ""))
    if quantised.get("bits"):
        return float(quantised["bits"]) / 8
    if quantised.get("load_in_4bit") or method == "mxfp4":
        return 0.5
    return 1.0 if "fp8" in method or quantised.get("load_in_8bit") else own


def _plain(value: Any) -> Any:
    """A float for one prompt, an array for many."""
    return float(value) if np.ndim(value) == 0 else value
