"""Attention of a transformers model, through the registry that transformers has for it.

transformers asks the registered mask function what the layers of a kind see, and hands the answer to them. Ours answers with a
Mask, never with a tensor of rows x keys: what a layer gets is what the model asked for, and all that is no Mask is refused.
Note [Models of transformers] in DESIGN.md.
"""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.hf_config import check_config, layer_masks
from ringflash.mask import Mask

NAME = "ring_attn"  # transformers takes any name with "flash" in it for FlashAttention
_SLOT = "ringflash_attention"
_BOTH = "attention in both directions is not what a decoder trains with"
# What a model gives its layers beside q, k and v and is no matter of attention.
_HARMLESS = {"position_ids", "position_embeddings", "use_cache", "cache", "past_key_values", "cache_position",
             "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "shift_labels",
             "num_items_in_batch"}
_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class _Slot:
    """What an attention module of an enabled model knows."""

    name: str
    mask: Mask  # of its layer, by the configuration; without documents
    attention: Callable[..., Tensor]  # as ring_attention, with its group

    def __deepcopy__(self, memo: dict) -> _Slot:
        return self  # a copied model stays on the same ring; a process group cannot be copied


def attach(model: nn.Module, attention: Callable[..., Tensor], *, untested: bool = False) -> None:
    """From now on the layers of `model` (a decoder of transformers) call attention(q, k, v, *, mask, layout, softmax_scale[,
    softcap, sinks]), q [B, S_local, Hq, D]. Its configuration becomes its own: one that other models share stays as it is.

    Raises ValueError naming layer or option for what cannot be computed so.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: must be a model of transformers, got {type(model).__name__}; DDP, FSDP, PEFT wrap it later")
    check_config(model.config, untested=untested)
    masks, slots = layer_masks(model.config), []
    for index, block in enumerate(decoder_layers(model)):
        found = [(name, module) for name, module in block.named_modules()
                 if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]
        if len(found) != 1:
            raise ValueError(f"layers.{index} ({type(block).__name__}): has {len(found)} attention modules, must have one")
        (name, module), = found
        if not module.is_causal:
            raise ValueError(f"layers.{index}.{name}: is_causal=False: {_BOTH}")
        slots.append((module, _Slot(f"layers.{index}.{name}", masks[index], attention)))
    if not type(model)._can_set_attn_implementation():
        raise ValueError(f"{type(model).__name__}: does not take its attention from transformers' registry")
    register()
    own_config(model)
    # A cache of keys and values is of no use in training; transformers makes one unless told not to.
    model.config.use_cache = False
    model.set_attn_implementation(NAME)
    for module, slot in slots:
        if not hasattr(module, _SLOT):
            module.register_forward_pre_hook(_still_ours)
        setattr(module, _SLOT, slot)


def _still_ours(module: nn.Module, args: tuple) -> None:
    """Before the forward of an attention module of an enabled model."""
    now = module.config._attn_implementation
    if now != NAME:
        raise ValueError(f"{getattr(module, _SLOT).name}: attn_implementation={now}: would see this rank's rows alone, and other documents; "
                         f"nearest: {NAME}, or a model that was never enabled")


def own_config(model: nn.Module) -> None:
    """Gives the model a copy of its configuration and of every part of it, wherever its modules hold one."""
    from transformers import PreTrainedConfig

    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                # One that is not part of the model's is copied here.
                setattr(module, name, copy.deepcopy(value, memo))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the decoder, in their order. ValueError where there is no list of them."""
    decoder, depth = model.get_decoder(), model.config.num_hidden_layers
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == depth:
            return list(child)
    raise ValueError(f"{type(decoder).__name__}: has no list of config.num_hidden_layers={depth} layers")


def check_rows(layout: Any) -> None:
    """ValueError, the same on every rank, where some rank of the layout has no rows."""
    if any(layout.shard_len(rank) == 0 for rank in range(layout.num_ranks)):
        raise ValueError(f"seq_len={layout.seq_len} over {layout.num_ranks} ranks: some rank has no rows, and modules of "
                         f"transformers need one at least; nearest: {layout.num_ranks} tokens")


def register() -> None:
    """Both functions, under NAME, for every model of this process. Changes nothing for models with another implementation."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float | None = None,
               dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
               layout: Any = None, is_causal: bool | None = None, **others: Any) -> tuple[Tensor, None]:
    """transformers' call of a layer: query [B, Hq, S_local, D], key, value [B, Hkv, S_local, D] -> (out [B, S_local, Hq, D],
    None)."""
    slot = getattr(module, _SLOT, None)
    if slot is None:
        raise RuntimeError(f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}: attn_implementation={NAME} "
                           "without ringflash.hf.enable(model, ...)")
    _refuse_options(slot.name, module, dropout, is_causal, others)
    mask = _mask_of_layer(slot, attention_mask, sliding_window, layout)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if torch.is_autocast_enabled(q.device.type):
        # As torch's own attention under autocast: rotary embedding may have left q and k wider than v.
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    options = ({"softcap": float(softcap)} if softcap else {}) | ({} if s_aux is None else {"sinks": s_aux})
    return slot.attention(q, k, v, mask=mask, layout=layout, softmax_scale=scaling, **options), None


def _refuse_options(name: str, module: nn.Module, dropout: float, is_causal: bool | None, others: dict[str, Any]) -> None:
    """ValueError naming the layer and what attention over a ring does not have."""
    if dropout:
        raise ValueError(f"{name}: dropout={dropout}: attention over a ring has none; nearest: 0.0")
    if is_causal is False or not module.is_causal:
        raise ValueError(f"{name}: is_causal=False: {_BOTH}")
    if others.get("use_cache"):
        raise ValueError(f"{name}: use_cache=True: a rank holds its own rows only, not those of the others; nearest: False")
    if others.get("output_attentions") or getattr(module.config, "output_attentions", False):
        raise ValueError(f"{name}: output_attentions=True: the weights (rows x keys) are never made; nearest: False")
    for key in _DOCUMENTS:
        if others.get(key) is not None:
            raise ValueError(f"{name}: {key}: documents are those of layout=, which shard_batch makes from batch['cu_seqlens']")
    for key, value in others.items():
        if key not in _HARMLESS and value is not None and value is not False:
            raise ValueError(f"{name}: {key}: not known to attention over a ring")


def _mask_of_layer(slot: _Slot, given: Any, sliding_window: int | None, layout: Any) -> Mask:
    """The layer's mask with the batch's documents, one of layout.masks."""
    if not isinstance(given, Mask):
        shown = f"a {given.ndim}-D tensor" if isinstance(given, Tensor) else repr(given)
        raise ValueError(f"{slot.name}: attention_mask is {shown}: masks of rows x keys are not taken; what is masked is said by "
                         "layout=, which shard_batch makes from batch['cu_seqlens']")
    if given != slot.mask:
        raise ValueError(f"{slot.name}: its configuration means {slot.mask!r}, but the model asked for {given!r}")
    if sliding_window is not None and given.window_size[0] != sliding_window - 1:
        raise ValueError(f"{slot.name}: sliding_window={sliding_window}, but the model asked for {given!r}")
    if layout is None:
        raise ValueError(f"{slot.name}: no layout: call the model with layout=, that of shard_batch (ringflash.hf.inputs)")
    documents = next((mask.cu_seqlens for mask in layout.masks if mask.cu_seqlens is not None), None)
    mask = given if documents is None else given.with_documents(documents)
    if mask not in layout.masks:
        raise ValueError(f"{slot.name}: {given!r} is not among the layout's masks; nearest: shard_batch(batch, ..., "
                         "masks=ringflash.hf.masks(model))")
    return mask


def _mask(*, mask_function: Callable, attention_mask: Tensor | None = None, q_length: int = 0, kv_length: int = 0,
          q_offset: Any = 0, kv_offset: Any = 0, **_: Any) -> Mask:
    """What transformers asks for as a Mask, without documents: those come with the layout. ValueError for all else."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("attention_mask: padding is not taken; packed documents and trailing padding are said by "
                         "batch['cu_seqlens'] of shard_batch")
    if q_length != kv_length or int(q_offset) or int(kv_offset):
        raise ValueError(f"{q_length} queries at {int(q_offset)} over {kv_length} keys: a cache of keys and values is not taken; "
                         "nearest: use_cache=False")
    found = dict(_parts(mask_function))
    if "causal" not in found:
        raise ValueError(f"mask {_kind(mask_function)}: {_BOTH}")
    if found.get("window") is not None and found.get("chunk") is not None:
        raise ValueError("mask: both a window and chunks in one layer")
    window = (found["window"] - 1, 0) if "window" in found else (-1, -1)
    return Mask(window_size=window, chunk_size=found.get("chunk"))


def _kind(function: Callable) -> str:
    return getattr(function, "__qualname__", repr(function)).split(".")[0]


def _parts(function: Callable) -> list[tuple[str, Any]]:
    """The bounds that a mask function of transformers is the conjunction of. ValueError for one that is not known."""
    code = getattr(function, "__code__", None)
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()))) if code else {}
    kind = _kind(function) if getattr(function, "__module__", "") == "transformers.masking_utils" else ""
    if kind == "and_masks":
        return [part for each in held["mask_functions"] for part in _parts(each)]
    if kind == "remap_positions_for_packed_sequence":
        return _parts(held["mask_function"])
    if kind == "bidirectional_mask_function":
        return []
    if kind == "packed_sequence_mask_function":
        # Guessed from jumps of the local positions, which a shard has in the middle of a document.
        return []
    if kind == "causal_mask_function":
        return [("causal", True)]
    if kind == "sliding_window_overlay":
        return [("window", held["sliding_window"])]
    if kind == "chunked_overlay":
        return [("chunk", held["chunk_size"])]
    raise ValueError(f"mask {getattr(function, '__qualname__', function)!s}: not known to attention over a ring; known are "
                     "causal, sliding windows and chunks")
