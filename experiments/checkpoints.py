"""Llama and Qwen2 checkpoint folders in Hugging Face's format, written without torch or transformers.

    GGUF file   -> dequantise, undo Llama's row permutation, rename ─┐
    shape, seed -> random weights ───────────────────────────────────┴-> model.safetensors + config + tokenizer

Weights stream through one tensor at a time, rounded to bfloat16. Any engine that reads a local Hugging Face folder
serves the result offline.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["LlamaShape", "convert_gguf", "random_llama", "weights_bytes"]

_BF16_BYTES = 2

# GGUF's name of a weight or bias inside block i -> Hugging Face's name inside layer i.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_FAMILY_SETTINGS = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    # Without the version, transformers takes a tokenizer of more than 100,000 tokens for a broken one of Mistral.
    "qwen2": {"use_sliding_window": False, "transformers_version": "4.57.0"},
}

# The words of Qwen2's tokenizer, as its tokenizer.json has them.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = ("smollm", "qwen2")


@dataclass(frozen=True)
class LlamaShape:
    """Everything of a Llama that decides its timing and the size of its KV.

    `family` is "llama", or "qwen2": the same with biases on queries, keys and values.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int = 32768
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    bos_id: int = 256
    eos_id: int = 256
    family: str = "llama"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of bfloat16 KV that one token takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BF16_BYTES

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "architectures": [_CLASSES[self.family]],
            "model_type": self.family,
            "dtype": "bfloat16",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            # Readers before transformers 5 know only the first form and would silently take 10,000 without it.
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tied_embeddings,
            **_FAMILY_SETTINGS[self.family],
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
            "pad_token_id": self.eos_id,
        }

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight and bias by its Hugging Face name."""
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        per_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (q_rows, self.hidden),
            "self_attn.k_proj.weight": (kv_rows, self.hidden),
            "self_attn.v_proj.weight": (kv_rows, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, q_rows),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        if self.family == "qwen2":
            per_layer |= {
                f"self_attn.{name}_proj.bias": (rows,)
                for name, rows in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)
            }
        shapes = {
            f"model.layers.{layer}.{name}": shape for layer in range(self.layers) for name, shape in per_layer.items()
        }
        shapes["model.embed_tokens.weight"] = (self.vocab, self.hidden)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


class _Tensor(NamedTuple):
    """One weight that is computed only when it is written."""

    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]  # float32, of that shape


def weights_bytes(shape: LlamaShape) -> int:
    """Return the bytes of model.safetensors for a shape, bar its header of a few kilobytes."""
    return sum(int(np.prod(size)) for size in shape.weight_shapes().values()) * _BF16_BYTES


def random_llama(folder: Path, shape: LlamaShape, *, seed: int, on_bytes: Callable[[int], object]) -> str:
    """Write a Llama with random weights and a byte tokenizer; return the SHA-256 of its weights.

    The standard deviation is 1.6 / sqrt(hidden), 0.07 at hidden 512: attention is then peaked, so that wrong KV shows.
    With 128 wrong tokens among 400, the next token of 8 layers of hidden 512 changed for 8 of 8 prompts; with the
    usual 0.02 it changed for 3 of 8.
    """
    deviation = np.float32(1.6 / shape.hidden**0.5)
    tensors = {}
    for index, (name, size) in enumerate(shape.weight_shapes().items()):
        tensors[name] = _Tensor(size, lambda index=index, size=size: _random_values(size, [seed, index], deviation))
    _write_byte_tokenizer(folder)
    _write_configs(folder, shape)
    return _write_safetensors(folder / "model.safetensors", tensors, on_bytes=on_bytes)


def convert_gguf(gguf_path: Path, folder: Path, *, on_bytes: Callable[[int], object]) -> tuple[LlamaShape, str]:
    """Write the Llama or Qwen2 in a GGUF file as a bfloat16 folder; return its shape and its weights' SHA-256.

    `on_bytes` is called with the number of bytes after each weight.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    shape = _gguf_shape(reader)
    _write_gguf_tokenizer(reader, folder)
    _write_configs(folder, shape)
    tensors = _gguf_tensors(reader, shape)
    return shape, _write_safetensors(folder / "model.safetensors", tensors, on_bytes=on_bytes)


def _write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose ids 0 to 255 are the bytes of UTF-8 text and 256 ends a text."""
    from tokenizers import models

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    _write_tokenizer(folder, models.BPE(vocabulary, []), special=["<|endoftext|>"])
    _write_tokenizer_config(folder, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def _random_values(size: tuple[int, ...], seed: list[int], deviation: np.float32) -> np.ndarray:
    if len(size) == 1:  # the scale of a norm
        return np.ones(size, np.float32)
    return np.random.default_rng(seed).standard_normal(size, np.float32) * deviation


def _gguf_value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _gguf_shape(reader: Any) -> LlamaShape:
    family = _gguf_value(reader, "general.architecture")
    if family not in _CLASSES:
        raise ValueError(f"only models of {' or '.join(_CLASSES)} are converted; this file holds one of {family}")
    value = partial(_family_value, reader, family)
    heads, hidden = value("attention.head_count"), value("embedding_length")
    return LlamaShape(
        layers=value("block_count"),
        hidden=hidden,
        intermediate=value("feed_forward_length"),
        heads=heads,
        kv_heads=value("attention.head_count_kv"),
        head_dim=hidden // heads,
        vocab=len(reader.fields["tokenizer.ggml.tokens"].data),
        max_positions=value("context_length"),
        rope_theta=value("rope.freq_base"),
        norm_eps=value("attention.layer_norm_rms_epsilon"),
        tied_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_id=_gguf_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_id=_gguf_value(reader, "tokenizer.ggml.eos_token_id"),
        family=family,
    )


def _family_value(reader: Any, family: str, key: str) -> Any:
    return _gguf_value(reader, f"{family}.{key}")


def _gguf_tensors(reader: Any, shape: LlamaShape) -> dict[str, _Tensor]:
    """Rename the file's weights; the shapes come from `shape`, so that a missing or unknown weight is a KeyError."""
    stored = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    return {
        name: _Tensor(size, lambda name=name: _dequantised(stored[name], name, shape))
        for name, size in shape.weight_shapes().items()
    }


def _hugging_face_name(gguf_name: str) -> str:
    stem, _, kind = gguf_name.rpartition(".")  # kind: weight or bias
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _dequantised(tensor: Any, name: str, shape: LlamaShape) -> np.ndarray:
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    if shape.family == "llama" and (".q_proj." in name or ".k_proj." in name):
        return _unpermuted(values, shape.head_dim)
    return values


def _unpermuted(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo GGUF's order of a Llama's query and key rows.

    GGUF interleaves the two halves of each head (rows 0, d/2, 1, d/2 + 1, ...) because its rotary embedding turns
    neighbours; Hugging Face's turns row i with row i + d/2. rows: [heads * head_dim, hidden].
    """
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_gguf_tokenizer(reader: Any, folder: Path) -> None:
    """Write the byte-level BPE tokenizer and the chat template that a GGUF file carries."""
    from gguf import TokenType
    from tokenizers import models

    kind, split = _gguf_value(reader, "tokenizer.ggml.model"), _gguf_value(reader, "tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _SPLITS:
        raise ValueError(
            f"only byte-level BPE split as {' or '.join(_SPLITS)} is converted; this file has {kind}/{split}"
        )
    tokens = _gguf_value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _gguf_value(reader, "tokenizer.ggml.merges")]
    types = np.array(_gguf_value(reader, "tokenizer.ggml.token_type"))
    special, whole = ([tokens[i] for i in np.flatnonzero(types == kind)] for kind in (
        TokenType.CONTROL, TokenType.USER_DEFINED))  # fmt: skip
    model = models.BPE({token: index for index, token in enumerate(tokens)}, merges)
    _write_tokenizer(folder, model, special=special, whole=whole, split=split)
    _write_tokenizer_config(
        folder,
        bos_token=tokens[_gguf_value(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_gguf_value(reader, "tokenizer.ggml.eos_token_id")],
        pad_token=tokens[_gguf_value(reader, "tokenizer.ggml.padding_token_id")],
        chat_template=_gguf_value(reader, "tokenizer.chat_template"),
    )


def _write_tokenizer(
    folder: Path, model: Any, *, special: Sequence[str], whole: Sequence[str] = (), split: str = ""
) -> None:
    """Tokens of `whole` are never split, and unlike those of `special` are part of the text."""
    from tokenizers import Tokenizer, decoders, normalizers

    tokenizer = Tokenizer(model)
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = _splitting(split)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(whole))
    tokenizer.save(str(folder / "tokenizer.json"))


def _splitting(split: str) -> Any:
    """What parts a text before pairs of bytes are merged: GPT-2's words; digits first; Qwen2's words."""
    from tokenizers import Regex, pre_tokenizers

    if split == "qwen2":
        words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    return by_words


def _write_tokenizer_config(folder: Path, **settings: str) -> None:
    # This class takes tokenizer.json as it is; a model's own class may rebuild the splitting rules from memory.
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary, as GPT-2 introduced it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def _write_configs(folder: Path, shape: LlamaShape) -> None:
    _write_json(folder / "config.json", shape.config())
    ids = {"bos_token_id": shape.bos_id, "eos_token_id": shape.eos_id, "pad_token_id": shape.eos_id}
    _write_json(folder / "generation_config.json", ids)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, tensors: dict[str, _Tensor], *, on_bytes: Callable[[int], object]) -> str:
    """Stream bfloat16 tensors, sorted by name, into a safetensors file; return the file's SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _safetensors_parts(tensors):
            digest.update(part)
            file.write(part)
            on_bytes(len(part))
    return digest.hexdigest()


def _safetensors_parts(tensors: dict[str, _Tensor]) -> Iterator[bytes]:
    yield _safetensors_header(tensors)
    for name in sorted(tensors):
        values = tensors[name].values()
        if values.shape != tensors[name].shape:
            raise ValueError(f"{name} has shape {values.shape}; the model's configuration says {tensors[name].shape}")
        yield _bfloat16_bits(values).tobytes()


def _safetensors_header(tensors: dict[str, _Tensor]) -> bytes:
    """Return the length and the JSON table that open a safetensors file, padded to a multiple of 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in sorted(tensors):
        stop = start + int(np.prod(tensors[name].shape)) * _BF16_BYTES
        table[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round finite float32 to bfloat16, ties to even; return the bits as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
