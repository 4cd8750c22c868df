"""What machines can do at most, and the media that KV is loaded from: published figures, each with its source.

    resolve_hardware("h100"), HARDWARE["h100"].times(4)
    TIERS["memory"].bytes_per_second

Peaks are dense 16-bit arithmetic without sparsity. No program reaches a peak: what a model does reach is in its
efficiencies (cost.py), which `calibrate` measures. Prices are not from a datasheet: they are round figures of what a
rented device costs, to be replaced by your own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from workbench.errors import InvalidInputError, UnknownNameError

__all__ = ["HARDWARE", "TIERS", "Hardware", "TierSpeed", "resolve_hardware"]


@dataclass(frozen=True)
class Hardware:
    """One device, or several that work as one.

    Args:
        name: For people.
        flops_per_second: Peak of dense 16-bit matrix arithmetic.
        memory_bytes_per_second: Peak of the device's own memory.
        memory_bytes: Of the device's own memory.
        link_bytes_per_second: To the host's memory, one direction.
        dollars_per_hour: An assumption; see above.
        source: Where the figures stand.
    """

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    memory_bytes: float
    link_bytes_per_second: float
    dollars_per_hour: float
    source: str

    def times(self, count: int) -> "Hardware":
        """So many of them as one: everything adds up, as with tensor parallelism without its communication.

        Raises:
            InvalidInputError: count is below 1.
        """
        if count < 1:
            raise InvalidInputError(f"{self.name} x {count}: at least 1 is needed")
        if count == 1:
            return self
        sums = {
            field: count * getattr(self, field)
            for field in ("flops_per_second", "memory_bytes_per_second", "memory_bytes", "link_bytes_per_second",
                          "dollars_per_hour")
        }  # fmt: skip
        return replace(self, name=f"{count} x {self.name}", **sums)


@dataclass(frozen=True)
class TierSpeed:
    """A medium that KV is loaded from.

    Args:
        name: For people.
        bytes_per_second: Read by one engine.
        latency_s: From the request to the first byte.
        source: Where the figures stand.
        through_link: The bytes reach the device over its host link, which may be slower.
    """

    name: str
    bytes_per_second: float
    latency_s: float
    source: str
    through_link: bool = True


_TERA, _GIGA = 1e12, 1e9
_SEVERAL = re.compile(r"([1-9]\d{0,3}) ?x ?(.+)")

HARDWARE: Mapping[str, Hardware] = MappingProxyType({
    "h100": Hardware("H100 SXM", 989 * _TERA, 3.35 * _TERA, 80 * _GIGA, 64 * _GIGA, 3.0,
                     "NVIDIA H100 datasheet: BF16 1,979 TFLOPS with sparsity, 3.35 TB/s, PCIe Gen5 128 GB/s both ways"),
    "h200": Hardware("H200 SXM", 989 * _TERA, 4.8 * _TERA, 141 * _GIGA, 64 * _GIGA, 3.5,
                     "NVIDIA H200 datasheet: BF16 1,979 TFLOPS with sparsity, 4.8 TB/s, PCIe Gen5 128 GB/s both ways"),
    "b200": Hardware("B200", 2250 * _TERA, 8.0 * _TERA, 180 * _GIGA, 64 * _GIGA, 5.0,
                     "NVIDIA DGX B200 datasheet, an eighth: BF16 4.5 PFLOPS with sparsity, 8 TB/s, 180 GB, PCIe Gen5"),
    "a100": Hardware("A100 SXM 80 GB", 312 * _TERA, 2.039 * _TERA, 80 * _GIGA, 32 * _GIGA, 1.5,
                     "NVIDIA A100 datasheet: BF16 312 TFLOPS dense, 2,039 GB/s, PCIe Gen4 64 GB/s both ways"),
    "l4": Hardware("L4", 121 * _TERA, 0.3 * _TERA, 24 * _GIGA, 32 * _GIGA, 0.7,
                   "NVIDIA L4 datasheet: BF16 242 TFLOPS with sparsity, 300 GB/s, PCIe Gen4 x16 64 GB/s both ways"),
    "rtx4090": Hardware("RTX 4090", 165.2 * _TERA, 1.008 * _TERA, 24 * _GIGA, 32 * _GIGA, 0.4,
                        "NVIDIA Ada whitepaper: BF16 tensor 165.2 TFLOPS dense with FP32 sums, 1,008 GB/s, PCIe Gen4"),
    "mi300x": Hardware("MI300X", 1307 * _TERA, 5.3 * _TERA, 192 * _GIGA, 64 * _GIGA, 3.0,
                       "AMD Instinct MI300X datasheet: BF16 1,307 TFLOPS dense, 5.3 TB/s, 192 GB, PCIe Gen5"),
    "epyc_core": Hardware("EPYC 9004, one core", 0.2 * _TERA, 12 * _GIGA, 4 * _GIGA, 12 * _GIGA, 0.04,
                          "AMD EPYC 9004: AVX-512 BF16 at 64 FLOPs a cycle and about 3.1 GHz; memory as one core reads "
                          "it, an estimate"),
})  # fmt: skip

TIERS: Mapping[str, TierSpeed] = MappingProxyType({
    "memory": TierSpeed("host memory", 200 * _GIGA, 1e-4, "DDR5-4800 on 8 of 12 channels; the host link is narrower"),
    "disk": TierSpeed("NVMe", 7 * _GIGA, 2e-4, "PCIe Gen4 x4 NVMe datasheets: 7 GB/s sequential read"),
    "redis": TierSpeed("Redis over 25 GbE", 2.5 * _GIGA, 1e-3, "25 Gbit/s less protocol, one connection's latency"),
    "rdma": TierSpeed("pool over 200 Gbit/s RDMA", 23 * _GIGA, 5e-5, "200 Gbit/s InfiniBand or RoCE less protocol"),
    "object_store": TierSpeed("object store", 1 * _GIGA, 3e-2, "parallel ranged reads; first byte after some 30 ms"),
})  # fmt: skip


def resolve_hardware(spec: Any) -> Hardware:
    """A preset by name, "4xh100" for several, or a `Hardware` as it is.

    Raises:
        UnknownNameError: There is no such preset; the message lists those that exist.
    """
    if isinstance(spec, Hardware):
        return spec
    match = _SEVERAL.fullmatch(str(spec))
    count, name = (int(match[1]), match[2]) if match else (1, str(spec))
    if name not in HARDWARE:
        raise UnknownNameError("hardware", str(spec), HARDWARE)
    return HARDWARE[name].times(count)
