"""Training equivalence: one SGD step of the same model on the same tokens, on one rank against a ring of N processes."""
from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ringflash.config import AttentionConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, validate
from ringflash.launch.check_spawn import Rank, run_ranks
from ringflash.launch.check_table import grid
from ringflash.train import equivalence
from ringflash.train.text import open_data


def small_configs(cache_dir: str) -> dict[str, Config]:
    """Small models on real text in fp32, by name; a length that no number of ranks divides."""
    plain = Config(
        model=ModelConfig(dim=64, num_layers=2, num_heads=8, num_kv_heads=2, ffn_dim=96, loss_chunk_rows=100),
        data=DataConfig(seq_len=509, max_bytes=200_000, cache_dir=cache_dir),
        train=TrainConfig(dtype="fp32", accumulation=2))
    mixed = dataclasses.replace(
        plain, model=dataclasses.replace(plain.model, sinks=True),
        attention=AttentionConfig(layout="balanced", layers=["window", "global"], window_size=[63, 0]))
    sharded = dataclasses.replace(plain, model=dataclasses.replace(plain.model, tie_embeddings=True), parallel=ParallelConfig(shard=-1))
    return {"a small model": plain, "one of window and global layers with sinks": mixed, "one of sharded and tied weights": sharded}


def run_config(folder: str | Path) -> tuple[Config, Mapping[str, torch.Tensor] | None]:
    """Configuration of a finished run and the weights that it left (None if it saved none). ValueError if it is not one."""
    from omegaconf import OmegaConf

    folder = Path(folder)
    written = folder / ".hydra" / "config.yaml"
    if not written.is_file():
        raise ValueError(f"--run={folder}: no run folder, {written} is missing; want one that launch/train.py made")
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(written)))
    weights = folder / "weights.pt"
    return cfg, torch.load(weights, map_location="cpu") if weights.is_file() else None


def overridden_config(words: Sequence[str]) -> Config:
    """Of overrides of launch/train.py; parallel.* is set by the check. ValueError for what cannot be."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from ringflash.launch.train import check_overrides, compose, misspelt, register_schema, to_config

    register_schema()
    try:
        check_overrides(list(words))
        return to_config(compose(list(words)))
    except (HydraException, OmegaConfBaseException) as error:
        said = "; ".join(misspelt(list(words))) or " ".join(str(error).split("Config search path")[0].split())
        raise ValueError(f"--config: {said}") from error


def train_ranks(rank: Rank, configs: Sequence[Config], weights: Mapping[str, torch.Tensor] | None) -> list[dict]:
    """The work of one rank; all return the same reports, as plain values."""
    group, reports, began = torch.distributed.group.WORLD, [], time.monotonic()

    def say(text: str) -> None:
        if rank.rank == 0:
            print(f"{time.monotonic() - began:7.1f} s: {text}", flush=True)

    for index, cfg in enumerate(configs):
        rank.at(index)
        reports.append(equivalence.run(cfg, open_data(cfg), device=rank.device, group=group, weights=weights, say=say).as_json())
    return reports


def check_train(*, num_processes: int, device_type: str, run: str | None, timeout_s: float, overrides: Sequence[str] = (),
                say: Callable[[str], None] = lambda text: None) -> tuple[bool, list[dict]]:
    """Prints a table per model; (every quantity within its budget, all figures). ValueError: impossible; RingFailure: a rank
    failed."""
    with tempfile.TemporaryDirectory(prefix="ringflash-check-") as cache_dir:
        weights = None
        if run:
            cfg, weights = run_config(run)
            configs = {f"the model of {run}": cfg}
        elif overrides:
            configs = {" ".join(overrides): overridden_config(overrides)}
        else:
            configs = small_configs(cache_dir)
        for name, cfg in configs.items():
            shard = 1 if cfg.parallel.shard == 1 else -1
            parallel = ParallelConfig(dp=1, cp=num_processes, shard=shard, timeout_s=cfg.parallel.timeout_s)
            configs[name] = cfg = dataclasses.replace(cfg, parallel=parallel)
            if cfg.run.device != "auto":
                device_type = cfg.run.device
            validate(cfg, num_processes)
            open_data(cfg)                  # a missing file is said here, once; and the ranks find the text prepared
        reports = run_ranks(train_ranks, num_processes, tuple(configs.values()), weights, device_type=device_type,
                            timeout_s=timeout_s, say=say, name_of=lambda index: f"the step of {list(configs)[index]}")[0]
    say("")
    records = [show(name, cfg, report, device_type, num_processes) for (name, cfg), report in zip(configs.items(), reports)]
    return all(record["ok"] for record in records), records


def show(name: str, cfg: Config, report: dict, device_type: str, num_processes: int) -> dict:
    """Prints the table of one model. Returns its record."""
    print(f"\nTraining equivalence: {name}, {cfg.data.seq_len} tokens, {cfg.attention.layout} layout, on {device_type}: "
          f"one SGD step on a ring of {num_processes} ranks against one rank\n")
    print(summary(report["rows"]))
    wrong = [row for row in report["rows"] if not row["ok"]]
    for row in wrong[:10]:
        print(f"FAIL {row['name']}: error {row['error']:.2e}, budget {row['budget']:.2e}")
    print(f"{len(report['rows']) - len(wrong)} of {len(report['rows'])} quantities within budget", flush=True)
    return {"model": name, **report}


def summary(rows: Sequence[Mapping]) -> str:
    """One line per kind of parameter (all layers together): the worst error over its budget."""
    kinds: dict[str, list[Mapping]] = {}
    for row in rows:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", row["name"]), []).append(row)
    lines = []
    for kind, members in kinds.items():
        worst = max(members, key=lambda row: row["error"] / row["budget"] if row["budget"] else row["error"])
        ratio = worst["error"] / worst["budget"] if worst["budget"] else 0.0 if worst["error"] == 0 else float("inf")
        lines.append([kind, len(members), f"{worst['scale']:.2e}", f"{worst['error']:.2e}", f"{ratio:.2f}",
                      "ok" if all(row["ok"] for row in members) else "FAIL"])
    return grid(["quantity", "tensors", "largest", "error", "of budget", ""], lines)
