"""What each layer of a Hugging Face config keeps and computes.

    config -> kind of each layer ("full", "window", "state", "linear", "both", "none") -> mixer + MLP -> Layer

The kinds come from whichever of a dozen fields the model family uses; `_kinds` is their list. A config that fits none
of them and names no attention heads is refused rather than guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.errors import InvalidInputError

__all__ = ["Layer", "first_of", "read_layers"]

# Families whose MLP has two matrices; all others gate it with a third.
_UNGATED = ("gpt2", "gptj", "gpt_neo", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2",
            "nemotron", "nemotron_h")  # fmt: skip
_KINDS = {
    "full_attention": "full", "attention": "full", "global": "full", "sliding_attention": "window",
    "chunked_attention": "window", "local": "window", "linear_attention": "linear", "mamba": "state",
    "mamba2": "state", "recurrent": "recurrent", "hybrid": "both",
}  # fmt: skip
_NEMOTRON_H = {"M": "state", "*": "full", "-": "none", "E": "none"}
_PURE_STATE = ("mamba", "mamba2", "falcon_mamba", "codestral_mamba")


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        cached_values: Keys, values or latents stored for each token.
        window: Tokens that attention reaches back and that are kept; None for all.
        pair_flops: Arithmetic of one token attending to one other.
        state_bytes: Recurrent state of a prompt.
        scan_flops: Arithmetic of the state for each token.
        parameters: In matrices every token passes.
        expert_parameters: In all experts together.
        expert_share: Experts that one token uses / experts.
    """

    cached_values: int = 0
    window: int | None = None
    pair_flops: int = 0
    state_bytes: int = 0
    scan_flops: int = 0
    parameters: int = 0
    expert_parameters: int = 0
    expert_share: float = 0.0

    @property
    def active_parameters(self) -> float:
        """Parameters that one token passes."""
        return self.parameters + self.expert_parameters * self.expert_share

    @property
    def flops_per_token(self) -> float:
        """Everything that grows with the number of new tokens alone."""
        return 2.0 * self.active_parameters + self.scan_flops

    def kept_values(self, tokens: np.ndarray) -> np.ndarray:
        """Keys and values kept for prompts of so many tokens."""
        return self.cached_values * (tokens if self.window is None else np.minimum(tokens, self.window))

    def attention_flops(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Of tokens start..stop - 1, each with itself and those before it."""
        return self.pair_flops * (self._pairs(stop) - self._pairs(start))

    def touched_parameters(self, tokens: np.ndarray) -> np.ndarray:
        """Parameters that so many tokens read, if each chooses its experts evenly and independently."""
        return self.parameters + self.expert_parameters * (1.0 - (1.0 - self.expert_share) ** tokens)

    def _pairs(self, n: np.ndarray) -> np.ndarray:
        if self.window is None:
            return n * (n + 1) / 2
        full = np.minimum(n, self.window)
        return full * (full + 1) / 2 + (n - full) * self.window


def first_of(config: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is there and not null, else None."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def read_layers(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """One `Layer` for each layer of a config.

    Raises:
        InvalidInputError: The number of layers is missing, or a kind of layer is not known.
    """
    kinds = _kinds(config)
    shared = int(config.get("num_kv_shared_layers") or 0)  # the last ones read an earlier layer's KV (Gemma 3n)
    layers = []
    for number, kind in enumerate(kinds):
        layer = _mixer(config, kind, number)
        if shared and number >= len(kinds) - shared:
            layer = replace(layer, cached_values=0)
        dense, experts, share = _mlp(config, kind, number)
        layers.append(
            replace(layer, parameters=layer.parameters + dense, expert_parameters=experts, expert_share=share)
        )
    return tuple(layers)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    count = first_of(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if not count:
        raise InvalidInputError("the config names no num_hidden_layers, n_layer, num_layers or n_layers")
    named = first_of(config, "layer_types", "layers_block_type", "block_types", "_block_types")
    if named:
        unknown = sorted({str(kind) for kind in named} - set(_KINDS))
        if unknown:
            raise InvalidInputError(f"layers of kind {', '.join(unknown)} are not known; known: {', '.join(_KINDS)}")
        kinds = [_KINDS[kind] for kind in named]
        return [kinds[number % len(kinds)] for number in range(count)]
    if pattern := config.get("hybrid_override_pattern"):
        return [_NEMOTRON_H[letter] for letter in pattern]
    if period := config.get("attn_layer_period"):
        offset = int(config.get("attn_layer_offset") or 0)
        return ["full" if number % period == offset else "state" for number in range(count)]
    if chosen := first_of(config, "attn_layer_indices", "hybrid_layer_ids"):
        return ["full" if number in chosen else "state" for number in range(count)]
    if config.get("model_type") in _PURE_STATE:
        return ["state"] * count
    return ["window" if _is_windowed(config, number) else "full" for number in range(count)]


def _is_windowed(config: Mapping[str, Any], number: int) -> bool:
    """Whether a layer of an attention-only model slides, by the older fields."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return False
    if pattern := config.get("sliding_window_pattern"):
        return (number + 1) % int(pattern) != 0
    if config.get("model_type") == "gemma2":
        return number % 2 == 0
    if config.get("use_sliding_window") and "max_window_layers" in config:
        return number >= int(config["max_window_layers"])
    return True


def _mixer(config: Mapping[str, Any], kind: str, number: int) -> Layer:
    if kind == "none":
        return Layer()
    if kind in ("full", "window"):
        return _attention(config, number, window=_window(config) if kind == "window" else None)
    if kind == "linear":
        return _linear_attention(config)
    if kind == "recurrent":
        return _gated_recurrence(config)
    state = _mamba(config)
    if kind == "state":
        return state
    both = _attention(config, number, window=None)
    return replace(both, state_bytes=state.state_bytes, scan_flops=state.scan_flops,
                   parameters=both.parameters + state.parameters)  # fmt: skip


def _window(config: Mapping[str, Any]) -> int:
    return int(first_of(config, "sliding_window", "attention_window_size", "attention_chunk_size") or 4096)


def _attention(config: Mapping[str, Any], number: int, *, window: int | None) -> Layer:
    hidden = int(first_of(config, "hidden_size", "n_embd", "d_model"))
    heads = _for_layer(first_of(config, "num_attention_heads", "n_head", "n_heads", "num_heads"), number)
    if not heads:
        raise InvalidInputError("the config names no num_attention_heads, n_head, n_heads or num_heads")
    if config.get("kv_lora_rank"):
        return _latent_attention(config, hidden, heads, window)
    kv_heads = _kv_heads(config, heads, number)
    size = int(first_of(config, "head_dim", "attention_head_dim", "kv_channels") or hidden // heads)
    value_size = int(config.get("v_head_dim") or size)
    gate = 2 if config.get("attn_output_gate") or config.get("model_type") == "qwen3_next" else 1
    parameters = hidden * (heads * size * gate + kv_heads * (size + value_size)) + heads * value_size * hidden
    return Layer(kv_heads * (size + value_size), window, 2 * heads * (size + value_size), parameters=parameters)


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int, window: int | None) -> Layer:
    """DeepSeek's MLA: one latent and one rotary key for all heads; prefill expands them."""
    latent, rotary = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    plain, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    queries = heads * (plain + rotary)
    rank = config.get("q_lora_rank")
    parameters = hidden * rank + rank * queries if rank else hidden * queries
    parameters += hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden
    return Layer(latent + rotary, window, 2 * heads * (plain + rotary + value), parameters=parameters)


def _kv_heads(config: Mapping[str, Any], heads: int, number: int) -> int:
    """Grouped heads by any of their names; Falcon and GPT-BigCode say `multi_query` for one."""
    if config.get("new_decoder_architecture"):
        return int(first_of(config, "num_kv_heads", "n_head_kv") or heads)
    if config.get("multi_query"):
        return 1
    if config.get("multi_query_attention"):
        return int(config.get("multi_query_group_num") or 1)
    nested = config.get("attn_config") or {}
    named = first_of(config, "num_key_value_heads", "num_key_value_heads_per_layer", "num_kv_heads", "n_head_kv")
    return _for_layer(named if named is not None else nested.get("kv_n_heads"), number) or heads


def _for_layer(value: Any, number: int) -> int:
    if isinstance(value, Sequence):
        return int(value[number])
    return int(value or 0)


# ---------------------------------------------------------------- states


def _state_itemsize(config: Mapping[str, Any]) -> int:
    return 4 if str(config.get("mamba_ssm_dtype", "")) == "float32" else 2


def _mamba(config: Mapping[str, Any]) -> Layer:
    """Mamba (one decay a channel) or Mamba-2 (one a head); conv state of kernel - 1 columns, as vLLM keeps it."""
    hidden = int(config["hidden_size"])
    expand = float(first_of(config, "mamba_expand", "expand") or 2)
    state = int(first_of(config, "mamba_d_state", "ssm_state_size", "state_size") or 16)
    kernel = int(first_of(config, "mamba_d_conv", "conv_kernel", "conv_kernel_size") or 4)
    heads = first_of(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    if heads is None and config.get("model_type") not in ("mamba2", "codestral_mamba"):
        inner = int(expand * hidden)
        rank = config.get("mamba_dt_rank") or config.get("time_step_rank")
        rank = -(-hidden // 16) if rank in (None, "auto") else int(rank)
        parameters = hidden * 2 * inner + inner * (kernel + rank + 2 * state) + rank * inner + inner * state
        conv = inner * (kernel - 1)
    else:
        size = int(first_of(config, "mamba_d_head", "mamba_head_dim", "head_dim", "mamba_headdim") or 64)
        heads = int(heads or first_of(config, "num_heads") or int(expand * hidden) // size)
        inner = heads * size
        groups = int(first_of(config, "mamba_n_groups", "n_groups", "mamba_ngroups") or 1)
        mixed = inner + 2 * groups * state
        parameters = hidden * (inner + mixed + heads) + mixed * kernel
        conv = mixed * (kernel - 1)
    nbytes = 2 * conv + _state_itemsize(config) * inner * state
    return Layer(state_bytes=nbytes, scan_flops=6 * inner * state, parameters=parameters + inner * hidden)


def _linear_attention(config: Mapping[str, Any]) -> Layer:
    """Gated delta rule (Qwen3-Next): one matrix of key size x value size a head."""
    hidden = int(config["hidden_size"])
    key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    mixed = 2 * key * key_heads + value * value_heads
    kernel = int(config.get("linear_conv_kernel_dim") or 4)
    parameters = hidden * (mixed + value * value_heads + 2 * value_heads) + mixed * kernel
    nbytes = 2 * mixed * (kernel - 1) + _state_itemsize(config) * value_heads * key * value
    return Layer(state_bytes=nbytes, scan_flops=6 * value_heads * key * value,
                 parameters=parameters + value * value_heads * hidden)  # fmt: skip


def _gated_recurrence(config: Mapping[str, Any]) -> Layer:
    """RG-LRU (RecurrentGemma): one float32 a channel and a short convolution."""
    hidden = int(config["hidden_size"])
    width = int(config.get("lru_width") or hidden)
    kernel = int(config.get("conv1d_width") or 4)
    heads = int(config.get("num_attention_heads") or 1)
    gates = 2 * width * width // heads
    return Layer(state_bytes=4 * width + 2 * width * (kernel - 1), scan_flops=10 * width,
                 parameters=3 * hidden * width + width * kernel + gates)  # fmt: skip


# ---------------------------------------------------------------- MLP and experts


def _mlp(config: Mapping[str, Any], kind: str, number: int) -> tuple[int, int, float]:
    """Parameters every token passes, parameters of all experts, share of the experts that a token uses."""
    hidden = int(first_of(config, "hidden_size", "n_embd", "d_model"))
    matrices = 2 if config.get("model_type") in _UNGATED else 3
    alone = kind != "none" if config.get("hybrid_override_pattern") else config.get("model_type") in _PURE_STATE
    if alone:  # Nemotron-H puts mixer and MLP in layers of their own; pure Mamba has no MLP
        return 0, 0, 0.0
    wide = _for_layer(
        first_of(config, "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        or int(hidden * float(config.get("expansion_ratio") or 4)), number,
    )  # fmt: skip
    experts = int(first_of(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0)
    if experts < 2 or not _has_experts(config, number):
        return matrices * hidden * (int(config.get("intermediate_size_mlp") or wide)), 0, 0.0
    used = int(first_of(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts") or 1)
    narrow = _for_layer(first_of(config, "moe_intermediate_size", "expert_ffn_hidden_size") or wide, number)
    shared = int(first_of(config, "shared_expert_intermediate_size", "shared_intermediate_size")
                 or narrow * int(first_of(config, "n_shared_experts", "num_shared_experts") or 0))  # fmt: skip
    return matrices * hidden * shared + hidden * experts, experts * matrices * hidden * narrow, used / experts


def _has_experts(config: Mapping[str, Any], number: int) -> bool:
    if number < int(config.get("first_k_dense_replace") or 0) or number in (config.get("mlp_only_layers") or ()):
        return False
    if period := config.get("expert_layer_period"):
        return number % period == int(config.get("expert_layer_offset") or 0)
    every = first_of(config, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")
    if isinstance(every, Sequence):
        return bool(every[number])
    if config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step"):
        return (number + 1) % int(every) == 0
    return number % int(every or 1) == 0
