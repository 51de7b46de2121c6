"""Tile configurations from the command line, for tuning: entries of kernels/triton_tiles.py replaced while a candidate runs."""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

KINDS = {"fwd": "forward", "bwd": "backward", "forward": "forward", "backward": "backward", "dkv": "dkv", "dq": "dq"}
WIDTHS = {"bf16": "half", "fp16": "half", "half": "half", "fp32": "float", "float": "float"}
FORM = "kind:D:dtype=block_m,block_n,warps,stages[,tma|notma][,dq=tma|atomic|separate][,section=MiB]; ..."


@dataclasses.dataclass(frozen=True)
class TilePatch:
    """Some entries of the tile table: ((kind, D, width), ((field, value), ...)) each; fields not named keep their value."""
    text: str
    entries: tuple[tuple[tuple[str, int, str], tuple[tuple[str, object], ...]], ...]

    def __str__(self) -> str:
        return f"triton[{self.text}]"

    @contextlib.contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        """The table with these entries in it, put back afterwards. RuntimeError for an entry that the table does not have."""
        from ringflash.kernels import triton_tiles

        arch = triton_tiles.arch_of(device)
        before = dict(triton_tiles.TILES)
        try:
            for (kind, head_dim, width), fields in self.entries:
                keys = [key for key in ((arch, head_dim, kind, width), ("any", head_dim, kind, width)) if key in before]
                if not keys:
                    raise RuntimeError(f"the tile table has no entry for {kind}, D={head_dim}, {width} on {arch}")
                triton_tiles.TILES[keys[0]] = dataclasses.replace(before[keys[0]], **dict(fields))
            yield
        finally:
            triton_tiles.TILES.clear()
            triton_tiles.TILES.update(before)


def parse_tiles(text: str) -> TilePatch:
    """E.g. 'fwd:128:bf16=128,128,8,3;bwd:64:bf16=64,128,8,2,tma,dq=tma'. Raises ValueError on anything else."""
    entries = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, equals, values = part.partition("=")
        try:
            kind, head_dim, dtype = name.split(":")
            key = (KINDS[kind], int(head_dim), WIDTHS[dtype])
            numbers, extras = values.split(",")[:4], values.split(",")[4:]
            fields = dict(zip(("block_m", "block_n", "warps", "stages"), map(int, numbers), strict=True))
            for extra in extras:
                fields.update(_extra(extra))
        except (ValueError, KeyError) as error:
            raise ValueError(f"tiles {part!r}: want {FORM} ({error})") from None
        entries.append((key, tuple(fields.items())))
    if not entries:
        raise ValueError(f"tiles {text!r}: empty; want {FORM}")
    return TilePatch(text, tuple(entries))


def _extra(text: str) -> dict[str, object]:
    name, _, value = text.partition("=")
    if text in ("tma", "notma"):
        return {"tma": text == "tma"}
    if name == "dq" and value in ("tma", "atomic", "separate"):
        return {"dq": value}
    if name == "section":
        return {"section_bytes": int(value) << 20}
    raise ValueError(f"{text!r} unknown")
