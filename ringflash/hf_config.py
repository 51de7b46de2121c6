"""What a configuration of transformers says that attention over a ring must know, read layer by layer, or refused by name.

Everything here takes the configuration object; transformers itself is imported by `read_config` alone.
"""
from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ringflash.config import MAX_HEAD_DIM, Config, ModelConfig
from ringflash.mask import Mask

# Held against transformers' own attention (tests/model/test_hf_families.py). Of others nobody knows whether a token's row depends
# on anything but its own position and what attention reads: convolutions, recurrences, positions counted from the local rows.
KNOWN = ("arcee", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2",
         "qwen3", "qwen3_moe", "smollm3", "starcoder2")
# transformers' word for a layer -> the option of its configuration that holds the size, None: there is none.
_KINDS = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# RoPE whose frequencies follow the longest position of the rows at hand: another number on every rank.
_LOCAL_ROPE = ("dynamic", "longrope")
# Options that change what attention computes, with the values that leave it alone.
_MUST_BE = {"attention_dropout": (None, 0, 0.0), "attn_pdrop": (None, 0, 0.0), "is_causal": (None, True),
            "use_bidirectional_attention": (None, False), "alibi": (None, False), "is_decoder": (None, False, True),
            "is_encoder_decoder": (None, False), "output_attentions": (None, False), "output_router_logits": (None, False),
            "pretraining_tp": (None, 1)}

# What a run with model.hf may say of its model, and what is said by config.json alone, or is not to be had.
_OURS = ("hf", "weights", "loss_chunk_rows", "z_loss")
_THEIRS = {"model": tuple(f.name for f in dataclasses.fields(ModelConfig) if f.name not in _OURS),
           "attention": ("window_size", "first_tokens", "chunk_size", "layers", "deterministic"),
           "train": ("tile_rows", "residual_dtype")}
# Changes to the logits, which the loss of the training loop (a plain output matrix) does not make.
_PLAIN_LOGITS = {"final_logit_softcapping": (None, 0.0), "logits_scaling": (None, 1, 1.0), "logit_scale": (None, 1, 1.0)}


def resolved(cfg: Config) -> Config:
    """cfg with the sizes and masks of its model.hf in `model` and `attention`, where everything that plans a run looks for them.

    Raises ValueError naming the key of ours that is set beside model.hf, or theirs that the training loop cannot do.
    """
    if not cfg.model.hf:
        raise ValueError("model.hf='': names no model; a folder with config.json, that file, or a name on the Hub, e.g. "
                         "model.hf=Qwen3-0.6B")
    plain = Config()
    for group, keys in _THEIRS.items():
        for key in keys:
            value, default = (getattr(getattr(each, group), key) for each in (cfg, plain))
            if value != default:
                raise ValueError(f"{group}.{key}={value}: a model of transformers (model.hf={cfg.model.hf}) has its own, or "
                                 f"none; nearest: {default}")
    if cfg.train.activations not in ("none", "block"):
        raise ValueError(f"train.activations={cfg.train.activations}: valid with model.hf={cfg.model.hf}: none, block")
    config = read_config(cfg.model.hf)
    try:
        check_config(config)
        masks = layer_masks(config)
        for key, valid in _PLAIN_LOGITS.items():
            if getattr(config, key, None) not in valid:
                raise ValueError(f"config.{key}={getattr(config, key)}: the loss of the training loop has none; nearest: "
                                 f"{valid[-1]}, or a loop of your own with ringflash.hf.enable")
    except ValueError as error:
        raise ValueError(f"model.hf={cfg.model.hf}: {error}") from error
    heads = config.num_attention_heads
    model = dataclasses.replace(
        cfg.model, vocab_size=config.vocab_size, dim=config.hidden_size, num_layers=config.num_hidden_layers, num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads, ffn_dim=config.intermediate_size,
        head_dim=head_dim(config), tie_embeddings=bool(config.tie_word_embeddings),
        softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0))
    kinds = ["window" if mask.window_size[0] >= 0 else "chunk" if mask.chunk_size else "global" for mask in masks]
    window = next((list(mask.window_size) for mask in masks if mask.window_size[0] >= 0), [-1, -1])
    attention = dataclasses.replace(
        cfg.attention, layers=kinds[:1] if len(set(kinds)) == 1 else kinds, window_size=window,
        chunk_size=next((mask.chunk_size for mask in masks if mask.chunk_size), None))
    return dataclasses.replace(cfg, model=model, attention=attention)


def check_config(config: Any, *, untested: bool = False) -> None:
    """ValueError, naming the option and its value, for a model whose rows cannot be spread over ranks. untested: take also those
    of a model_type that is not in KNOWN."""
    kind = config.model_type
    if kind not in KNOWN and not untested:
        raise ValueError(f"model_type={kind}: not among those that were compared with transformers' own attention "
                         f"({', '.join(KNOWN)}); ringflash.hf.enable(..., untested=True) takes it all the same")
    if config.get_text_config() is not config:
        raise ValueError(f"model_type={kind}: a model of several parts; nearest: its text model alone")
    for key, valid in _MUST_BE.items():
        if getattr(config, key, None) not in valid:
            raise ValueError(f"config.{key}={getattr(config, key)}: attention over a ring has none of it; nearest: {valid[-1]}")
    for rope in _rope_parameters(config):
        if rope.get("rope_type") in _LOCAL_ROPE:
            raise ValueError(f"config.rope_parameters: rope_type={rope['rope_type']}: its frequencies follow the last position "
                             "of a rank's own rows, so every rank would have others; nearest: yarn, llama3, linear, default")
    size = head_dim(config)
    if size > MAX_HEAD_DIM:
        raise ValueError(f"config.head_dim={size}: the kernels take at most {MAX_HEAD_DIM}")


def layer_masks(config: Any) -> tuple[Mask, ...]:
    """What each decoder layer sees, without documents. ValueError naming the layer and its kind where that is no Mask."""
    depth, masks = config.num_hidden_layers, []
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if windowed else "full_attention"] * depth
    for index, kind in enumerate(kinds[:depth]):
        if kind not in _KINDS:
            raise ValueError(f"layers.{index}: config.layer_types[{index}]={kind}: valid: {', '.join(_KINDS)}")
        key = _KINDS[kind]
        size = None if key is None else getattr(config, key, None)
        if key is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"layers.{index}: config.layer_types[{index}]={kind} with config.{key}={size}: must be at least 1")
        # transformers counts the query itself among the keys of a window.
        masks.append({None: lambda: Mask(), "sliding_window": lambda: Mask(window_size=(size - 1, 0)),
                      "attention_chunk_size": lambda: Mask(chunk_size=size)}[key]())
    return tuple(masks)


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def read_config(source: str) -> Any:
    """The configuration of a folder with a config.json, of that file, or of a name on the Hub. ValueError if there is none."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError(f"model.hf={source}: needs the transformers package ({error}): pip install 'ringflash[hf]'") from error
    path = Path(source)
    looks_local = path.exists() or path.is_absolute() or source.startswith(".") or source.endswith(".json")
    if looks_local and not (path if path.suffix == ".json" else path / "config.json").is_file():
        raise ValueError(f"model.hf={source}: no config.json there")
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model.hf={source}: {error}") from error


def _rope_parameters(config: Any) -> list[dict]:
    """One for all layers, or one for each kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    return nested or [given]
