"""Training, from one command to one run folder.

    python launch/train.py experiment=quickstart            plain: checks everything, makes the run folder, starts the ranks
    python launch/train.py -m train.seed=0,1,2 ...           a sweep: one job after the other, each with its own ranks; results.jsonl
    torchrun ... launch/train.py experiment=eight_gpus       under torchrun (or any launcher that sets RANK): is one rank
    python launch/train.py --resume outputs/run-... [...]    either way: the overrides of that run, its folder, its last checkpoint

Plain, this process never trains: it composes and validates the configuration, looks at the data, makes the folder and starts
torchrun (train_agent.py) with the composed configuration, so every rank reads the same one. Under torchrun the ranks compose for
themselves, compare notes through the store, and rank 0 makes the folder that all of them use. Either way rank 0 writes .hydra/ once
the folder is its own and the checkpoint in it fits: a start that is refused leaves what --resume reads as it was.
"""
from __future__ import annotations

import dataclasses
import difflib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

if __package__ in (None, "") and (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file():
    # A script's own folder comes first on the path, where train, check and bench would be top-level modules: use the checkout.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringflash.config import Config, validate
from ringflash.launch.sweep import Sweep
from ringflash.train.checkpoint_files import FOLDER, candidates
from ringflash.train.exit_codes import REFUSED
from ringflash.train.folder import claim_run_folder, make_run_folder, read_description, stop_mark, write_description
from ringflash.train.text import open_data

CONFIGS = "ringflash.configs"
_RUN_FOLDER = "--run-folder"
_RESUME = "--resume"
_COMPOSED = "RINGFLASH_COMPOSED"  # in the ranks' environment: .hydra's files as JSON
_OPTIONAL_GROUPS = ("experiment", "debug")
_INTERRUPT_GRACE_S = 5.0


def main(argv: list[str] | None = None) -> None:
    """`argv`: Hydra's arguments (overrides and flags), without the program's name. Exits non-zero when anything failed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    register_schema()
    try:
        argv = of_resumed_run(argv)
        check_overrides(argv)
    except (ValueError, OSError) as error:
        _refuse(str(error))
    if "RANK" in os.environ:
        sys.exit(worker(argv))
    if _is_sweep(argv) and not any(a.startswith("hydra.sweep.dir=") for a in argv):
        # The process id makes it unique: two sweeps may start in the same second.
        argv.append(f"hydra.sweep.dir=${{run.root}}/sweep-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    # argparse takes overrides in one run only: flags first, so that `a=1 -m b=1,2` means what it says.
    argv.sort(key=lambda a: "=" in a and not a.startswith("-"))
    sys.argv = ["ringflash train", *argv]
    try:
        sweep = Sweep(launch) if _is_sweep(argv) else None
        task = sweep.task() if sweep else launch
        hydra.main(version_base="1.3", config_path=f"pkg://{CONFIGS}", config_name="train")(task)()
        if sweep and sweep.finish():
            sys.exit(1)
    except SystemExit as leaving:
        for hint in misspelt(argv) if leaving.code in (1, REFUSED) else ():
            print(f"ringflash train: {hint}", file=sys.stderr)
        raise


def register_schema() -> None:
    """Hydra's `schema`: what is not a field of ringflash.config.Config is refused while composing."""
    ConfigStore.instance().store(name="schema", node=Config)


def of_resumed_run(argv: list[str]) -> list[str]:
    """`--resume FOLDER ...` as the overrides that FOLDER was started with, those given here instead of them, and its run.dir."""
    if _RESUME not in argv:
        return argv
    place = argv.index(_RESUME)
    if place + 1 == len(argv):
        raise ValueError(f"{_RESUME}: names the run folder to go on in, e.g. {_RESUME} outputs/run-20260101-120000")
    folder, rest = Path(argv[place + 1]), argv[:place] + argv[place + 2:]
    saved = folder / ".hydra" / "overrides.yaml"
    if not saved.is_file() or not (folder / FOLDER).is_dir():
        raise ValueError(f"{_RESUME} {folder}: no run with checkpoints; it has no {'.hydra' if not saved.is_file() else FOLDER}")
    words = read_description(saved, list)
    given = {word.split("=")[0].lstrip("+~") for word in rest if not word.startswith("-")} | {"run.dir"}
    kept = [word for word in words if word.split("=")[0].lstrip("+~") not in given]
    quoted = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [*kept, *rest, f"run.dir='{quoted}'"]


def check_overrides(words: list[str]) -> None:
    """ValueError for an override that takes a whole group away: the dataclasses' defaults would silently stand in for it."""
    groups = {field.name for field in dataclasses.fields(Config)}
    for word in words:
        key, _, value = word.partition("=")
        group = key.lstrip("~").split("@")[0]
        if (key.startswith("~") or value.strip().lower() in ("null", "[]")) and group in groups:
            raise ValueError(f"{word}: {group} cannot be taken away, a run needs one; nearest: {group}=NAME, a file of configs/{group}/, "
                             "or leave it out")
        if key.startswith("~") and group not in _OPTIONAL_GROUPS and not group.startswith("hydra"):
            raise ValueError(f"{word}: every key has a value, and none can be taken away; nearest: {group}=VALUE, or leave it out")


def misspelt(argv: list[str]) -> list[str]:
    """For every override whose key does not exist, the keys that come closest. (Hydra has refused it already.)"""
    known = _dotted(dataclasses.asdict(Config()))
    groups = {key.split(".")[0] for key in known} | {"experiment", "debug"}
    hints = []
    for key in (a.split("=")[0].lstrip("+~") for a in argv if "=" in a and not a.startswith("-")):
        if key not in known and key not in groups and not key.startswith("hydra"):
            close = difflib.get_close_matches(key, [*known, *groups], n=2, cutoff=0.5)
            hints.append(f"{key}: no such key; nearest: {' or '.join(close) or ', '.join(sorted(groups))}")
    return hints


def _dotted(values: dict, prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys += _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return keys


def launch(composed: DictConfig) -> float | None:
    """One job in the parent: checks, makes the folder, runs the ranks. Returns the held-out loss (what a sweeper minimises)."""
    try:
        cfg = to_config(composed)
        nproc = num_workers(cfg)
        validate(cfg, nproc)
        check_world(cfg, nproc)
        overrides = OmegaConf.to_container(HydraConfig.get().overrides.task)
        check_overrides(overrides)
        folder = parent_folder(cfg)
        texts = description(composed, overrides, HydraConfig.instance().cfg)
        if not cfg.checkpoint.every:
            # Without checkpoints there is no lock: this is what keeps another start out.
            write_description(folder, texts)
    except (ValueError, OSError, OmegaConfBaseException) as error:
        _refuse(str(error))
    print(f"{nproc} rank{'s' if nproc > 1 else ''}, run folder {folder}", file=sys.stderr, flush=True)
    stopped_before = stop_mark(folder)
    code = run_torchrun(nproc, folder, texts, cpu=_on_cpu(cfg), restarts=cfg.checkpoint.restarts)
    if code == REFUSED:
        sys.exit(code)
    if stop_mark(folder) not in (None, stopped_before):
        # torchrun's own code says that it was told to stop. The run is as whole as one can be that is not finished.
        sys.exit(0)
    if code:
        print(f"ringflash train: failed (exit code {code}), see {folder}", file=sys.stderr, flush=True)
        sys.exit(code if code > 0 else 128 - code)
    summary = json.loads((folder / "summary.json").read_text())
    return summary["heldout_loss"]


def to_config(composed: DictConfig) -> Config:
    """The dataclasses, with the sizes of a model.hf. OmegaConfBaseException for a key that they lack: Hydra lets `+train.typo=1`
    through."""
    # By way of plain values, since the node that `+` opened would stay open.
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(composed)))
    if cfg.model.hf is None:
        return cfg
    from ringflash.hf_config import resolved

    return resolved(cfg)


def num_workers(cfg: Config) -> int:
    """parallel.nproc, or one per GPU, or one on CPU."""
    if cfg.parallel.nproc is not None:
        return cfg.parallel.nproc
    if cfg.run.device == "cpu":
        return 1
    import torch

    return max(torch.cuda.device_count(), 1)


def check_world(cfg: Config, num_local: int) -> None:
    """What must be here before ranks start: cards, the kernel asked for by name, and the data. ValueError or OSError if not."""
    if cfg.run.device != "cpu" or cfg.attention.kernel != "auto":
        # torch takes seconds to import: on a CPU the parent does without.
        from ringflash.train.trainer import select_kernel
        from ringflash.train.world import pick_device

        device = pick_device(cfg.run.device, num_local - 1)
        if cfg.attention.kernel != "auto":
            select_kernel(cfg, device)
    if cfg.checkpoint.resume not in ("auto", "none") and not candidates(Path(cfg.checkpoint.resume)):
        raise ValueError(f"checkpoint.resume={cfg.checkpoint.resume}: no checkpoint there; valid: auto, none, a run folder, or one "
                         "checkpoint's folder")
    if cfg.model.weights is not None:
        from ringflash.model.weights import check_folder

        check_folder(cfg)
    open_data(cfg)


def parent_folder(cfg: Config) -> Path:
    """The run folder of this job: run.dir, or hydra's own (of a sweep's job, or set by hand), or a fresh one under run.root."""
    hydra_dir = HydraConfig.get().runtime.output_dir
    if cfg.run.dir is not None:
        return claim_run_folder(cfg.run.dir, resume=resumes(cfg)).resolve()
    if Path(hydra_dir) != Path.cwd():
        return claim_run_folder(hydra_dir, resume=resumes(cfg)).resolve()
    return make_run_folder(cfg.run.root, cfg.run.name).resolve()


def resumes(cfg: Config) -> bool:
    """Whether a run folder that keeps checkpoints may be taken again."""
    return cfg.checkpoint.resume == "auto" and cfg.checkpoint.every > 0


def description(composed: DictConfig, overrides: list[str], hydra_cfg: DictConfig | None) -> dict[str, str]:
    """{name: text} of what .hydra/ will hold."""
    texts = {"config.yaml": OmegaConf.to_yaml(composed), "overrides.yaml": OmegaConf.to_yaml(OmegaConf.create(overrides))}
    if hydra_cfg is not None:
        texts["hydra.yaml"] = OmegaConf.to_yaml(OmegaConf.masked_copy(hydra_cfg, "hydra"))
    return texts


def run_torchrun(nproc: int, folder: Path, texts: dict[str, str], *, cpu: bool, restarts: int = 0) -> int:
    """Starts the ranks and waits for them. SIGTERM and Ctrl-C reach them; returns the exit code of
    train_agent.py."""
    agent = Path(__file__).resolve().with_name("train_agent.py")
    command = [sys.executable, str(agent), str(os.getpid()), str(nproc), str(restarts), str(folder)]
    env = os.environ | {_COMPOSED: json.dumps(texts)}
    if cpu:
        # torchrun would give each rank one thread; the ranks share the cores evenly instead.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env.setdefault("OMP_NUM_THREADS", str(max(cores // nproc, 1)))
    process = subprocess.Popen(command, env=env)

    def pass_on(signum, frame) -> None:
        # Ctrl-C goes to the whole foreground group, so torchrun is stopping already; sent to this process alone, it has to be told.
        grace_s = _INTERRUPT_GRACE_S if signum == signal.SIGINT else 0.0
        timer = threading.Timer(grace_s, process.terminate)     # which does nothing to a process that has ended
        timer.daemon = True
        timer.start()

    handlers = {signal.SIGINT: pass_on, signal.SIGTERM: pass_on}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def worker(argv: list[str]) -> int:
    """One rank: agrees with the others on configuration and folder, then trains. Returns the exit code."""
    from ringflash.train.loop import run
    from ringflash.train.startup import StartError, agree, check_launcher, rendezvous
    from ringflash.train.stopping import leave_on_signals

    try:
        check_launcher(os.environ)
    except ValueError as problem:
        _complain(str(problem))
        return REFUSED
    stop = leave_on_signals(without_parent="TORCHELASTIC_RUN_ID" in os.environ)
    cfg = error = texts = None
    given = Path(argv[1]) if argv[:1] == [_RUN_FOLDER] else None
    try:
        texts = json.loads(os.environ[_COMPOSED]) if given else description(compose(argv), argv, None)
        cfg = to_config(OmegaConf.create(texts["config.yaml"]))
        validate(cfg, int(os.environ["WORLD_SIZE"]))
        check_world(cfg, int(os.environ.get("LOCAL_RANK", "0")) + 1)
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as problem:
        error = str(problem)

    def make_folder() -> Path:
        if given:
            return given
        folder = claim_run_folder(cfg.run.dir, resume=resumes(cfg)) if cfg.run.dir else make_run_folder(cfg.run.root, cfg.run.name)
        if not cfg.checkpoint.every:
            write_description(folder, texts)
        return folder

    timeout_s = cfg.parallel.timeout_s if cfg else 60.0
    store, rank, world_size = rendezvous(timeout_s)
    try:
        folder = agree(store, rank, world_size, error=error, config=dataclasses.asdict(cfg) if cfg else None,
                       make_folder=make_folder, timeout_s=timeout_s, speak=_complain)
    except StartError:
        return REFUSED
    if rank == 0 and not given:
        print(f"{world_size} ranks, run folder {folder}", file=sys.stderr, flush=True)
        if cfg.run.dir is None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            _complain("torchrun started these ranks again, and without run.dir every start is a run of its own, from the first step")
    return run(cfg, store=store, rank=rank, world_size=world_size, folder=folder, stop=stop,
               accepted=lambda: write_description(folder, texts))


def compose(argv: list[str]) -> DictConfig:
    """The configuration of these overrides, as a rank under torchrun composes it. Raises ValueError for a sweep."""
    if _is_sweep(argv):
        raise ValueError("-m / --multirun under torchrun: every rank would sweep by itself; start the sweep plainly, "
                         "`python launch/train.py -m ...`, and each of its jobs starts its own torchrun")
    flags = [a for a in argv if a.startswith("-")]
    if flags:
        raise ValueError(f"{' '.join(flags)}: under torchrun only overrides like train.steps=10 are taken")
    with hydra.initialize_config_module(CONFIGS, version_base="1.3"):
        return hydra.compose("train", overrides=argv)


def _is_sweep(argv: list[str]) -> bool:
    return any(a in ("-m", "--multirun") for a in argv)


def _on_cpu(cfg: Config) -> bool:
    if cfg.run.device != "auto":
        return cfg.run.device == "cpu"
    import torch

    return torch.cuda.device_count() == 0


def _complain(message: str) -> None:
    print(f"ringflash train: {message}", file=sys.stderr, flush=True)


def _refuse(message: str) -> None:
    _complain(message)
    sys.exit(REFUSED)


if __name__ == "__main__":
    main()
