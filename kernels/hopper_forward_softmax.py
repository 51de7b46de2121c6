"""What happens between the two products of the `hopper` forward: cap, mask, online softmax, and probabilities as operand registers.

The reference of a row's exponents is kept in base 2, scaled and rounded (`ref`): what is subtracted from the scores and what the
sums are rescaled by are then the same number, and no error grows with the number of tiles (Note [Rescaling by a difference]).
"""
from __future__ import annotations

from .gluon_shim import gl, gluon

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# The reference moves only when the maximum has grown by more than this (in powers of 2): exact all the same, since the sums of
# fp32 have the room, and most tiles rescale nothing.
LAZY = gl.constexpr(8.0)
# How far below the running lse the reference of a fold may start: one that has seen n keys holds p of about 1 / n, which in fp16
# is subnormal from 16,384 keys on.
FOLD_ROOM = gl.constexpr(16.0)


@gluon.jit
def base_2(x):
    """x * LOG2_E, rounded: never the half of a fused multiply-add, so that equal x give a difference of 0."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, 0f3FB8AA3B;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def cap(s, pre):
    """tanh(s * pre) to about two roundings of fp32 (lse is judged by those; tanh.approx is off by 2^-11)."""
    x = s * pre
    a = gl.abs(x)
    e = gl.exp2(a * (2 * LOG2_E))
    large = 1.0 - 2.0 * gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], dtype=gl.float32, is_pure=True, pack=1)
    # below, 1 - 2 / (e + 1) would cancel: x + x^3 * a polynomial, fitted on |x| < 0.6 to 1e-8
    z = x * x
    y = z * -0.00627639 + 0.02111621
    y = y * z - 0.05387514
    y = y * z + 0.13332924
    y = y * z - 0.3333333
    return gl.where(a < 0.6, x + x * (z * y), gl.where(x < 0, -large, large))


@gluon.jit
def apply_mask(s, lo, hi, col0, cols):
    """-inf outside [lo, hi) of each row; s [rows, BLOCK_N] are the scores of the keys from col0 on."""
    # cols is a constant plus the thread's own part (bits 1 and 2): constants against two thresholds per row
    c = (cols & ~6)[None, :]
    own = (cols & 6)[None, :]
    return gl.where((c >= (lo - col0)[:, None] - own) & (c < (hi - col0)[:, None] - own), s, -float("inf"))


@gluon.jit
def softmax(s, ref, row_sum, scale_log2, GUARD: gl.constexpr):
    """(p, ref, row_sum, shrink): p = 2^(s * scale_log2 - ref); shrink is what the accumulator has to be multiplied by.

    GUARD: rows may have seen nothing yet (ref -inf).
    """
    top = gl.max(s, 1) * scale_log2
    jump = top - ref > LAZY  # false for -inf - -inf
    new = gl.where(jump, top, ref)
    finite = gl.where(new == -float("inf"), 0.0, new) if GUARD else new
    p = gl.exp2(s * scale_log2 - finite[:, None])
    shrink = gl.where(jump, gl.exp2(ref - finite), 1.0)
    return p, new, add_up(row_sum, shrink, p), shrink


@gluon.jit
def add_up(sums, shrink, p):
    """sums * shrink plus p, summed over what one thread holds: sums [rows, 4], whose total is taken at the end (`row_total`)."""
    own = own_sums(p)
    return sums * gl.convert_layout(shrink, gl.SliceLayout(1, own.type.layout))[:, None] + own


@gluon.jit
def own_sums(p):
    """[rows, 4]: a thread of a wgmma accumulator holds two of eight columns."""
    pairs = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(pairs, 3), 1)


@gluon.jit
def row_total(sums, layout: gl.constexpr):
    return gl.convert_layout(gl.sum(sums, 1), layout)


@gluon.jit
def softmax_of_first_tile(s, ref, scale_log2, FOLD: gl.constexpr):
    """`softmax` where nothing has been seen in this visit. FOLD: ref is the running lse in base 2, whose row_sum is 1; without it
    there is nothing to rescale and shrink means nothing."""
    top = gl.max(s, 1) * scale_log2
    if FOLD:
        # a row that sees nothing here keeps its lse, and so its result, to the bit
        new = gl.where(top == -float("inf"), ref, gl.maximum(top, ref - FOLD_ROOM))
    else:
        new = top
    finite = gl.where(new == -float("inf"), 0.0, new)
    p = gl.exp2(s * scale_log2 - finite[:, None])
    sums = own_sums(p)
    if FOLD:
        shrink = gl.exp2(ref - finite)  # 0 for ref -inf
        # a quarter of the running sum in each
        return p, new, sums + 0.25 * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None], shrink
    else:
        return p, new, sums, finite


def _rescale_text(n: int) -> str:
    # n accumulator registers times their row's factor, skipped by a warp whose factors are all one. The row alternates every
    # two registers. Inside inline assembly because a branch that the compiler sees would end the overlap.
    a, b = f"${2 * n}", f"${2 * n + 2}"
    body = "".join(f"mul.f32 ${r}, ${r}, {a if r % 4 < 2 else b};\n" for r in range(n))
    return ("{\n.reg .pred p, q;\n" f"setp.neu.f32 p, {a}, 0f3F800000;\nsetp.neu.or.f32 p, {b}, 0f3F800000, p;\n"
            "vote.sync.any.pred q, p, 0xffffffff;\n@!q bra same;\n" + body + "same:\n}")


def _rescale_registers(n: int) -> str:
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


TEXT_32, TEXT_64, TEXT_128 = (gl.constexpr(_rescale_text(n)) for n in (32, 64, 128))
REGISTERS_32, REGISTERS_64, REGISTERS_128 = (gl.constexpr(_rescale_registers(n)) for n in (32, 64, 128))


@gluon.jit
def rescale(acc, shrink, acc_layout: gl.constexpr):
    """acc [rows, D] * shrink [rows]."""
    factor = gl.convert_layout(shrink, gl.SliceLayout(1, acc_layout))[:, None]
    n: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    if n == 32:
        return gl.inline_asm_elementwise(TEXT_32, REGISTERS_32, [acc, factor], dtype=gl.float32, is_pure=True, pack=32)
    elif n == 64:
        return gl.inline_asm_elementwise(TEXT_64, REGISTERS_64, [acc, factor], dtype=gl.float32, is_pure=True, pack=64)
    else:
        gl.static_assert(n == 128)
        return gl.inline_asm_elementwise(TEXT_128, REGISTERS_128, [acc, factor], dtype=gl.float32, is_pure=True, pack=128)


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """[rows, N] fp32 -> [rows, N / 2] int32, two 16-bit columns each: as 16-bit values carried round the loop they would cost 32
    PRMT a step."""
    even, odd = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=False, pack=1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def unpack(x, dtype: gl.constexpr, layout: gl.constexpr):
    """What `pack` packed, as [rows, N] of dtype in `layout` (an operand of wgmma); costs no instruction."""
    even = x.to(gl.int16).to(dtype, bitcast=True)
    odd = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(even, odd).reshape([x.shape[0], 2 * x.shape[1]]), layout)
