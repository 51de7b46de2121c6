"""Backward of one visit, key-stationary: a program owns a tile of keys and walks the query tiles that see it, over all query
heads of its GQA group, so dk and dv need no atomics. dq is added to in fp32 per step, or left to `triton_dq` (deterministic).

Probabilities are recomputed from the merged lse, so each visit yields its exact share of the whole gradient (Dao 2023).
"""
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

# lse is passed in base 2 with +inf for rows that saw nothing anywhere: exp2(score - inf) is 0, never inf or NaN.


@triton.jit
def exponent_kernel(
    lse,  # IN    [B, Hq, Sq] fp32, natural log
    lse_log2,  # OUT   [B, Hq, Sq] fp32 contiguous, base 2; +inf where lse is -inf
    num_q,
    num_heads,
    lse_sb,
    lse_sh,
    BLOCK: tl.constexpr,
):
    head_b = tl.program_id(1)
    batch = head_b // num_heads
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # 64 bit: B * Hq * Sq elements
    source = lse + batch.to(tl.int64) * lse_sb + (head_b - batch * num_heads).to(tl.int64) * lse_sh + rows
    value = tl.load(source, mask=rows < num_q, other=0.0)
    value = tl.where(value == -float("inf"), float("inf"), value * LOG2_E)
    tl.store(lse_log2 + head_b.to(tl.int64) * num_q + rows, value, mask=rows < num_q)


@triton.jit
def _step(
    q, dout, lse_log2, delta, dq, k_tile, v_tile, dk, dv, lo, hi, batch, head, row0,
    softmax_scale, scale_log2, tanh_scale, num_q, num_heads,
    q_sb, q_ss, q_sh, dout_sb, dout_ss, dout_sh, dq_sb, dq_ss, dq_sh,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, HEAD_DIM_V: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DQ: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):
    """One query tile against the program's keys. Scores are transposed, [BLOCK_N, BLOCK_M]: p and ds then feed dv and dk from
    registers, and the bounds are two numbers per row of the tile."""
    rows = row0 + tl.arange(0, BLOCK_M)
    q_tile = load_rows(q, batch, head, row0, num_q, q_sb, q_ss, q_sh, BLOCK_M, HEAD_DIM, D_PAD, TMA, MASKED)
    dout_tile = load_rows(dout, batch, head, row0, num_q, dout_sb, dout_ss, dout_sh, BLOCK_M, HEAD_DIM_V, DV_PAD, TMA, MASKED)
    # 64 bit: B * Hq * Sq elements
    row_base = (batch * num_heads + head).to(tl.int64) * num_q
    if MASKED:
        row_lse = tl.load(lse_log2 + row_base + rows, mask=rows < num_q, other=float("inf"))
        row_delta = tl.load(delta + row_base + rows, mask=rows < num_q, other=0.0)
    else:
        row_lse = tl.load(lse_log2 + row_base + rows)
        row_delta = tl.load(delta + row_base + rows)
    scores = dot(k_tile, q_tile.T, UPCAST)
    if tanh_scale is not None:
        scores, slope = tanh_and_slope(scores * tanh_scale)
    exponents = scores * scale_log2 - row_lse[None, :]
    if MASKED:
        seen = (rows[None, :] >= lo[:, None]) & (rows[None, :] < hi[:, None])
        exponents = tl.where(seen, exponents, -float("inf"))
    p = tl.exp2(exponents)
    dv = dot_add(rounded(p, dout_tile.dtype, UPCAST), dout_tile, dv, UPCAST)
    # p of the score gradient; with a cap times its slope, here: one tensor less is alive through the next product
    weight = p if tanh_scale is None else p * slope
    dp = dot(v_tile, dout_tile.T, UPCAST)
    ds = weight * (dp - row_delta[None, :])
    if MASKED:
        # By selection: 0 * (inf or NaN) would stay NaN. Testing the weight spares the registers that would hold `seen`.
        ds = tl.where(weight == 0.0, 0.0, ds)
    ds = rounded(ds, q_tile.dtype, UPCAST)
    dk = dot_add(ds, q_tile, dk, UPCAST)
    if DQ == "tma":
        dq_tile = dot(ds.T, k_tile, UPCAST) * softmax_scale
        dq.atomic_add([batch, head, row0, 0], dq_tile.reshape([1, 1, BLOCK_M, D_PAD]))
    elif DQ == "atomic":
        dq_tile = dot(ds.T, k_tile, UPCAST) * softmax_scale
        pointers, mask = tile_pointers(dq, batch, head, row0, num_q, dq_sb, dq_ss, dq_sh, BLOCK_M, HEAD_DIM, D_PAD)
        tl.atomic_add(pointers, dq_tile, mask=mask, sem="relaxed")
    return dk, dv


_COUNTS = ["num_q", "num_k", "num_heads", "group", "num_kv_total", "section"]


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["q_lo", "q_hi", "lse_log2", "delta"])
def backward_kernel(
    q,  # IN    [B, Sq, Hq, D] pointer, or descriptor with blocks of BLOCK_M rows
    k,  # IN    [B, Sk, Hkv, D] likewise, BLOCK_N rows
    v,  # IN    [B, Sk, Hkv, Dv] likewise, BLOCK_N rows
    dout,  # IN    [B, Sq, Hq, Dv] likewise, BLOCK_M rows
    q_lo,  # IN    [Sk] int32, non-decreasing
    q_hi,  # IN    [Sk] int32, non-decreasing
    lse_log2,  # IN    [B, Hq, Sq] fp32 contiguous, base 2, +inf for dead rows
    delta,  # IN    [B, Hq, Sq] fp32 contiguous
    dq,  # INOUT [B, Sq, Hq, D] fp32: pointer, descriptor (DQ = "tma") or None; added to
    dk,  # OUT / INOUT [B, Sk, Hkv, D] fp32
    dv,  # OUT / INOUT [B, Sk, Hkv, Dv] fp32
    softmax_scale,
    softcap,  # fp32; None: no cap
    tanh_scale,  # softmax_scale / softcap; None: no cap
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, dout_sb, dout_ss, dout_sh,
    dq_sb, dq_ss, dq_sh, dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh,
    num_q, num_k,
    num_heads,  # Hq
    group,  # Hq / Hkv
    num_kv_total,  # B * Hkv
    section,  # kv heads walked together
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, HEAD_DIM_V: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ACCUMULATE: tl.constexpr,  # add to dk, dv
    DQ: tl.constexpr,  # "tma", "atomic" or "separate"
    TMA: tl.constexpr, UPCAST: tl.constexpr,
):
    # the first key tiles first: under a causal mask they are the longest
    rank, head_b = section_of(tl.program_id(0), tl.cdiv(num_k, BLOCK_N), num_kv_total, section)
    col0 = rank * BLOCK_N
    num_kv_heads = num_heads // group
    batch = head_b // num_kv_heads
    kv_head = head_b - batch * num_kv_heads
    head0 = kv_head * group
    scale_log2 = (softmax_scale if softcap is None else softcap) * LOG2_E

    last = tl.minimum(col0 + BLOCK_N, num_k) - 1
    lo_first = tl.load(q_lo + col0)
    lo_last = tl.load(q_lo + last)
    hi_first = tl.load(q_hi + col0)
    hi_last = tl.load(q_hi + last)
    if ACCUMULATE:
        if hi_last <= lo_first:
            return  # nobody reads these keys
    tile_lo = lo_first // BLOCK_M
    tile_hi = tl.where(hi_last > lo_first, tl.cdiv(hi_last, BLOCK_M), tile_lo)
    full_lo = tl.cdiv(lo_last, BLOCK_M)
    full_hi = hi_first // BLOCK_M
    # in a tile that reaches past the last key every step is masked, since its zero rows would still give p > 0
    no_full = (full_hi <= full_lo) | (col0 + BLOCK_N > num_k)
    full_lo = tl.where(no_full, tile_lo, full_lo)
    full_hi = tl.where(no_full, tile_lo, full_hi)

    cols = col0 + tl.arange(0, BLOCK_N)
    k_tile = load_rows(k, batch, kv_head, col0, num_k, k_sb, k_ss, k_sh, BLOCK_N, HEAD_DIM, D_PAD, TMA, True)
    v_tile = load_rows(v, batch, kv_head, col0, num_k, v_sb, v_ss, v_sh, BLOCK_N, HEAD_DIM_V, DV_PAD, TMA, True)
    dk_acc = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, DV_PAD], tl.float32)

    # One loop over (head, full tile): a loop per head would drain its pipeline at every head.
    # Neighbours start one tile apart, or all programs of a head would add to the same rows of dq at once.
    num_full = full_hi - full_lo
    start = full_lo + rank % tl.maximum(num_full, 1)
    tile = start
    head = head0
    for _ in range(0, num_full * group):
        dk_acc, dv_acc = _step(
            q, dout, lse_log2, delta, dq, k_tile, v_tile, dk_acc, dv_acc, 0, 0, batch, head, tile * BLOCK_M,
            softmax_scale, scale_log2, tanh_scale, num_q, num_heads,
            q_sb, q_ss, q_sh, dout_sb, dout_ss, dout_sh, dq_sb, dq_ss, dq_sh,
            HEAD_DIM, D_PAD, HEAD_DIM_V, DV_PAD, BLOCK_M, BLOCK_N, DQ, TMA, False, UPCAST)
        tile = tl.where(tile + 1 == full_hi, full_lo, tile + 1)
        head = tl.where(tile == start, head + 1, head)

    lo = tl.load(q_lo + cols, mask=cols < num_k, other=0)
    hi = tl.load(q_hi + cols, mask=cols < num_k, other=0)
    left = full_lo - tile_lo
    num_masked = left + tile_hi - full_hi
    index = 0
    head = head0
    for _ in range(0, num_masked * group):
        row0 = tl.where(index < left, tile_lo + index, full_hi + index - left) * BLOCK_M
        dk_acc, dv_acc = _step(
            q, dout, lse_log2, delta, dq, k_tile, v_tile, dk_acc, dv_acc, lo, hi, batch, head, row0,
            softmax_scale, scale_log2, tanh_scale, num_q, num_heads,
            q_sb, q_ss, q_sh, dout_sb, dout_ss, dout_sh, dq_sb, dq_ss, dq_sh,
            HEAD_DIM, D_PAD, HEAD_DIM_V, DV_PAD, BLOCK_M, BLOCK_N, DQ, TMA, True, UPCAST)
        index = tl.where(index + 1 == num_masked, 0, index + 1)
        head = tl.where(index == 0, head + 1, head)

    pointers, mask = tile_pointers(dv, batch, kv_head, col0, num_k, dv_sb, dv_ss, dv_sh, BLOCK_N, HEAD_DIM_V, DV_PAD)
    if ACCUMULATE:
        dv_acc += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, dv_acc, mask=mask)
    dk_acc = dk_acc * softmax_scale
    pointers, mask = tile_pointers(dk, batch, kv_head, col0, num_k, dk_sb, dk_ss, dk_sh, BLOCK_N, HEAD_DIM, D_PAD)
    if ACCUMULATE:
        dk_acc += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, dk_acc, mask=mask)


def exponent(lse: Tensor) -> Tensor:
    """lse [B, Hq, Sq] natural -> contiguous base 2, +inf for dead rows."""
    batch, num_heads, num_q = lse.shape
    result = torch.empty((batch, num_heads, num_q), dtype=torch.float32, device=lse.device)
    if result.numel():
        block = 16 if INTERPRETED else 1024
        sb, sh = strides(lse, (0, 1))
        launch(exponent_kernel, (triton.cdiv(num_q, block), batch * num_heads), dict(
            lse=lse, lse_log2=result, num_q=num_q, num_heads=num_heads, lse_sb=sb, lse_sh=sh, BLOCK=block), {})
    return result


def backward_launch(
    dout: Tensor,  # IN    [B, Sq, Hq, Dv], last stride 1
    q: Tensor,  # IN    [B, Sq, Hq, D], last stride 1
    k: Tensor,  # IN    [B, Sk, Hkv, D], last stride 1
    v: Tensor,  # IN    [B, Sk, Hkv, Dv], last stride 1
    lse_log2: Tensor,  # IN    [B, Hq, Sq] fp32 contiguous
    delta: Tensor,  # IN    [B, Hq, Sq] fp32 contiguous
    q_lo: Tensor,  # IN    [Sk] int32
    q_hi: Tensor,  # IN    [Sk] int32
    dq: Tensor | None,  # INOUT [B, Sq, Hq, D] fp32; None: left to another kernel
    dk: Tensor,  # OUT / INOUT [B, Sk, Hkv, D] fp32
    dv: Tensor,  # OUT / INOUT [B, Sk, Hkv, Dv] fp32
    softmax_scale: float,
    softcap: float,
    accumulate: bool,
    tile: Tile,
) -> tuple[tuple[int], dict, dict]:
    """(grid, kernel arguments, options) of `backward_kernel`."""
    batch, num_q, num_heads, head_dim = q.shape
    num_k, num_kv_heads, head_dim_v = v.shape[1:]
    width, width_v = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    tma = tile.tma and all(describable(x) for x in (q, k, v, dout))
    mode = "separate" if dq is None else tile.dq
    if mode == "tma" and not (tma and describable(dq)):
        mode = "atomic"
    arguments = dict(
        q=describe(q, tile.block_m, width) if tma else q,
        k=describe(k, tile.block_n, width) if tma else k,
        v=describe(v, tile.block_n, width_v) if tma else v,
        dout=describe(dout, tile.block_m, width_v) if tma else dout,
        q_lo=q_lo, q_hi=q_hi, lse_log2=lse_log2, delta=delta,
        dq=describe(dq, tile.block_m, width) if mode == "tma" else dq,
        dk=dk, dv=dv, softmax_scale=float(softmax_scale), softcap=float(softcap) if softcap else None,
        tanh_scale=scale_in_tanh(softmax_scale, softcap),
        **named_strides(q=q, k=k, v=v, dout=dout, dq=dq, dk=dk, dv=dv),
        num_q=num_q, num_k=num_k, num_heads=num_heads, group=num_heads // num_kv_heads, num_kv_total=batch * num_kv_heads,
        section=section_heads(k, v, batch * num_kv_heads, tile.section_bytes),
        HEAD_DIM=head_dim, D_PAD=width, HEAD_DIM_V=head_dim_v, DV_PAD=width_v, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        ACCUMULATE=accumulate, DQ=mode, TMA=tma, UPCAST=INTERPRETED,
    )
    grid = (triton.cdiv(num_k, tile.block_n) * batch * num_kv_heads,)
    return grid, arguments, {"num_warps": tile.warps, "num_stages": tile.stages}
