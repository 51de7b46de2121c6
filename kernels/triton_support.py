"""Shared by the triton kernels: loading and storing tiles, dots, and what the host prepares for a launch."""
from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launching import Form
from .visits import ALIGNMENT_BYTES

INTERPRETED: bool = triton.knobs.runtime.interpret  # read here, when the kernels are decorated, and never again
LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_2_LOG2_E = tl.constexpr(-2 * 1.4426950408889634)


def interpreter_problem() -> str | None:
    """Why Triton's interpreter cannot run these kernels here, or None: that of 3.6 fails on loop bounds with numpy 2.4 and later."""
    triton_version, numpy_version = (tuple(int(part) for part in text.split(".")[:2]) for text in (triton.__version__, version("numpy")))
    if triton_version < (3, 7) and numpy_version >= (2, 4):
        return f"the interpreter of triton {triton.__version__} needs numpy < 2.4, this is {version('numpy')}"
    return None


@triton.jit
def load_rows(
    src,  # IN pointer to [B, S, H, D], or a descriptor of [B, H, S, D] with blocks [1, 1, ROWS, D_PAD]
    batch,
    head,
    row0,
    num_rows,  # S
    stride_b,
    stride_s,
    stride_h,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    TMA: tl.constexpr,
    TAIL: tl.constexpr,  # False: the caller knows that all rows exist
):
    """[ROWS, D_PAD] from row0 on; zeros past the last row and past HEAD_DIM."""
    if TMA:
        # block coordinates are int32, the hardware's addresses are 64-bit
        return src.load([batch, head, row0, 0]).reshape([ROWS, D_PAD])
    else:
        # 64 bit: row * stride_s passes 2^31 at 174,763 rows of a fused 32-head buffer; batch and head likewise
        rows = row0 + tl.arange(0, ROWS)
        cols = tl.arange(0, D_PAD)
        base = src + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        pointers = base + rows.to(tl.int64)[:, None] * stride_s + cols[None, :]
        if TAIL and HEAD_DIM < D_PAD:
            return tl.load(pointers, mask=(rows[:, None] < num_rows) & (cols[None, :] < HEAD_DIM), other=0.0)
        elif TAIL:
            return tl.load(pointers, mask=rows[:, None] < num_rows, other=0.0)
        elif HEAD_DIM < D_PAD:
            return tl.load(pointers, mask=cols[None, :] < HEAD_DIM, other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def tile_pointers(
    dst,  # pointer to [B, S, H, D]
    batch,
    head,
    row0,
    num_rows,
    stride_b,
    stride_s,
    stride_h,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Pointers [ROWS, D_PAD] to a tile, and the mask of those inside the tensor."""
    # 64 bit: row * stride_s, batch * stride_b (fp32 accumulators of 524,288 rows x 32 heads x 128 pass 2^31)
    rows = row0 + tl.arange(0, ROWS)
    cols = tl.arange(0, D_PAD)
    base = dst + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    mask = rows[:, None] < num_rows
    if HEAD_DIM < D_PAD:
        mask = mask & (cols[None, :] < HEAD_DIM)
    return base + rows.to(tl.int64)[:, None] * stride_s + cols[None, :], mask


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """a @ b in fp32; products of fp32 inputs in full precision (the default would be TF32)."""
    if UPCAST:
        # the interpreter keeps bf16 as raw 16-bit integers and would multiply those
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b, as `dot`."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """x as the operand of a dot with tensors of `dtype`."""
    if UPCAST:
        return x
    else:
        return x.to(dtype)


@triton.jit
def tanh(x):
    """tanh(x) in fp32; see `tanh_and_slope`."""
    # in (0, 1]: neither this nor what follows overflows, and tanh(+-inf) = +-1
    e = tl.exp2(tl.abs(x) * MINUS_2_LOG2_E)
    return _tanh(x, e, 1.0 / (1.0 + e))


@triton.jit
def tanh_and_slope(x):
    """(tanh(x), 1 - tanh(x)^2) in fp32, each with a small *relative* error everywhere (Note [Softcap])."""
    e = tl.exp2(tl.abs(x) * MINUS_2_LOG2_E)
    r = 1.0 / (1.0 + e)
    # never as 1 - tanh^2, which cancels where tanh is near 1
    return _tanh(x, e, r), 4.0 * e * (r * r)


@triton.jit
def _tanh(x, e, r):
    """e = exp(-2 |x|), r = 1 / (1 + e). 1 - 2 e r cancels near 0, so there it is x + x^3 P(x^2), P fitted to least relative error
    (3e-9) on |x| < 0.6; the hardware's own tanh is good to 11 bits only."""
    square = x * x
    series = (((-0.005895140580832958 * square + 0.020795956254005432) * square - 0.053783826529979706) * square
              + 0.13331924378871918) * square - 0.33333298563957214
    far = 1.0 - 2.0 * e * r
    return tl.where(tl.abs(x) < 0.6, x + x * square * series, tl.where(x < 0.0, -far, far))


@triton.jit
def section_of(pid, num_tiles, num_heads, section):
    """(rank of the tile, head) of a program: sections of heads in turn, in each the first tile of all its heads first.

    num_heads counts batches too. int32 throughout: the grid itself has fewer than 2^31 programs.
    """
    first = pid // (section * num_tiles) * section
    heads = tl.minimum(section, num_heads - first)
    within = pid - first * num_tiles
    return within // heads, first + within % heads


def rows_last(x: Tensor) -> Tensor:
    """x [..., D] itself when neighbours in the last dim are neighbours in memory, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(x: Tensor | None, names: tuple[int, ...] = (0, 1, 2)) -> tuple[int, ...]:
    """The named strides in elements; 0 for a dim of size 1 (whose stride means nothing and would only cost a recompile)."""
    if x is None:
        return (0,) * len(names)
    shape, steps = x.shape, x.stride()
    return tuple([0 if shape[i] == 1 else steps[i] for i in names])


def describe(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Descriptor of x [B, S, H, D], `describable`, as [B, H, S, D] with blocks [1, 1, rows, width]; ends at the last real row and
    column, past which loads give 0 and stores do nothing."""
    b, s, h, d = x.shape
    # the stride of a dim of size 1 is never used but must be legal
    step_b, step_s, step_h = (step if n > 1 else ALIGNMENT_BYTES for n, step in zip((b, s, h), x.stride()))
    return _form(x.dtype, rows, width).describe(x, [b, h, s, d], [step_b, step_h, step_s, 1])


@lru_cache(maxsize=None)
def _form(dtype: torch.dtype, rows: int, width: int) -> Form:
    return Form(lambda x, shape, strides: TensorDescriptor(x, shape, strides, [1, 1, rows, width]))


def named_strides(**tensors: Tensor | None) -> dict[str, int]:
    """The first three strides (see `strides`) of each, as arguments of a kernel: q_sb, q_ss, q_sh, ..."""
    return dict(zip(_stride_names(tuple(tensors)), chain.from_iterable(map(strides, tensors.values()))))


@lru_cache(maxsize=None)
def _stride_names(names: tuple[str, ...]) -> list[str]:
    return [f"{name}_s{dim}" for name in names for dim in "bsh"]


def scale_in_tanh(softmax_scale: float, softcap: float) -> float | None:
    """What q k^T is multiplied by inside the tanh; None without a cap. Divided here, in double precision."""
    return float(softmax_scale) / softcap if softcap else None


def section_heads(k: Tensor, v: Tensor, num_groups: int, section_bytes: int) -> int:
    """kv heads (over all batches, `num_groups` of them) whose k and v take about section_bytes together; at least 1."""
    per_head = max(1, k.shape[1] * (k.shape[3] + v.shape[3]) * k.element_size())
    return max(1, min(num_groups, section_bytes // per_head))
