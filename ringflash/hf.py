"""Models of Hugging Face transformers over a ring, in two lines:

    ringflash.hf.enable(model, mesh["cp"])
    loss = model(**ringflash.hf.inputs(ringflash.shard_batch(batch, group=mesh["cp"], masks=ringflash.hf.masks(model)))).loss

Each rank then holds its share of the loss: the shares of all ranks, and the gradients of them, only have to be added. Needs the
transformers package (the extra `hf`), which is imported when a model comes.
"""
from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ringflash import ring_attention
from ringflash.arguments import check_rotate, check_routing
from ringflash.hf_config import layer_masks
from ringflash.mask import Mask
from ringflash.mesh import ranks_of
from ringflash.sharding import ShardedBatch


def enable(model: Any, group: Any = None, *, kernel: str = "auto", exchange: str = "auto", rotate: str = "auto",
           routing: str = "auto", deterministic: bool = False, untested: bool = False) -> Any:
    """The attention of `model` (a decoder of transformers, not yet wrapped by DDP or FSDP) goes over the ring from now on.

    group, kernel, exchange, rotate, routing, deterministic: as in ring_attention. Windows, chunks, softcap, sinks and the scale
    are those of the model's layers. The model gets a configuration of its own, with use_cache=False: one that other models
    were made from is left alone.
    untested: take also a model_type that was never compared with transformers' own attention.

    Returns model. Called afterwards without what `inputs` gives, it raises ValueError, as it does for padding, masks that are no
    Mask, caches and attention weights. Raises ValueError, naming layer or option, for attention dropout, layers of other kinds,
    RoPE that follows the local length; RuntimeError without transformers.
    """
    ranks_of(group)  # an error of the user's here and not in the first layer
    check_rotate(rotate)
    check_routing(routing)
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"ringflash.hf needs the transformers package ({error}): pip install 'ringflash[hf]'") from error
    from ringflash.hf_attention import attach

    attach(model, functools.partial(ring_attention, group=group, kernel=kernel, exchange=exchange, rotate=rotate, routing=routing,
                                    deterministic=deterministic), untested=untested)
    return model


def masks(model: Any) -> tuple[Mask, ...]:
    """What the layers of the model see, each kind once: for shard_batch(..., masks=...)."""
    return tuple(dict.fromkeys(layer_masks(model.config)))


def inputs(sharded: ShardedBatch, *, num_items: int | Tensor | None = None) -> dict[str, Any]:
    """What to call an enabled model with, from shard_batch's part of this rank: `model(**inputs(...))`.

    num_items: by what the sum of losses is divided: the valid tokens of the whole optimizer step, of all rings and
    micro-batches. Default: this ring's in this batch (sharded.num_valid). A rank without a valid token has loss and gradient 0.

    The loss (and each of its gradients) is this rank's share: add it up over all ranks of dp x cp, where DDP and FSDP average.
    Logits are made for every local row, [B, S_local, V] in fp32: for a large vocabulary use `model=hf` of the training loop, or
    the hidden states with ringflash.loss.chunked_cross_entropy.
    Raises ValueError where some rank of the ring has no rows, which transformers' modules cannot take.
    """
    from ringflash.hf_attention import check_rows

    check_rows(sharded.layout)
    count = sharded.num_valid if num_items is None else num_items
    positions = sharded.positions[None].expand(len(sharded.tokens), -1)
    count = torch.clamp(count, min=1) if isinstance(count, Tensor) else max(count, 1)
    # transformers computes a loss where there are labels, and takes shift_labels as they are.
    return {"input_ids": sharded.tokens, "position_ids": positions, "labels": sharded.labels, "shift_labels": sharded.labels,
            "num_items_in_batch": count, "layout": sharded.layout, "use_cache": False}
