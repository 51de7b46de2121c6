"""Backward of one visit for Hopper: what `hopper.py` calls. Head dims 64 and 128, fp16 and bf16. Note [Hopper backward].

Shapes and semantics are those of `reference`. Operands (q, k, v, dout) that a tensor map cannot describe (last stride not 1, base
or strides no multiples of 16 bytes, expanded dims) are copied; such a dq, dk or dv is computed in a buffer and added or copied.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import triton_dq
from .gluon_shim import describe
from .hopper_backward_items import key_items
from .hopper_backward_kernel import backward_kernel
from .hopper_backward_prepare import prepare
from .hopper_forward import even_section
from .intervals import Intervals
from .launching import launch
from .triton_backward import exponent
from .triton_support import rows_last
from .triton_tiles import tile_for
from .visits import describable, loadable, write_no_gradient

KEYS = 128  # of a tile: fewer would double the traffic of dq
# Heads walked together: with one at a time the last wave is long where a head has few tiles or some long ones (8k rows, 8 kv
# heads, causal: 80% of the SMs' time used, against 98%), with all of them q and dout do not stay in L2.
SECTION_BYTES = 56 << 20


@dataclass(frozen=True)
class Variant:
    """One compiled kernel. The static table below is all there is: nothing is chosen by timing."""

    block_m: int  # query rows of a step
    by_rows: bool  # the consumers share a step's dq by rows (else by columns)
    packed: bool  # ds is made from the p that was rounded to 16 bits, else from that in fp32
    init_dp: bool  # the sum of dp starts from -delta
    late: bool  # dp is started after p
    consumer_regs: int = 240
    other_regs: int = 24


VARIANTS = {
    128: Variant(block_m=64, by_rows=False, packed=False, init_dp=True, late=True),
    64: Variant(block_m=128, by_rows=True, packed=True, init_dp=False, late=False),
}


@torch.no_grad()
def backward(
    dout: Tensor,  # IN    [B, Sq, Hq, D], any strides
    q: Tensor,  # IN    [B, Sq, Hq, D], any strides
    k: Tensor,  # IN    [B, Sk, Hkv, D], any strides
    v: Tensor,  # IN    [B, Sk, Hkv, D], any strides
    lse: Tensor,  # IN    [B, Hq, Sq] fp32, merged, natural log
    delta: Tensor,  # IN    [B, Hq, Sq] fp32
    intervals: Intervals,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    dq: Tensor,  # OUT / INOUT [B, Sq, Hq, D] fp32
    dk: Tensor,  # OUT / INOUT [B, Sk, Hkv, D] fp32
    dv: Tensor,  # OUT / INOUT [B, Sk, Hkv, D] fp32
    accumulate_dq: bool,
    accumulate_dkv: bool,
    deterministic: bool,
    spare_sms: int = 0,  # nothing here to spare: the grid is not persistent
) -> None:
    """This visit's share of dq, dk, dv. Not accumulating: every row is written and nothing is read. Rows whose lse is -inf give
    nothing. deterministic: the same bits from run to run, with a query-stationary kernel for dq. Otherwise dq is the sum of fp32
    additions in any order, and so are those rows of dk and dv that several programs add to (`key_items`)."""
    if 0 in q.shape or 0 in k.shape or intervals.is_empty:
        write_no_gradient(dq, dk, dv, accumulate_dq, accumulate_dkv)
        return
    if not accumulate_dq and not deterministic:
        dq.zero_()  # the kernel adds
    # The kernel wants a positive scale: a sign or a zero goes into the keys, which is right for dq, and into dk's last factor.
    sign = (softmax_scale > 0) - (softmax_scale < 0)
    if sign <= 0:
        k, softmax_scale = k * sign, abs(softmax_scale) or 1.0
    dout, q, k, v = (loadable(x) for x in (dout, q, k, v))
    targets = [_target(x, keep) for x, keep in ((dq, True), (dk, accumulate_dkv), (dv, accumulate_dkv))]
    variant = VARIANTS[q.shape[-1]]
    with torch.cuda.device(q.device):
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        *_, any_rows = _items(q, k, intervals, variant, sms, not deterministic, accumulate_dkv)
        rows = prepare(lse, delta, softmax_scale, _folded(q.dtype), variant.init_dp, any_rows)
        grid, arguments, options = backward_launch(
            dout, q, k, v, *rows, intervals, None if deterministic else targets[0], *targets[1:], softmax_scale, softcap, sign,
            accumulate_dkv, variant, sms)
        launch(backward_kernel, grid, arguments, options)
        if deterministic:
            _dq_by_rows(dout, q, k, v, lse, delta, intervals, dq, softmax_scale, softcap, accumulate_dq)
            targets[0] = dq
    for x, target, keep in zip((dq, dk, dv), targets, (True, accumulate_dkv, accumulate_dkv)):
        if target is not x:
            x.add_(target) if keep else x.copy_(target)


def _target(x: Tensor, accumulate: bool) -> Tensor:
    """x, or what stands in for it."""
    if describable(x):
        return x
    make = torch.zeros if accumulate else torch.empty
    return make(x.shape, dtype=x.dtype, device=x.device)


def _dq_by_rows(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, intervals: Intervals, dq: Tensor,
    softmax_scale: float, softcap: float, accumulate: bool,
) -> None:
    """dq [B, Sq, Hq, D] fp32, last stride 1, by the query-stationary kernel of the triton backend (shapes as `backward`)."""
    dead = lse == -math.inf
    grid, arguments, options = triton_dq.dq_launch(
        dout, q, k, v, exponent(rows_last(lse)), torch.where(dead, 0.0, delta), intervals.k_lo, intervals.k_hi, dq,
        softmax_scale, softcap, accumulate, tile_for("hopper", q.shape[-1], "dq", q.dtype))
    launch(triton_dq.dq_kernel, grid, arguments, options)


def delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse: fp32 [B, Hq, Sq]. dout, out: [B, Sq, Hq, D], dlse [B, Hq, Sq], any strides."""
    with torch.cuda.device(out.device):
        return triton_dq.delta(dout, out, dlse)


def backward_launch(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor,  # describable
    row_lse: Tensor, row_delta: Tensor,  # from `prepare`
    intervals: Intervals,
    dq: Tensor | None,  # INOUT [B, Sq, Hq, D] fp32; None: left to another kernel
    dk: Tensor, dv: Tensor,
    softmax_scale: float,  # > 0
    softcap: float,
    dk_sign: int,
    accumulate: bool,
    variant: Variant,
    sms: int,
) -> tuple[tuple[int], dict[str, Any], dict[str, int]]:
    """(grid, kernel arguments, options) of `backward_kernel`. Zeroes the rows of dk and dv that several programs add to. Shapes
    as `backward`, all describable."""
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    capped = softcap > 0
    folded = _folded(q.dtype)
    block_m, half = variant.block_m, KEYS // 2
    dq_block = (1, block_m // 2, 1, head_dim) if variant.by_rows else (1, block_m, 1, head_dim // 2)
    num_kv_total = batch * num_kv_heads
    items, shared, longest, _ = _items(q, k, intervals, variant, sms, dq is not None, accumulate)
    if shared is not None and not accumulate:
        for x in (dk, dv):  # what several programs add to has to hold something
            x[:, shared].zero_() if isinstance(shared, slice) else x.index_fill_(1, shared, 0.0)
    arguments = dict(
        q=describe(q, (1, block_m, 1, head_dim)), k=describe(k, (1, KEYS, 1, head_dim)), v=describe(v, (1, KEYS, 1, head_dim)),
        dout=describe(dout, (1, block_m, 1, head_dim)),
        row_lse=describe(row_lse, (1, block_m), False), row_delta=describe(row_delta, (1, block_m), False),
        dq=describe(dk, (1, half, 1, head_dim)) if dq is None else describe(dq, dq_block),
        dk=describe(dk, (1, half, 1, head_dim)), dv=describe(dv, (1, half, 1, head_dim)),
        q_lo=intervals.q_lo, q_hi=intervals.q_hi, items=items,
        exponent_scale=softmax_scale / softcap if capped else softmax_scale * math.log2(math.e),
        dq_scale=1.0 if folded else softmax_scale, dk_scale=float(dk_sign) * (1.0 if folded else softmax_scale),
        dv_scale=1.0 / softmax_scale if folded else 1.0, softcap=float(softcap),
        num_heads=num_heads, group=num_heads // num_kv_heads, num_kv_total=num_kv_total,
        section=_section(q, num_kv_total, longest), num_items=items.shape[0],
        D=head_dim, BM=block_m, HALF=half, BY_ROWS=variant.by_rows, INIT_DP=variant.init_dp,
        # a cap keeps its slope beside p: only so do the registers suffice
        PACKED=variant.packed or capped, LATE=variant.late or capped, CAPPED=capped, FOLDED=folded, WITH_DQ=dq is not None,
        CONSUMER_REGS=variant.consumer_regs, OTHER_REGS=variant.other_regs,
    )
    return (items.shape[0] * num_kv_total,), arguments, {"num_warps": 4, "maxnreg": 168}


def _items(q: Tensor, k: Tensor, intervals: Intervals, variant: Variant, sms: int, with_dq: bool, accumulate: bool):
    """`key_items` of this visit."""
    group = q.shape[2] // k.shape[2]
    return key_items(
        intervals, variant.block_m, KEYS, group, q.shape[0] * k.shape[2], sms, cut=with_dq, accumulate=accumulate)


def _folded(dtype: torch.dtype) -> bool:
    """Whether softmax_scale is part of p, which saves a multiplication of dq. bf16 has fp32's range; in fp16 p times the scale
    would sink into the subnormal numbers at long lengths."""
    return dtype == torch.bfloat16


def _section(q: Tensor, num_kv_total: int, longest: int) -> int:
    """kv heads that are walked together, of num_kv_total, over all batches: those of which a longest program's queries (`longest`
    rows of q and dout, for each head of the group) take about SECTION_BYTES together."""
    per_head = 2 * q.shape[0] * longest * q.shape[2] * q.shape[3] * q.element_size() // num_kv_total
    return even_section(num_kv_total, SECTION_BYTES // max(1, per_head))
