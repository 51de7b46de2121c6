"""From what a user calls a group to the process group of one ring."""
from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


def ring_group(group: Any) -> dist.ProcessGroup | None:
    """The process group of a ring: group is a ProcessGroup, a 1-D DeviceMesh, or None (one rank, no group).

    Raises ValueError for anything else, also for a group that this process is not in; NotImplementedError for a 2-D mesh.
    """
    if group is None:
        return None
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return group
    if dist.is_available() and isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise NotImplementedError(
                f"group: a {group.ndim}-D DeviceMesh {group.mesh_dim_names}: ulysses x ring is not built yet; "
                f"pass its ring axis, such as mesh['cp']")
        return group.get_group()
    raise ValueError(f"group={group!r}: must be a torch.distributed ProcessGroup, a 1-D DeviceMesh, or None for one rank")


def group_by_name(name: str) -> tuple[dist.ProcessGroup | None, int, int]:
    """(group, cp_rank, cp_size) of a group's name; "" is one rank. Ops take names: a graph cannot hold a group."""
    if not name:
        return None, 0, 1
    group = _resolve_process_group(name)
    return group, dist.get_rank(group), dist.get_world_size(group)


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(cp_rank, cp_size); (0, 1) without a group. ValueError when this process is not in the group."""
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: this process is not in it; build each ring's group on all ranks and pass the one you are in")
    return rank, dist.get_world_size(group)


def make_mesh(dp_size: int, cp_size: int, device_type: str) -> dist.DeviceMesh:
    """The ("dp", "cp") mesh of dp_size * cp_size ranks; a ring's ranks are neighbours, so that a host holds whole rings.

    Raises ValueError when the product is not the world size.
    """
    world_size = dist.get_world_size()
    if dp_size * cp_size != world_size:
        raise ValueError(f"dp_size={dp_size} x cp_size={cp_size} = {dp_size * cp_size}: must be world_size={world_size}")
    return dist.init_device_mesh(device_type, (dp_size, cp_size), mesh_dim_names=("dp", "cp"))
