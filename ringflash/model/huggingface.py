"""Weights and sizes to and from Hugging Face folders (config.json and *.safetensors) of Llama and Qwen3 shapes.

Both turn dims i and i + D / 2 as we do, so weights are renamed, never permuted. What a Transformer cannot compute (biases, other
activations, windows, unknown kinds of RoPE) is refused by its key, nothing is left out in silence. Needs the safetensors package
(the extra `hf`), not transformers.
"""
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..rotary import RopeScaling
from .transformer import ModelConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Our name and theirs of what every layer has, without the layer's prefix.
_LAYER = {
    "attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight", "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight", "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight", "ffn.up.weight": "mlp.up_proj.weight", "ffn.down.weight": "mlp.down_proj.weight",
}
_NORMS = {"attention.q_norm.weight": "self_attn.q_norm.weight", "attention.k_norm.weight": "self_attn.k_norm.weight"}
# What must be absent or have this value, for the model to be the one that we compute.
_MUST_BE = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False,),
            "sliding_window": (None,), "pretraining_tp": (1,), "partial_rotary_factor": (1.0,)}
_SIZES = {"vocab_size": "vocab_size", "dim": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
          "ffn_dim": "intermediate_size"}


def names(config: ModelConfig) -> dict[str, str]:
    """Our name of every weight -> theirs. A tied head has no weight of its own, there as here."""
    found = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not config.tie_embeddings:
        found["head.weight"] = "lm_head.weight"
    layer = _LAYER | (_NORMS if config.qk_norm else {})
    return found | {f"layers.{n}.{ours}": f"model.layers.{n}.{theirs}" for n in range(config.num_layers)
                    for ours, theirs in layer.items()}


def config_from_huggingface(values: dict[str, Any], **changes) -> ModelConfig:
    """The model of a config.json (as written by transformers 4 or 5); changes are fields of ModelConfig that replace it.

    Raises ValueError naming the key that is missing or that makes it another model than ours.
    """
    kind = values.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"config.json: model_type={kind}: valid: {', '.join(ARCHITECTURES)}")
    for key, valid in _MUST_BE.items():
        # Qwen3 names a window's length beside use_sliding_window=false: then there is none.
        unused = key == "sliding_window" and values.get("use_sliding_window") is False
        if key in values and values[key] not in valid and not unused:
            raise ValueError(f"config.json: {key}={values[key]}: this model has {valid[0]} there and nothing else")
    other = set(values.get("layer_types") or ()) - {"full_attention"}
    if other:
        raise ValueError(f"config.json: layer_types: {', '.join(sorted(other))}: this model's layers are all full_attention")
    missing = [key for key in (*_SIZES.values(), "rms_norm_eps") if key not in values]
    if missing:
        raise ValueError(f"config.json: {missing[0]} is missing")
    heads = values["num_attention_heads"]
    base, scaling = _rope(values)
    made = {ours: values[theirs] for ours, theirs in _SIZES.items()} | {
        "num_kv_heads": values.get("num_key_value_heads") or heads, "head_dim": values.get("head_dim"), "rope_base": base,
        "rope_scaling": scaling, "norm_eps": values["rms_norm_eps"], "tie_embeddings": values.get("tie_word_embeddings", False),
        "init_std": values.get("initializer_range", 0.02), "qk_norm": kind == "qwen3"}
    if made["head_dim"] is None and kind == "qwen3":
        made["head_dim"] = 128
    config = ModelConfig(**made | changes)
    config.validate()
    return config


def _rope(values: dict[str, Any]) -> tuple[float, RopeScaling]:
    """(base, scaling): transformers 5 has both in rope_parameters, 4 has rope_theta and rope_scaling."""
    given = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    base = float(given.pop("rope_theta", values.get("rope_theta", 10000.0)))
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json: partial_rotary_factor: this model turns all of head_dim")
    if kind == "default":
        return base, RopeScaling()
    known = {f.name for f in fields(RopeScaling)} - {"kind"}
    if kind not in ("linear", "llama3", "yarn") or not given.keys() <= known:
        raise ValueError(f"config.json: rope_type={kind} with {', '.join(sorted(given))}: known are default, linear, llama3, "
                         f"yarn with {', '.join(sorted(known))}")
    given = {key: value for key, value in given.items() if value is not None}
    if kind == "linear":
        given.pop("original_max_position_embeddings", None)  # written there too, and not used
    elif "original_max_position_embeddings" not in given:
        given["original_max_position_embeddings"] = values.get("original_max_position_embeddings") or values.get(
            "max_position_embeddings")
    return base, RopeScaling(kind, **given)


def config_to_huggingface(config: ModelConfig, *, max_position_embeddings: int,
                          dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What config.json says of our model: Qwen3 where it has QK-norm, Llama otherwise; in the form of transformers 5
    and in that of 4 (with which it was never read).

    Raises ValueError for what neither has: softcap, sinks.
    """
    for key in ("softcap", "sinks"):
        if getattr(config, key):
            raise ValueError(f"model.{key}={getattr(config, key)}: neither Llama nor Qwen3 has it; nearest: "
                             f"{'0.0' if key == 'softcap' else 'false'}")
    kind = "qwen3" if config.qk_norm else "llama"
    plain, s = RopeScaling(), config.rope_scaling
    rope = {"rope_type": "default" if s.kind == "none" else s.kind}
    # low and high have no default there; of the others those that differ are named.
    always = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
    rope |= {f.name: getattr(s, f.name) for f in fields(s) if f.name != "kind" and (
        f.name in always.get(s.kind, ()) or getattr(s, f.name) != getattr(plain, f.name))}
    values = {theirs: getattr(config, ours) for ours, theirs in _SIZES.items()} | {
        "architectures": [ARCHITECTURES[kind]], "model_type": kind, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.resolved_head_dim, "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std, "hidden_act": "silu", "attention_bias": False, "rope_theta": config.rope_base,
        "rope_parameters": rope | {"rope_theta": config.rope_base}, "max_position_embeddings": max_position_embeddings,
        # No token of ours begins or ends a text for them, until their tokenizer says so.
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True}
    if s.kind != "none":
        values["rope_scaling"] = rope
    return values


def load_huggingface(folder: str | os.PathLike, **changes) -> tuple[ModelConfig, dict[str, Tensor]]:
    """(config, state) of a Hugging Face folder on the CPU, in the dtypes of its files, for load_state_dict of a
    Transformer(config). changes are fields of ModelConfig, e.g. rope_scaling, that replace those of its config.json.

    Raises ValueError for weights that are missing, unknown or damaged, and RuntimeError without safetensors. Shapes are
    load_state_dict's matter.
    """
    folder = Path(folder)
    config = config_from_huggingface(json.loads((folder / "config.json").read_text()), **changes)
    safetensors = _safetensors()
    from safetensors import SafetensorError

    if (folder / INDEX).is_file():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        files = [SINGLE]
    found: dict[str, Tensor] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"{folder}: {file} is missing")
        try:
            found |= safetensors.load_file(folder / file)
        except SafetensorError as error:
            raise ValueError(f"{folder}: {file} is cut short or damaged: {error}") from error
    theirs = names(config)
    if config.tie_embeddings:
        found.pop("lm_head.weight", None)  # some write it twice
    # Buffers that old files still have.
    found = {name: value for name, value in found.items() if not name.endswith("rotary_emb.inv_freq")}
    missing, unknown = sorted(set(theirs.values()) - found.keys()), sorted(found.keys() - set(theirs.values()))
    if missing or unknown:
        raise ValueError(f"{folder}: " + "; ".join(f"{what} {', '.join(which[:3])}{' ...' if len(which) > 3 else ''}"
                                                   for what, which in (("missing", missing), ("unknown", unknown)) if which))
    state = {ours: found[name] for ours, name in theirs.items()}
    if config.tie_embeddings:
        state["head.weight"] = state["embedding.weight"]
    return config, state


def save_huggingface(folder: str | os.PathLike, config: ModelConfig, state: dict[str, Tensor], *, max_position_embeddings: int,
                     dtype: torch.dtype | None = None) -> None:
    """Writes config.json and model.safetensors of a Transformer's whole state_dict, cast to dtype (None: as they are). The
    weights appear whole or not at all, config.json after them.

    Raises ValueError for what the formats cannot hold and for a state that is not this config's, RuntimeError
    without safetensors.
    """
    written = dtype or next(iter(state.values())).dtype
    # First: what the format has no place for is told by its key, not as an odd weight.
    values = config_to_huggingface(config, max_position_embeddings=max_position_embeddings, dtype=written)
    theirs, safetensors = names(config), _safetensors()
    state = {name: value for name, value in state.items() if not (config.tie_embeddings and name == "head.weight")}
    if state.keys() != theirs.keys():
        odd = sorted(state.keys() ^ theirs.keys())
        raise ValueError(f"state has or lacks {', '.join(odd[:3])}: not the weights of this config")
    weights = {theirs[name]: value.detach().to("cpu", dtype or value.dtype).contiguous() for name, value in state.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / (SINGLE + ".part")
    safetensors.save_file(weights, part, metadata={"format": "pt"})
    os.replace(part, folder / SINGLE)
    part = folder / "config.json.part"
    part.write_text(json.dumps(values, indent=2) + "\n")
    os.replace(part, folder / "config.json")


def _safetensors():
    try:
        import safetensors.torch
    except ImportError as error:
        raise RuntimeError("Hugging Face files need the safetensors package: pip install 'ringflash[hf]'") from error
    return safetensors.torch
