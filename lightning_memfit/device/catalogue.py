"""Catalogue of common GPUs: their memory, bandwidths and arithmetic rates.

`memory_bytes` is torch's `total_memory` on Linux, which is less than the marketing figure: the driver keeps a part, and
so does ECC. It is taken from torch's own out-of-memory messages ("GPU 0 has a total capacity of 79.10 GiB"), the lower
figure where drivers differ, so it may be 1 to 2 % low. Entries whose source says "memory estimated" take the figure of
a card of the same size and generation. `probe_device` reads the true figure of the card in this machine.

Arithmetic rates are dense (no sparsity) and accumulate in fp32, which GeForce cards do at half rate. Bandwidths are
theoretical maxima; the host link counts one direction of PCIe x16 unless said otherwise.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_memfit.memory import GIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

_PCIE3, _PCIE4, _PCIE5 = 15.75e9, 31.5e9, 63.0e9
_NOISE = {"nvidia", "geforce", "tesla", "quadro", "gpu", "rtx", "gtx", "generation"}
_VARIANTS = {"ti", "super"}  # never assumed: a name without these words means the plain card
_SIZE = re.compile(r"[0-9.]+\s*[kmgt]i?b", re.IGNORECASE)


@dataclass(frozen=True)
class ReachedRates:
    """What training programs reach of a device's data sheet."""

    flops: Mapping[str, float]
    """FLOP/s of matrix products by dtype."""
    bytes_per_s: float | None
    """Of the device's memory."""
    link_bytes_per_s: float | None
    """Between the device and host memory, one direction."""


_OF_PRODUCTS, _OF_HOT, _OF_FLOAT32, _OF_BANDWIDTH, _OF_LINK = 0.8, 0.66, 0.78, 0.85, 0.8
"""Shares of the data sheet's figures that operators reach. Products on tensor cores: four fifths, but two thirds on
Hopper and later, which lower their clocks under load. Products in float32 run on the vector units. Those of an H200 are
fitted to its step times (docs/benchmarks/gpu.md)."""


@dataclass(frozen=True)
class DeviceSpec:
    """One device. Unknown figures (for a bare size) are None or absent from `flops`."""

    name: str
    memory_bytes: int
    """Total memory as torch reports it."""
    bandwidth_bytes_per_s: float | None = None
    flops: Mapping[str, float] = field(default_factory=dict)
    """Dense FLOP/s by `float32`, `tf32`, `float16`, `bfloat16`, `float8`, `int8`; absent without a fast path."""
    compute_capability: tuple[int, int] | None = None
    host_link_bytes_per_s: float | None = None
    source: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Name and aliases."""
        return (self.name, *self.aliases)

    @property
    def peer_bytes_per_s(self) -> float | None:
        """Bandwidth to the other devices of its machine over NVLink, one direction; None if they use the host link."""
        return _NVLINK.get(self.name)

    def reached(self) -> ReachedRates:
        """Rates to plan with as long as nothing was measured on the device."""
        link, bandwidth = self.host_link_bytes_per_s, self.bandwidth_bytes_per_s
        share = _OF_HOT if self.compute_capability in ((9, 0), (10, 0)) else _OF_PRODUCTS
        return ReachedRates(
            {name: (_OF_FLOAT32 if name == "float32" else share) * rate for name, rate in self.flops.items()},
            None if bandwidth is None else _OF_BANDWIDTH * bandwidth,
            None if link is None else _OF_LINK * link,
        )

    def flops_for(self, dtype: torch.dtype | str) -> float:
        """FLOP/s of matrix products in one dtype.

        Raises:
            ValueError: If the catalogue has no rate for this device.
        """
        name = str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else name
        if name not in self.flops:
            raise ValueError(
                f"`dtype={name}` has no known rate on {self.name}. Known: {', '.join(self.flops) or 'none'}."
            )
        return self.flops[name]


def find_device(name: str) -> DeviceSpec:
    """Look a device up by a name as people or drivers write it: `3060`, `NVIDIA A100-SXM4-80GB`, `H200`, or `12GiB`.

    Raises:
        ValueError: If the name is unknown or fits several devices; the message lists the candidates.
    """
    if _SIZE.fullmatch(name.strip()):
        size = parse_bytes(name, "device")
        return DeviceSpec(f"device of {format_bytes(size)}", size, source="size given by the user")
    words, sizes = _split(name)
    fitting = [spec for spec in DEVICES if _fits(spec, words, sizes)]
    exact = [spec for spec in fitting if any(words == _split(known)[0] for known in spec.names)] or fitting
    if words and len(exact) == 1:
        return exact[0]
    if words and exact:
        raise ValueError(f"`device={name!r}` fits several: {', '.join(spec.name for spec in exact)}. Name one of them.")
    close = difflib.get_close_matches(name.lower(), _BY_LOWER_NAME, n=5, cutoff=0.3)
    raise ValueError(
        f"`device={name!r}` is unknown. Closest: {', '.join(_BY_LOWER_NAME[key] for key in close) or 'none'}. "
        "A size works as well, for example 12GiB. AMD devices are not modelled."
    )


def _split(name: str) -> tuple[frozenset[str], frozenset[int]]:
    """Words and sizes in GB of a name; vendor and brand are left out."""
    separated = re.sub(r"(\d{4})(ti|super|tis)\b", r"\1 \2", name.lower())
    tokens = frozenset(re.split(r"[^a-z0-9]+", separated)) - _NOISE - {""}
    sizes = frozenset(token for token in tokens if re.fullmatch(r"\d+gb", token))
    return tokens - sizes, frozenset(int(size.removesuffix("gb")) for size in sizes)


def _fits(spec: DeviceSpec, words: frozenset[str], sizes: frozenset[int]) -> bool:
    """Whether one of its names has the words, and that name or the marketing figure (up to a tenth more) the sizes."""
    for known in spec.names:
        known_words, known_sizes = _split(known)
        if not words <= known_words or (known_words - words) & _VARIANTS:
            continue
        if all(s in known_sizes or 0.9 <= spec.memory_bytes / GIB / s <= 1.01 for s in sizes):
            return True
    return False


def _gpu(
    name: str,
    memory_gib: float,
    bandwidth_gb_per_s: float,
    tflops: Mapping[str, float],
    capability: tuple[int, int],
    link: float,
    source: str,
    *aliases: str,
) -> DeviceSpec:
    flops = {dtype: value * 1e12 for dtype, value in tflops.items()}
    memory_bytes = int(memory_gib * GIB)
    return DeviceSpec(name, memory_bytes, bandwidth_gb_per_s * 1e9, flops, capability, link, source, aliases)


def _ampere(fp32: float) -> dict[str, float]:
    """GeForce 30: tensor cores with fp32 accumulation at twice the fp32 rate, TF32 at the fp32 rate."""
    return {"float32": fp32, "tf32": fp32, "float16": 2 * fp32, "bfloat16": 2 * fp32, "int8": 8 * fp32}


def _ada(fp32: float) -> dict[str, float]:
    """GeForce 40 and 50: like GeForce 30, and FP8 at four times the fp32 rate."""
    return {**_ampere(fp32), "float8": 4 * fp32}


def _tensor(fp32: float, fp16: float, *, bf16: bool = True, fp8: bool = False) -> dict[str, float]:
    """Professional cards: full rate with fp32 accumulation, TF32 at half of it, INT8 and FP8 at twice."""
    rates = {"float32": fp32, "float16": fp16, "int8": 2 * fp16}
    if bf16:
        rates |= {"tf32": fp16 / 2, "bfloat16": fp16}
    return rates | ({"float8": 2 * fp16} if fp8 else {})


_ESTIMATED = "; memory estimated"
_GA102 = "NVIDIA Ampere GA102 whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_SPECS = "NVIDIA GeForce product page"
_H100 = _tensor(66.9, 989.4, fp8=True)
_L40S = {"float32": 91.6, "tf32": 183, "float16": 362, "bfloat16": 362, "float8": 733, "int8": 733}
_A100 = _tensor(19.5, 312)
_B200 = {"float32": 75, "tf32": 1125, "float16": 2250, "bfloat16": 2250, "float8": 4500, "int8": 4500}

DEVICES: tuple[DeviceSpec, ...] = (
    # Pascal, Volta, Turing
    _gpu("GTX 1080 Ti", 10.91, 484, {"float32": 11.3}, (6, 1), _PCIE3, _SPECS),
    _gpu("P100 16GB", 15.89, 732, {"float32": 9.3, "float16": 18.7}, (6, 0), _PCIE3, "NVIDIA P100 PCIe datasheet"),
    _gpu("T4", 14.56, 300, {"float32": 8.1, "float16": 65, "int8": 130}, (7, 5), _PCIE3, "NVIDIA T4 datasheet"),
    _gpu("V100 16GB", 15.77, 900, {"float32": 15.7, "float16": 125}, (7, 0), _PCIE3, "NVIDIA V100 datasheet, SXM2",
         "V100 SXM2 16GB"),
    _gpu("V100 32GB", 31.73, 900, {"float32": 15.7, "float16": 125}, (7, 0), _PCIE3, "NVIDIA V100 datasheet, SXM2",
         "V100 SXM2 32GB"),
    _gpu("RTX 2080 Ti", 10.75, 616, {"float32": 13.4, "float16": 53.8, "int8": 215}, (7, 5), _PCIE3,
         "NVIDIA Turing whitepaper, reference clock"),
    # Ampere, GeForce
    _gpu("RTX 3060 12GB", 11.75, 360, _ampere(12.7), (8, 6), _PCIE4, _SPECS),
    _gpu("RTX 3060 Ti", 7.78, 448, _ampere(16.2), (8, 6), _PCIE4, _SPECS + _ESTIMATED),
    _gpu("RTX 3070", 7.78, 448, _ampere(20.3), (8, 6), _PCIE4, _GA102),
    _gpu("RTX 3070 Ti", 7.78, 608, _ampere(21.7), (8, 6), _PCIE4, _SPECS + _ESTIMATED),
    _gpu("RTX 3080 10GB", 9.77, 760, _ampere(29.8), (8, 6), _PCIE4, _GA102),
    _gpu("RTX 3080 12GB", 11.76, 912, _ampere(30.6), (8, 6), _PCIE4, _SPECS + _ESTIMATED),
    _gpu("RTX 3080 Ti", 11.76, 912, _ampere(34.1), (8, 6), _PCIE4, _SPECS),
    _gpu("RTX 3090", 23.68, 936, _ampere(35.6), (8, 6), _PCIE4, _GA102),
    _gpu("RTX 3090 Ti", 23.67, 1008, _ampere(40.0), (8, 6), _PCIE4, _SPECS),
    # Ampere, professional
    _gpu("A10", 22.06, 600, _tensor(31.2, 125), (8, 6), _PCIE4, "NVIDIA A10 datasheet"),
    _gpu("A10G", 21.99, 600, _tensor(31.5, 70), (8, 6), _PCIE4, "NVIDIA A10G datasheet"),
    _gpu("A30", 23.50, 933, _tensor(10.3, 165), (8, 0), _PCIE4, "NVIDIA A30 datasheet"),
    _gpu("A40", 44.34, 696, _tensor(37.4, 149.7), (8, 6), _PCIE4, "NVIDIA A40 datasheet"),
    _gpu("RTX A4000", 15.73, 448, _tensor(19.2, 76.7), (8, 6), _PCIE4, "NVIDIA RTX A4000 datasheet"),
    _gpu("RTX A5000", 23.68, 768, _tensor(27.8, 111.1), (8, 6), _PCIE4, "NVIDIA RTX A5000 datasheet"),
    _gpu("RTX A6000", 47.53, 768, _tensor(38.7, 154.8), (8, 6), _PCIE4, "NVIDIA RTX A6000 datasheet, ECC off"),
    _gpu("A100 40GB", 39.38, 1555, _A100, (8, 0), _PCIE4, "NVIDIA A100 datasheet, SXM4", "A100 SXM4 40GB",
         "A100 PCIe 40GB"),
    _gpu("A100 80GB", 79.14, 2039, _A100, (8, 0), _PCIE4, "NVIDIA A100 datasheet, SXM4", "A100 SXM4 80GB"),
    _gpu("A100 80GB PCIe", 79.14, 1935, _A100, (8, 0), _PCIE4, "NVIDIA A100 datasheet, PCIe"),
    # Ada
    _gpu("L4", 21.95, 300, _tensor(30.3, 121, fp8=True), (8, 9), _PCIE4, "NVIDIA L4 datasheet"),
    _gpu("L40", 44.39, 864, {**_tensor(90.5, 181, fp8=True), "tf32": 90.5}, (8, 9), _PCIE4, "NVIDIA L40 datasheet"),
    _gpu("L40S", 44.32, 864, _L40S, (8, 9), _PCIE4, "NVIDIA L40S datasheet"),
    _gpu("RTX 4060 Ti 8GB", 7.60, 288, _ada(22.1), (8, 9), _PCIE4 / 2, f"{_SPECS}, PCIe x8{_ESTIMATED}"),
    _gpu("RTX 4060 Ti 16GB", 15.60, 288, _ada(22.1), (8, 9), _PCIE4 / 2, f"{_SPECS}, PCIe x8{_ESTIMATED}"),
    _gpu("RTX 4070", 11.60, 504, _ada(29.1), (8, 9), _PCIE4, _SPECS + _ESTIMATED),
    _gpu("RTX 4070 Super", 11.60, 504, _ada(35.5), (8, 9), _PCIE4, _SPECS + _ESTIMATED),
    _gpu("RTX 4070 Ti", 11.60, 504, _ada(40.1), (8, 9), _PCIE4, _SPECS),
    _gpu("RTX 4070 Ti Super", 15.57, 672, _ada(44.1), (8, 9), _PCIE4, _SPECS + _ESTIMATED, "4070 TiS"),
    _gpu("RTX 4080", 15.60, 717, _ada(48.7), (8, 9), _PCIE4, _ADA),
    _gpu("RTX 4080 Super", 15.57, 736, _ada(52.2), (8, 9), _PCIE4, _SPECS + _ESTIMATED),
    _gpu("RTX 4090", 23.52, 1008, _ada(82.6), (8, 9), _PCIE4, _ADA),
    _gpu("RTX 6000 Ada", 47.38, 960, _tensor(91.1, 364.2, fp8=True), (8, 9), _PCIE4, "NVIDIA RTX 6000 Ada datasheet"),
    # Hopper
    _gpu("H100 PCIe 80GB", 79.10, 2039, _tensor(51.2, 756, fp8=True), (9, 0), _PCIE5, "NVIDIA H100 datasheet, PCIe"),
    _gpu("H100 SXM 80GB", 79.10, 3350, _H100, (9, 0), _PCIE5, "NVIDIA H100 datasheet, SXM5", "H100", "H100 80GB HBM3"),
    _gpu("H100 NVL 94GB", 93.00, 3938, _tensor(60, 835.5, fp8=True), (9, 0), _PCIE5,
         "NVIDIA H100 NVL datasheet; memory estimated"),
    _gpu("H200 141GB", 139.71, 4800, _H100, (9, 0), _PCIE5, "NVIDIA H200 datasheet, SXM"),
    _gpu("GH200 96GB", 94.50, 4000, _H100, (9, 0), 450e9, "NVIDIA GH200 datasheet, NVLink-C2C", "GH200 480GB"),
    _gpu("GH200 144GB", 141.5, 4900, _H100, (9, 0), 450e9, "NVIDIA GH200 datasheet; memory estimated"),
    # Blackwell
    _gpu("B200 180GB", 178.35, 7700, _B200, (10, 0), _PCIE5, "NVIDIA HGX B200 datasheet"),
    _gpu("RTX 5060 Ti 16GB", 15.46, 448, _ada(23.7), (12, 0), _PCIE5 / 2, f"{_SPECS}, PCIe x8{_ESTIMATED}"),
    _gpu("RTX 5070", 11.50, 672, _ada(30.9), (12, 0), _PCIE5, _BLACKWELL + _ESTIMATED),
    _gpu("RTX 5070 Ti", 15.45, 896, _ada(43.9), (12, 0), _PCIE5, _BLACKWELL),
    _gpu("RTX 5080", 15.45, 960, _ada(56.3), (12, 0), _PCIE5, _BLACKWELL),
    _gpu("RTX 5090", 31.34, 1792, _ada(104.8), (12, 0), _PCIE5, _BLACKWELL),
    _gpu("RTX PRO 6000 Blackwell", 94.50, 1792, _tensor(126, 503.8, fp8=True), (12, 0), _PCIE5,
         "NVIDIA RTX PRO Blackwell whitepaper; memory estimated", "RTX PRO 6000 Blackwell Workstation Edition"),
)  # fmt: skip

_NVLINK: dict[str, float] = {
    "V100 16GB": 150e9,
    "V100 32GB": 150e9,
    "A100 40GB": 300e9,
    "A100 80GB": 300e9,
    "H100 SXM 80GB": 450e9,
    "H200 141GB": 450e9,
    "B200 180GB": 900e9,
}
"""Half of the data sheets' NVLink bandwidth (300, 600, 900, 1800 GB/s), which counts both directions. Machines with SXM
modules have it; bridges between pairs of other cards are not assumed."""

_BY_LOWER_NAME = {spec.name.lower(): spec.name for spec in DEVICES}
