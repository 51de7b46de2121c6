"""Is training on N ranks the training of one? One plain SGD step of the same model on the same tokens, both ways, compared.

Plain SGD without clipping: Adam and clipping would both hide a gradient that is wrong by a constant factor.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.config import Config, OptimConfig, parallel_degrees
from ringflash.degrees import shard_size
from ringflash.train.sharded import load_full_state_dict, whole
from ringflash.train.text import Data
from ringflash.train.trainer import Trainer, activation_dtype
from ringflash.train.world import World, connect, single

_SGD = OptimConfig(name="sgd", lr=0.1, warmup_steps=0, weight_decay=0.0, momentum=0.0, grad_clip=0.0)
# fp32: what another order of summation may cost, in units of eps x the largest reference value (measured, W = 2 and 4, models of
# configs/model/{tiny,small}.yaml). 16 bit: two roundings, beside twice what one rank errs itself (Note [Training equivalence]).
_BUDGET_EPS = {torch.float32: 64.0, torch.bfloat16: 2.0}

_calls = itertools.count()  # of _on_rank_0, the same on all ranks


@dataclass(frozen=True)
class Row:
    """One compared quantity: largest absolute difference over all entries and all ranks, and what is allowed."""

    name: str
    error: float
    budget: float
    scale: float  # the largest absolute value of the reference

    @property
    def ok(self) -> bool:
        return math.isfinite(self.error) and self.error <= self.budget


@dataclass(frozen=True)
class Report:
    dp: int
    cp: int
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def table(self) -> str:
        """One line per quantity, the wrong ones marked, and a verdict."""
        width = max(len(row.name) for row in self.rows)
        lines = [f"{'one SGD step, dp ' + str(self.dp) + ' x cp ' + str(self.cp) + ' against one rank':<{width}}"
                 f"  {'largest':>9}  {'error':>9}  {'budget':>9}"]
        lines += [f"{row.name:<{width}}  {row.scale:>9.2e}  {row.error:>9.2e}  {row.budget:>9.2e}{'' if row.ok else '  WRONG'}"
                  for row in self.rows]
        wrong = sum(not row.ok for row in self.rows)
        lines.append(f"{len(self.rows) - wrong} of {len(self.rows)} within budget")
        return "\n".join(lines)

    def as_json(self) -> dict:
        rows = [dataclasses.asdict(row) | {"ok": row.ok} for row in self.rows]
        return {"dp": self.dp, "cp": self.cp, "ok": self.ok, "rows": rows}


def run(cfg: Config, data: Data, *, device: torch.device, group: dist.ProcessGroup | None = None,
        weights: Mapping[str, Tensor] | None = None, say: Callable[[str], None] = lambda text: None) -> Report:
    """Compares step 0 on dp x cp ranks (cfg.parallel; `group` is the default group, None for one rank) with one rank: in fp32
    directly, in 16 bit both with one rank in fp32 (Note [Training equivalence] in DESIGN.md).

    Every rank calls this, computes the one-rank step by itself (of a 16-bit run; its fp32 twin is rank 0's work alone), and returns
    the same Report: loss, gradient norm, each parameter's gradient and each parameter after the step. cfg's optimizer is not
    used, all else of it is.
    weights: a state_dict to start from (a run's weights.pt), else those of train.seed. say: told what was computed (all ranks).
    Raises ValueError when dp * cp is not the size of the group, or group is not the default one.
    """
    if group is not None and group is not dist.group.WORLD:
        raise ValueError("equivalence.run compares the default group; dp and cp are cut from it")
    dp, cp = parallel_degrees(cfg, dist.get_world_size() if group is not None else 1)
    ring = dataclasses.replace(cfg, optim=_SGD)
    world = single(device) if group is None else connect(
        dp, cp, device, timeout_s=cfg.parallel.timeout_s, ulysses=cfg.parallel.ulysses, shard=shard_size(cfg.parallel, dp * cp))
    alone = dataclasses.replace(ring, train=dataclasses.replace(cfg.train, accumulation=cfg.train.accumulation * dp))
    dtype = activation_dtype(cfg, device)
    got = _step(Trainer(ring, world, data), weights)
    say(f"the step of {dp * cp} ranks")
    want = one_rank = _step(Trainer(alone, single(device), data), weights)
    say("the step of one rank, by each")
    if dtype != torch.float32:
        exact = dataclasses.replace(alone, train=dataclasses.replace(alone.train, dtype="fp32"))
        want = _on_rank_0(lambda: _step(Trainer(exact, single(device), data), weights), world, cfg.parallel.timeout_s)
        say("the step of one rank in fp32, by rank 0")
    return Report(dp, cp, compare(got, one_rank, want, world, dtype))


def _on_rank_0(compute: Callable[[], dict[str, Tensor]], world: World, timeout_s: float) -> dict[str, Tensor] | None:
    """compute() on rank 0; on the others None, once it is done there. They wait for a key of the store, as a collective that
    waits would take its turns on a card that they share."""
    if world.group is None:
        return compute()
    store, key = dist.distributed_c10d._get_default_store(), f"ringflash-equivalence-{next(_calls)}"
    if world.rank:
        store.wait([key], timedelta(seconds=timeout_s))
        return None
    found = compute()
    store.set(key, b"done")
    return found


def compare(got: Mapping[str, Tensor], one_rank: Mapping[str, Tensor], want: Mapping[str, Tensor] | None, world: World,
            dtype: torch.dtype) -> tuple[Row, ...]:
    """What _step found on the ranks of world, and on one rank in dtype, both against one rank in fp32 (want, of rank 0; None on
    ranks that did not compute it); the same on all ranks."""
    figures = torch.stack([_figures(got[name], mine, None if want is None else want[name], world)
                           for name, mine in one_rank.items()])
    if world.group is not None:
        # The worst rank counts: weights that drift apart between ranks show here. A NaN must win over any number.
        figures = figures.nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=world.group)
    found = {name: row for name, row in zip(one_rank, figures.tolist(), strict=True)}
    allowed = _BUDGET_EPS[dtype] * torch.finfo(dtype).eps
    rows = []
    for name, (error, own_error, scale) in found.items():
        budget = allowed * scale
        if name.startswith("weight "):
            # A weight is compared by what the step did to it, plus the rounding of the weight itself.
            moved = _SGD.lr * found[f"gradient of {name.removeprefix('weight ')}"][2]
            budget = allowed * moved + 2 * torch.finfo(torch.float32).eps * scale
        rows.append(Row(name, error, 2 * own_error + budget, scale))
    return tuple(rows)


def _figures(got: Tensor, one_rank: Tensor, want: Tensor | None, world: World) -> Tensor:
    """Error of the ring, error of one rank, largest value, all against rank 0's reference. Every rank computed the one-rank step by
    itself: one whose step is not rank 0's (other data, other weights) shows as an error of the ring."""
    agreed, first = (one_rank if want is None else want).clone(), one_rank.clone()
    if world.group is not None:
        dist.broadcast(agreed, src=0, group=world.group)
        dist.broadcast(first, src=0, group=world.group)
    error = torch.maximum((got - agreed).abs().max(), (one_rank - first).abs().max())
    return torch.stack([error, (first - agreed).abs().max(), agreed.abs().max()])


def _step(trainer: Trainer, weights: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Everything that one step yields, by name, in fp64."""
    if weights is not None:
        load_full_state_dict(trainer.model, weights)
    result = trainer.train_step(0)
    found = {name: torch.tensor(value, dtype=torch.float64)
             for name, value in (("loss", result.loss), ("gradient norm", result.grad_norm))}
    found |= {f"gradient of {name}": whole(p.grad) for name, p in trainer.model.named_parameters()}
    found |= {f"weight {name}": whole(p.detach()) for name, p in trainer.model.named_parameters()}
    return {name: tensor.to(device=trainer.world.device, dtype=torch.float64) for name, tensor in found.items()}
