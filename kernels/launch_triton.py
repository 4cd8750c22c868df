"""What every Triton launcher needs: the addresses of paged tiles on the device, and whether they are aligned."""

from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.tiles import Tiles

__all__ = ["Paged", "paged", "upload"]


class Paged(NamedTuple):
    """A paged cache as a kernel takes it.

    Attributes:
        pointers: (L,) int64 on the device, the address of each layer.
        block_step, head_step, row_step: In elements.
        aligned: Every address and step is a multiple of 16 bytes, so that 128-bit loads are possible.
        device: Where the pages lie.
    """

    pointers: torch.Tensor
    block_step: int
    head_step: int
    row_step: int
    aligned: bool
    device: torch.device


def paged(tiles: Tiles) -> Paged:
    """The pointer table of tiles made of torch tensors."""
    device = tiles.pages[0].device
    steps = [int(stride) // tiles.itemsize for stride in tiles.strides]
    aligned = not (tiles.addresses % 16).any() and not (tiles.strides % 16).any()
    return Paged(upload(tiles.addresses, device), *steps, aligned, device)


def upload(array: np.ndarray, device: Any) -> torch.Tensor:
    """A small host array (block ids, addresses) on the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
