"""Forward of one visit on Hopper: softmax(q k^T) v over each row's interval of keys, folded into the running (out, lse).

One CTA per SM, warp-specialised (Note [Hopper forward]): a scheduler draws query tiles, a producer loads, two or three consumer
warpgroups of 64 rows compute. This file is the kernel that puts them together and the host side of its launch.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gluon_shim import describe, fence_async_shared, gl, gluon, mbarrier
from .hopper_forward_consumer import consumer
from .hopper_forward_producer import producer
from .hopper_forward_scheduler import TILE_INFO, scheduler
from .hopper_forward_tiles import query_tiles
from .intervals import Intervals, Turn

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class ForwardTile:
    """consumers: warpgroups of block_m query rows each. consumer_registers: per thread, of all but the first warpgroup; it has
    what is left below max_registers. by_sums: full tiles are done without maxima where p may be as large as in fp32 (bf16)."""

    block_m: int
    block_n: int
    consumers: int
    stages: int
    q_stages: int
    q_registers: bool
    consumer_registers: int
    max_registers: int
    by_sums: bool
    any_rows: bool  # tiles may begin with a document (`tile_rows`)
    section_bytes: int = 64 << 20  # of the k and v that a tile walks at most, of all heads at a time (one head was 0.89-0.94x)

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.block_m * self.consumers


FORWARD_TILES = {
    64: ForwardTile(64, 128, 3, stages=3, q_stages=2, q_registers=False, consumer_registers=160, max_registers=128,
                    by_sums=True, any_rows=True),
    128: ForwardTile(64, 128, 2, stages=2, q_stages=2, q_registers=True, consumer_registers=240, max_registers=168,
                     by_sums=True, any_rows=True),
    256: ForwardTile(64, 64, 2, stages=2, q_stages=1, q_registers=False, consumer_registers=240, max_registers=168,
                     by_sums=False, any_rows=False),
}


_COUNTS = ["num_q", "num_heads", "group", "num_heads_total", "section", "num_tiles", "total", "lse_sb", "lse_sh"]


@gluon.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["k_lo", "k_hi", "counter", "lse"])
def forward_kernel(
    q_desc,  # IN    [B, Sq, Hq, D] descriptor, blocks of BLOCK_M rows
    k_desc,  # IN    [B, Sk, Hkv, D] descriptor, blocks of BLOCK_N rows
    v_desc,  # IN    likewise
    out_desc,  # OUT   [B, Sq, Hq, D] descriptor like q's, input dtype: tiles that end
    out,  # OUT   the same as a pointer
    state,  # INOUT [B, Sq, Hq, D] fp32: read where a tile does not start (never: FIRST), written where it does not end (never: LAST)
    lse,  # INOUT [B, Hq, Sq] fp32, natural log, likewise; always written
    k_lo,  # IN    [Sq] int32, non-decreasing
    k_hi,  # IN    [Sq] int32, non-decreasing
    tiles,  # IN    [num_tiles, 8] int32, see `query_tiles`
    counter,  # INOUT [1] int32, 0 before and after
    num_q, num_heads,
    group,  # Hq / Hkv
    num_heads_total,  # B * Hq
    section,  # query heads walked together
    num_tiles,  # query tiles per head that are computed
    total,  # num_tiles * num_heads_total
    out_sb, out_ss, out_sh, state_sb, state_ss, state_sh, lse_sb, lse_sh,
    scale_log2, pre,  # see `consumer`
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, Q_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
    FIRST: gl.constexpr, LAST: gl.constexpr, CAPPED: gl.constexpr, BY_SUMS: gl.constexpr, ANY_ROWS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_s = gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, BLOCK_M, D], tile)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    info_s = gl.allocate_shared_memory(gl.int32, [2, TILE_INFO], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    failed_s = gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    info_full = gl.allocate_shared_memory(gl.int64, [1, 1], bar)
    info_empty = gl.allocate_shared_memory(gl.int64, [1, 1], bar)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * CONSUMERS, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    mbarrier.init(info_full.index(0), count=1)
    mbarrier.init(info_empty.index(0), count=CONSUMERS + 1)
    for i in gl.static_range(Q_STAGES * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    memory = (q_s, k_s, v_s, info_s, failed_s)
    barriers = (info_full, info_empty, q_full, q_empty, k_full, v_full, kv_empty)
    given = (out_desc, out, state, lse, k_lo, k_hi, num_q, out_sb, out_ss, out_sh, state_sb, state_ss, state_sh, lse_sb, lse_sh,
             scale_log2, pre)
    drawn = (tiles, counter, num_heads, num_heads_total, section, num_tiles, total)
    # Partitions are written out: only tensors and scalars may be kept in a variable, neither constants nor functions.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (0, given, memory, barriers, BLOCK_M, BLOCK_N, D, CONSUMERS, Q_STAGES, STAGES, Q_REGISTERS, not FIRST,
                        LAST, CAPPED, dtype, BY_SUMS, ANY_ROWS)),
            (consumer, (1, given, memory, barriers, BLOCK_M, BLOCK_N, D, CONSUMERS, Q_STAGES, STAGES, Q_REGISTERS, not FIRST,
                        LAST, CAPPED, dtype, BY_SUMS, ANY_ROWS)),
            (producer, (q_desc, k_desc, v_desc, memory, barriers, group, BLOCK_M, BLOCK_N, D, CONSUMERS, Q_STAGES, STAGES)),
            (scheduler, (drawn, memory, barriers, BLOCK_M * CONSUMERS, CONSUMERS, BY_SUMS)),
        ], [4, 1, 1], [REGISTERS, 24, 24])
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (consumer, (0, given, memory, barriers, BLOCK_M, BLOCK_N, D, CONSUMERS, Q_STAGES, STAGES, Q_REGISTERS, not FIRST,
                        LAST, CAPPED, dtype, BY_SUMS, ANY_ROWS)),
            (consumer, (1, given, memory, barriers, BLOCK_M, BLOCK_N, D, CONSUMERS, Q_STAGES, STAGES, Q_REGISTERS, not FIRST,
                        LAST, CAPPED, dtype, BY_SUMS, ANY_ROWS)),
            (consumer, (2, given, memory, barriers, BLOCK_M, BLOCK_N, D, CONSUMERS, Q_STAGES, STAGES, Q_REGISTERS, not FIRST,
                        LAST, CAPPED, dtype, BY_SUMS, ANY_ROWS)),
            (producer, (q_desc, k_desc, v_desc, memory, barriers, group, BLOCK_M, BLOCK_N, D, CONSUMERS, Q_STAGES, STAGES)),
            (scheduler, (drawn, memory, barriers, BLOCK_M * CONSUMERS, CONSUMERS, BY_SUMS)),
        ], [4, 4, 1, 1], [REGISTERS, REGISTERS, 24, 24])


def even_section(heads: int, most: int) -> int:
    """Heads of a section, at most `most` (at least one): a divisor of all where one is at least half as large, else as even as can be.
    A smaller last section would end with its long tiles alone."""
    most = max(1, min(most, heads))
    divisor = max(n for n in range(1, most + 1) if heads % n == 0)
    return divisor if 2 * divisor >= most else -(-heads // -(-heads // most))


def forward_launch(
    q: Tensor,  # IN    [B, Sq, Hq, D], describable
    k: Tensor,  # IN    [B, Sk, Hkv, D], describable
    v: Tensor,  # IN    [B, Sk, Hkv, D], describable
    intervals: Intervals,
    counter: Tensor,  # INOUT [1] int32
    state: Tensor | None,  # INOUT [B, Sq, Hq, D] fp32
    lse: Tensor,  # INOUT [B, Hq, Sq] fp32
    out: Tensor | None,  # OUT   [B, Sq, Hq, D], describable
    softmax_scale: float,
    softcap: float,
    first: bool,
    num_ctas: int,  # at most: one per SM that may be used
    turn: Turn | None = None,
) -> tuple[tuple[int], dict, dict]:
    """(grid, kernel arguments, options) of `forward_kernel`. Nothing is launched: a test compiles from the same arguments."""
    batch, num_q, num_heads, head_dim = q.shape
    num_k, num_kv_heads = k.shape[1], k.shape[2]
    tile = FORWARD_TILES[head_dim]
    group = num_heads // num_kv_heads
    by_sums = tile.by_sums and q.dtype == torch.bfloat16
    last = out is not None and (turn is None or turn.closes)
    tiles, longest = query_tiles(
        intervals, tile.rows, tile.block_n, by_sums, first, last, num_ctas, batch * num_heads, turn, tile.any_rows)
    num_tiles = tiles.shape[0]
    total = num_tiles * batch * num_heads
    per_group = 2 * max(1, min(longest, num_k)) * head_dim * k.element_size()
    section = even_section(batch * num_heads, max(1, tile.section_bytes // per_group) * group)
    unused = first and last
    # the stride of a dim of size 1 means nothing and would only cost another compile
    steps = [0 if unused or state.shape[i] == 1 else state.stride(i) for i in range(3)]
    out_steps = [0 if out is None or out.shape[i] == 1 else out.stride(i) for i in range(3)]
    lse_steps = [0 if lse.shape[i] == 1 else lse.stride(i) for i in range(2)]
    arguments = dict(
        q_desc=describe(q, (1, tile.block_m, 1, head_dim)), k_desc=describe(k, (1, tile.block_n, 1, head_dim)),
        v_desc=describe(v, (1, tile.block_n, 1, head_dim)),
        out_desc=describe(q if out is None else out, (1, tile.block_m, 1, head_dim)),
        out=q if out is None else out, state=lse if unused else state, lse=lse, k_lo=intervals.k_lo, k_hi=intervals.k_hi,
        tiles=tiles, counter=counter,
        num_q=num_q, num_heads=num_heads, group=group, num_heads_total=batch * num_heads, section=section, num_tiles=num_tiles,
        total=total, out_sb=out_steps[0], out_ss=out_steps[1], out_sh=out_steps[2],
        state_sb=steps[0], state_ss=steps[1], state_sh=steps[2], lse_sb=lse_steps[0], lse_sh=lse_steps[1],
        # tanh leaves scores of at most 1, which the cap then scales
        scale_log2=(softcap if softcap else softmax_scale) * LOG2_E, pre=softmax_scale / softcap if softcap else 0.0,
        D=head_dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, CONSUMERS=tile.consumers, Q_STAGES=tile.q_stages,
        STAGES=tile.stages, Q_REGISTERS=tile.q_registers, REGISTERS=tile.consumer_registers,
        FIRST=first, LAST=last, CAPPED=softcap > 0, BY_SUMS=by_sums, ANY_ROWS=tile.any_rows,
    )
    return (max(1, min(total, num_ctas)),), arguments, {"num_warps": 4, "maxnreg": tile.max_registers}
