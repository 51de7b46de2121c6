"""The random number generators of a process as tensors of fixed shapes. Training draws nothing from them today; what will (dropout,
a shuffle of a user's own) goes on after a resume as if there had been no stop."""
from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """torch uint8 [n], python int64 [625], numpy int64 [626], normals float64 [2] (drawn in advance, NaN: none), cuda uint8 [m]."""
    _, words, next_normal = random.getstate()
    generator = np.random.get_state(legacy=False)
    inner = generator["state"]
    normals = [math.nan if next_normal is None else next_normal, generator["gauss"] if generator["has_gauss"] else math.nan]
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.tensor([*inner["key"].tolist(), int(inner["pos"]), int(generator["has_gauss"])], dtype=torch.int64),
        "normals": torch.tensor(normals, dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    next_normal, gauss = state["normals"].tolist()
    random.setstate((random.getstate()[0], tuple(state["python"].tolist()), None if math.isnan(next_normal) else next_normal))
    *key, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, gauss if has_gauss else 0.0))
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
