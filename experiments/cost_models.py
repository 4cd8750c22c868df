"""Published configs of well-known models, as far as cost needs them.

    resolve_shape("llama-3-8b")          # a preset
    resolve_shape("/models/mine")        # a folder with config.json, or the file, or its dictionary

Values are those of each model's config.json on Hugging Face; tests hold the parameters they give to the published ones.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments.cost_shapes import KVShape
from workbench.errors import UnknownNameError

__all__ = ["MODELS", "resolve_shape"]


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **more: Any
           ) -> dict[str, Any]:  # fmt: skip
    return {"model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "vocab_size": vocab,
            "torch_dtype": "bfloat16", **more}  # fmt: skip


# name -> (config, where it stands, parameters as published)
MODELS: Mapping[str, tuple[dict[str, Any], str, float]] = MappingProxyType({
    "smollm2-135m": (_llama(576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True, max_position_embeddings=8192),
                     "HuggingFaceTB/SmolLM2-135M-Instruct", 134.5e6),
    "llama-7b": (_llama(4096, 32, 32, 32, 11008, 32000, max_position_embeddings=2048),
                 "LLaMA, arXiv 2302.13971, table 2", 6.7e9),
    "llama-3-8b": (_llama(4096, 32, 32, 8, 14336, 128256, max_position_embeddings=131072),
                   "meta-llama/Llama-3.1-8B", 8.03e9),
    "llama-3-70b": (_llama(8192, 80, 64, 8, 28672, 128256, max_position_embeddings=131072),
                    "meta-llama/Llama-3.1-70B", 70.6e9),
    "qwen3-8b": (_llama(4096, 36, 32, 8, 12288, 151936, model_type="qwen3", head_dim=128,
                        max_position_embeddings=40960), "Qwen/Qwen3-8B", 8.19e9),
    "granite-3.3-8b": (_llama(4096, 40, 32, 8, 12800, 49159, model_type="granite", tie_word_embeddings=True,
                              max_position_embeddings=131072), "ibm-granite/granite-3.3-8b-instruct", 8.17e9),
    "mistral-7b": (_llama(4096, 32, 32, 8, 14336, 32000, model_type="mistral", sliding_window=4096,
                          max_position_embeddings=32768), "mistralai/Mistral-7B-v0.1", 7.24e9),
    "gemma-3-27b": (_llama(5376, 62, 32, 16, 21504, 262208, model_type="gemma3_text", head_dim=128,
                           sliding_window=1024, sliding_window_pattern=6, tie_word_embeddings=True,
                           max_position_embeddings=131072), "google/gemma-3-27b-it, text part", 27.0e9),
    "deepseek-v3": ({"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
                     "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
                     "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
                     "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
                     "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": 129280,
                     "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"},
                     "max_position_embeddings": 163840}, "deepseek-ai/DeepSeek-V3", 671e9),
    "jamba-v0.1": (_llama(4096, 32, 32, 8, 14336, 65536, model_type="jamba", attn_layer_period=8, attn_layer_offset=4,
                          expert_layer_period=2, expert_layer_offset=1, num_experts=16, num_experts_per_tok=2,
                          mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=256,
                          max_position_embeddings=262144), "ai21labs/Jamba-v0.1", 51.6e9),
})  # fmt: skip


def resolve_shape(spec: Any, *, kv_dtype: str = "auto") -> KVShape:
    """A preset by name, any local Hugging Face config, or a `KVShape` as it is.

    Raises:
        UnknownNameError: Neither a preset nor a file here.
        InvalidInputError: The config cannot be read.
    """
    if isinstance(spec, KVShape):
        return spec
    if isinstance(spec, Mapping):
        return KVShape.from_hf_config(spec, kv_dtype=kv_dtype)
    if str(spec) in MODELS:
        return KVShape.from_hf_config(MODELS[str(spec)][0], kv_dtype=kv_dtype, name=str(spec))
    if Path(str(spec)).exists():
        return KVShape.from_hf_config(Path(str(spec)), kv_dtype=kv_dtype)
    raise UnknownNameError("model preset or config file", str(spec), MODELS)
