"""A run from its first step to its summary, and the life of a rank around it."""
from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from ringflash.config import Config, parallel_degrees
from ringflash.degrees import shard_size
from ringflash.ring import post_mortem, watchdog
from ringflash.ring.heads import HeadSplit
from ringflash.train.checkpoint import Checkpoints, ResumeError, SaveError
from ringflash.train.evaluation import Interrupted, evaluate
from ringflash.train.exit_codes import REFUSED, TOLD
from ringflash.train.mfu import Meter
from ringflash.train.passkey import recall
from ringflash.train.places import tell_layers
from ringflash.train.profile import Traces
from ringflash.train.record import Recorder, save_weights
from ringflash.train.sharded import full_state_dict
from ringflash.train.stopping import StopRequest
from ringflash.train.text import Data, open_data
from ringflash.train.trainer import NonFiniteError, StepResult, Trainer, activation_dtype, model_config, select_kernel
from ringflash.train.world import World, connect, pick_device

_LAST_STEPS = 10  # over which the summary averages the training loss
# The group gives up later than the watchdog, which knows step, hop and peer.
_GROUP_GRACE_S = 30.0


@dataclass
class Progress:
    """How far a run is; saved with its checkpoints, as JSON."""

    step: int = 0  # optimizer steps done
    tokens: int = 0
    trained_s: float = 0.0
    time_s: float = 0.0
    first_loss: float | None = None
    last_losses: list[float] = field(default_factory=list)
    skipped: int = 0  # steps that changed nothing, and how many of them came last
    skipped_last: int = 0
    evaluated: int = 0  # the step of the newest evaluation
    heldout_loss: float | None = None
    passkey_found: float | None = None

    def add(self, result: StepResult, step_s: float, is_skipped: bool) -> None:
        self.step += 1
        self.tokens += result.tokens
        self.trained_s += step_s
        self.skipped += is_skipped
        self.skipped_last = self.skipped_last + 1 if is_skipped else 0
        if not is_skipped:
            self.first_loss = result.loss if self.first_loss is None else self.first_loss
            self.last_losses = [*self.last_losses, result.loss][-_LAST_STEPS:]


def train(cfg: Config, world: World, data: Data, folder: Path | None, stop: StopRequest | None = None,
          accepted: Callable[[], None] | None = None) -> dict | None:
    """All steps and evaluations that cfg asks for and the folder's checkpoints do not have yet; returns the summary, or None when
    stopped on the way, with a checkpoint. Rank 0 writes into `folder`, which all ranks know (None: nowhere, and no checkpoints), and
    calls accepted() before it changes anything there: the folder is this run's, and the checkpoint is one to go on from.

    Every rank raises the same: NonFiniteError, SaveError, ResumeError."""
    stop = StopRequest() if stop is None else stop
    trainer = Trainer(cfg, world, data, stop.asked)
    meter, traces = Meter(trainer), Traces(cfg.train, world.rank, folder)
    tell_layers(trainer.model.blocks)
    checkpoints = Checkpoints(cfg, world, trainer, folder)
    found = checkpoints.restore(lambda: _tell(world, accepted))
    progress = Progress(**found["progress"]) if found else Progress()
    recorder = Recorder(folder if world.rank == 0 else None, cfg, progress.step, progress.evaluated)
    if checkpoints.root is not None:
        stop.arm(cfg.checkpoint.grace_s)
    start = time.perf_counter() - progress.time_s
    try:
        # An evaluation takes the time that the checkpoint of a run that is told to stop needs: such a run leaves it out, or drops
        # it half done, and makes up for it here, after the resume.
        is_told = progress.step > 0 and _evaluate_if_due(trainer, meter, recorder, progress, start)
        while True:
            if progress.step < cfg.train.steps and not is_told:
                with traces.step(progress.step):
                    is_told = _step(trainer, meter, recorder, progress, start)
            is_told = is_told or _evaluate_if_due(trainer, meter, recorder, progress, start)
            if checkpoints.due(progress.step) or is_told:
                with _saving(stop, recorder):
                    progress.time_s = time.perf_counter() - start
                    checkpoints.save(progress.step, dataclasses.asdict(progress), must=is_told)
            if is_told:
                recorder.stopped(progress.step)
                checkpoints.close()
                return None
            if progress.step >= cfg.train.steps:
                break
        with _saving(stop, recorder):
            checkpoints.wait()
    except NonFiniteError:
        with suppress(SaveError):
            checkpoints.wait()
        raise
    finally:
        recorder.close()
        traces.close(progress.step)
    progress.time_s = time.perf_counter() - start
    summary = _summary(cfg, trainer, meter, progress)
    weights = full_state_dict(trainer.model) if cfg.run.save_weights and folder is not None else None
    failure = ""
    if world.rank == 0 and folder is not None:
        try:
            if weights is not None:
                save_weights(folder / "weights.pt", weights)
            recorder.finish(summary, plot=cfg.run.plot, unigram_nats=data.unigram_nats)
        except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of a full disk
            failure = f"the results could not be written to {folder}: {_cause(error)}"
            if checkpoints.saved == progress.step:
                failure += f"; the checkpoint of step {progress.step} has them, for a start that goes on"
    if world.sum(float(bool(failure)))[0]:
        raise SaveError(failure or "the results could not be written: see rank 0")
    checkpoints.close()
    return summary


def _cause(error: Exception) -> str:
    origin = error.__context__ if isinstance(error.__context__, OSError) else error
    return getattr(origin, "strerror", None) or str(origin)


def _tell(world: World, accepted: Callable[[], None] | None) -> None:
    failure = ""
    if accepted is None:
        return
    if world.rank == 0:
        try:
            accepted()
        except OSError as error:
            failure = str(error)
    if world.sum(float(bool(failure)))[0]:
        raise ResumeError(f"the run folder cannot be written: {failure or 'see rank 0'}")


def _step(trainer: Trainer, meter: Meter, recorder: Recorder, progress: Progress, start: float) -> bool:
    """One optimizer step; whether the ranks are to stop after it.

    Its seconds end when the device has done the optimizer's work, not when it is queued. The wait costs at most what the host would
    have prepared of the next step meanwhile: the loss and the norm were waited for already, and data is read ahead by a thread
    that began within the step."""
    watchdog.at(stage=f"optimizer step {progress.step + 1}")
    began, reason = time.perf_counter(), {}
    try:
        result = trainer.train_step(progress.step)
    except NonFiniteError as error:
        options = trainer.cfg.train
        if options.on_nonfinite == "stop":
            raise
        if progress.skipped_last >= options.max_skipped:
            raise NonFiniteError(f"{error}. The {progress.skipped_last} steps before it were skipped too, train.max_skipped="
                                 f"{options.max_skipped}", error.result) from error
        # All ranks are here: the loss and the norm are the same numbers on each.
        result, reason = error.result, {"loss": None, "grad_norm": None, "skipped": error.found}
    if trainer.world.device.type == "cuda":
        torch.cuda.synchronize(trainer.world.device)
    step_s = time.perf_counter() - began
    progress.add(result, step_s, bool(reason))
    tokens_per_s = result.tokens / step_s
    recorder.step({"step": progress.step, "loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm,
                   "tokens": progress.tokens, "valid_tokens": result.valid_tokens, "tokens_per_s": tokens_per_s,
                   "tokens_per_s_per_rank": tokens_per_s / trainer.world.world_size, **meter.row(progress.step - 1, step_s),
                   "data_wait_ms": result.data_wait_ms, "pairs_imbalance": result.pairs_imbalance,
                   "pairs_imbalance_in_order": result.pairs_imbalance_in_order, "time_s": time.perf_counter() - start} | reason)
    return result.stop


def _evaluation_is_due(cfg: Config, progress: Progress) -> bool:
    due = progress.step >= cfg.train.steps or (cfg.train.eval_every and progress.step % cfg.train.eval_every == 0)
    return bool(due) and progress.evaluated != progress.step and cfg.train.eval_sequences > 0


def _evaluate_if_due(trainer: Trainer, meter: Meter, recorder: Recorder, progress: Progress, start: float) -> bool:
    """Whether the ranks are to stop: then there is no evaluation."""
    if not _evaluation_is_due(trainer.cfg, progress):
        return False
    try:
        _evaluate(trainer, meter, recorder, progress, start)
        return False
    except Interrupted:
        return True


def _evaluate(trainer: Trainer, meter: Meter, recorder: Recorder, progress: Progress, start: float) -> None:
    watchdog.at(stage=f"evaluation after step {progress.step}")
    evaluation, peak = evaluate(trainer), meter.memory()
    found = recall(trainer)
    recorder.evaluation({"step": progress.step, "heldout_loss": evaluation.loss, "valid_tokens": evaluation.tokens,
                         "by_position": evaluation.rows(), "peak_memory_gib": peak / 2**30,
                         "time_s": time.perf_counter() - start})
    if found is not None:
        meter.memory()
        progress.passkey_found = found.mean()
        recorder.passkey(progress.step, found)
    progress.heldout_loss, progress.evaluated = evaluation.loss, progress.step


@contextmanager
def _saving(stop: StopRequest, recorder: Recorder) -> Iterator[None]:
    with stop.saving():
        recorder.sync()
        yield


def _summary(cfg: Config, trainer: Trainer, meter: Meter, progress: Progress) -> dict:
    world = trainer.world
    summary = {
        "steps": cfg.train.steps,
        "parameters": trainer.num_parameters,
        "ranks": f"dp {world.dp} x cp {world.cp}{_shared(world)} on {world.device.type}",
        "kernel": select_kernel(cfg, world.device).name,
        "tokens": progress.tokens,
        "tokens_per_s": progress.tokens / progress.trained_s,
        "tokens_per_s_per_rank": progress.tokens / progress.trained_s / world.world_size,
        **meter.summary(),
        "time_s": progress.time_s,
        "first_loss": progress.first_loss,
        f"train_loss_last_{_LAST_STEPS}": sum(progress.last_losses) / len(progress.last_losses) if progress.last_losses else None,
        "heldout_loss": progress.heldout_loss,
        "unigram_entropy": trainer.data.unigram_nats,
    }
    if progress.skipped:
        summary["steps_skipped"] = progress.skipped
    if progress.passkey_found is not None:
        summary["passkey_found"] = progress.passkey_found
    return summary


def run(cfg: Config, *, store: dist.Store, rank: int, world_size: int, folder: Path, stop: StopRequest,
        accepted: Callable[[], None] | None = None) -> int:
    """A rank's whole life after the start was agreed on. Returns the exit code, 0 only if this rank did all its work, or saved it
    when it was told to stop. accepted: as in train()."""
    dp, cp = parallel_degrees(cfg, world_size)
    device = pick_device(cfg.run.device, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    data = open_data(cfg)
    warm_up_kernel(cfg, device)
    post_mortem.keep_in(folder, rank)
    try:
        world = connect(dp, cp, device, timeout_s=cfg.parallel.timeout_s + _GROUP_GRACE_S, store=store, rank=rank,
                        ulysses=cfg.parallel.ulysses, shard=shard_size(cfg.parallel, world_size))
        watchdog.start(cfg.parallel.timeout_s, store.clone() if world_size > 1 else None)
        if train(cfg, world, data, folder, stop, accepted) is None and rank == 0:
            print(f"ringflash train: stopped by SIGTERM, and saved; to go on: --resume {folder}", file=sys.stderr, flush=True)
    except (NonFiniteError, SaveError, ResumeError) as error:
        if rank == 0:
            print(f"ringflash train: {error}", file=sys.stderr, flush=True)
        if dist.is_initialized():
            # All ranks are here. Nobody leaves before rank 0 has spoken: the launcher kills the rest at the first exit.
            dist.barrier()
        return _leave(REFUSED if isinstance(error, ResumeError) else TOLD)
    except Exception:
        # With its traceback, from every rank that has one: a ring that breaks looks different from each side.
        print(f"rank {rank}: {traceback.format_exc()}{watchdog.describe()}", file=sys.stderr, flush=True)
        return _leave(1)
    watchdog.stop()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def warm_up_kernel(cfg: Config, device: torch.device) -> None:
    """Compiles what attention will run. Before the first collective: a rank that is busy with it looks like a hang to others."""
    model = model_config(cfg)
    heads = HeadSplit(model.num_heads, model.num_kv_heads, cfg.parallel.ulysses)
    select_kernel(cfg, device).warmup(
        activation_dtype(cfg, device), model.resolved_head_dim, device, batch=cfg.data.batch_size, num_heads=heads.per_rank,
        num_kv_heads=heads.local_kv_heads, deterministic=cfg.attention.deterministic, softcap=model.softcap)


def _leave(code: int) -> int:
    """Ends the process without destructors: those of a group whose peer is gone may wait for ever."""
    sys.stdout.flush()
    os._exit(code)


def _shared(world: World) -> str:
    ring = "" if world.ulysses == 1 else f" (ring {world.cp // world.ulysses} x ulysses {world.ulysses})"
    return ring if world.shard == 1 else f"{ring}, weights over {world.shard},"
