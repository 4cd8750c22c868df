"""Codecs as LMCache serdes: the transform on tensors, and the registration where LMCache is installed."""

import select
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from workbench.codecs import CorruptDataError
from workbench.connectors.lmcache_serde import CodecDeserializer, CodecSerializer, register
from workbench.errors import CapacityError, InvalidInputError

SHAPE = (2, 3, 128, 2 * 64)  # K and V, layers, tokens, heads * head size


def kv():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def description(shape=SHAPE) -> SimpleNamespace:
    """What LMCache's MemoryLayoutDesc holds."""
    return SimpleNamespace(shapes=[torch.Size(shape)], dtypes=[torch.bfloat16])


def held(tensor) -> SimpleNamespace:
    """The one attribute of a MemoryObj that a serde reads."""
    return SimpleNamespace(tensor=tensor)


@pytest.mark.parametrize(("codec", "most"), [("raw", 0.0), ("lossless", 0.0), ("int8", 0.02), ("echo", 0.2)])
def test_a_tensor_comes_back(codec, most):
    writer, reader = (kind(codec, num_kv_heads=2) for kind in (CodecSerializer, CodecDeserializer))
    source, out = kv(), torch.zeros(SHAPE, dtype=torch.bfloat16)
    buffer = torch.full((writer.estimate_serialized_size(description()),), 0xAB, dtype=torch.uint8)
    written = writer.serialize(held(source), held(buffer), None)
    assert written <= len(buffer) and not buffer[written:].any()
    reader.deserialize(held(buffer), held(out), None)
    assert torch.linalg.norm((out - source).float()) <= most * torch.linalg.norm(source.float())


def test_the_room_is_kept_to():
    writer = CodecSerializer("ecsq", num_kv_heads=2, bits_per_value=5)
    size = writer.estimate_serialized_size(description())
    assert size == kv().numel() * 5 // 8
    writer.serialize(held(kv()), held(torch.zeros(size, dtype=torch.uint8)), None)
    with pytest.raises(CapacityError, match="buffer has 1000"):
        writer.serialize(held(kv()), held(torch.zeros(1000, dtype=torch.uint8)), None)


def test_what_is_not_ours_is_refused():
    reader = CodecDeserializer("int8", num_kv_heads=2)
    for buffer in (torch.zeros(4, dtype=torch.uint8), torch.full((5000,), 255, dtype=torch.uint8)):
        with pytest.raises(CorruptDataError):
            reader.deserialize(held(buffer), held(kv()), None)
    with pytest.raises(InvalidInputError, match="head size"):
        CodecSerializer("int8", num_kv_heads=3).estimate_serialized_size(description())


def test_lmcache_runs_it():
    serde = pytest.importorskip("lmcache.v1.distributed.serde", reason="LMCache is not installed")
    register()
    register()
    config = serde.SerdeConfig(type="kvworkbench", kwargs={"codec": "int8", "num_kv_heads": 2})
    processor = serde.create_serde_processor(config)
    try:
        source, out = kv(), torch.zeros(SHAPE, dtype=torch.bfloat16)
        buffer = torch.zeros(processor.estimate_serialized_size(description()), dtype=torch.uint8)
        assert len(buffer) < 0.56 * source.numel() * 2
        task = processor.submit_serialize([held(source)], [held(buffer)], [None])
        assert select.select([processor.get_serialize_event_fd()], [], [], 30)[0]
        assert processor.query_serialize_result(task) is True
        task = processor.submit_deserialize([held(buffer)], [held(out)], [None])
        assert select.select([processor.get_deserialize_event_fd()], [], [], 30)[0]
        assert processor.query_deserialize_result(task) is True
        assert torch.linalg.norm((out - source).float()) <= 0.02 * torch.linalg.norm(source.float())
    finally:
        processor.close()
