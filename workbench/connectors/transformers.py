"""The engine beside Hugging Face transformers: keep and give back `past_key_values`.

store     Cache -> per layer [heads, tokens, K | V] -> pages -> engine
retrieve  engine -> pages -> per layer K, V -> DynamicCache that `model.generate` takes

cache = TransformersConnector(model, memory_bytes="2GiB")
with cache.reusing():
    model.generate(input_ids)          # reuses the longest stored prefix, stores what it computed
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kernels.pages import PageTable
from workbench.chunks import ChunkScope
from workbench.config import CacheConfig
from workbench.engine import CacheEngine
from workbench.errors import InvalidInputError, LayoutError
from workbench.fingerprint import weights_fingerprint
from workbench.layout import Identity, KVLayout

__all__ = ["TransformersConnector"]


class TransformersConnector:
    """Stores and retrieves the KV of one model. One prompt at a time; a batch of one.

    Args:
        model: A decoder whose layers all attend to the whole prefix.
        config: Settings of the engine, or give them as keywords.

    Raises:
        LayoutError: The model keeps anything but plain keys and values of the whole prefix in each layer.
    """

    def __init__(self, model: PreTrainedModel, config: CacheConfig | None = None, **settings: Any):
        self.model = model
        config = config if config is not None else CacheConfig(**settings)
        self.engine = CacheEngine(_identity_of(model, config.chunk_tokens), config)

    def store(self, tokens: Sequence[int], past_key_values: DynamicCache, *, scope: ChunkScope = ChunkScope()) -> int:
        """Save the KV of `tokens`; returns how many tokens were newly saved.

        Args:
            tokens: Ids of the tokens that the cache holds, from the first one; a longer list is cut to it.
            past_key_values: Filled by a forward pass over them, batch size 1.
            scope: Salt and adapter.
        """
        layout = self.engine.identity.layout
        held = min(len(tokens), past_key_values.get_seq_length())
        pages = _Pages(layout, layout.blocks_of(held))
        for number, layer in enumerate(past_key_values.layers):
            _check_layer(layer, layout)
            pages.fill(number, layer.keys[0, :, :held], layer.values[0, :, :held])
        return self.engine.store(tokens[:held], pages.table, blocks=range(pages.num_blocks), scope=scope)

    def retrieve(self, tokens: Sequence[int], *, max_prefix_length: int | None = None,
                 scope: ChunkScope = ChunkScope()) -> DynamicCache:  # fmt: skip
        """The KV of the longest saved prefix, as a cache for `model.generate` or a forward pass.

        Args:
            tokens: The prompt.
            max_prefix_length: Use no more tokens than this; by default one is left for the model to compute.
            scope: Salt and adapter.

        Returns:
            A cache of its own, to be changed freely; `get_seq_length()` says how many tokens it holds, 0 on a miss.
        """
        layout = self.engine.identity.layout
        most = len(tokens) - 1 if max_prefix_length is None else min(max_prefix_length, len(tokens))
        cache = DynamicCache(config=self.model.config)
        pages = _Pages(layout, max(1, layout.blocks_of(len(tokens))))  # untouched pages take no memory
        hit = self.engine.retrieve(tokens, pages.table, blocks=range(pages.num_blocks), scope=scope)
        if (usable := min(hit, most)) > 0:
            device = self.model.get_input_embeddings().weight.device
            for number in range(layout.num_layers):
                keys, values = pages.read(number, usable)
                cache.update(keys[None].to(device), values[None].to(device), number)
        return cache

    @contextmanager
    def reusing(self, *, scope: ChunkScope = ChunkScope()) -> Iterator["TransformersConnector"]:
        """Within it, `model.generate` of a single prompt reuses and stores KV; calls it cannot help run unchanged."""
        original = self.model.generate

        def generate(inputs=None, **options):
            ids = inputs if inputs is not None else options.get("input_ids")
            if not _can_help(ids, options):
                return original(inputs, **options) if inputs is not None else original(**options)
            tokens = ids[0].tolist()
            cache = self.retrieve(tokens, scope=scope)
            options = {**options, "past_key_values": cache, "use_cache": True}
            output = original(inputs, **options) if inputs is not None else original(**options)
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            self.store(sequences[0].tolist(), cache, scope=scope)
            return output

        self.model.generate = generate
        try:
            yield self
        finally:
            del self.model.generate

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "TransformersConnector":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class _Pages:
    """Temporary pages in the layout's token-major form, one block a chunk: [heads][token][K | V], zeros behind the last
    token."""

    def __init__(self, layout: KVLayout, num_blocks: int):
        self.layout, self.num_blocks = layout, num_blocks
        self._dtype = getattr(torch, layout.dtype)
        shape = (num_blocks, layout.num_kv_heads, layout.block_size, 2 * layout.head_size)
        self._layers = [torch.zeros(shape, dtype=self._dtype) for _ in range(layout.num_layers)]
        self.table = PageTable([layer.view(torch.uint8).flatten(1).numpy() for layer in self._layers])

    def fill(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one layer's [heads, tokens, size] keys and values."""
        tokens, block_size = keys.shape[1], self.layout.block_size
        for block, start in enumerate(range(0, tokens, block_size)):
            own = slice(start, min(start + block_size, tokens))
            torch.cat([keys[:, own], values[:, own]], 2, out=self._layers[number][block, :, : own.stop - start])

    def read(self, number: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values of the first tokens, [heads, tokens, size] each; copies."""
        size = self.layout.head_size
        both = self._layers[number].transpose(0, 1).flatten(1, 2)[:, :tokens]
        return both[..., :size].contiguous(), both[..., size:].contiguous()


def _identity_of(model: PreTrainedModel, chunk_tokens: int) -> Identity:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise LayoutError(f"layers of kind {', '.join(sorted(kinds))}; only full attention keeps the whole prefix")
    heads = config.num_attention_heads
    layout = KVLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        block_size=chunk_tokens,
        chunk_tokens=chunk_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    revision = str(getattr(model.config, "_commit_hash", "") or "")
    return Identity(
        layout=layout,
        weights=weights_fingerprint(model.name_or_path, model.name_or_path or f"object {id(model)}", revision),
        architecture=type(model).__name__,
        model_dtype=str(model.dtype),
        rope=repr(sorted((getattr(config, "rope_parameters", None) or {}).items())),
        attention=str(getattr(config, "_attn_implementation", "")),
        extra=("transformers", str(model.device.type)),
    )


def _check_layer(layer: Any, layout: KVLayout) -> None:
    keys = getattr(layer, "keys", None)
    expected = (1, layout.num_kv_heads, layout.head_size)
    if keys is None or keys.dim() != 4 or (keys.shape[0], keys.shape[1], keys.shape[3]) != expected:
        shape = None if keys is None else tuple(keys.shape)
        raise InvalidInputError(f"a layer's keys are {shape}; expected [1, {expected[1]} heads, tokens, {expected[2]}]")


def _can_help(ids: Any, options: dict[str, Any]) -> bool:
    """One prompt, no padding, greedy or sampled in one stream, no cache of the caller's own."""
    mask = options.get("attention_mask")
    return (
        isinstance(ids, torch.Tensor)
        and ids.dim() == 2
        and ids.shape[0] == 1
        and options.get("past_key_values") is None
        and options.get("use_cache") is not False
        and options.get("num_return_sequences", 1) == 1
        and options.get("num_beams", 1) == 1
        and (mask is None or bool(mask.all()))
    )
