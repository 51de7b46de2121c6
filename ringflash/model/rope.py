"""Rotary position embedding (Su et al. 2021, "RoFormer"), exact at positions in the millions, and its stretched forms.

Angles come from int64 positions in fp64: near position 1M an fp32 angle is off by 0.03 rad, and bf16 positions collide. Only
cos and sin are fp32. Nothing is a buffer, so casting a model cannot change them.
"""
import math

import torch
from torch import Tensor

from ..rotary import RopeScaling


def rope_cos_sin(positions: Tensor, head_dim: int, base: float, scaling: RopeScaling | None = None) -> tuple[Tensor, Tensor]:
    """positions int64 [S] -> (cos, sin), each fp32 [S, head_dim // 2], of positions * frequency, times the attention factor.

    scaling (None: none) as ringflash.rotary.rope_problems finds it right. Raises ValueError unless positions are a 1-D int64
    tensor and head_dim is even.
    """
    if positions.dtype != torch.int64 or positions.ndim != 1:
        raise ValueError(f"positions must be a 1-D int64 tensor, got {positions.dtype} {tuple(positions.shape)}")
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rotary embedding turns pairs, so it must be even; nearest is {head_dim + 1}")
    frequencies = rope_frequencies(head_dim, base, scaling, device=positions.device)
    angles = positions.to(torch.float64)[:, None] * frequencies
    factor = attention_factor(scaling)
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def rope_frequencies(head_dim: int, base: float, scaling: RopeScaling | None = None, *, device=None) -> Tensor:
    """Radians per position of each pair of dims, fp64 [head_dim // 2]: base ** (-2 i / head_dim), stretched as scaling says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    plain = base ** -exponents
    if scaling is None or scaling.kind == "none":
        return plain
    stretched = plain / scaling.factor
    if scaling.kind == "linear":
        return stretched
    if scaling.kind == "llama3":
        # Turns over the original length, from low_freq_factor (all stretched) to high_freq_factor (none).
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        first, last = _yarn_ramp(head_dim, base, scaling)
        kept = 1 - (torch.arange(head_dim // 2, dtype=torch.float64, device=device) - first) / (last - first)
    return torch.lerp(stretched, plain, kept.clamp(0, 1))


def _yarn_ramp(head_dim: int, base: float, scaling: RopeScaling) -> tuple[float, float]:
    """The pairs between which YaRN (Peng et al. 2023) passes from kept frequencies to stretched ones."""

    def pair(turns: float) -> float:
        """The (fractional) pair that turns so often over the original length."""
        return head_dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # head_dim - 1, not the number of pairs: as published, and as models were trained.
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else last + 0.001


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: YaRN's temperature of the scores, 1 for the others."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _temperature(scaling.factor, scaling.mscale) / _temperature(scaling.factor, scaling.mscale_all_dim)
    return _temperature(scaling.factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, H, D] turned by (cos, sin) fp32 [S, D // 2], pairing dims i and i + D // 2; fp32 inside, returned in x.dtype."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
