"""`split_planes` and `join_planes` on a GPU."""

# ruff: noqa: N803 - a Triton kernel's compile-time constants are in capitals

import torch
import triton
import triton.language as tl

__all__ = ["join_planes", "join_planes_kernel", "split_planes", "split_planes_kernel"]

_BLOCK = 2048


@triton.jit
def split_planes_kernel(values, high, low, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + at, mask=at < count, other=0).to(tl.int32) & 0xFFFF
    tl.store(high + at, ((value >> 7) & 0xFF).to(tl.uint8), mask=at < count)
    tl.store(low + at, (((value << 1) | (value >> 15)) & 0xFF).to(tl.uint8), mask=at < count)


@triton.jit
def join_planes_kernel(values, high, low, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(high + at, mask=at < count, other=0).to(tl.int32)
    bottom = tl.load(low + at, mask=at < count, other=0).to(tl.int32)
    value = (top << 7) | (bottom >> 1) | ((bottom & 1) << 15)
    tl.store(values + at, value.to(tl.uint16).to(tl.int16, bitcast=True), mask=at < count)


def split_planes(values: torch.Tensor, *, high: torch.Tensor, low: torch.Tensor) -> None:
    if values.numel():
        grid = (triton.cdiv(values.numel(), _BLOCK),)
        split_planes_kernel[grid](values.view(torch.int16), high, low, values.numel(), BLOCK=_BLOCK)


def join_planes(values: torch.Tensor, *, high: torch.Tensor, low: torch.Tensor) -> None:
    if values.numel():
        grid = (triton.cdiv(values.numel(), _BLOCK),)
        join_planes_kernel[grid](values.view(torch.int16), high, low, values.numel(), BLOCK=_BLOCK)
