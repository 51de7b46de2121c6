"""Saving and resuming a run with torch.distributed.checkpoint: whole or not there, verified, on any number of ranks. Note [Checkpoints].

Everything here is called by all ranks together, at the end of a step. What fails on one of them is told to all, so that all go on or
none does.
"""
from __future__ import annotations

import concurrent.futures
import dataclasses
import shutil
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from ringflash.config import Config
from ringflash.train import checkpoint_files as files
from ringflash.train.rng import rng_state, set_rng_state
from ringflash.train.trainer import Trainer
from ringflash.train.world import World

_UNCOMPARED = ("run", "checkpoint")  # groups of the configuration that a resumed run may change without a word


class SaveError(RuntimeError):
    """A checkpoint could not be saved. Every rank raises it in the same step."""


class ResumeError(ValueError):
    """There is no checkpoint to go on from where there should be one. Every rank raises it."""


class _Writer(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save closes its archive after a write has failed, complains about that, and hides that the disk is full.
            cause = error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror) from error


class Checkpoints:
    """The checkpoints of one run. folder: the run's, the same on all ranks (None: nothing is saved)."""

    def __init__(self, cfg: Config, world: World, trainer: Trainer, folder: Path | None):
        self.cfg, self.options, self.world, self.trainer = cfg, cfg.checkpoint, world, trainer
        self.root = folder / files.FOLDER if folder is not None and cfg.checkpoint.every else None
        self.saved: int | None = None  # the step of the newest checkpoint in root, as far as it belongs to this run
        self.group = None
        self._lock = None
        self._pending: concurrent.futures.Future | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "ringflash-checkpoint")
        self._stager = None
        # One rank saves without a group, which is what the warning is about.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        if world.group is not None and (self.root is not None or self.options.resume not in ("auto", "none")):
            # Its own: a thread that saves must not meet the collectives of training. gloo: objects and CPU tensors.
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.options.timeout_s))

    def due(self, step: int) -> bool:
        return self.root is not None and (step % self.options.every == 0 or step == self.cfg.train.steps)

    # Saving

    def save(self, step: int, progress: dict, *, must: bool = False) -> None:
        """Saves the state after `step` steps; `progress` (JSON) comes back from restore(). Waits for an earlier one first.

        Returns when it is on the disk, or with checkpoint.asynchronous when the state has been copied. A failure is a message, or
        with checkpoint.on_error=stop (or must=True, which also waits) SaveError.
        """
        self.wait()
        if self.root is None or self.saved == step:
            return
        trainer = self.trainer
        description = {
            "format": files.FORMAT, "step": step, "sample": trainer.first_sample(step), "progress": progress,
            "samples_per_step": trainer.samples_per_step, "data": trainer.data.train.description(),
            "ranks": self.world.degrees,
            "config": dataclasses.asdict(self.cfg), "torch": torch.__version__,
        }
        state = self._state() | self._rng()
        if self.options.asynchronous and not must:
            self._pending = self._thread.submit(self._write, self._staged(state), description)
        else:
            self._judge(self._write(state, description), must)

    def wait(self) -> None:
        """Until no checkpoint is being written. SaveError as in save()."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._judge(pending.result(), False)

    def close(self) -> None:
        """After the last save() and wait()."""
        self._thread.shutdown()
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
        if self._lock is not None:
            self._lock.close()

    def _judge(self, failure: str | None, must: bool) -> None:
        if failure is not None and (must or self.options.on_error == "stop"):
            raise SaveError(failure)

    def _write(self, state: dict[str, Tensor], description: dict) -> str | None:
        """One checkpoint; None, or why there is none, which rank 0 has said already. In a thread when asynchronous."""
        step = description["step"]
        part = files.part_folder(self.root, step)

        def prepare() -> None:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)

        def finish(digests: dict) -> None:
            files.write_manifest(part, description | {"files": digests})
            files.publish(self.root, step)
            try:
                files.prune(self.root, self.options.keep)
            except OSError as error:
                _say(f"older checkpoints could not be removed from {self.root}: {error.strerror}")

        failure = self._first(prepare) or self._write_data(part, state)
        if failure is None:
            failure, digests = self._digests(part)
            failure = failure or self._first(lambda: finish(digests))
        if failure is None:
            self.saved = step
            return None
        failure = f"the checkpoint of step {step} could not be saved: {failure}"
        if self.world.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            newest = next((folder.name for _, folder in files.whole(self.root)), None)
            _say(f"{failure}; {f'the newest is still {newest}' if newest else 'there is none yet'}")
        return failure

    def _write_data(self, part: Path, state: dict[str, Tensor]) -> str | None:
        try:
            dcp.save(state, storage_writer=_Writer(part, sync_files=True), process_group=self.group,
                     planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
        except dcp.api.CheckpointException as error:
            # Raised on all ranks alike, unlike what a dead peer causes, which is no matter of a disk.
            return "; ".join(self._named(rank, cause) for rank, (cause, _) in sorted(error.failures.items()))
        return None

    def _digests(self, part: Path) -> tuple[str | None, dict]:
        """Each rank reads back what it has written."""
        mine: dict | str = {}
        try:
            for path in sorted(part.glob(f"__{self.world.rank}_*")) + ([part / ".metadata"] if self.world.rank == 0 else []):
                mine[path.name] = files.digest(path)
        except OSError as error:
            mine = self._named(self.world.rank, error)
        found = self._gather(mine)
        failures = [item for item in found if isinstance(item, str)]
        return "; ".join(failures) or None, {} if failures else {k: v for item in found for k, v in item.items()}

    # Resuming

    def restore(self, accepted: Callable[[], None] = lambda: None) -> dict | None:
        """Loads what checkpoint.resume names and returns its manifest; None for a run from the beginning.

        Raises ResumeError where a checkpoint should be and none is whole, or it does not fit this configuration; and where root
        cannot be written or another process writes there. Else every rank calls accepted(), before anything in the folder changes.
        """
        failure = self._first(self._open) if self.root is not None else None
        if failure is not None:
            raise ResumeError(f"checkpoint.every={self.options.every}: checkpoints cannot be saved in {self.root}: {failure}; "
                              "nearest: another run.dir, or checkpoint.every=0")
        where = {"none": None, "auto": self.root}.get(self.options.resume, Path(self.options.resume))
        mine = [str(path) for path in files.candidates(where)] if where is not None and self.world.rank == 0 else []
        paths = self._broadcast(mine) if where is not None else []
        for path in map(Path, paths):
            manifest = self._verified(path)
            if manifest is not None:
                self._load(path, manifest, accepted)
                return manifest
        if paths or self.options.resume not in ("auto", "none"):
            raise ResumeError(f"checkpoint.resume={self.options.resume}: {where} holds no whole checkpoint; "
                              "checkpoint.resume=none and another run.dir start from the beginning")
        self._take(None, accepted)
        return None

    def _take(self, step: int | None, accepted: Callable[[], None]) -> None:
        """The folder is this run's. Removes what a killed run left, and with `step` sets newer checkpoints than that aside."""
        accepted()
        failure = self._first(lambda: self._clear(step)) if self.root is not None else None
        if failure is not None:
            raise ResumeError(f"{self.root}: {failure}")

    def _open(self) -> None:
        """Rank 0, before any step: the folder can be written, is ours, and has room."""
        moments = 2 if self.cfg.optim.name == "adamw" else int(self.cfg.optim.momentum > 0)
        self._lock, known = files.open_root(self.root, 4 * self.trainer.num_parameters * (1 + moments),
                                            must_fit=self.options.on_error == "stop")
        for line in known:
            _say(line)

    def _verified(self, path: Path) -> dict | None:
        """The manifest of a whole checkpoint; else None, after rank 0 has said what is wrong."""
        manifest: dict | str | None = None
        if self.world.rank == 0:
            try:
                manifest = files.read_manifest(path)
            except files.DamagedError as error:
                manifest = str(error)
        manifest = self._broadcast(manifest)
        problems = [manifest] if isinstance(manifest, str) else []
        if not problems:
            mine = sorted(manifest["files"].items())[self.world.rank::self.world.world_size]
            found = self._gather([files.problem_of(path, name, expected) for name, expected in mine])
            problems = [problem for each in found for problem in each if problem]
        if problems and self.world.rank == 0:
            _say(f"{path} is passed over: {'; '.join(problems)}")
        return None if problems else manifest

    def _load(self, path: Path, manifest: dict, accepted: Callable[[], None]) -> None:
        trainer, step = self.trainer, manifest["step"]
        changed = _changes(manifest["config"], dataclasses.asdict(self.cfg))
        if step > self.cfg.train.steps:
            raise ResumeError(f"train.steps={self.cfg.train.steps}: {path} stands at step {step} already; nearest: {step}")
        state = self._state()
        saved_on = {"shard": 1} | manifest["ranks"]  # the first checkpoints had no sharded weights
        same_ranks = saved_on == self.world.degrees
        rng = self._rng() if same_ranks else {}
        reader = dcp.FileSystemReader(path)
        saved = reader.read_metadata().state_dict_metadata
        misfits = [f"{name} {_shape(saved.get(name))} there, {list(tensor.shape)} here" for name, tensor in state.items()
                   if _shape(saved.get(name)) != list(tensor.shape)]
        if misfits:
            more = f" and {len(misfits) - 2} more" if len(misfits) > 2 else ""
            raise ResumeError(f"{path} is of another model or optimizer: {'; '.join(misfits[:2])}{more}; "
                              f"the configuration differs in {'; '.join(changed) or 'nothing'}")
        try:
            # In place, into the tensors that model and optimizer hold.
            dcp.load(state | rng, storage_reader=reader, process_group=self.group,
                     planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
        except dcp.api.CheckpointException as error:
            causes = "; ".join(self._named(rank, cause) for rank, (cause, _) in sorted(error.failures.items()))
            raise ResumeError(f"{path} cannot be loaded: {causes}") from error
        if rng:
            prefix = f"rng.{self.world.rank}."
            set_rng_state({name.removeprefix(prefix): tensor for name, tensor in rng.items()}, self.world.device)
        is_same_data = manifest["data"] == trainer.data.train.description()
        trainer.start_at(step, manifest["sample"] if is_same_data else 0)
        if self.root is not None and path.parent.resolve() == self.root.resolve():
            self.saved = step
        self._take(self.saved, accepted)
        if self.world.rank == 0:
            _say(f"goes on after step {step}, sample {trainer.first_sample(step)}, from {path}"
                 + ("" if same_ranks else f"; saved on {_ranks(saved_on)}, now {_ranks(self.world.degrees)}: equal within rounding")
                 + ("" if is_same_data else "; the data is another, and is read from its beginning")
                 + (f"; changed: {'; '.join(changed)}" if changed else ""))

    def _clear(self, step: int | None) -> None:
        for name in files.clear_leftovers(self.root):
            _say(f"{name} was never finished: removed")
        for newer, folder in files.whole(self.root):
            if step is not None and newer > step:
                _say(f"{folder.name} is now {files.set_aside(folder).name}")

    # State

    def _state(self) -> dict[str, Tensor]:
        """Weights and optimizer state under names that do not depend on the ranks: plain tensors, or DTensors where sharded. What
        the configuration says (learning rate, decay) is not among them."""
        trainer = self.trainer
        model = get_model_state_dict(trainer.model)
        optimizer = get_optimizer_state_dict(trainer.model, trainer.optimizer,
                                             options=StateDictOptions(flatten_optimizer_state_dict=True))
        state = {f"model.{name}": value for name, value in model.items()}
        return state | {f"optimizer.{name.removeprefix('state.')}": value for name, value in optimizer.items()
                        if name.startswith("state.")}

    def _rng(self) -> dict[str, Tensor]:
        return {f"rng.{self.world.rank}.{name}": value for name, value in rng_state(self.world.device).items()}

    def _staged(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy in host memory, which the next steps do not touch."""
        if self.world.device.type == "cpu":
            return {name: value.detach().clone() for name, value in state.items()}
        if self._stager is None:
            self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        return self._stager.stage(state)

    # Together

    def _first(self, action: Callable[[], None]) -> str | None:
        """Rank 0 acts; every rank gets None, or what went wrong."""
        failure = None
        if self.world.rank == 0:
            try:
                action()
            except OSError as error:
                failure = self._named(0, error)
        return self._broadcast(failure)

    def _broadcast(self, item):
        items = [item]
        if self.group is not None:
            dist.broadcast_object_list(items, src=0, group=self.group)
        return items[0]

    def _gather(self, item) -> list:
        items = [item]
        if self.group is not None:
            items = [None] * self.world.world_size
            dist.all_gather_object(items, item, group=self.group)
        return items

    def _named(self, rank: int, cause: BaseException) -> str:
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else f"{type(cause).__name__}: {cause}"
        return text if self.world.world_size == 1 else f"rank {rank}: {text}"


def _changes(there: dict, here: dict) -> list[str]:
    keys = [(group, key) for group in here if group not in _UNCOMPARED for key in here[group]]
    pairs = [(f"{group}.{key}", there.get(group, {}).get(key), here[group][key]) for group, key in keys]
    return [f"{key}={now} ({before} there)" for key, before, now in pairs if before != now]


def _shape(metadata) -> list[int] | None:
    return None if metadata is None else list(metadata.size)


def _ranks(ranks: dict) -> str:
    shard = f", weights over {ranks['shard']}," if ranks["shard"] > 1 else ""
    return f"dp {ranks['dp']} x cp {ranks['cp']}{shard} on {ranks['device']}"


def _say(message: str) -> None:
    print(f"ringflash train: {message}", file=sys.stderr, flush=True)
