"""The rules of what a step keeps in memory (train.activations, tile_rows, residual_dtype, loss, optim.offload): a part of
ringflash.config, without torch as that is."""
from __future__ import annotations

import importlib.util

ACTIVATIONS = ("none", "block", "block_save_attention", "offload", "auto")
RESIDUAL_DTYPES = ("fp32", "bf16")
LOSSES = ("chunked", "liger")


def memory_problems(cfg) -> list[str]:
    """A line for each broken rule of a Config."""
    t, problems = cfg.train, []
    for key, valid in (("activations", ACTIVATIONS), ("residual_dtype", RESIDUAL_DTYPES), ("loss", LOSSES)):
        if getattr(t, key) not in valid:
            problems.append(f"train.{key}={getattr(t, key)}: valid: {', '.join(valid)}")
    if t.tile_rows < 0:
        problems.append(f"train.tile_rows={t.tile_rows}: must be at least 0; nearest: 0 (no tiles)")
    if t.residual_dtype == "bf16" and t.dtype == "fp32":
        problems.append("train.residual_dtype=bf16: activations are fp32 with train.dtype=fp32; nearest: fp32, or "
                        "train.dtype=bf16")
    if t.loss == "liger":
        if cfg.run.device == "cpu":
            problems.append("train.loss=liger: its kernels need a GPU, run.device=cpu has none; nearest: chunked")
        if importlib.util.find_spec("liger_kernel") is None:
            problems.append("train.loss=liger: the package liger-kernel is not installed here; nearest: chunked, or "
                            "pip install liger-kernel")
    if cfg.optim.offload and cfg.optim.name != "adamw":
        problems.append(f"optim.offload=true: moves the moments of optim.name=adamw, optim.name={cfg.optim.name} has none; "
                        "nearest: false")
    return problems
