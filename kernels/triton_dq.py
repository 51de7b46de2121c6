"""dq of one visit, query-stationary: no atomics, so bitwise the same from run to run (and for head dims whose dk, dv, dq do
not fit in one kernel's registers). Also delta, the row sums both backward kernels need."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import launch
from .triton_support import (
    INTERPRETED, LOG2_E, describe, dot, dot_add, load_rows, named_strides, rounded, scale_in_tanh, section_heads, section_of,
    strides, tanh_and_slope, tile_pointers,
)
from .triton_tiles import Tile, padded_head_dim
from .visits import describable


@triton.jit
def _step(
    q_tile, dout_tile, row_lse, row_delta, k_tile, v_tile, dq, col0, lo, hi, scale_log2, tanh_scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):
    scores = dot(q_tile, k_tile.T, UPCAST)
    if tanh_scale is not None:
        scores, slope = tanh_and_slope(scores * tanh_scale)
    dp = dot(dout_tile, v_tile.T, UPCAST)
    exponents = scores * scale_log2 - row_lse[:, None]
    if MASKED:
        cols = col0 + tl.arange(0, BLOCK_N)
        seen = (cols[None, :] >= lo[:, None]) & (cols[None, :] < hi[:, None])
        exponents = tl.where(seen, exponents, -float("inf"))
    weight = tl.exp2(exponents)
    if tanh_scale is not None:
        weight = weight * slope
    ds = weight * (dp - row_delta[:, None])
    if MASKED:
        # By selection: 0 * (inf or NaN) would stay NaN. Testing the weight spares the registers that would hold `seen`.
        ds = tl.where(weight == 0.0, 0.0, ds)
    return dot_add(rounded(ds, k_tile.dtype, UPCAST), k_tile, dq, UPCAST)


_COUNTS = ["num_q", "num_k", "num_heads", "group", "num_kv_total", "section"]


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["k_lo", "k_hi", "lse_log2", "delta"])
def dq_kernel(
    q,  # IN    [B, Sq, Hq, D] pointer, or descriptor with blocks of BLOCK_M rows
    k,  # IN    [B, Sk, Hkv, D] likewise, BLOCK_N rows
    v,  # IN    [B, Sk, Hkv, Dv] likewise, BLOCK_N rows
    dout,  # IN    [B, Sq, Hq, Dv] likewise, BLOCK_M rows
    k_lo,  # IN    [Sq] int32, non-decreasing
    k_hi,  # IN    [Sq] int32, non-decreasing
    lse_log2,  # IN    [B, Hq, Sq] fp32 contiguous, base 2, +inf for dead rows
    delta,  # IN    [B, Hq, Sq] fp32 contiguous
    dq,  # OUT / INOUT [B, Sq, Hq, D] fp32
    softmax_scale,
    softcap,  # fp32; None: no cap
    tanh_scale,  # softmax_scale / softcap; None: no cap
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, dout_sb, dout_ss, dout_sh, dq_sb, dq_ss, dq_sh,
    num_q, num_k,
    num_heads,  # Hq
    group,  # Hq / Hkv
    num_kv_total,  # B * Hkv
    section,  # kv heads walked together
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, HEAD_DIM_V: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ACCUMULATE: tl.constexpr,  # add to dq
    TMA: tl.constexpr, UPCAST: tl.constexpr,
):
    num_tiles = tl.cdiv(num_q, BLOCK_M)
    rank, head_b = section_of(tl.program_id(0), num_tiles, num_kv_total * group, section * group)
    row0 = (num_tiles - 1 - rank) * BLOCK_M  # the longest first, as in the forward
    batch = head_b // num_heads
    head = head_b - batch * num_heads
    kv_head = head // group
    scale_log2 = (softmax_scale if softcap is None else softcap) * LOG2_E

    last = tl.minimum(row0 + BLOCK_M, num_q) - 1
    lo_first = tl.load(k_lo + row0)
    lo_last = tl.load(k_lo + last)
    hi_first = tl.load(k_hi + row0)
    hi_last = tl.load(k_hi + last)
    if ACCUMULATE:
        if hi_last <= lo_first:
            return
    tile_lo = lo_first // BLOCK_N
    tile_hi = tl.where(hi_last > lo_first, tl.cdiv(hi_last, BLOCK_N), tile_lo)
    full_lo = tl.cdiv(lo_last, BLOCK_N)
    full_hi = hi_first // BLOCK_N
    no_full = full_hi <= full_lo
    full_lo = tl.where(no_full, tile_lo, full_lo)
    full_hi = tl.where(no_full, tile_lo, full_hi)

    rows = row0 + tl.arange(0, BLOCK_M)
    valid = rows < num_q
    q_tile = load_rows(q, batch, head, row0, num_q, q_sb, q_ss, q_sh, BLOCK_M, HEAD_DIM, D_PAD, TMA, True)
    dout_tile = load_rows(dout, batch, head, row0, num_q, dout_sb, dout_ss, dout_sh, BLOCK_M, HEAD_DIM_V, DV_PAD, TMA, True)
    # 64 bit: B * Hq * Sq elements
    row_base = head_b.to(tl.int64) * num_q
    row_lse = tl.load(lse_log2 + row_base + rows, mask=valid, other=float("inf"))
    row_delta = tl.load(delta + row_base + rows, mask=valid, other=0.0)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for tile in range(full_lo, full_hi):
        col0 = tile * BLOCK_N
        k_tile = load_rows(k, batch, kv_head, col0, num_k, k_sb, k_ss, k_sh, BLOCK_N, HEAD_DIM, D_PAD, TMA, False)
        v_tile = load_rows(v, batch, kv_head, col0, num_k, v_sb, v_ss, v_sh, BLOCK_N, HEAD_DIM_V, DV_PAD, TMA, False)
        acc = _step(q_tile, dout_tile, row_lse, row_delta, k_tile, v_tile, acc, col0, 0, 0, scale_log2, tanh_scale,
                    BLOCK_N, False, UPCAST)

    lo = tl.load(k_lo + rows, mask=valid, other=0)
    hi = tl.load(k_hi + rows, mask=valid, other=0)
    left = full_lo - tile_lo
    for step in range(0, left + tile_hi - full_hi):
        col0 = tl.where(step < left, tile_lo + step, full_hi + step - left) * BLOCK_N
        k_tile = load_rows(k, batch, kv_head, col0, num_k, k_sb, k_ss, k_sh, BLOCK_N, HEAD_DIM, D_PAD, TMA, True)
        v_tile = load_rows(v, batch, kv_head, col0, num_k, v_sb, v_ss, v_sh, BLOCK_N, HEAD_DIM_V, DV_PAD, TMA, True)
        acc = _step(q_tile, dout_tile, row_lse, row_delta, k_tile, v_tile, acc, col0, lo, hi, scale_log2, tanh_scale,
                    BLOCK_N, True, UPCAST)

    acc = acc * softmax_scale
    pointers, mask = tile_pointers(dq, batch, head, row0, num_q, dq_sb, dq_ss, dq_sh, BLOCK_M, HEAD_DIM, D_PAD)
    if ACCUMULATE:
        acc += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, acc, mask=mask)


def dq_launch(
    dout: Tensor,  # IN    [B, Sq, Hq, Dv], last stride 1
    q: Tensor,  # IN    [B, Sq, Hq, D], last stride 1
    k: Tensor,  # IN    [B, Sk, Hkv, D], last stride 1
    v: Tensor,  # IN    [B, Sk, Hkv, Dv], last stride 1
    lse_log2: Tensor,  # IN    [B, Hq, Sq] fp32 contiguous
    delta: Tensor,  # IN    [B, Hq, Sq] fp32 contiguous
    k_lo: Tensor,  # IN    [Sq] int32
    k_hi: Tensor,  # IN    [Sq] int32
    dq: Tensor,  # OUT / INOUT [B, Sq, Hq, D] fp32
    softmax_scale: float,
    softcap: float,
    accumulate: bool,
    tile: Tile,
) -> tuple[tuple[int], dict, dict]:
    """(grid, kernel arguments, options) of `dq_kernel`."""
    batch, num_q, num_heads, head_dim = q.shape
    num_k, num_kv_heads, head_dim_v = v.shape[1:]
    width, width_v = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    tma = tile.tma and all(describable(x) for x in (q, k, v, dout))
    arguments = dict(
        q=describe(q, tile.block_m, width) if tma else q,
        k=describe(k, tile.block_n, width) if tma else k,
        v=describe(v, tile.block_n, width_v) if tma else v,
        dout=describe(dout, tile.block_m, width_v) if tma else dout,
        k_lo=k_lo, k_hi=k_hi, lse_log2=lse_log2, delta=delta, dq=dq, softmax_scale=float(softmax_scale),
        softcap=float(softcap) if softcap else None, tanh_scale=scale_in_tanh(softmax_scale, softcap),
        **named_strides(q=q, k=k, v=v, dout=dout, dq=dq),
        num_q=num_q, num_k=num_k, num_heads=num_heads, group=num_heads // num_kv_heads, num_kv_total=batch * num_kv_heads,
        section=section_heads(k, v, batch * num_kv_heads, tile.section_bytes),
        HEAD_DIM=head_dim, D_PAD=width, HEAD_DIM_V=head_dim_v, DV_PAD=width_v, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        ACCUMULATE=accumulate, TMA=tma, UPCAST=INTERPRETED,
    )
    grid = (triton.cdiv(num_q, tile.block_m) * batch * num_heads,)
    return grid, arguments, {"num_warps": tile.warps, "num_stages": tile.stages}


@triton.jit(do_not_specialize=["num_q", "num_heads"])
def delta_kernel(
    dout,  # IN    [B, Sq, Hq, Dv], any strides
    out,  # IN    [B, Sq, Hq, Dv], any strides
    dlse,  # IN    [B, Hq, Sq], any strides, or None
    delta,  # OUT   [B, Hq, Sq] fp32 contiguous
    dout_sb, dout_ss, dout_sh, dout_sd, out_sb, out_ss, out_sh, out_sd, dlse_sb, dlse_sh, dlse_ss,
    num_q,
    num_heads,
    HEAD_DIM_V: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):
    # heads are neighbours in memory, so they are neighbours in the grid
    tile = tl.program_id(0) // num_heads
    head = tl.program_id(0) - tile * num_heads
    batch = tl.program_id(1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, DV_PAD)
    valid = rows < num_q
    mask = valid[:, None] & (cols[None, :] < HEAD_DIM_V)
    # 64 bit: row * stride_s of dout is that of whatever wider tensor it is a view of; out, dlse and delta likewise
    rows64 = rows.to(tl.int64)
    cols64 = cols.to(tl.int64)
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    dout_tile = tl.load(dout + batch64 * dout_sb + head64 * dout_sh + rows64[:, None] * dout_ss + cols64[None, :] * dout_sd,
                        mask=mask, other=0.0)
    out_tile = tl.load(out + batch64 * out_sb + head64 * out_sh + rows64[:, None] * out_ss + cols64[None, :] * out_sd,
                       mask=mask, other=0.0)
    result = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    if dlse is not None:
        result -= tl.load(dlse + batch64 * dlse_sb + head64 * dlse_sh + rows64 * dlse_ss, mask=valid, other=0.0).to(tl.float32)
    tl.store(delta + (batch64 * num_heads + head64) * num_q + rows, result, mask=valid)


def delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse: fp32 [B, Hq, Sq], contiguous. dout, out: [B, Sq, Hq, Dv], any strides."""
    batch, num_q, num_heads, head_dim_v = out.shape
    result = torch.empty((batch, num_heads, num_q), dtype=torch.float32, device=out.device)
    if result.numel() == 0:
        return result
    rows = 16 if INTERPRETED else 32
    dout_sb, dout_ss, dout_sh, dout_sd = strides(dout, (0, 1, 2, 3))
    out_sb, out_ss, out_sh, out_sd = strides(out, (0, 1, 2, 3))
    dlse_sb, dlse_sh, dlse_ss = strides(dlse)
    launch(delta_kernel, (triton.cdiv(num_q, rows) * num_heads, batch), dict(
        dout=dout, out=out, dlse=dlse, delta=result, dout_sb=dout_sb, dout_ss=dout_ss, dout_sh=dout_sh, dout_sd=dout_sd,
        out_sb=out_sb, out_ss=out_ss, out_sh=out_sh, out_sd=out_sd, dlse_sb=dlse_sb, dlse_sh=dlse_sh, dlse_ss=dlse_ss,
        num_q=num_q, num_heads=num_heads, HEAD_DIM_V=head_dim_v, DV_PAD=padded_head_dim(head_dim_v), ROWS=rows), {})
    return result
