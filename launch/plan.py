"""What a training step will take: memory by part, FLOPs, bytes, seconds, the best way to divide the GPUs, the longest sequence.

    python launch/plan.py model=llama3_8b data.seq_len=1048576 --gpu h200 --gpus 8 --png plan.png
    python launch/plan.py model=qwen3_32b data.seq_len=4194304 parallel.shard=64 --gpus 1024 --network-gb-s 12.5
    python launch/plan.py model=base data.seq_len=262144 train.activations=block --gpus 8 --calibration calibration.json
    python launch/plan.py calibrate model=llama3_8b --json calibration.json           on the GPU at hand, up to 64K tokens
    python launch/plan.py measure experiment=one_million data.seq_len=262144 --policies block,offload --json measured.json
    python launch/plan.py compare --calibration calibration.json --measured outputs/one_gpu-...      predicted against measured

Overrides are those of launch/train.py. What of parallel.dp, parallel.cp, parallel.ulysses, parallel.shard and train.activations
is not given is searched for; all else is planned as training runs it (train.tile_rows=4096 is proposed in a line where it is not
given). Numbers of hardware are printed with their sources; --rate replaces one, --calibration those of one kind of card.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ in ("__main__", "__mp_main__") and not __package__ and (ROOT / "pyproject.toml").is_file():
    sys.path[0] = str(ROOT)                 # run as a file: the checkout, not launch/, is the import root

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from ringflash.config import Config, validate
from ringflash.launch import plan_calibrate, plan_compare, plan_measure
from ringflash.launch.counts import count
from ringflash.launch.files import PICTURES, check_writable
from ringflash.launch.plan_calibrate import TILE_ROWS
from ringflash.launch.train import check_overrides, compose, register_schema, to_config
from ringflash.planning import search, show
from ringflash.planning.hardware import DEFAULT, GPUS, Hardware, hardware_of
from ringflash.planning.job import Job, check_counts, divisions
from ringflash.ring.documents import parse_documents
from ringflash.train.trainer import layer_masks


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 where no division fits, or of compare where an error is larger than allowed; 2 for what cannot be, in one line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = {"calibrate": plan_calibrate, "compare": plan_compare, "measure": plan_measure}.get(argv[0]) if argv else None
    parser = argparse.ArgumentParser(prog="ringflash plan", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as of ringflash train: model=llama3_8b data.seq_len=1048576 ...")
    (command.add_options if command else add_options)(parser)
    options = parser.parse_intermixed_args(argv[1:] if command else argv)
    try:
        return command.run(options, read_config) if command else run(options)
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        print(f"ringflash plan: {plan_compare.in_a_line(error, options.overrides)}", file=sys.stderr)
        return 2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", help=f"kind: {', '.join(GPUS)} (default: the calibration's, or {DEFAULT})")
    parser.add_argument("--gpus", type=int, default=1, help="how many, over all hosts (default 1)")
    parser.add_argument("--gpus-per-host", type=int, default=8, help="default 8")
    parser.add_argument("--network-gb-s", type=float, help="between hosts, per GPU (default 45: one 400 Gb/s port each)")
    parser.add_argument("--documents", help="packed documents, e.g. lognormal:sigma=1.0,seed=0 (default: one)")
    parser.add_argument("--calibration", metavar="FILE", help="what `plan.py calibrate` measured, in place of the table")
    parser.add_argument("--rate", action="append", default=[], metavar="NAME=VALUE", help="another number of the table")
    parser.add_argument("--top", type=count(1), default=8, help="how many divisions the table shows (default 8)")
    parser.add_argument("--json", metavar="FILE", help="writes what is shown")
    parser.add_argument("--png", metavar="FILE", help="draws memory and seconds by part")


def run(options: argparse.Namespace) -> int:
    """1 where nothing fits: then the table says how much it would take."""
    check_writable("--json", options.json)
    check_writable("--png", options.png, PICTURES)
    check_counts(options.gpus, options.gpus_per_host)
    hardware = read_hardware(options)
    cfg = read_config(options.overrides, options.gpus)
    jobs = read_jobs(cfg, options)
    found, refused = search.ranked(jobs, hardware)
    if not found:
        raise ValueError(refused[0])
    best, longest = found[0], search.longest_sequence(found[0].job, hardware)
    if cfg.run.device == "cpu":
        print(f"run.device=cpu: training so is on a CPU; this is the plan of its run.device=cuda on {hardware.name}")
    print(show.text(best, found[1:options.top], longest))
    if not _is_written("train.tile_rows", options.overrides) and not cfg.train.tile_rows and best.job.rows > TILE_ROWS:
        print(show.proposal(f"train.tile_rows={TILE_ROWS}", search.predict(_in_tiles(best.job), hardware)))
    for text in refused[:3]:
        print(f"left out: {text}")
    if options.json:
        written = {"longest": longest, "predictions": [show.as_dict(each) for each in found]}
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n")
    if options.png:
        show.draw(found[:options.top], options.png)
    return 0 if best.fits else 1


def _in_tiles(job: Job) -> Job:
    return replace(job, cfg=replace(job.cfg, train=replace(job.cfg.train, tile_rows=TILE_ROWS)))


def read_hardware(options: argparse.Namespace) -> Hardware:
    hardware = hardware_of(options.gpu, options.calibration)
    given = {}
    for text in options.rate:
        name, _, value = text.partition("=")
        try:
            given[name] = float(value)
        except ValueError:
            raise ValueError(f"--rate {text}: must be NAME=NUMBER") from None
    hardware = hardware.given(given, "--rate")
    return hardware if options.network_gb_s is None else hardware.given({"across_gb_s": options.network_gb_s}, "--network-gb-s")


def read_config(overrides: Sequence[str], num_gpus: int) -> Config:
    """The configuration of these overrides, with its rules held. Of parallel.* nothing is checked here: it is searched."""
    register_schema()
    overrides = list(overrides)
    check_overrides(overrides)
    cfg = to_config(compose(overrides))
    if cfg.model.hf is not None:
        raise ValueError(f"model.hf={cfg.model.hf}: only models of ringflash are counted, by their sizes; nearest: model=llama3_8b, "
                         "with model.dim, model.num_layers, ... of yours")
    # What was not given is searched for, so whatever the defaults are must not stand in the way.
    dp, cp, ulysses, shard = (getattr(cfg.parallel, key) for key in ("dp", "cp", "ulysses", "shard"))
    cfg.parallel.dp, cfg.parallel.cp, cfg.parallel.ulysses, cfg.parallel.shard = 1, -1, 1, 1
    validate(cfg, num_gpus)
    cfg.parallel.dp, cfg.parallel.cp, cfg.parallel.ulysses, cfg.parallel.shard = dp, cp, ulysses, shard
    return cfg


def read_jobs(cfg: Config, options: argparse.Namespace) -> list[Job]:
    documents = parse_documents(options.documents, cfg.data.seq_len) if options.documents else None

    def is_given(key: str) -> bool:
        """On the command line, or by a group or an experiment, as far as that differs from the default."""
        group, name = key.split(".")
        return _is_written(key, options.overrides) or getattr(getattr(cfg, group), name) != getattr(getattr(Config(), group), name)

    given = {key: getattr(cfg.parallel, key) for key in ("dp", "cp", "ulysses") if is_given(f"parallel.{key}")}
    policy = cfg.train.activations if is_given("train.activations") else "auto"
    shards = [cfg.parallel.shard]
    if not is_given("parallel.shard"):
        shards = sorted({1, min(options.gpus, options.gpus_per_host), options.gpus})
    kinds = layer_masks(cfg.attention)
    return [job for shard in shards for job in divisions(cfg, kinds, options.gpus, options.gpus_per_host, **given,
                                                         activations=policy, shard=shard, documents=documents)]


def _is_written(key: str, overrides: Sequence[str]) -> bool:
    return any(word.split("=")[0].lstrip("+") == key for word in overrides)


if __name__ == "__main__":
    sys.exit(main())
