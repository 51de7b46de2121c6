"""How fast a run is and how much of its GPUs it uses: the figures of a step and the convention behind them."""
from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ringflash.flops import LayerPairs, peak_tflops, step_flops
from ringflash.train.trainer import layer_masks
from ringflash.train.world import World

if TYPE_CHECKING:
    from ringflash.train.trainer import Trainer


class Meter:
    """Figures of a run's steps, per rank: one rank has one GPU."""

    def __init__(self, trainer: Trainer):
        cfg, self.world, self.train = trainer.cfg, trainer.world, trainer.data.train
        self.trainer = trainer
        self.pairs = LayerPairs(layer_masks(cfg.attention), cfg.model.num_layers, self.train.seq_len)
        self.matmul_parameters = matmul_parameters(trainer.model)
        self.heads = {"num_heads": cfg.model.num_heads, "head_dim": cfg.model.head_dim or cfg.model.dim // cfg.model.num_heads}
        self.peak, self.convention = peak_of(trainer.dtype, self.world.device)
        # Of the stacked weights of experts a token meets a few, which the model alone knows.
        self.is_counted = all(parameter.ndim <= 2 for parameter in trainer.parameters)
        if not self.is_counted:
            self.peak, self.convention = None, "no MFU: a token does not meet all weights of a mixture of experts"
        self.flops = 0  # of the steps seen here, all ranks
        self.seconds = 0.0
        self.peak_bytes = 0

    def step_flops(self, step: int) -> int:
        """Model FLOPs of a step, all ranks: its samples are the same numbers however they are dealt out."""
        first, count = self.trainer.first_sample(step), self.trainer.samples_per_step
        pairs = sum(self.pairs.of(self.train.cu_seqlens(sample)) for sample in range(first, first + count)) \
            if self.train.document_mask else count * self.pairs.of(None)
        return step_flops(self.matmul_parameters, count * self.train.seq_len, layer_pairs=pairs, **self.heads)

    def row(self, step: int, step_s: float) -> dict:
        """{tflops_per_rank (not of experts), mfu (where the peak is known), peak_memory_gib} of optimizer step `step` (from 0),
        which took step_s."""
        flops = self.step_flops(step)
        self.flops, self.seconds = self.flops + flops, self.seconds + step_s
        return self._rate(flops, step_s) | {"peak_memory_gib": self.memory() / 2**30}

    def memory(self) -> int:
        """Bytes that this rank's device (on a CPU: the process) held at most since this was last asked."""
        peak = peak_bytes(self.world.device)
        self.peak_bytes = max(self.peak_bytes, peak)
        return peak

    def _rate(self, flops: int, seconds: float) -> dict:
        if not self.is_counted:
            return {}
        tflops = flops / seconds / self.world.world_size / 1e12
        return {"tflops_per_rank": tflops} | ({} if self.peak is None else {"mfu": tflops / self.peak})

    def summary(self) -> dict:
        """The same over all steps, with the convention; the memory is that of the rank that has most. All ranks come here."""
        rate = self._rate(self.flops, self.seconds) if self.seconds else {}
        return rate | {"mfu_convention": self.convention, "peak_memory_gib": most(self.peak_bytes, self.world) / 2**30}


def matmul_parameters(model: nn.Module) -> int:
    """Weights that a token is multiplied with: matrices, but not embedding tables (a tied one counts as the head)."""
    found = {id(parameter): parameter.numel() for module in model.modules() if not isinstance(module, nn.Embedding)
             for parameter in module.parameters(recurse=False) if parameter.ndim >= 2}
    return sum(found.values())


def peak_of(dtype: torch.dtype, device: torch.device) -> tuple[float | None, str]:
    """(TFLOP/s of one rank's device, in words what MFU is measured by, or why there is none)."""
    if device.type != "cuda":
        return None, f"no MFU: the peak of a {device.type.upper()} is not known"
    name = torch.cuda.get_device_name(device)
    if dtype != torch.bfloat16:
        return None, f"no MFU: peaks are those of bf16, this run computes in {str(dtype).removeprefix('torch.')}"
    peak = peak_tflops(name)
    if peak is None:
        return None, f"no MFU: the peak of {name} is not known"
    return peak, ("6 x matmul weights x tokens + 12 x heads x head_dim x allowed pairs, of "
                  f"{peak:,.0f} TFLOP/s ({name}, bf16 dense)")


def peak_bytes(device: torch.device) -> int:
    """On a GPU what its tensors took at most since this was last asked, on a CPU what the process took at most since it began."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    # KiB, but bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def most(value: float, world: World) -> float:
    """The largest of all ranks' values."""
    largest = torch.tensor(value, dtype=torch.float64, device=world.device)
    if world.group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=world.group)
    return float(largest)
