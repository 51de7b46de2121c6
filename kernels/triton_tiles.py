"""Static tile table of the triton backend. Chosen on the host from what is known before a launch, never by timing: ranks that
tuned for themselves would compile different kernels at different times, which looks like a hang in the first collective.

TILES is a plain dict: a benchmark may replace entries (`TILES[key] = Tile(...)`) and call again.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Tile:
    """One kernel configuration. tma: load tiles through tensor descriptors where alignment allows (Hopper and later).

    dq (Note [Two backward kernels]): how the key-stationary backward adds to dq: "tma" (bulk reduce from shared memory),
    "atomic" (from registers), or "separate" (a second, query-stationary kernel: two dot products more, no atomics).
    """

    block_m: int  # query rows
    block_n: int  # key rows
    warps: int
    stages: int
    tma: bool = False
    dq: str = "separate"
    # Heads are walked in sections whose k and v together take about this much, so that they stay in L2.
    section_bytes: int = 64 << 20


KINDS = ("forward", "backward", "dkv", "dq")  # backward: dk, dv and dq in one; dkv, dq: the two deterministic kernels

# (arch, padded head_dim, kind, "half" | "float"). 16 and 32 use the entries of 64.
TILES: dict[tuple[str, int, str, str], Tile] = {
    # Hopper: every dot of 16-bit inputs is a wgmma, so no side of a tile is below 64. Registers and spills per entry are
    # recorded in tests/kernels/test_triton_compile.py.
    ("hopper", 64, "forward", "half"): Tile(64, 128, 4, 3, tma=True),
    ("hopper", 128, "forward", "half"): Tile(128, 128, 8, 3, tma=True),
    ("hopper", 256, "forward", "half"): Tile(128, 64, 8, 2, tma=True),
    ("hopper", 64, "backward", "half"): Tile(64, 128, 8, 3, tma=True, dq="tma"),
    ("hopper", 128, "backward", "half"): Tile(64, 128, 8, 3, tma=True, dq="separate"),
    ("hopper", 256, "backward", "half"): Tile(64, 64, 8, 2, tma=True, dq="separate"),
    ("hopper", 64, "dkv", "half"): Tile(64, 128, 8, 3, tma=True),
    ("hopper", 128, "dkv", "half"): Tile(64, 128, 8, 3, tma=True),
    ("hopper", 256, "dkv", "half"): Tile(64, 64, 8, 2, tma=True),
    ("hopper", 64, "dq", "half"): Tile(128, 64, 8, 4, tma=True),
    ("hopper", 128, "dq", "half"): Tile(128, 64, 8, 4, tma=True),
    ("hopper", 256, "dq", "half"): Tile(128, 32, 8, 2, tma=True),
    # 160 KiB of shared memory and more (A100, data-center Blackwell).
    ("ampere", 64, "forward", "half"): Tile(128, 64, 4, 3),
    ("ampere", 128, "forward", "half"): Tile(128, 64, 8, 3),
    ("ampere", 256, "forward", "half"): Tile(64, 64, 8, 2),
    ("ampere", 64, "backward", "half"): Tile(64, 128, 8, 2, dq="atomic"),
    ("ampere", 128, "backward", "half"): Tile(64, 128, 8, 2, dq="atomic"),
    ("ampere", 256, "backward", "half"): Tile(32, 64, 8, 1, dq="separate"),
    ("ampere", 64, "dkv", "half"): Tile(64, 128, 8, 2),
    ("ampere", 128, "dkv", "half"): Tile(64, 128, 8, 2),
    ("ampere", 256, "dkv", "half"): Tile(32, 64, 8, 1),
    ("ampere", 64, "dq", "half"): Tile(128, 64, 8, 2),
    ("ampere", 128, "dq", "half"): Tile(128, 64, 8, 2),
    ("ampere", 256, "dq", "half"): Tile(64, 32, 8, 1),
    # Anything else: 64 KiB of shared memory suffice.
    ("small", 64, "forward", "half"): Tile(64, 64, 4, 2),
    ("small", 128, "forward", "half"): Tile(64, 32, 4, 2),
    ("small", 256, "forward", "half"): Tile(32, 32, 4, 1),
    ("small", 64, "backward", "half"): Tile(32, 64, 4, 1, dq="separate"),
    ("small", 128, "backward", "half"): Tile(32, 64, 8, 1, dq="separate"),
    ("small", 256, "backward", "half"): Tile(16, 32, 4, 1, dq="separate"),
    ("small", 64, "dkv", "half"): Tile(32, 64, 4, 1),
    ("small", 128, "dkv", "half"): Tile(32, 64, 8, 1),
    ("small", 256, "dkv", "half"): Tile(16, 32, 4, 1),
    ("small", 64, "dq", "half"): Tile(64, 32, 4, 1),
    ("small", 128, "dq", "half"): Tile(64, 32, 8, 1),
    ("small", 256, "dq", "half"): Tile(32, 16, 4, 1),
    # float32 with IEEE products runs on the general cores: small tiles, for correctness work only.
    # Their dots are unrolled: larger tiles would compile for minutes.
    ("any", 64, "forward", "float"): Tile(32, 32, 8, 1),
    ("any", 128, "forward", "float"): Tile(32, 32, 8, 1),
    ("any", 256, "forward", "float"): Tile(16, 16, 4, 1),
    ("any", 64, "dkv", "float"): Tile(32, 32, 8, 1),
    ("any", 128, "dkv", "float"): Tile(16, 32, 8, 1),
    ("any", 256, "dkv", "float"): Tile(16, 16, 8, 1),
    ("any", 64, "dq", "float"): Tile(32, 32, 8, 1),
    ("any", 128, "dq", "float"): Tile(32, 16, 8, 1),
    ("any", 256, "dq", "float"): Tile(16, 16, 8, 1),
}
for _d in (64, 128, 256):
    TILES["any", _d, "backward", "float"] = replace(TILES["any", _d, "dkv", "float"], dq="separate")

# The interpreter: cost goes by programs and trips, correctness must meet full, masked and tail tiles within 48 rows.
INTERPRETER_TILES: dict[str, Tile] = {
    "forward": Tile(16, 16, 4, 1),
    "backward": Tile(16, 16, 4, 1, dq="atomic"),
    "dkv": Tile(16, 16, 4, 1),
    "dq": Tile(16, 16, 4, 1),
}


def padded_head_dim(head_dim: int) -> int:
    """Next power of two, at least 16 (the smallest side of a dot product)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def arch_of(device: torch.device) -> str:
    """Row of the table for a CUDA device: "hopper", "ampere" or "small"."""
    if torch.version.hip is not None:
        return "small"
    major, minor = torch.cuda.get_device_capability(device)
    if major == 9:
        return "hopper"
    # 8.6, 8.9 and 12.x have about 100 KiB of shared memory per block.
    return "ampere" if (major, minor) in ((8, 0), (8, 7)) or major in (10, 11) else "small"


def tile_for(arch: str, head_dim: int, kind: str, dtype: torch.dtype, head_dim_v: int | None = None) -> Tile:
    """The table's entry; arch "interpreter" has its own. head_dim_v (None: as head_dim): where it differs, the entry of the wider
    of the two, which needs more of everything."""
    if arch == "interpreter":
        return INTERPRETER_TILES[kind]
    width = max(64, padded_head_dim(max(head_dim, head_dim_v or 0)))
    if dtype == torch.float32:
        return TILES.get((arch, width, kind, "float")) or TILES["any", width, kind, "float"]
    return TILES[arch, width, kind, "half"]
