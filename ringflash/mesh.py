"""From what a user calls a group to the process groups of the ranks that share a sequence."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a sequence, as one of them sees them: a ring, whose every place is held by `ulysses_size` ranks
    (Note [Ulysses] in DESIGN.md). A group is None where its axis has one rank and none was given."""

    ring: dist.ProcessGroup | None = None
    ulysses: dist.ProcessGroup | None = None
    ring_rank: int = 0
    ring_size: int = 1
    ulysses_rank: int = 0
    ulysses_size: int = 1

    @property
    def rank(self) -> int:
        """Among all of them: those of one place of the ring follow each other."""
        return self.ring_rank * self.ulysses_size + self.ulysses_rank

    @property
    def size(self) -> int:
        return self.ring_size * self.ulysses_size

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Gathering over the first, and what came of it over the next, gathers from all ranks in their order."""
        return tuple(group for group in (self.ulysses, self.ring) if group is not None)

    @property
    def names(self) -> tuple[str, str]:
        """Of ring and ulysses, for ops: a graph cannot hold a group. "": none."""
        return tuple("" if group is None else group.group_name for group in (self.ring, self.ulysses))


def ranks_of(group: Any) -> Ranks:
    """group: a ProcessGroup or 1-D DeviceMesh (a ring), a 2-D DeviceMesh (ring x ulysses, the latter inside: its ranks follow
    each other), None (one rank), or Ranks.

    Raises ValueError for anything else, also for a group that this process is not in.
    """
    if group is None:
        return Ranks()
    if isinstance(group, Ranks):
        return group
    if dist.is_available() and isinstance(group, dist.DeviceMesh) and group.ndim == 2:
        names = group.mesh_dim_names or ()
        if names and "ulysses" in names[0]:
            raise ValueError(f"group: a DeviceMesh {names}: the ring is its first axis, ulysses its second, so that the ranks "
                             f"that share heads are neighbours; make the mesh as (ring, ulysses)")
        ring, ulysses = group.get_group(0), group.get_group(1)
        return Ranks(ring, ulysses, *rank_and_size(ring), *rank_and_size(ulysses))
    ring = ring_group(group)
    return Ranks(ring, None, *rank_and_size(ring))


def ring_group(group: Any) -> dist.ProcessGroup | None:
    """The process group of a ring: group is a ProcessGroup, a 1-D DeviceMesh, or None (one rank, no group).

    Raises ValueError for anything else.
    """
    if group is None:
        return None
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return group
    if dist.is_available() and isinstance(group, dist.DeviceMesh):
        if group.ndim > 2:
            raise ValueError(f"group: a {group.ndim}-D DeviceMesh {group.mesh_dim_names}: must have one axis (a ring) or two "
                             f"(ring and ulysses, in this order); pass those of its axes, such as mesh['ring', 'ulysses']")
        return group.get_group()
    raise ValueError(f"group={group!r}: must be a torch.distributed ProcessGroup, a 1-D or 2-D DeviceMesh, or None for one rank")


def ranks_by_name(ring: str, ulysses: str) -> Ranks:
    """Inverse of Ranks.names."""
    groups = [_resolve_process_group(name) if name else None for name in (ring, ulysses)]
    return Ranks(*groups, *rank_and_size(groups[0]), *rank_and_size(groups[1]))


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(cp_rank, cp_size); (0, 1) without a group. ValueError when this process is not in the group."""
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: this process is not in it; build each ring's group on all ranks and pass the one you are in")
    return rank, dist.get_world_size(group)


def make_shard_mesh(shard_size: int, device_type: str) -> dist.DeviceMesh:
    """All ranks as ("shard",), or ("replicate", "shard") where groups of shard_size neighbours have a copy of the weights each.
    ValueError unless shard_size divides the world size."""
    world_size = dist.get_world_size()
    if shard_size < 1 or world_size % shard_size:
        raise ValueError(f"shard_size={shard_size}: must divide world_size={world_size}")
    if shard_size == world_size:
        return dist.init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    return dist.init_device_mesh(device_type, (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def make_mesh(dp_size: int, cp_size: int, device_type: str, ulysses_size: int = 1) -> dist.DeviceMesh:
    """The mesh of dp_size * cp_size ranks: ("dp", "cp"), or with ulysses_size > 1 ("dp", "ring", "ulysses") with cp_size =
    ring * ulysses; ranks that share a sequence are neighbours, those that share heads the nearest, so that a host holds them.

    Raises ValueError when the product is not the world size, or ulysses_size does not divide cp_size.
    """
    world_size = dist.get_world_size()
    if dp_size * cp_size != world_size:
        raise ValueError(f"dp_size={dp_size} x cp_size={cp_size} = {dp_size * cp_size}: must be world_size={world_size}")
    if cp_size % ulysses_size:
        raise ValueError(f"ulysses_size={ulysses_size}: must divide cp_size={cp_size}")
    if ulysses_size == 1:
        return dist.init_device_mesh(device_type, (dp_size, cp_size), mesh_dim_names=("dp", "cp"))
    return dist.init_device_mesh(device_type, (dp_size, cp_size // ulysses_size, ulysses_size),
                                 mesh_dim_names=("dp", "ring", "ulysses"))
