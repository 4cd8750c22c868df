"""split_planes and join_planes: lossless for every 16-bit pattern, the same planes in every implementation."""

import numpy as np
import pytest
from interpreted import DEVICE, torch

from kernels.byteplanes import join_planes, split_planes

EVERY = np.arange(1 << 16, dtype=np.uint16)


def split(impl: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if impl == "triton":
        tensor = torch.from_numpy(values.view(np.int16).copy()).to(DEVICE)
        high, low = (torch.zeros(len(values), dtype=torch.uint8, device=DEVICE) for _ in range(2))
        split_planes(tensor, high=high, low=low, impl=impl)
        return high.cpu().numpy(), low.cpu().numpy()
    high, low = np.zeros(len(values), np.uint8), np.zeros(len(values), np.uint8)
    split_planes(values, high=high, low=low, impl=impl)
    return high, low


def join(impl: str, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    if impl == "triton":
        out = torch.zeros(len(high), dtype=torch.int16, device=DEVICE)
        join_planes(out, high=torch.from_numpy(high).to(DEVICE), low=torch.from_numpy(low).to(DEVICE), impl=impl)
        return out.cpu().numpy().view(np.uint16)
    out = np.zeros(len(high), np.uint16)
    join_planes(out, high=high, low=low, impl=impl)
    return out


@pytest.mark.parametrize("impl", split_planes.impls)
@pytest.mark.parametrize("count", [1 << 16, 70001, 1, 0])
def test_every_pattern_comes_back(impl, count):
    values = np.resize(EVERY, count)
    high, low = split(impl, values)
    want = split("reference", values)
    np.testing.assert_array_equal(high, want[0])
    np.testing.assert_array_equal(low, want[1])
    np.testing.assert_array_equal(join(impl, high, low), values)


def test_the_high_plane_is_the_exponent():
    high, low = split("reference", np.array([0x3F80, 0xBF80, 0x4049], np.uint16))  # 1.0, -1.0, 3.14
    assert high.tolist() == [127, 127, 128] and low.tolist() == [0, 1, 0x49 << 1 & 0xFF]
