"""Rotary position embedding (Su et al. 2021, "RoFormer"), exact at positions in the millions.

Angles come from int64 positions in fp64: near position 1M an fp32 angle is off by 0.03 rad, and bf16 positions collide. Only
cos and sin are fp32. Nothing is a buffer, so casting a model cannot change them.
"""
import torch
from torch import Tensor


def rope_cos_sin(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """positions int64 [S] -> (cos, sin), each fp32 [S, head_dim // 2], of positions * base ** (-2 i / head_dim).

    Raises ValueError unless positions are a 1-D int64 tensor and head_dim is even.
    """
    if positions.dtype != torch.int64 or positions.ndim != 1:
        raise ValueError(f"positions must be a 1-D int64 tensor, got {positions.dtype} {tuple(positions.shape)}")
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rotary embedding turns pairs, so it must be even; nearest is {head_dim + 1}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[:, None] * base ** -exponents
    return angles.cos().float(), angles.sin().float()


def rope_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, H, D] turned by (cos, sin) fp32 [S, D // 2], pairing dims i and i + D // 2; fp32 inside, returned in x.dtype."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
