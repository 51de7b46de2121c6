"""Between the two products of the `hopper` forward: cap, mask, online softmax, and probabilities as operand registers.

Of eight neighbouring columns a thread holds two, in both accumulators. So a tile [rows, N] is looked at as [rows, N / 8, 4, 2],
and a row has four of everything, [rows, 4], one per thread: `ref`, the reference of its exponents (the same in all four), and
`sums`, four parts of the denominator. Nothing is exchanged between threads until the end of a query tile, except maxima.

The reference is kept in base 2, scaled and rounded: what is subtracted from the scores and what the sums are rescaled by are then
the same number, and no error grows with the number of tiles (Note [Rescaling by a difference]). It may lag behind the maximum,
exactly all the same, as long as nothing overflows: Note [Hopper forward] on when it moves.
"""
from __future__ import annotations

from .gluon_shim import gl, gluon

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# The reference moves only when the maximum has grown by more than this (in powers of 2): most tiles rescale nothing.
LAZY = gl.constexpr(8.0)
# How far below the running lse the reference of a fold may start: one that has seen n keys holds p of about 1 / n, which in fp16
# is subnormal from 16,384 keys on.
FOLD_ROOM = gl.constexpr(16.0)
# `softmax_by_sums`: what a sum of 32 probabilities has to exceed for the reference to move, and what it must not exceed.
SUM_LAZY = "46000000"  # 2^13
SUM_LIMIT = "5D800000"  # 2^60


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
    half = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], dtype=gl.float32, is_pure=True, pack=1)
    large = 1.0 - 2.0 * half
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
def per_thread(x):
    """[rows, N] -> [rows, N / 8, 4, 2]; costs nothing."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def own_sums(p):
    """[rows, N / 8, 4, 2] -> [rows, 4]."""
    return gl.sum(gl.sum(p, 3), 1)


@gluon.jit
def row_max(s):
    """[rows, N / 8, 4, 2] -> [rows, 1], exchanged between the four threads of a row."""
    return gl.max(gl.max(gl.max(s, 3), 1), 1)[:, None]


@gluon.jit
def exponentials(s, ref, scale_log2):
    return gl.exp2(s * scale_log2 - ref[:, None, :, None])


@gluon.jit
def softmax_of_first_tile(s, ref, scale_log2, FOLD: gl.constexpr):
    """(p [rows, N / 8, 4, 2], ref, sums, shrink) where nothing has been seen in this visit. ref [rows]: FOLD: the running lse in
    base 2, whose denominator is 1; else -inf. shrink [rows, 4]: what the accumulator has to be multiplied by (FOLD)."""
    s = per_thread(s)
    own = gl.max(gl.max(s, 3), 1)
    top = gl.max(own, 1)[:, None] * scale_log2 + gl.zeros_like(own)
    before = gl.convert_layout(ref, gl.SliceLayout(1, own.type.layout))[:, None]
    if FOLD:
        # a row that sees nothing here keeps its lse, and so its result, to the bit
        new = gl.where(top == -float("inf"), before, gl.maximum(top, before - FOLD_ROOM))
    else:
        new = top
    finite = gl.where(new == -float("inf"), 0.0, new)
    p = exponentials(s, finite, scale_log2)
    sums = own_sums(p)
    if FOLD:
        shrink = gl.exp2(before - finite)  # 0 for -inf
        return p, new, sums + 0.25 * shrink, shrink
    else:
        return p, new, sums, gl.full_like(sums, 1.0)


@gluon.jit
def softmax(s, ref, sums, scale_log2, GUARD: gl.constexpr):
    """(p [rows, N / 8, 4, 2], ref, sums, shrink) of a later tile, by its maxima. GUARD: rows may have seen nothing (ref -inf)."""
    s = per_thread(s)
    top = row_max(s) * scale_log2
    jump = top - ref > LAZY  # false for -inf - -inf
    new = gl.where(jump, top, ref)
    finite = gl.where(new == -float("inf"), 0.0, new) if GUARD else new
    p = exponentials(s, finite, scale_log2)
    shrink = gl.where(jump, gl.exp2(ref - finite), 1.0)
    return p, new, sums * shrink + own_sums(p), shrink


def _update_text() -> str:
    # $0, $1 new reference; $2, $3 shrink; $4, $5 sums of the tile; $6, $7 reference: of the thread's two rows. An output may be
    # given the register of an input (the loop carries one into the other), so outputs are written last.
    text = ("{\n.reg .pred a, b, q;\n.reg .f32 x, y, n0, n1, s0, s1;\nmov.f32 n0, $6;\nmov.f32 n1, $7;\n"
            "mov.f32 s0, 0f3F800000;\nmov.f32 s1, 0f3F800000;\n"
            f"setp.gt.f32 a, $4, 0f{SUM_LAZY};\nsetp.gt.or.f32 a, $5, 0f{SUM_LAZY}, a;\n"
            "vote.sync.any.pred q, a, 0xffffffff;\n@!q bra same;\n")
    for row in range(2):
        own, ref = f"${4 + row}", f"${6 + row}"
        text += (f"shfl.sync.bfly.b32 x, {own}, 1, 31, 0xffffffff;\nmax.f32 x, x, {own};\n"
                 "shfl.sync.bfly.b32 y, x, 2, 31, 0xffffffff;\nmax.f32 x, x, y;\n"
                 f"setp.gt.f32 a, x, 0f{SUM_LAZY};\nsetp.gt.f32 b, x, 0f{SUM_LIMIT};\n"
                 f"lg2.approx.f32 y, x;\nselp.f32 y, 0f7FFFFFFF, y, b;\nadd.f32 y, {ref}, y;\n@a mov.f32 n{row}, y;\n"
                 f"sub.f32 y, {ref}, n{row};\nex2.approx.f32 s{row}, y;\n")
    return text + "same:\nmov.f32 $0, n0;\nmov.f32 $1, n1;\nmov.f32 $2, s0;\nmov.f32 $3, s1;\n}"


UPDATE_TEXT = gl.constexpr(_update_text())


@gluon.jit
def softmax_by_sums(s, ref, sums, scale_log2):
    """(p, next ref, sums, next shrink) without maxima: the reference is moved afterwards, for the next tile, when a sum shows
    that p grew. Within one tile it may grow by 2^60; beyond, ref, shrink and all that is computed from them become NaN."""
    s = per_thread(s)
    p = exponentials(s, ref, scale_log2)
    own = own_sums(p)
    # not pure: the threads of a warp exchange values in it, so it must stay where it is
    new, shrink = gl.inline_asm_elementwise(UPDATE_TEXT, "=f,=f,=f,=f,f,f,f,f", [own, ref], dtype=(gl.float32, gl.float32),
                                            is_pure=False, pack=2)
    return p, new, sums + own, shrink


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
def rescale(acc, shrink):
    """acc [rows, D] * shrink [rows, 4]."""
    own = per_thread(acc)
    like = gl.sum(gl.sum(own, 3), 1)
    factor = gl.convert_layout(shrink, like.type.layout)[:, None, :, None]
    n: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    if n == 32:
        own = gl.inline_asm_elementwise(TEXT_32, REGISTERS_32, [own, factor], dtype=gl.float32, is_pure=True, pack=32)
    elif n == 64:
        own = gl.inline_asm_elementwise(TEXT_64, REGISTERS_64, [own, factor], dtype=gl.float32, is_pure=True, pack=64)
    else:
        gl.static_assert(n == 128)
        own = gl.inline_asm_elementwise(TEXT_128, REGISTERS_128, [own, factor], dtype=gl.float32, is_pure=True, pack=128)
    return gl.convert_layout(own.reshape([acc.shape[0], acc.shape[1]]), acc.type.layout)


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """[rows, N / 8, 4, 2] fp32 -> [rows, N / 2] int32, two 16-bit columns each: as 16-bit values carried round the loop they
    would cost 32 PRMT a step."""
    text: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    even, odd = gl.split(p.reshape([p.shape[0], p.shape[1] * 4, 2]))
    # not pure: it has to stay behind the wait
    return gl.inline_asm_elementwise(text, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def unpack(x, dtype: gl.constexpr, layout: gl.constexpr):
    """What `pack` packed, as [rows, N] of dtype in `layout` (an operand of wgmma); costs no instruction."""
    even = x.to(gl.int16).to(dtype, bitcast=True)
    odd = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(even, odd).reshape([x.shape[0], 2 * x.shape[1]]), layout)
