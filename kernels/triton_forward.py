"""Forward of one visit: softmax(q k^T) v over each row's interval of keys, folded into the running (out, lse).

Query-stationary, online softmax (Milakov & Gimelshein 2018; Dao et al. 2022). Key tiles that every row of the query tile
sees in full run without any masking; only those that an end of an interval crosses are masked.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .intervals import Intervals
from .launching import launch
from .triton_support import (
    INTERPRETED, LOG2_E, describe, dot, dot_add, load_rows, named_strides, rounded, rows_last, scale_in_tanh,
    section_heads, section_of, strides, tanh, tile_pointers,
)
from .triton_tiles import Tile, padded_head_dim
from .visits import check_forward, describable, with_positive_scale, write_nothing_seen


@triton.jit
def _attend(
    q, acc, row_sum, row_max, k, v, col0, lo, hi, scale_log2, tanh_scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):
    """One key tile. row_max is of raw scores, or of their tanh: the scale, or cap, enters in the exponent's multiply-add."""
    scores = dot(q, k.T, UPCAST)
    if tanh_scale is not None:
        scores = tanh(scores * tanh_scale)
    if MASKED:
        cols = col0 + tl.arange(0, BLOCK_N)
        seen = (cols[None, :] >= lo[:, None]) & (cols[None, :] < hi[:, None])
        scores = tl.where(seen, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # a row that has seen nothing yet keeps max -inf; its reference must be finite or -inf - -inf is NaN
    reference = tl.where(new_max == -float("inf"), 0.0, new_max) if MASKED else new_max
    p = tl.exp2(scores * scale_log2 - (reference * scale_log2)[:, None])
    # Subtract first: exactly 1 while the maximum stands (Note [Rescaling by a difference]).
    shrink = tl.exp2((row_max - reference) * scale_log2)
    row_sum = row_sum * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = dot_add(rounded(p, v.dtype, UPCAST), v, acc, UPCAST)
    return acc, row_sum, new_max


_COUNTS = ["num_q", "num_k", "num_heads", "group", "num_kv_total", "section", "lse_sb", "lse_sh"]


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["k_lo", "k_hi", "lse"])
def forward_kernel(
    q,  # IN    [B, Sq, Hq, D] pointer, or descriptor with blocks of BLOCK_M rows
    k,  # IN    [B, Sk, Hkv, D] likewise, BLOCK_N rows
    v,  # IN    [B, Sk, Hkv, Dv] likewise
    k_lo,  # IN    [Sq] int32, non-decreasing
    k_hi,  # IN    [Sq] int32, non-decreasing
    state,  # INOUT [B, Sq, Hq, Dv] fp32, or None
    lse,  # INOUT [B, Hq, Sq] fp32, natural log
    out,  # OUT   [B, Sq, Hq, Dv] input dtype, or None
    softmax_scale,  # > 0; of the scores, or of their tanh: then it is the softcap
    tanh_scale,  # fp32: scores become tanh(tanh_scale * q k^T); None: no cap
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh,
    state_sb, state_ss, state_sh, out_sb, out_ss, out_sh, lse_sb, lse_sh,
    num_q, num_k,
    num_heads,  # Hq
    group,  # Hq / Hkv
    num_kv_total,  # B * Hkv
    section,  # kv heads walked together
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, HEAD_DIM_V: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr,  # nothing to fold into
    WRITE_STATE: tl.constexpr,
    WRITE_OUT: tl.constexpr,
    TMA: tl.constexpr, UPCAST: tl.constexpr,
):
    num_tiles = tl.cdiv(num_q, BLOCK_M)
    # the last query tiles first: under a causal mask they are the longest, and short ones fill the last wave
    rank, head_b = section_of(tl.program_id(0), num_tiles, num_kv_total * group, section * group)
    row0 = (num_tiles - 1 - rank) * BLOCK_M
    batch = head_b // num_heads
    head = head_b - batch * num_heads
    kv_head = head // group
    scale_log2 = softmax_scale * LOG2_E

    # both ends are non-decreasing: the first and last row bound the tile
    last = tl.minimum(row0 + BLOCK_M, num_q) - 1
    lo_first = tl.load(k_lo + row0)
    lo_last = tl.load(k_lo + last)
    hi_first = tl.load(k_hi + row0)
    hi_last = tl.load(k_hi + last)
    if not FIRST and not WRITE_OUT:
        if hi_last <= lo_first:
            return  # nothing seen: the running result stays as it is
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
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)

    for tile in range(full_lo, full_hi):
        col0 = tile * BLOCK_N
        k_tile = load_rows(k, batch, kv_head, col0, num_k, k_sb, k_ss, k_sh, BLOCK_N, HEAD_DIM, D_PAD, TMA, False)
        v_tile = load_rows(v, batch, kv_head, col0, num_k, v_sb, v_ss, v_sh, BLOCK_N, HEAD_DIM_V, DV_PAD, TMA, False)
        acc, row_sum, row_max = _attend(
            q_tile, acc, row_sum, row_max, k_tile, v_tile, col0, 0, 0, scale_log2, tanh_scale, BLOCK_N, False, UPCAST)

    lo = tl.load(k_lo + rows, mask=valid, other=0)
    hi = tl.load(k_hi + rows, mask=valid, other=0)
    left = full_lo - tile_lo
    for step in range(0, left + tile_hi - full_hi):
        col0 = tl.where(step < left, tile_lo + step, full_hi + step - left) * BLOCK_N
        k_tile = load_rows(k, batch, kv_head, col0, num_k, k_sb, k_ss, k_sh, BLOCK_N, HEAD_DIM, D_PAD, TMA, True)
        v_tile = load_rows(v, batch, kv_head, col0, num_k, v_sb, v_ss, v_sh, BLOCK_N, HEAD_DIM_V, DV_PAD, TMA, True)
        acc, row_sum, row_max = _attend(
            q_tile, acc, row_sum, row_max, k_tile, v_tile, col0, lo, hi, scale_log2, tanh_scale, BLOCK_N, True, UPCAST)

    # Natural log from here on. The raw maximum times the scale is rounded once; -inf stays -inf, also through log(0).
    lse_here = row_max * softmax_scale + tl.log(row_sum)
    nonzero_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    # 64 bit: batch * lse_sb and head * lse_sh (lse has B * Hq * Sq elements)
    lse_pointers = lse + batch.to(tl.int64) * lse_sb + head.to(tl.int64) * lse_sh + rows
    if FIRST:
        result = acc * (1.0 / nonzero_sum)[:, None]
        merged = lse_here
    else:
        before = tl.load(lse_pointers, mask=valid, other=-float("inf"))
        top = tl.maximum(before, lse_here)
        reference = tl.where(top == -float("inf"), 0.0, top)  # (-inf, -inf) merges to (0, -inf) without NaN
        weight_before = tl.exp2((before - reference) * LOG2_E)
        weight_here = tl.exp2((lse_here - reference) * LOG2_E)
        total = weight_before + weight_here
        nonzero_total = tl.where(total == 0.0, 1.0, total)
        merged = top + tl.log(nonzero_total)
        pointers, mask = tile_pointers(
            state, batch, head, row0, num_q, state_sb, state_ss, state_sh, BLOCK_M, HEAD_DIM_V, DV_PAD)
        running = tl.load(pointers, mask=mask, other=0.0)
        result = running * (weight_before / nonzero_total)[:, None] + acc * (weight_here / (nonzero_total * nonzero_sum))[:, None]
    tl.store(lse_pointers, merged, mask=valid)
    if WRITE_STATE:
        pointers, mask = tile_pointers(
            state, batch, head, row0, num_q, state_sb, state_ss, state_sh, BLOCK_M, HEAD_DIM_V, DV_PAD)
        tl.store(pointers, result, mask=mask)
    if WRITE_OUT:
        pointers, mask = tile_pointers(out, batch, head, row0, num_q, out_sb, out_ss, out_sh, BLOCK_M, HEAD_DIM_V, DV_PAD)
        tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)


def forward_launch(
    q: Tensor,  # IN    [B, Sq, Hq, D], last stride 1
    k: Tensor,  # IN    [B, Sk, Hkv, D], last stride 1
    v: Tensor,  # IN    [B, Sk, Hkv, Dv], last stride 1
    k_lo: Tensor,  # IN    [Sq] int32
    k_hi: Tensor,  # IN    [Sq] int32
    state: Tensor | None,  # INOUT [B, Sq, Hq, Dv] fp32
    lse: Tensor,  # INOUT [B, Hq, Sq] fp32
    out: Tensor | None,  # OUT   [B, Sq, Hq, Dv]
    softmax_scale: float,
    softcap: float,
    first: bool,
    tile: Tile,
) -> tuple[tuple[int], dict, dict]:
    """(grid, kernel arguments, options) of `forward_kernel`. Nothing is launched: a test compiles from the same arguments."""
    batch, num_q, num_heads, head_dim = q.shape
    num_k, num_kv_heads, head_dim_v = v.shape[1:]
    group = num_heads // num_kv_heads
    width, width_v = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    tma = tile.tma and describable(q) and describable(k) and describable(v)
    section = section_heads(k, v, batch * num_kv_heads, tile.section_bytes)
    if first and out is not None:
        state = None  # neither read nor written
    lse_sb, lse_sh = strides(lse, (0, 1))
    arguments = dict(
        q=describe(q, tile.block_m, width) if tma else q,
        k=describe(k, tile.block_n, width) if tma else k,
        v=describe(v, tile.block_n, width_v) if tma else v,
        k_lo=k_lo, k_hi=k_hi, state=state, lse=lse, out=out, softmax_scale=float(softcap or softmax_scale),
        tanh_scale=scale_in_tanh(softmax_scale, softcap),
        **named_strides(q=q, k=k, v=v, state=state, out=out), lse_sb=lse_sb, lse_sh=lse_sh, num_q=num_q, num_k=num_k, num_heads=num_heads, group=group,
        num_kv_total=batch * num_kv_heads, section=section,
        HEAD_DIM=head_dim, D_PAD=width, HEAD_DIM_V=head_dim_v, DV_PAD=width_v, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        FIRST=first, WRITE_STATE=out is None, WRITE_OUT=out is not None, TMA=tma, UPCAST=INTERPRETED,
    )
    grid = (triton.cdiv(num_q, tile.block_m) * batch * num_heads,)
    return grid, arguments, {"num_warps": tile.warps, "num_stages": tile.stages}


def forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, *,
    softmax_scale: float, softcap: float, state: Tensor | None, lse: Tensor, out: Tensor | None, first: bool, tile: Tile,
) -> None:
    """`triton_backend.forward` with its tile."""
    check_forward(state, lse, out, first)
    if 0 in lse.shape:
        return
    if k.shape[1] == 0 or intervals.is_empty:
        write_nothing_seen(state, lse, out, first)
        return
    q, softmax_scale = with_positive_scale(q, softmax_scale)
    grid, arguments, options = forward_launch(
        rows_last(q), rows_last(k), rows_last(v), intervals.k_lo, intervals.k_hi, state, lse, out, softmax_scale, softcap,
        first, tile)
    launch(forward_kernel, grid, arguments, options)
