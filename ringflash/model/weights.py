"""The first weights of a model from a folder (model.weights): one at a time, with their names and shapes checked first."""
from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from ringflash.config import Config
from ringflash.hf_config import read_config
from ringflash.rotary import RopeScaling

from .build import build_model, model_config
from .huggingface import INDEX, SINGLE, config_from_huggingface, names
from .transformer import ModelConfig

_log = logging.getLogger("ringflash")
# What of a model's description no weight depends on.
_FREE = {"vocab_size", "dim", "num_layers", "ffn_dim", "init_std", "loss_chunk_rows", "z_loss"}  # sizes show in the shapes
# What no weight of a model of transformers shows.
_HIDDEN = ("model_type", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "norm_eps", "hidden_act",
           "hidden_activation", "attn_logit_softcapping", "query_pre_attn_scalar", "num_experts_per_tok")
_STRETCHED = {"rope_base", "rope_scaling"}  # changed on purpose, to train at longer positions


@dataclass(frozen=True)
class Weights:
    """What a folder holds, by our names."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]  # name -> the weight on the CPU, in the dtype of its file
    config: ModelConfig | None  # of the model they are from, as far as the folder says


def open_weights(cfg: Config) -> Weights:
    """Of model.weights: a folder with weights.pt (of a run, or made by `launch/convert.py import`), or one of Hugging Face with
    config.json and safetensors. Reads names and shapes. ValueError for a folder with neither, RuntimeError without safetensors.
    """
    folder = Path(cfg.model.weights)
    if (folder / "weights.pt").is_file():
        try:
            state = torch.load(folder / "weights.pt", map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"model.weights={folder}: weights.pt is torn or no torch file: {reason}") from error
        return Weights({name: tuple(value.shape) for name, value in state.items()}, state.__getitem__, _config_beside(folder))
    if not (folder / "config.json").is_file() or not ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
        raise ValueError(f"model.weights={folder}: has neither weights.pt nor config.json with {SINGLE} or {INDEX}")
    found = _of_safetensors(folder)
    if cfg.model.hf is not None:
        from .hf_model import ours, pretrained

        if is_converted(folder):
            state = {ours(name): value for name, value in pretrained(folder).items()}
            return Weights({name: tuple(value.shape) for name, value in state.items()}, state.__getitem__, None)
        theirs, config = {ours(name): name for name in found}, None
    else:
        config = config_from_huggingface(json.loads((folder / "config.json").read_text()))
        known = {name: mine for mine, name in names(config).items()} | {"lm_head.weight": "head.weight"}
        theirs = {known.get(name, name): name for name in found if not name.endswith("rotary_emb.inv_freq")}
    return Weights({mine: found[name][1] for mine, name in theirs.items()}, lambda mine: _read(*found[theirs[mine]][0]), config)


def check_folder(cfg: Config) -> None:
    """Whether model.weights are those of the model that cfg names, before there are ranks. ValueError, as check_weights. (Those
    that have to be read whole to know their names are left to the ranks.)"""
    if cfg.model.hf is not None and is_converted(Path(cfg.model.weights)):
        return
    with torch.device("meta"):
        model = build_model(cfg, _no_attention)
    try:
        check_weights(cfg, open_weights(cfg), model)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def is_converted(folder: Path) -> bool:
    """Whether transformers holds these weights under other names than their files do: experts are one tensor there."""
    path = folder / "config.json"
    return path.is_file() and not (folder / "weights.pt").is_file() and \
        json.loads(path.read_text()).get("model_type") in ("mixtral", "qwen3_moe")


def _no_attention(*_, **__) -> Tensor:
    raise RuntimeError("a model on the meta device has no attention")


def check_weights(cfg: Config, weights: Weights, model: nn.Module) -> None:
    """ValueError naming what differs: weights that are missing, unknown or of another shape, and sizes that no shape shows."""
    parameters = dict(model.named_parameters())
    # A tied matrix may be written under both of its names.
    aliases = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    there = weights.shapes
    groups = {"missing": sorted(parameters.keys() - there.keys()), "unknown": sorted(there.keys() - parameters.keys() - aliases),
              "of another shape": [f"{name} {list(there[name])} there, {list(parameter.shape)} here"
                                   for name, parameter in parameters.items()
                                   if name in there and tuple(parameter.shape) != there[name]]}
    problems = [f"{what}: {', '.join(which[:3])}{f' and {len(which) - 3} more' if len(which) > 3 else ''}"
                for what, which in groups.items() if which]
    if weights.config is not None and cfg.model.hf is None:
        mine, theirs = model_config(cfg), weights.config
        for key in (f.name for f in fields(ModelConfig)):
            here, there = (config.resolved_head_dim if key == "head_dim" else getattr(config, key) for config in (mine, theirs))
            if here == there or key in _FREE:
                continue
            if key in _STRETCHED:
                _log.warning("model.%s=%s: model.weights=%s were trained with %s", key, here, cfg.model.weights, there)
            else:
                problems.append(f"model.{key}={here}: they are of a model with {there}")
    elif cfg.model.hf is not None and (Path(cfg.model.weights) / "config.json").is_file():
        mine, theirs = read_config(cfg.model.hf), read_config(cfg.model.weights)
        problems += [f"config.{key}={getattr(mine, key, None)}: they are of a model with {getattr(theirs, key, None)}"
                     for key in _HIDDEN if getattr(mine, key, None) != getattr(theirs, key, None)]
    if problems:
        raise ValueError(f"model.weights={cfg.model.weights}: {'; '.join(problems)}")


@torch.no_grad()
def load_weights(cfg: Config, model: nn.Module, write: Callable[[Tensor, Tensor], None] = Tensor.copy_) -> None:
    """Those of model.weights into a built model. write(parameter, the weight, whole and on the CPU) may keep a part of it.

    Raises ValueError as open_weights and check_weights do, before any weight is written.
    """
    weights = open_weights(cfg)
    check_weights(cfg, weights, model)
    for name, parameter in model.named_parameters():
        write(parameter, weights.read(name).to(parameter.dtype))


def _config_beside(folder: Path) -> ModelConfig | None:
    """Of the model.yaml that convert.py writes beside weights.pt, or of a run folder's own configuration."""
    import yaml

    if (folder / "model.yaml").is_file():
        values = yaml.safe_load((folder / "model.yaml").read_text())
    elif (folder / ".hydra" / "config.yaml").is_file():
        values = yaml.safe_load((folder / ".hydra" / "config.yaml").read_text())["model"]
    else:
        return None
    known = {f.name for f in fields(ModelConfig)}
    values = {key: value for key, value in values.items() if key in known}
    return ModelConfig(**values | {"rope_scaling": RopeScaling(**values.get("rope_scaling") or {})})


def _of_safetensors(folder: Path) -> dict[str, tuple[tuple[Path, str], tuple[int, ...]]]:
    """Their name -> ((file, name), shape)."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise RuntimeError(f"model.weights={folder}: needs the safetensors package: pip install 'ringflash[hf]'") from error
    files = [SINGLE]
    if (folder / INDEX).is_file():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    found = {}
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"model.weights={folder}: {file} is missing")
        try:
            with safe_open(folder / file, framework="pt") as opened:
                found |= {name: ((folder / file, name), tuple(opened.get_slice(name).get_shape())) for name in opened.keys()}
        except SafetensorError as error:
            raise ValueError(f"model.weights={folder}: {file}: {error}") from error
    return found


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)
