"""Weights between a run and a Hugging Face folder (config.json, *.safetensors): Llama and Qwen3 shapes, and runs of model=hf.

    python launch/convert.py export outputs/run-... exported --dtype bf16      a run folder with weights.pt: to a Hugging Face folder
    python launch/convert.py import Qwen3-0.6B imported                        a Hugging Face folder: to weights.pt and model.yaml

model.yaml is the run's `model` group (a file for configs/model), weights.pt the state of a Transformer of those sizes. Needs the
safetensors package (pip install 'ringflash[hf]'). A run of model=hf needs no import: model.weights names their folder. No tokenizer
is written: a model trained on bytes has none of theirs.
"""
from __future__ import annotations

import argparse
import dataclasses
import pickle
import sys
from pathlib import Path

if __package__ in (None, "") and (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file():
    # A script's own folder comes first on the path, where train, check and bench would be top-level modules: use the checkout.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringflash import Mask
from ringflash.config import Config
from ringflash.model import ModelConfig
from ringflash.model.build import model_config
from ringflash.model.huggingface import load_huggingface, save_huggingface
from ringflash.train.folder import read_description
from ringflash.train.trainer import layer_masks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: list[str] | None = None) -> int:
    """0, or 2 with one line on stderr that says what is wrong."""
    parser = argparse.ArgumentParser(prog="convert", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="from a run folder to a Hugging Face folder")
    export.add_argument("run", type=Path, help="a run folder with weights.pt (run.save_weights=true)")
    export.add_argument("--max-positions", type=int, help="max_position_embeddings; default: the run's data.seq_len")
    taken = commands.add_parser("import", help="from a Hugging Face folder to weights.pt and model.yaml")
    taken.add_argument("source", type=Path)
    for command in (export, taken):
        command.add_argument("out", type=Path, help="a folder that has none of these files yet")
        command.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as they are")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        for name in ("config.json", "model.safetensors") if args.command == "export" else ("weights.pt", "model.yaml"):
            if (args.out / name).exists():
                raise ValueError(f"{args.out / name} exists: name another folder")
        written = (_export if args.command == "export" else _import)(args)
    except (ValueError, OSError, RuntimeError, OmegaConfBaseException) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    print(f"{written:,} parameters in {args.out}")
    return 0


def _export(args: argparse.Namespace) -> int:
    saved, weights = args.run / ".hydra" / "config.yaml", args.run / "weights.pt"
    for path in (saved, weights):
        if not path.is_file():
            raise ValueError(f"{args.run}: no finished run; it has no {path.relative_to(args.run)}")
    cfg: Config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), read_description(saved, dict)))
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{weights} is torn or no torch file: {str(error).splitlines()[0]}") from error
    if cfg.model.hf is not None:
        from ringflash.hf_config import read_config
        from ringflash.model.hf_model import save_pretrained

        if args.max_positions is not None:
            raise ValueError(f"--max-positions: model.hf={cfg.model.hf} has a config.json of its own, which says it")
        return save_pretrained(args.out, read_config(cfg.model.hf), state, DTYPES.get(args.dtype))
    if any(mask != Mask() for mask in layer_masks(cfg.attention)):
        a = cfg.attention
        raise ValueError(f"attention.layers={list(a.layers)}, attention.window_size={list(a.window_size)}, attention.chunk_size={a.chunk_size}"
                         ": the layers of Llama and Qwen3 as they are written here see all that comes before")
    config = model_config(cfg)
    positions = cfg.data.seq_len if args.max_positions is None else args.max_positions
    save_huggingface(args.out, config, state, max_position_embeddings=positions, dtype=DTYPES.get(args.dtype))
    return _count(config, state)


def _import(args: argparse.Namespace) -> int:
    config, state = load_huggingface(args.source)
    if args.dtype:
        # A tied head stays the same tensor, so that it is written once.
        cast = {id(value): value.to(DTYPES[args.dtype]) for value in state.values()}
        state = {name: cast[id(value)] for name, value in state.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    torch.save(state, args.out / "weights.pt")
    OmegaConf.save(OmegaConf.create(dataclasses.asdict(config)), args.out / "model.yaml")
    return _count(config, state)


def _count(config: ModelConfig, state: dict[str, torch.Tensor]) -> int:
    return sum(value.numel() for name, value in state.items() if not (config.tie_embeddings and name == "head.weight"))


if __name__ == "__main__":
    sys.exit(main())
