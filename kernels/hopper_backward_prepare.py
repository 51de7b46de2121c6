"""What the hopper backward reads per query row, prepared once per visit in the form that its kernel uses."""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import launch
from .triton_support import LOG2_E, strides

ROWS = 1024  # of a program
PAD = 128  # rows are padded to a multiple of this: whole query tiles for every BM, and 16-byte strides for the tensor maps
# Copies, each a row further on than the last, where query tiles begin at any row: the copy engine reads from whole 16 bytes on (from
# others: illegal instruction), and row r is number r - r % COPIES of copy r % COPIES.
COPIES = 4


_LENGTHS = ["num_q", "padded", "num_heads", "lse_sb", "lse_sh", "lse_ss", "delta_sb", "delta_sh", "delta_ss"]


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=["lse", "delta"])
def prepare_kernel(
    lse,  # IN    [B, Hq, Sq] fp32, natural log, merged
    delta,  # IN    [B, Hq, Sq] fp32
    row_lse,  # OUT   [copies, B * Hq, padded] fp32 contiguous
    row_delta,  # OUT   [copies, B * Hq, padded] fp32 contiguous
    num_q, padded, num_heads,
    shift,  # added to lse in base 2
    delta_factor,
    lse_sb, lse_sh, lse_ss, delta_sb, delta_sh, delta_ss,
    BLOCK: tl.constexpr,
):
    head_b = tl.program_id(1)
    batch = (head_b // num_heads).to(tl.int64)
    head = (head_b % num_heads).to(tl.int64)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.program_id(2)
    rows64 = (number + copy).to(tl.int64)  # B * Hq * Sq elements pass 2^31
    real = rows64 < num_q
    value = tl.load(lse + batch * lse_sb + head * lse_sh + rows64 * lse_ss, mask=real, other=-float("inf"))
    row_sum = tl.load(delta + batch * delta_sb + head * delta_sh + rows64 * delta_ss, mask=real, other=0.0)
    dead = value == -float("inf")
    # By selection: whatever delta holds in a row that saw nothing, and for rows past the end, p and ds are 0.
    value = tl.where(dead, float("inf"), value * LOG2_E + shift)
    row_sum = tl.where(dead, 0.0, row_sum)
    target = (copy.to(tl.int64) * tl.num_programs(1) + head_b) * padded + number
    tl.store(row_lse + target, value, mask=number < padded)
    tl.store(row_delta + target, row_sum * delta_factor, mask=number < padded)


def prepare(
    lse: Tensor,  # IN    [B, Hq, Sq] fp32, any strides
    delta: Tensor,  # IN    [B, Hq, Sq] fp32, any strides
    softmax_scale: float,  # > 0
    folded: bool, init_dp: bool,
    any_rows: bool,  # query tiles begin at any row
) -> tuple[Tensor, Tensor]:
    """(row_lse, row_delta) [copies * B * Hq, padded] fp32: COPIES of them where any_rows, else one.

    row_lse: lse in base 2, less log2(softmax_scale) when folded: p then comes out multiplied by the scale. Rows that saw nothing
    and rows past the end: +inf, so that p is 0. row_delta: delta, negated with init_dp; 0 in such rows.
    """
    batch, num_heads, num_q = lse.shape
    padded = -(-num_q // PAD) * PAD
    copies = COPIES if any_rows else 1
    row_lse = torch.empty((copies * batch * num_heads, padded), dtype=torch.float32, device=lse.device)
    row_delta = torch.empty_like(row_lse)
    (lse_sb, lse_sh, lse_ss), (delta_sb, delta_sh, delta_ss) = strides(lse), strides(delta)
    launch(prepare_kernel, (triton.cdiv(padded, ROWS), batch * num_heads, copies), dict(
        lse=lse, delta=delta, row_lse=row_lse, row_delta=row_delta, num_q=num_q, padded=padded, num_heads=num_heads,
        shift=-math.log2(softmax_scale) if folded else 0.0, delta_factor=-1.0 if init_dp else 1.0,
        lse_sb=lse_sb, lse_sh=lse_sh, lse_ss=lse_ss, delta_sb=delta_sb, delta_sh=delta_sh, delta_ss=delta_ss, BLOCK=ROWS), {})
    return row_lse, row_delta
