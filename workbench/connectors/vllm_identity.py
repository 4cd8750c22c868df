"""What vLLM's configuration says about KV: the identity of an engine and the scope of a request.

Everything is read by feature detection, so that vLLM 0.30 to 0.32 give the same answers where they mean the same.
"""

import json
from pathlib import Path
from typing import Any

from workbench.chunks import ChunkScope
from workbench.errors import LayoutError
from workbench.fingerprint import fingerprint_files, weights_fingerprint
from workbench.layout import Identity, KVLayout

__all__ = ["identity_of", "layout_of", "scope_of"]

_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings")


def layout_of(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int) -> KVLayout:
    """Shape of the KV pages of one rank.

    Raises:
        LayoutError: There is more than one group of layers with block tables of their own.
        InvalidInputError: The chunk is not a multiple of the block size.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise LayoutError(
            f"{len(groups)} KV cache groups; this connector handles one (vLLM merges hybrid layers into one)"
        )
    spec, num_layers = groups[0].kv_cache_spec, len(groups[0].layer_names)
    dtype = str(spec.dtype).removeprefix("torch.")
    sizes = {"num_layers": num_layers, "block_size": spec.block_size, "chunk_tokens": chunk_tokens}
    if dtype in ("bfloat16", "float16", "float32"):
        layout = KVLayout(num_kv_heads=spec.num_kv_heads, head_size=spec.head_size, dtype=dtype,
                          page_format=_page_format(_isa(vllm_config, spec)), **sizes)  # fmt: skip
        if layout.page_nbytes == spec.page_size_bytes:
            return layout
    # MLA latents, quantised KV, padded pages: moved whole, seen as bytes.
    per_token, rest = divmod(spec.page_size_bytes, 2 * spec.block_size)
    if rest:
        raise LayoutError(f"a page of {spec.page_size_bytes} bytes does not divide into {spec.block_size} tokens")
    return KVLayout(num_kv_heads=1, head_size=per_token, dtype="uint8", page_format="opaque", **sizes)


def _page_format(isa: str) -> str:
    return {"": "token-major", "vec": "vllm-cpu-vec", "vec16": "vllm-cpu-vec"}.get(isa, "opaque")


def _isa(vllm_config: Any, spec: Any) -> str:
    """How the CPU backend packs a page, which the instruction set decides; "" on a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return _get_attn_isa(spec.dtype, spec.block_size, getattr(spec, "head_size", None),
                             vllm_config.cache_config.cache_dtype)  # fmt: skip
    except (ImportError, TypeError):  # moved or changed in another release: keep machines of each kind apart
        from torch.backends.cpu import get_cpu_capability

        return f"unknown/{get_cpu_capability()}"


def identity_of(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int) -> Identity:
    """The identity of all KV that this engine computes. Equal on the scheduler and on each worker."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    text = getattr(model, "hf_text_config", None) or model.hf_config
    groups = kv_cache_config.kv_cache_groups
    return Identity(
        layout=layout_of(vllm_config, kv_cache_config, chunk_tokens),
        weights=weights_fingerprint(_model_path(model), model.model, str(getattr(model, "revision", "") or "")),
        architecture=",".join(getattr(model.hf_config, "architectures", None) or [type(model.hf_config).__name__]),
        model_dtype=f"{model.dtype}/{getattr(model, 'quantization', None)}",
        kv_scales=f"{cache.cache_dtype}/{getattr(cache, 'calculate_kv_scales', False)}",
        rope=json.dumps({name: getattr(text, name, None) for name in _ROPE_FIELDS}, sort_keys=True, default=str),
        attention="; ".join(f"{len(g.layer_names)} x {g.kv_cache_spec!r}" for g in groups),
        tensor_parallel=(0, parallel.tensor_parallel_size),
        pipeline_parallel=(0, parallel.pipeline_parallel_size),
        isa=_isa(vllm_config, groups[0].kv_cache_spec),
        extra=(f"layout={getattr(cache, 'kv_cache_layout', None)}", f"seed={_dummy_seed(vllm_config)}"),
    )


def _dummy_seed(vllm_config: Any) -> int | None:
    """Dummy weights depend on nothing but the seed."""
    load = getattr(vllm_config, "load_config", None)
    return vllm_config.model_config.seed if "dummy" in str(getattr(load, "load_format", "")) else None


def _model_path(model: Any) -> str:
    """Directory of the weights: the path itself, or the snapshot that a hub name has in the local cache."""
    if Path(model.model).exists():
        return model.model
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model.model, "config.json", revision=getattr(model, "revision", None))
    except (ImportError, ValueError):  # ValueError: not a valid repository name
        return model.model
    return str(Path(found).parent) if isinstance(found, str) else model.model


def scope_of(request: Any) -> ChunkScope | None:
    """Salt, LoRA and multimodal inputs of a request; None if its KV depends on what no key here covers."""
    if getattr(request, "prompt_embeds", None) is not None or getattr(request, "prompt_is_token_ids", None) is not None:
        return None
    inputs = tuple(
        (f.mm_position.offset, f.mm_position.offset + f.mm_position.length, str(f.identifier))
        for f in getattr(request, "mm_features", None) or ()
    )
    return ChunkScope(salt=request.cache_salt or "", lora=_lora_parts(request.lora_request), inputs=inputs)


def _lora_parts(lora: Any) -> tuple[str, ...]:
    """Name and content of an adapter: the same name with other weights is another adapter."""
    if lora is None:
        return ()
    path = Path(getattr(lora, "lora_path", "") or "")
    files = [f for f in path.iterdir() if f.is_file()] if path.is_dir() else []
    content = fingerprint_files(files) if files else str(path)
    return lora.lora_name, content
