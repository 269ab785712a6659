"""Catalogue of common GPUs: their memory, bandwidths and arithmetic rates.

`memory_bytes` is torch's `total_memory` on Linux, which is less than the marketing figure: the driver keeps a part, and
so does ECC. It is taken from torch's own out-of-memory messages ("GPU 0 has a total capacity of 79.10 GiB"), the lower
figure where drivers differ, so it may be 1 to 2 % low. Entries whose source says "memory estimated" take the figure of
a card of the same size and generation. `probe_device` reads the true figure of the card in this machine.

Arithmetic rates are dense (no sparsity) and accumulate in fp32. GeForce cards reach twice their fp32 rate in 16 bits,
four times in FP8, and TF32 at the fp32 rate. Professional cards run TF32 at half their rate in 16 bits, INT8 and FP8 at
twice. Bandwidths are theoretical maxima; the host link counts one direction of PCIe x16 unless said otherwise, that to
peers one direction of NVLink in machines with SXM modules (data sheets count both).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memfit.memory import GIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

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
    peer_bytes_per_s: float | None = None
    """Bandwidth to the other devices of its machine over NVLink, one direction; None if they use the host link."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name and aliases."""
        return (self.name, *self.aliases)

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


def _read(name: str, entry: Mapping[str, Any]) -> DeviceSpec:
    return DeviceSpec(
        name,
        int(entry["memory_gib"] * GIB),
        entry["gb_per_s"] * 1e9,
        {dtype: value * 1e12 for dtype, value in entry["tflops"].items()},
        (entry["capability"][0], entry["capability"][1]),
        entry["link_gb_per_s"] * 1e9,
        entry["source"],
        tuple(entry.get("aliases", ())),
        entry["peer_gb_per_s"] * 1e9 if "peer_gb_per_s" in entry else None,
    )


_TABLE = json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))
DEVICES: tuple[DeviceSpec, ...] = tuple(_read(name, entry) for name, entry in _TABLE.items())
"""From the oldest generation to the newest; the table is `devices.json`."""

_BY_LOWER_NAME = {spec.name.lower(): spec.name for spec in DEVICES}
