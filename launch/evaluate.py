"""Evaluates a finished run's weights: held-out loss, loss by position, and keys found by depth and length.

    python launch/evaluate.py run=outputs/run-... eval.passkey.lengths=[4096,16384]
    python launch/evaluate.py run=outputs/run-... parallel.nproc=4 train.eval_sequences=64 out=elsewhere
    torchrun ... launch/evaluate.py run=...            any launcher, any number of nodes

The run's configuration counts, with what is given here instead (dotted keys of ringflash/config.py); the number of ranks may be
another: the figures are the same for all. Writes evaluation.json, loss_by_position.png and passkey.png into `out`, the run folder
unless it is given. Exits 0, or 2 with a line for what cannot be.
"""
from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

if __package__ in (None, "") and (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file():
    # A script's own folder comes first on the path, where train, check and bench would be top-level modules: use the checkout.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringflash.config import Config, parallel_degrees, validate
from ringflash.degrees import shard_size
from ringflash.launch.check_spawn import Rank, RingFailure, run_ranks
from ringflash.launch.train import check_world, misspelt, num_workers, to_config
from ringflash.train.evaluation import Evaluation, evaluate
from ringflash.train.folder import read_description
from ringflash.train.loop import warm_up_kernel
from ringflash.train.passkey import Recall, plot_recall, recall
from ringflash.train.plots import plot_positions
from ringflash.train.text import open_data
from ringflash.train.trainer import Trainer
from ringflash.train.world import connect, pick_device

_TIMEOUT_S = 24 * 3600.0  # of all ranks together; a hang is the watchdog's to end


def main(argv: list[str] | None = None) -> int:
    """`argv`: run=FOLDER and overrides. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0 if argv else 2
    is_worker = "RANK" in os.environ
    overrides: list[str] = []
    try:
        run, out, overrides = arguments(argv)
        cfg = configuration(run, overrides)
        ranks = int(os.environ["WORLD_SIZE"]) if is_worker else num_workers(cfg)
        validate(cfg, ranks)
        if cfg.train.eval_sequences == 0:
            raise ValueError("train.eval_sequences=0: evaluates nothing; nearest: train.eval_sequences=1")
        check_world(cfg, 1)
        if os.environ.get("RANK", "0") == "0":
            check_out(out)
    except (ValueError, OSError, OmegaConfBaseException) as error:
        said = str(error).splitlines()[0] if isinstance(error, OmegaConfBaseException) else str(error)
        for line in (said, *misspelt(overrides)):
            print(f"ringflash evaluate: {line}", file=sys.stderr, flush=True)
        return 2
    if is_worker:
        return _under_torchrun(cfg, out)
    device_type = pick_device(cfg.run.device, 0).type
    if ranks == 1:
        figures = figures_of(cfg, torch.device(device_type))
    else:
        try:
            figures = run_ranks(work, ranks, cfg, device_type=device_type, timeout_s=_TIMEOUT_S,
                                name_of=lambda index: "the evaluation")[0]
        except RingFailure as failure:
            print(f"ringflash evaluate: {failure}", file=sys.stderr, flush=True)
            return 1
    show(out, *figures)
    return 0


def arguments(words: list[str]) -> tuple[Path, Path, list[str]]:
    """(run folder, where the results go, overrides). ValueError for what is neither."""
    strange = [word for word in words if "=" not in word or word.startswith("-")]
    if strange:
        raise ValueError(f"{' '.join(strange)}: want run=FOLDER, and overrides like train.eval_sequences=64")
    given = dict(word.split("=", 1) for word in words if word.split("=")[0] in ("run", "out"))
    if "run" not in given:
        raise ValueError("run=FOLDER is missing: a folder that launch/train.py made, e.g. run=outputs/run-20260101-120000")
    run = Path(given["run"])
    for path in (run / ".hydra" / "config.yaml", run / "weights.pt"):
        if not path.is_file():
            raise ValueError(f"run={run}: no finished run with its weights (run.save_weights=true), {path} is missing")
    return run, Path(given.get("out", run)), [word for word in words if word.split("=")[0] not in ("run", "out")]


def check_out(out: Path) -> None:
    """Makes the folder of the results. OSError, before the work is done, where it cannot be made or written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise OSError(f"out={out}: the results cannot be written there ({error.strerror})") from error


def configuration(run: Path, overrides: list[str]) -> Config:
    """The run's, with dotted overrides instead and its last weights as the first ones. OmegaConfBaseException for a key that does
    not exist or a value of another type."""
    cfg = to_config(OmegaConf.merge(read_description(run / ".hydra" / "config.yaml", dict), OmegaConf.from_dotlist(overrides)))
    cfg.model.weights = str(run)
    return cfg


def figures_of(cfg: Config, device: torch.device, world_size: int = 1, **join) -> tuple[Evaluation, Recall | None]:
    """The work of one rank; the same on all."""
    dp, cp = parallel_degrees(cfg, world_size)
    warm_up_kernel(cfg, device)
    world = connect(dp, cp, device, timeout_s=cfg.parallel.timeout_s, ulysses=cfg.parallel.ulysses,
                    shard=shard_size(cfg.parallel, world_size), **join)
    trainer = Trainer(cfg, world, open_data(cfg))
    return evaluate(trainer), recall(trainer)


def work(rank: Rank, cfg: Config) -> tuple[Evaluation, Recall | None]:
    """figures_of, in a process of run_ranks."""
    rank.at(0)
    return figures_of(cfg, rank.device, rank.num_processes)


def _under_torchrun(cfg: Config, out: Path) -> int:
    from ringflash.train.startup import rendezvous

    device = pick_device(cfg.run.device, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, world_size = rendezvous(cfg.parallel.timeout_s)
    figures = figures_of(cfg, device, world_size, store=store, rank=rank)
    if rank == 0:
        show(out, *figures)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


def show(out: Path, evaluation: Evaluation, found: Recall | None) -> None:
    """Prints the figures and writes them."""
    out.mkdir(parents=True, exist_ok=True)
    print(f"held-out loss {evaluation.loss:.4f} nats per token ({evaluation.tokens:,} tokens)")
    print("by the number of tokens before it in its document (or, without document masks, in its sample):")
    for bucket in evaluation.by_position:
        print(f"  {bucket.start:>9,} to {bucket.stop - 1:>9,}  {bucket.loss:.4f}  ({bucket.tokens:,} tokens)")
    record = {"heldout_loss": evaluation.loss, "valid_tokens": evaluation.tokens, "by_position": evaluation.rows()}
    if evaluation.by_position:
        plot_positions(out / "loss_by_position.png", evaluation.rows(), "of the finished run")
    if found is not None:
        print(found.table(), flush=True)
        record["passkey"] = found.row()
        plot_recall(out / "passkey.png", found)
    (out / "evaluation.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
