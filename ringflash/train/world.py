"""The ranks of a run: device, dp x cp mesh, process groups."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringflash.mesh import make_mesh, make_shard_mesh, ranks_of
from ringflash.ring import watchdog


@dataclass(frozen=True)
class World:
    """Where this rank stands. cp is the inner axis: the ranks of a ring follow each other, so a ring stays inside a host.

    The groups are None in a world of one rank, and cp_group is None for rings of one rank: such a ring has no messages. The cp
    ranks are a ring of cp / ulysses places, each held by `ulysses` ranks. shard_mesh: its last axis are the ranks that share one
    copy of the weights; None where each rank has a copy.
    """

    rank: int
    world_size: int
    dp: int
    cp: int
    device: torch.device
    mesh: DeviceMesh | None = None
    ulysses: int = 1
    shard_mesh: DeviceMesh | None = None

    @property
    def shard(self) -> int:
        """Ranks that share one copy of the weights."""
        return 1 if self.shard_mesh is None else self.shard_mesh.size(self.shard_mesh.ndim - 1)

    @property
    def degrees(self) -> dict:
        """What a run that goes on must share with the one before to be equal to it to the bit; JSON."""
        return {"dp": self.dp, "cp": self.cp, "shard": self.shard, "device": self.device.type}

    @property
    def dp_rank(self) -> int:
        return self.rank // self.cp

    @property
    def cp_rank(self) -> int:
        return self.rank % self.cp

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks, dp x cp: gradients and losses are summed over it."""
        return dist.group.WORLD if self.world_size > 1 else None

    @cached_property
    def cp_group(self) -> dist.ProcessGroup | DeviceMesh | None:
        """The ranks of this rank's sequence: a group, or with ulysses > 1 the mesh (ring, ulysses)."""
        if self.mesh is None or self.cp == 1:
            return None
        return self.mesh.get_group("cp") if self.ulysses == 1 else self.mesh["ring", "ulysses"]

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        return self.mesh.get_group("dp") if self.mesh is not None and self.dp > 1 else None

    def sum(self, *values: float) -> list[float]:
        """The sums over all ranks, in fp64 and in one collective."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.group is None:
            return total.tolist()
        with watchdog.collective("adding up the figures of a step", self.rank, self.world_size):
            dist.all_reduce(total, group=self.group)
            return total.tolist()


def single(device: torch.device | str = "cpu") -> World:
    return World(rank=0, world_size=1, dp=1, cp=1, device=torch.device(device))


def connect(dp: int, cp: int, device: torch.device, *, timeout_s: float, store: dist.Store | None = None,
            rank: int | None = None, ulysses: int = 1, shard: int = 1) -> World:
    """Joins the process groups of a dp x cp world (gloo on CPU, NCCL on GPU) and warms every one of them up.

    With a default group already there (tests), that one is used; else `store` and `rank` are needed. shard: ranks that share one
    copy of the weights, neighbours.
    """
    world_size = dp * cp
    if not dist.is_initialized():
        if world_size == 1:
            return World(rank=0, world_size=1, dp=1, cp=1, device=device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        # device_id binds the communicator to the card at once: an error shows here, not in the first collective.
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s),
                                device_id=device if device.type == "cuda" else None)
    elif dist.get_world_size() != world_size:
        raise ValueError(f"dp * cp = {dp} * {cp} = {world_size}: the process group has {dist.get_world_size()} ranks")
    mesh = make_mesh(dp, cp, device.type, ulysses) if world_size > 1 else None
    shard_mesh = make_shard_mesh(shard, device.type) if shard > 1 else None
    world = World(rank=dist.get_rank(), world_size=world_size, dp=dp, cp=cp, device=device, mesh=mesh, ulysses=ulysses,
                  shard_mesh=shard_mesh)
    # A first point-to-point batch that only some ranks join is undefined: a collective on each group comes before it.
    sharing = shard_mesh.get_all_groups() if shard_mesh is not None else []
    for group in (world.group, world.dp_group, *ranks_of(world.cp_group).groups, *sharing):
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    return world


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device of a worker for run.device=auto | cpu | cuda. Raises ValueError where there is no such card."""
    count = torch.cuda.device_count() if name != "cpu" else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    if local_rank >= count:
        raise ValueError(f"run.device={name}: local rank {local_rank} needs its own GPU, this machine has {count}; "
                         f"nearest: {f'parallel.nproc={count}' if count else 'run.device=cpu'}")
    return torch.device("cuda", local_rank)
