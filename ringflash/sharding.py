"""From global tensors and batches to what a rank owns, and back."""
from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.agreement import REFUSALS, agree, check_ranks, gather_in_order, layout_fields, token_of
from ringflash.arguments import check_layout_argument
from ringflash.batch_rows import IGNORE, batch_hash, has_successor, num_labels, num_successors, rows_of, sorted_union
from ringflash.layout import LAYOUTS, Layout, as_masks, check_made_as
from ringflash.mask import Mask
from ringflash.mesh import Ranks, ranks_of

_KEYS = ("tokens", "cu_seqlens", "labels", "positions", "attention_mask")


@dataclass(frozen=True)
class ShardedBatch:
    """One rank's part of a batch.

    tokens: int64 [B, S_local]; positions: int64 [S_local], global (or as the batch gave them); labels: int64 [B, S_local],
    the next token of the same document, -100 where there is none. num_valid: labels that count over the whole ring, the same
    on each of its ranks. layout: with the batch's documents in its masks, and a token when a group agreed on it.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    num_valid: int
    layout: Layout


def shard(x: Tensor, layout: Layout | str, *, rank: int | None = None, group: Any = None, dim: int = 1) -> Tensor:
    """The rows of x (global, layout.seq_len along dim) that a rank owns, sorted by position. A copy; differentiable.

    Either rank, or group (whose rank of this process it is; of all num_ranks ranks), or neither (a Layout of one rank). A layout
    by name needs group.
    ValueError when x has another length than the layout, or the rank does not exist.
    """
    layout, rank = _place(layout, x.shape[dim], rank, group)
    if x.shape[dim] != layout.seq_len:
        raise ValueError(f"x.shape[{dim}]={x.shape[dim]}: must be layout.seq_len={layout.seq_len}")
    return x.index_select(dim, torch.from_numpy(layout.positions(rank)).to(x.device))


def unshard(x_local: Tensor, layout: Layout | str, *, group: Any = None, dim: int = 1) -> Tensor:
    """The global tensor (layout.seq_len along dim) from all ranks' shards, on every rank. Inverse of shard.

    Differentiable: every rank may use the whole result, so the gradient of a shard is the SUM over ranks of the gradients that
    its rows get there (a reduce-scatter, summed in fp32 or better). Where each rank computes the same loss from the whole tensor,
    divide it by cp_size. ValueError when the local rows are not what the layout gives this rank; the ranks compare their arguments
    first, and all raise the same error.
    """
    ranks = ranks_of(group)
    problem, fields = None, {}
    try:
        if not isinstance(x_local, Tensor) or not -x_local.ndim <= dim < x_local.ndim:
            raise ValueError(f"x_local: must be a torch.Tensor that has dim={dim!r}, got "
                             f"{tuple(x_local.shape) if isinstance(x_local, Tensor) else type(x_local).__name__}")
        layout, rank = _place(layout, x_local.shape[dim] * ranks.size, None, ranks)
        if x_local.shape[dim] != layout.shard_len(rank):
            raise ValueError(f"x_local.shape[{dim}]={x_local.shape[dim]}: the layout gives cp rank {rank} "
                             f"{layout.shard_len(rank)} rows")
        others = list(x_local.shape)
        del others[dim]
        fields = {**layout_fields(layout), "x_local.dtype": x_local.dtype, "x_local.device": x_local.device.type,
                  "dim": dim % x_local.ndim, "x_local's other dims": others,
                  "needs gradients": torch.is_grad_enabled() and x_local.requires_grad}
    except REFUSALS as error:
        if ranks.size == 1:
            raise
        problem = error
    if ranks.size > 1:
        agree(ranks, "unshard", fields, problem=problem)
    return _Unshard.apply(x_local, layout, ranks, dim % x_local.ndim)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, layout: Layout, ranks: Ranks, dim: int) -> Tensor:
        ctx.layout, ctx.ranks, ctx.dim = layout, ranks, dim
        rows_first = x_local.movedim(dim, 0).contiguous()
        if layout.num_ranks == 1:
            parts = [rows_first]
        else:
            # Collectives want equal shapes; shards differ by a row at most, so the longest (rank 0's) stands for all.
            padded = rows_first.new_zeros((layout.shard_len(0), *rows_first.shape[1:]))
            padded[:rows_first.shape[0]] = rows_first
            parts = [part[:layout.shard_len(rank)] for rank, part in enumerate(gather_in_order(padded, ranks))]
        whole = torch.empty((layout.seq_len, *rows_first.shape[1:]), dtype=x_local.dtype, device=x_local.device)
        for rank, part in enumerate(parts):
            whole[torch.from_numpy(layout.positions(rank)).to(whole.device)] = part
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # All-reduce and cut: gloo has no reduce-scatter of uneven parts, and this op is not on a training path.
        total = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        if ctx.layout.num_ranks > 1:
            total = total.clone()
            for group in ctx.ranks.groups:
                dist.all_reduce(total, group=group)
        own = torch.from_numpy(ctx.layout.positions(ctx.ranks.rank)).to(grad.device)
        return total.index_select(ctx.dim, own).to(grad.dtype), None, None, None


def shard_batch(
    batch: Mapping[str, Any], layout: Layout | str | Any = "zigzag", *, group: Any = None, rank: int | None = None,
    masks: Mask | Iterable[Mask] | None = None, device: torch.device | str | None = None,
) -> ShardedBatch:
    """This rank's rows of a batch, with labels shifted on the global sequence; the ring's ranks agree on it all here, once.

    batch: "tokens" [B, S] integers (torch, numpy, memory-mapped, or anything with shape that takes [..., index]): only
        this rank's rows and the ones after them are read. Optional: "cu_seqlens" [N+1], B == 1: documents; rows from
        cu_seqlens[-1] on belong to none. "labels" [B, S], aligned with tokens (not shifted; -100 is ignored). "positions" [S]:
        used instead of 0..S-1; if they restart, cu_seqlens must say where. "attention_mask" [B, S]: all ones only.
    layout: a Layout, a name (also "balanced" and "auto"), or the DeviceMesh of the ring or of ring x ulysses (zigzag). A Layout's
        masks get the batch's documents unless they have them, and a balanced or "auto" one is made anew for them. masks: for a
        layout by name or mesh, default causal.
    group: ProcessGroup or 1-D DeviceMesh of the ring, 2-D DeviceMesh (ring, ulysses), or with a Layout the ProcessGroup of all
        its num_ranks ranks: they compare layout, masks and a hash of the batch in one collective (one per axis of a mesh), and
        the returned layout carries the token. rank (without group): that rank's part, nothing is exchanged. Neither: one rank.
    device: where the result goes (default: where torch tokens are, else CPU).

    num_valid counts over the ring; without "labels" it follows from the documents alone. Raises ValueError for a batch that
    cannot be; with a group, the same error on all its ranks.
    """
    if group is None and not isinstance(layout, (Layout, str)):
        layout, group = "zigzag", _ranks_of_layout(layout)
    has_group, ranks = group is not None, ranks_of(group)
    problem, fields, count, made, result = None, {}, 0, None, ()
    # All that can fail is in here, also moving the result: without a group that is one, there is nobody to tell.
    try:
        if not isinstance(layout, (Layout, str)):
            _ranks_of_layout(layout)
            raise ValueError("layout is a mesh and group is given too; give the ring once")
        if has_group and rank is not None:
            raise ValueError(f"rank={rank} together with group: the group knows this process's rank; give one of them")
        if not has_group and rank is not None and isinstance(layout, str):
            raise ValueError(f"layout={layout!r} with rank={rank}: a name does not say how many ranks there are; give a Layout "
                             f"or group")
        made = _read(batch, layout, ranks if has_group else None, rank, masks)
        fields, count = {**layout_fields(made.layout), **made.fields}, made.count
        result = _placed(made, batch["tokens"], device)
    except REFUSALS as error:
        if ranks.size == 1:
            raise
        problem = error
    if ranks.size > 1:
        count = sum(agree(ranks, "shard_batch", fields, problem=problem, count=count))
        made.layout.set_token(token_of(fields))
    return ShardedBatch(*result, count, made.layout)


def _ranks_of_layout(layout: Any) -> Ranks:
    """Of the mesh that is given as a layout. ValueError for what is none."""
    if not isinstance(layout, (Ranks, dist.DeviceMesh, dist.ProcessGroup)):
        raise ValueError(f"layout={layout!r}: must be a ringflash.Layout, one of {', '.join(LAYOUTS)}, or the DeviceMesh of the ring")
    return ranks_of(layout)


def _placed(made: _Read, source: Any, device: Any) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, positions, labels where they go. RuntimeError for a device that is not here."""
    if device is None:
        device = source.device if isinstance(source, Tensor) else "cpu"
    try:
        device = torch.device(device)
        tokens, positions, labels = (torch.from_numpy(x).to(device) for x in (made.tokens, made.positions, made.labels))
    except Exception as error:  # a torch without CUDA raises AssertionError
        raise RuntimeError(f"device={device}: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    return tokens, positions, labels


@dataclass
class _Read:
    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    count: int                                              # own valid labels with a group, else those of the whole ring
    fields: dict[str, object]
    layout: Layout


def _read(batch: Mapping[str, Any], layout: Layout | str, ranks: Ranks | None, rank: int | None, masks: Any) -> _Read:
    """ranks: of the group, None without one."""
    has_group = ranks is not None
    tokens = _check_batch(batch)
    batch_size, seq_len = tokens.shape
    layout = _with_documents(layout, batch.get("cu_seqlens"), seq_len, ranks or Ranks(), masks)
    layout, rank = _place(layout, seq_len, rank, ranks)
    if layout.seq_len != seq_len:
        raise ValueError(f"batch['tokens'] has {seq_len} columns, but layout.seq_len={layout.seq_len}")
    boundaries = next((mask.cu_seqlens for mask in layout.masks if mask.cu_seqlens is not None), None)
    if boundaries is not None and batch_size != 1:
        raise ValueError(f"cu_seqlens with batch size {batch_size}: packed documents need B == 1")
    positions = _check_positions(batch.get("positions"), seq_len, boundaries)
    own = layout.positions(rank)
    has_next = has_successor(own, seq_len, boundaries)
    # One read for tokens and their successors: a sorted union touches every row once.
    source = batch.get("labels")
    wanted = own if source is not None else sorted_union(own, own[has_next] + 1)
    read = rows_of(tokens, wanted)
    labels = np.full((batch_size, own.shape[0]), IGNORE, dtype=np.int64)
    if source is None:
        labels[:, has_next] = read[:, np.searchsorted(wanted, own[has_next] + 1)]
        count = batch_size * (int(has_next.sum()) if has_group else num_successors(seq_len, boundaries))
    else:
        labels[:, has_next] = rows_of(source, own[has_next] + 1)
        count = int((labels != IGNORE).sum()) if has_group else num_labels(source, seq_len, boundaries)
    fields: dict[str, object] = {"batch shape": tuple(tokens.shape), "hash of tokens": batch_hash(tokens)}
    if source is not None:
        fields["hash of labels"] = batch_hash(source)
    if positions is not None:
        fields["hash of positions"] = zlib.crc32(positions.tobytes())
    return _Read(np.ascontiguousarray(read[:, np.searchsorted(wanted, own)]), own if positions is None else positions[own], labels,
                 count, fields, layout)


def _check_batch(batch: Mapping[str, Any]) -> Any:
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch: must be a mapping with 'tokens', got {type(batch).__name__}")
    unknown = [key for key in batch if key not in _KEYS]
    if unknown or "tokens" not in batch:
        raise ValueError(f"batch has keys {sorted(batch)}: needs 'tokens', may have {', '.join(_KEYS[1:])}")
    tokens = batch["tokens"]
    shape = tuple(getattr(tokens, "shape", ()))
    if len(shape) != 2 or shape[1] < 1:
        raise ValueError(f"batch['tokens'] has shape {shape}: must be [B, S] with S >= 1")
    for key in ("labels", "attention_mask"):
        other = batch.get(key)
        found = tuple(getattr(other, "shape", ()))
        if other is not None and found != shape:
            raise ValueError(f"batch[{key!r}] has shape {found}: must be that of tokens, {shape}")
    mask = batch.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise ValueError("batch['attention_mask'] is not all ones: say what is masked by cu_seqlens (for trailing padding, [0, "
                         "length])")
    return tokens


def _check_positions(positions: Any, seq_len: int, boundaries: np.ndarray | None) -> np.ndarray | None:
    if positions is None:
        return None
    values = positions.detach().cpu().numpy() if isinstance(positions, Tensor) else np.asarray(positions)
    if values.shape != (seq_len,) or values.dtype.kind not in "iu":
        raise ValueError(f"batch['positions'] has shape {values.shape} and dtype {values.dtype}: must be integers [{seq_len}]")
    values = values.astype(np.int64)
    restarts = np.flatnonzero(np.diff(values) != 1) + 1
    known = np.empty(0, dtype=np.int64) if boundaries is None else boundaries
    strange = restarts[~np.isin(restarts, known)]
    if boundaries is not None:
        strange = strange[strange < boundaries[-1]]         # rows after the last document belong to none
    if strange.size:
        raise ValueError(f"batch['positions'] restart at row {int(strange[0])}, where cu_seqlens has no boundary: "
                         "attention would cross documents; give batch['cu_seqlens']")
    return values


def _with_documents(layout: Layout | str, cu_seqlens: Any, seq_len: int, ranks: Ranks, masks: Any) -> Layout:
    """A fresh Layout (it will get a token of its own) whose masks have the batch's documents."""
    if isinstance(layout, Layout):
        if masks is not None:
            raise ValueError("masks together with a Layout: its masks are those it was made with; give one of them")
        given = layout.masks
    else:
        check_made_as(layout)
        given = as_masks(masks)
    if cu_seqlens is not None:
        documents = Mask(cu_seqlens=cu_seqlens).cu_seqlens
        for mask in given:
            if mask.cu_seqlens is not None and not np.array_equal(mask.cu_seqlens, documents):
                raise ValueError(f"batch['cu_seqlens'] and the layout's {mask!r} name different documents")
        given = tuple(mask.with_documents(documents) for mask in given)
    # A balanced layout gets the rows that suit the batch.
    if isinstance(layout, Layout):
        return layout.with_masks(given)
    return Layout(layout, seq_len, ranks.ring_size, given, ranks.ulysses_size)


def _place(layout: Layout | str, seq_len: int, rank: int | None, group: Any) -> tuple[Layout, int]:
    """The layout as a value, and the rank that is meant."""
    ranks = Ranks() if group is None else ranks_of(group)
    if group is not None and rank is not None:
        raise ValueError(f"rank={rank} together with group: give one of them")
    if isinstance(layout, str):
        if rank is not None:
            raise ValueError(f"layout={layout!r} with rank={rank}: a name does not say how many ranks there are; give a Layout "
                             f"or group")
        check_layout_argument(layout, "layout")
        layout = Layout(layout, seq_len, ranks.ring_size, ulysses_size=ranks.ulysses_size)
    check_layout_argument(layout, "layout")
    if group is not None:
        check_ranks(layout, ranks)
        rank = ranks.rank
    if rank is None:
        if layout.num_ranks != 1:
            raise ValueError(f"layout of {layout.num_ranks} ranks: which rank is meant? give rank or group")
        rank = 0
    if not 0 <= rank < layout.num_ranks:
        raise ValueError(f"rank={rank}: must lie in [0, {layout.num_ranks})")
    return layout, rank
