"""ring_attention: the public op."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringflash.agreement import REFUSALS, agree
from ringflash.arguments import (
    Call, check_layout_argument, check_rotate, check_routing, check_tensors, make_mask, read_options, read_softcap,
    refuse_forward_mode, refuse_meta)
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.mesh import ranks_of
from ringflash.ops import RingArguments, attention_forward, must_compare


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None, layout: Layout | str = "zigzag", group: Any = None,
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: Tensor | None = None, kernel: str = "auto",
    exchange: str = "auto", deterministic: bool = False, return_lse: bool = False, rotate: str = "auto",
    layout_k: Layout | str | None = None, causal: bool | None = None, window_size: tuple[int, int] | None = None,
    cu_seqlens: Any = None, routing: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence whose rows are spread over the ranks of a ring (Liu et al. 2023).

    q: [B, S_local, Hq, D]; k: [B, Sk_local, Hkv, D]; v: [B, Sk_local, Hkv, Dv]: this rank's shards, rows sorted by global
        position; fp16, bf16, fp32, or fp64 (kernel "reference"); any strides; Hq a multiple of Hkv, K and V are never repeated.
        Any number of local rows, also 0.
    mask: a Mask in global positions. causal, window_size, cu_seqlens: sugar for Mask(...), causal=True unless given; not with
        mask. Without any, the first mask of a Layout applies, or else causal.
    layout, layout_k: which rows the ranks own, of q, and of k and v (None: the same). A name ("contiguous", "zigzag",
        "striped") means equal shards, seq_len = ranks * S_local; uneven shards need a Layout. With
        Sq != Sk the last query sits at the last key.
    group: ProcessGroup or 1-D DeviceMesh of the ring; None is one rank. A 2-D DeviceMesh (ring, ulysses): the ranks of a row of
        it share the rows of one place of the ring outside, and its heads inside (Note [Ulysses] in DESIGN.md). Then rank = ring
        rank * ulysses size + Ulysses rank, a Layout needs ulysses_size, and that must divide Hq (not Hkv).
    softmax_scale: None is D ** -0.5.
    softcap: c > 0 makes the scores c * tanh(score / c), before the mask; 0.0 is none. In a compiled function each new value of
        it, as of softmax_scale, is a new graph.
    sinks: [Hq], one logit per query head that takes its share of every row's softmax and gives nothing to out; any of the dtypes
        above, replicated over the ranks, differentiable: each rank's gradient is its own rows' share (with Ulysses that of its
        own heads in all rows of its place of the ring), to be summed over the ranks as that of any replicated weight. -inf is no
        sink in that head. Values are not looked at (a host sync): NaN or +inf spoil their head.
    kernel: "auto", "triton", "cpu", "reference". exchange: what carries blocks: "copy", the copy engines of one host's GPUs, with
        NCCL to other hosts; "nccl"; "gloo"; "auto", on GPUs "copy" where all ranks find that they can, logged (Note [Copy engines]).
    deterministic: gradients bitwise equal from run to run (out and lse always are).
    rotate: what goes round the ring in the backward: "kv", K, V and their gradients; "q", q, dout, lse, delta and dq, while dk and dv
        stay at home; "auto", whichever sends fewer bytes (Note [What rotates in the backward] in DESIGN.md). Both are exact; they
        add in different orders, so gradients may differ by rounding. The forward always sends K and V.

    routing: how K and V reach their readers: "ring", hop by hop; "direct", from owner to reader, one of each per step;
        "allgather", all that is read in one step, and all gradients back in one, for sequences so short that the number of exchanges counts
        and not their overlap with kernels; "auto", any of them, by the rows that ranks read (Note [Ring or direct]). All are exact.

    Returns out [B, S_local, Hq, Dv] in q's dtype, and with return_lse also lse [B, Hq, S_local], fp32 (fp64 for fp64), natural
    log; both differentiable. A row that sees no key has out 0, lse -inf and gradient 0, whatever its memory holds; with sinks its
    lse is the sink, and what arrives at that lse goes to the sink. Gradients have their input's dtype; they accumulate and travel
    in fp32.

    Unless every layout is a Layout made with a group (it carries a token), each call on several ranks first compares its
    arguments over them, in one small collective (one per axis of a mesh); the first call on a group always does.

    Raises ValueError for arguments that cannot be, NotImplementedError for forward-mode AD, RuntimeError for what this machine or
    network lacks, or when a peer fails (naming pass, step, hop and peer). With an exchange of arguments, all ranks raise the same error.
    """
    ranks = ranks_of(group)
    is_agreed = _is_agreed(layout) and (layout_k is None or _is_agreed(layout_k))
    try:
        check_rotate(rotate)
        check_routing(routing)
        check_tensors(Call(q, k, v, sinks))
        refuse_forward_mode(q, k, v, sinks)
        refuse_meta(q, ranks.size)
        check_layout_argument(layout, "layout")
        if layout_k is not None:
            check_layout_argument(layout_k, "layout_k")
        sugar, chosen = _read_mask(mask, causal, window_size, cu_seqlens)
        scale = read_options(softmax_scale, q.shape[3], kernel, exchange, deterministic, return_lse)
        cap = read_softcap(softcap)
    except REFUSALS as error:
        # The others are on their way to compare arguments: tell them there.
        if must_compare(ranks, is_agreed):
            agree(ranks, "ring_attention", {}, problem=error)
        raise
    arguments = RingArguments(
        mask=None if chosen is None else chosen.spec, causal=sugar[0], left=sugar[1], right=sugar[2],
        layout=None if isinstance(layout, str) else layout.spec, layout_kind=layout if isinstance(layout, str) else "",
        masks=[] if isinstance(layout, str) else [allowed.spec for allowed in layout.masks],
        layout_k=layout_k.spec if isinstance(layout_k, Layout) else None,
        layout_k_kind=layout_k if isinstance(layout_k, str) else "",
        softmax_scale=scale, softcap=cap, group_name=ranks.names[0], ulysses_name=ranks.names[1], kernel=kernel,
        exchange=exchange, rotate=rotate, routing=routing, deterministic=deterministic, is_agreed=is_agreed,
        # A rank that runs no backward leaves the others waiting in theirs. Asked here: inside an op there is no grad mode.
        needs_gradients=torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (q, k, v, sinks)))
    out, lse = attention_forward(q, k, v, sinks, *arguments.flatten())
    return (out, lse) if return_lse else out


def _is_agreed(layout: Layout | str) -> bool:
    return isinstance(layout, Layout) and layout.is_agreed


def _read_mask(
    mask: Mask | None, causal: bool | None, window_size: Any, cu_seqlens: Any
) -> tuple[tuple[int, int, int], Mask | None]:
    """(sugar for the op, or a Mask). In a traced call causal and window_size stay plain ints: numpy cannot be traced there."""
    if torch.compiler.is_compiling() and mask is None and cu_seqlens is None:
        if causal is None and window_size is None:
            return (-1, -1, -1), None
        left, right = (-1, -1) if window_size is None else window_size
        return (int(causal is None or causal), left, right), None
    return (-1, -1, -1), make_mask(mask, causal, window_size, cu_seqlens)
