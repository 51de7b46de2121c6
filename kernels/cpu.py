"""Attention on the CPU in chunks of query rows: the default where there is no GPU. float16, bfloat16, float32; any head dims.

A chunk of rows meets its key range [k_lo[first], k_hi[last]) in one matrix product per kv head; the query heads of a GQA group
are rows of that product, so K and V are never repeated, and no tensor has Sq * Sk elements. Masking is paid for on the
columns that an end crosses only. 16-bit inputs are raised to float32 and rounded once, in out. Deterministic. Semantics,
shapes and dtypes: reference.py.

Plain products, not ATen's flash operator: that one needs an additive mask for anything but top-left causal, has no lse for rows
without keys, and dies on empty inputs. `python -m ringflash.kernels.cpu` measures both; float32, causal, ms, one thread of an
AMD EPYC with AVX-512 that other work shared, so compare ratios, torch 2.13, 2026-11-29:

    rows  Hq/Hkv  D    forward: ours  ATen masked  ATen causal    backward: ours  ATen masked  ATen causal
    1024  4/2    32              9.2          8.8          5.8              16.2         22.3         15.6
    1024  8/2    64             23.1         29.7         19.8              45.8         73.3         51.9
    2048  4/2    64             46.2         60.5         34.3             120.5        217.8        123.5
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .intervals import Intervals
from .reference import check_shapes, check_softcap, delta, exact_matmul, merge, warmup

__all__ = ["backward", "delta", "forward", "name", "unavailable", "warmup"]

name = "cpu"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Score tiles of a thread stay in the L2 cache: 1 MiB of float32, at least 16 and at most 256 rows high.
_TILE_ELEMENTS = 2**18
_MIN_ROWS, _MAX_ROWS = 16, 256


def unavailable(
    device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool, head_dim_v: int | None = None
) -> str | None:
    if device.type != "cpu":
        return f"tensors are on {device.type}, runs on cpu"
    return None if dtype in _DTYPES else f"dtype {dtype}, takes float16, bfloat16 and float32"


@torch.no_grad()
def forward(
    q: Tensor,  # IN    [B, Sq, Hq, D]
    k: Tensor,  # IN    [B, Sk, Hkv, D]
    v: Tensor,  # IN    [B, Sk, Hkv, Dv]
    intervals: Intervals,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    state: Tensor | None,  # INOUT [B, Sq, Hq, Dv] fp32
    lse: Tensor,  # INOUT [B, Hq, Sq] fp32
    out: Tensor | None,  # OUT   [B, Sq, Hq, Dv] q.dtype
    first: bool,
    spare_sms: int = 0,  # nothing here to spare
) -> None:
    check_shapes(q, k, v, intervals)
    check_softcap(softcap)
    B, _, Hq, _ = q.shape
    num_kv_heads, Dv = v.shape[2:]
    k32, v32 = _by_head(k), _by_head(v)
    chunks = _chunks(intervals, Hq // num_kv_heads)
    buffer = _buffer(chunks, Hq // num_kv_heads)
    with exact_matmul("cpu"):
        for chunk in chunks:
            rows = slice(chunk.start, chunk.stop)
            if chunk.lo == chunk.hi and not first:
                if out is not None:
                    out[:, rows] = state[:, rows]
                continue
            shape = (B, num_kv_heads, chunk.stop - chunk.start, Hq // num_kv_heads)
            visit_out = torch.zeros(*shape, Dv)
            visit_lse = torch.full(shape, -torch.inf)
            if chunk.lo < chunk.hi:
                q32 = _chunk_by_head(q[:, rows], num_kv_heads) * softmax_scale  # [B, Hkv, rows * G, D]
                hidden = _hidden(chunk, intervals)
                for b, h in _heads(k32):
                    _softmax_pv(q32[b, h], k32[b, h], v32[b, h], softcap, chunk, hidden, buffer, visit_out[b, h], visit_lse[b, h])
            new_out = visit_out.permute(0, 2, 1, 3, 4).flatten(2, 3)  # [B, rows, Hq, Dv]
            new_lse = visit_lse.permute(0, 1, 3, 2).flatten(1, 2)  # [B, Hq, rows]
            if not first:
                new_out, new_lse = merge(state[:, rows], lse[:, :, rows], new_out, new_lse)
            lse[:, :, rows] = new_lse
            if out is None:
                state[:, rows] = new_out
            else:
                out[:, rows] = new_out  # the one rounding to the input dtype


def _softmax_pv(
    q: Tensor, k: Tensor, v: Tensor, softcap: float, chunk: _Chunk, hidden: list, buffer: Tensor, out: Tensor, lse: Tensor
) -> None:
    """One kv head: q [rows * G, D] scaled, k [Sk, D], v [Sk, Dv]; out [rows, G, Dv], lse [rows, G] are written."""
    p = _scores(q, k, softcap, chunk, hidden, buffer)
    top = p.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)  # a row without keys: exp(-inf - 0) is 0, where exp(-inf + inf) is NaN
    p.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)  # at least 1 where the row has a key
    lse.copy_((top + total.log()).view_as(lse))
    out.copy_((torch.mm(p, v[chunk.lo : chunk.hi]) / total.masked_fill(total == 0, 1.0)).view_as(out))


@torch.no_grad()
def backward(
    dout: Tensor,  # IN    [B, Sq, Hq, Dv] q.dtype
    q: Tensor,  # IN    [B, Sq, Hq, D]
    k: Tensor,  # IN    [B, Sk, Hkv, D]
    v: Tensor,  # IN    [B, Sk, Hkv, Dv]
    lse: Tensor,  # IN    [B, Hq, Sq] fp32, merged
    delta: Tensor,  # IN    [B, Hq, Sq] fp32
    intervals: Intervals,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    dq: Tensor,  # INOUT [B, Sq, Hq, D] fp32
    dk: Tensor,  # INOUT [B, Sk, Hkv, D] fp32
    dv: Tensor,  # INOUT [B, Sk, Hkv, Dv] fp32
    accumulate_dq: bool,
    accumulate_dkv: bool,
    deterministic: bool,
    spare_sms: int = 0,  # nothing here to spare
) -> None:
    """Bitwise the same from run to run, whatever `deterministic` says."""
    check_shapes(q, k, v, intervals)
    check_softcap(softcap)
    num_kv_heads = k.shape[2]
    group = q.shape[2] // num_kv_heads
    k32, v32 = _by_head(k), _by_head(v)
    dk32, dv32 = torch.zeros_like(k32), torch.zeros_like(v32)
    chunks = _chunks(intervals, group)
    p_buffer, dp_buffer = _buffer(chunks, group), _buffer(chunks, group)
    slope_buffer = _buffer(chunks, group) if softcap else None
    with exact_matmul("cpu"):
        for chunk in chunks:
            rows = slice(chunk.start, chunk.stop)
            if chunk.lo == chunk.hi:
                if not accumulate_dq:
                    dq[:, rows] = 0.0
                continue
            q32 = _chunk_by_head(q[:, rows], num_kv_heads) * softmax_scale
            dout32 = _chunk_by_head(dout[:, rows], num_kv_heads)
            # +inf for -inf: exp(score - inf) is 0, so a row that no visit gave a key contributes nothing.
            lse_rows = _rows_by_head(lse[:, :, rows], num_kv_heads)
            empty = lse_rows == -torch.inf
            lse_rows = lse_rows.masked_fill(empty, torch.inf)
            delta_rows = _rows_by_head(delta[:, :, rows], num_kv_heads).masked_fill(empty, 0.0)
            chunk_dq = torch.empty_like(q32)
            hidden = _hidden(chunk, intervals)
            for b, h in _heads(k32):
                keys = (b, h, slice(chunk.lo, chunk.hi))
                p = _scores(q32[b, h], k32[b, h], softcap, chunk, hidden, p_buffer, slope_buffer)
                p.sub_(lse_rows[b, h]).exp_()
                dv32[keys].addmm_(p.t(), dout32[b, h])
                ds = torch.mm(dout32[b, h], v32[keys].t(), out=dp_buffer[: p.numel()].view_as(p))
                ds.sub_(delta_rows[b, h]).mul_(p)
                if slope_buffer is not None:
                    ds.mul_(slope_buffer[: ds.numel()].view_as(ds))
                dk32[keys].addmm_(ds.t(), q32[b, h])
                torch.mm(ds, k32[keys], out=chunk_dq[b, h])
            chunk_dq = _from_head(chunk_dq.mul_(softmax_scale), group)
            dq[:, rows] = dq[:, rows] + chunk_dq if accumulate_dq else chunk_dq
    for grad, visit in ((dk, dk32.transpose(1, 2)), (dv, dv32.transpose(1, 2))):
        if accumulate_dkv:
            grad.add_(visit)
        else:
            grad.copy_(visit)


class _Chunk(NamedTuple):
    """Query rows [start, stop) against keys [lo, hi); columns left of lo_last or from hi_first on are hidden from some row."""

    start: int
    stop: int
    lo: int
    hi: int
    lo_last: int
    hi_first: int


def _chunks(intervals: Intervals, group: int) -> list[_Chunk]:
    """All query rows in order. A chunk is as high as the cache allows for the keys that its rows reach."""
    key = (name, group)
    if key not in intervals.cache:
        k_lo, k_hi = intervals.host_k_lo.tolist(), intervals.host_k_hi.tolist()
        most, chunks, start = max(1, _MAX_ROWS // group), [], 0
        while start < len(k_lo):
            reach = max(1, k_hi[min(start + most, len(k_lo)) - 1] - k_lo[start])
            height = min(most, max(1, _MIN_ROWS // group, _TILE_ELEMENTS // (reach * group)))
            stop = min(start + height, len(k_lo))
            lo, hi = k_lo[start], k_hi[stop - 1]
            chunks.append(_Chunk(start, stop, lo, hi, min(k_lo[stop - 1], hi), max(k_hi[start], lo)))
            start = stop
        intervals.cache[key] = chunks
    return intervals.cache[key]


def _buffer(chunks: list[_Chunk], group: int) -> Tensor:
    return torch.empty(max(((c.stop - c.start) * group * (c.hi - c.lo) for c in chunks), default=0))


def _hidden(chunk: _Chunk, intervals: Intervals) -> list[tuple[slice, Tensor]]:
    """Columns of the chunk's scores in which some row must not see some key, with bool [rows, 1, columns]."""
    rows = slice(chunk.start, chunk.stop)
    hidden = []
    if chunk.lo < chunk.lo_last:
        columns = torch.arange(chunk.lo, chunk.lo_last, dtype=torch.int32)
        hidden.append((slice(0, chunk.lo_last - chunk.lo), (columns < intervals.k_lo[rows, None])[:, None]))
    if chunk.hi_first < chunk.hi:
        columns = torch.arange(chunk.hi_first, chunk.hi, dtype=torch.int32)
        hidden.append((slice(chunk.hi_first - chunk.lo, chunk.hi - chunk.lo), (columns >= intervals.k_hi[rows, None])[:, None]))
    return hidden


def _scores(
    q: Tensor, k: Tensor, softcap: float, chunk: _Chunk, hidden: list, buffer: Tensor, slope_buffer: Tensor | None = None
) -> Tensor:
    """q [rows * G, D] scaled, k [Sk, D] -> [rows * G, hi - lo] in the buffer, capped, -inf where hidden. slope_buffer gets the
    derivative of the capped scores by the others, in the same order."""
    num_rows, num_keys = q.shape[0], chunk.hi - chunk.lo
    scores = torch.mm(q, k[chunk.lo : chunk.hi].t(), out=buffer[: num_rows * num_keys].view(num_rows, num_keys))
    if softcap:
        scores.mul_(1.0 / softcap)
        if slope_buffer is not None:
            # 1 - tanh^2 by cosh, as in reference.sech_squared
            torch.cosh(scores, out=slope_buffer[: scores.numel()].view_as(scores)).reciprocal_().square_()
        scores.tanh_().mul_(softcap)
    for columns, mask in hidden:
        scores.view(mask.shape[0], -1, num_keys)[..., columns].masked_fill_(mask, -torch.inf)
    return scores


def _heads(k: Tensor) -> list[tuple[int, int]]:
    return [(b, h) for b in range(k.shape[0]) for h in range(k.shape[1])]


def _by_head(x: Tensor) -> Tensor:
    """[B, S, H, D] -> fp32 [B, H, S, D], contiguous."""
    return x.transpose(1, 2).to(torch.float32).contiguous()


def _chunk_by_head(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, rows, Hq, D] -> fp32 [B, Hkv, rows * G, D], contiguous; row r * G + g is query head g of the group."""
    return x.to(torch.float32).unflatten(2, (num_kv_heads, -1)).transpose(1, 2).flatten(2, 3).contiguous()


def _rows_by_head(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, rows] -> [B, Hkv, rows * G, 1] in the same order of rows."""
    return x.unflatten(1, (num_kv_heads, -1)).transpose(2, 3).flatten(2)[..., None].contiguous()


def _from_head(x: Tensor, group: int) -> Tensor:
    """[B, Hkv, rows * G, D] -> [B, rows, Hq, D]."""
    return x.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)


def _measure(num_threads: int) -> None:
    """Prints the table of the docstring: this module, and ATen's operator with an additive mask and top-left causal."""
    from time import perf_counter

    def best_ms(run) -> float:
        run()
        times = []
        for _ in range(10):
            start = perf_counter()
            run()
            times.append(1e3 * (perf_counter() - start))
        return min(times)

    torch.set_num_threads(num_threads)
    aten = torch.ops.aten
    print("threads  rows  Hq/Hkv  D   forward: ours  masked  causal   backward: ours  masked  causal")
    for num_rows, Hq, Hkv, D in ((1024, 4, 2, 32), (1024, 8, 2, 64), (2048, 4, 2, 64), (2048, 8, 8, 32)):
        q, dout = torch.randn(1, num_rows, Hq, D), torch.randn(1, num_rows, Hq, D)
        k, v = torch.randn(1, num_rows, Hkv, D), torch.randn(1, num_rows, Hkv, D)
        ends = torch.arange(1, num_rows + 1, dtype=torch.int32)
        intervals = Intervals.from_rows(torch.zeros_like(ends), ends, num_rows, "cpu")
        out, lse, grads = torch.empty_like(q), torch.empty(1, Hq, num_rows), [torch.empty_like(x) for x in (q, k, v)]

        def ours():
            forward(q, k, v, intervals, softmax_scale=D**-0.5, state=None, lse=lse, out=out, first=True)

        def ours_backward():
            backward(dout, q, k, v, lse, delta(dout, out), intervals, softmax_scale=D**-0.5, dq=grads[0], dk=grads[1],
                     dv=grads[2], accumulate_dq=False, accumulate_dkv=False, deterministic=True)

        heads = [x.transpose(1, 2) for x in (q, k, v)]
        bias = torch.zeros(num_rows, num_rows).masked_fill(torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1), -torch.inf)
        flash, flash_backward = (getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{x}") for x in ("", "_backward"))
        aten_out, aten_lse = flash(*heads, 0.0, True)
        times = [best_ms(ours)]
        times += [best_ms(lambda: flash(*heads, 0.0, c, attn_mask=m)) for c, m in ((False, bias), (True, None))]
        times += [best_ms(ours_backward)]
        times += [best_ms(lambda: flash_backward(dout.transpose(1, 2), *heads, aten_out, aten_lse, 0.0, c, attn_mask=m))
                  for c, m in ((False, bias), (True, None))]
        print(f"{num_threads:7}  {num_rows:4}  {Hq:>3}/{Hkv}   {D}  {times[0]:13.1f} {times[1]:7.1f} {times[2]:7.1f}  "
              f"{times[3]:14.1f} {times[4]:7.1f} {times[5]:7.1f}")


if __name__ == "__main__":
    for count in (1, 2):
        _measure(count)
