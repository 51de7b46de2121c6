"""Seconds of a training step on the busiest rank, by part, from FLOPs, bytes and a machine's rates. No torch."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ringflash.flops import step_flops
from ringflash.mask import Mask
from ringflash.planning.hardware import GIB, Hardware
from ringflash.planning.job import Job
from ringflash.planning.ring_steps import PASSES, PassTime, pass_time, ring_loads
from ringflash.ring.heads import HeadSplit
from ringflash.work import Work

# Bytes that elementwise passes read and write, counted by reading model/transformer.py, rope.py, rowwise.py and loss.py: per
# element of the width in question and direction. They are a few percent of a long step; `Hardware.rest_factor` corrects them.
_ROPE_BYTES = 48  # per element of q and k: fp32 and eager, four products, two sums, a concatenation, two conversions
_NORM_BYTES = {"forward": 14, "backward": 36}  # per element of x, each of two norms
_SWIGLU_BYTES = {"forward": 10, "backward": 18}  # per element of ffn_dim
_RESIDUAL_BYTES = {"forward": 20, "backward": 16}  # per element of x: two sums, and tiles copied into place
_LOGIT_BYTES = 80  # per logit: fp32 chunks, made twice, softmax, one-hot, selection, conversion
_CONVERT_BYTES = 6  # per parameter of a product under autocast: fp32 read, 16 bit written

# What a policy computes again in the backward: (attention, everything else of a layer), in forwards.
RECOMPUTED = {"none": (0, 0), "block": (1, 1), "block_save_attention": (0, 1), "offload": (0, 1)}


@dataclass(frozen=True)
class StepTime:
    """parts: seconds by part, of which the step is the sum. attention: of a layer of each kind, (mask, layers, forward,
    backward). model_flops: of all ranks, causal-exact, nothing counted twice that is computed twice."""

    parts: Mapping[str, float]
    attention: tuple[tuple[Mask, int, PassTime, PassTime], ...]
    model_flops: float
    matmul_flops: float  # of model_flops, what is not attention
    tokens: int  # of all ranks
    num_gpus: int
    fsdp_gb: float  # that a rank receives and sends for weights and gradients, per step
    offload_gb: float  # each way
    peak_tflops: float = field(repr=False, default=0.0)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.num_gpus

    @property
    def model_tflops_per_gpu(self) -> float:
        return self.model_flops / self.seconds / self.num_gpus / 1e12

    @property
    def mfu(self) -> float:
        return self.model_tflops_per_gpu / self.peak_tflops


def step_time(job: Job, hardware: Hardware, saved_gb: float = 0.0) -> StepTime:
    """saved_gb: what one layer moves to the host for its backward (policy offload)."""
    cfg, sizes, tokens = job.cfg, job.sizes, job.tokens
    micro = cfg.train.accumulation
    again_attention, again_rest = RECOMPUTED[job.activations]
    rate = hardware.matmul_tflops * 1e12
    attention = _attention(job, hardware)

    # One layer of this rank, without attention.
    product = 2.0 * sizes.layer_matmul * tokens / rate
    passes = {pass_: _elementwise_bytes(job, pass_) * tokens / (hardware.memory_gb_s * 1e9) for pass_ in PASSES}
    converted = _converted_s(job, hardware)
    # A tiled function of rows computes its forward again in the backward, whatever the policy, and also where one tile holds all
    # rows; what stands before attention does so after a policy has already made q, k and v again.
    is_tiled = cfg.train.tile_rows > 0
    again = max(again_rest, int(is_tiled)) + again_rest * is_tiled * sizes.layer_before / sizes.layer_matmul
    rest = {"forward": (product + passes["forward"] + converted) * hardware.rest_factor,
            "backward": (2 * product + passes["backward"] + converted) * hardware.rest_factor,
            "again": again * (product + passes["forward"]) * hardware.rest_factor}
    layers = cfg.model.num_layers
    parts = {"matmul and rows, forward": layers * rest["forward"], "matmul and rows, backward": layers * rest["backward"],
             "matmul and rows, recomputed": layers * rest["again"]}
    parts |= {"attention, forward": 0.0, "attention, backward": 0.0, "attention, recomputed": 0.0, "ring, not hidden": 0.0,
              "all-to-all": 0.0, "head and loss": _head_s(job, hardware)}
    alltoall = exposed = gather = copied = 0.0
    for _, count, forward, backward in attention:
        parts["attention, forward"] += count * forward.kernels_ms / 1e3
        parts["attention, backward"] += count * backward.kernels_ms / 1e3
        parts["attention, recomputed"] += count * again_attention * forward.kernels_ms / 1e3
        exposed += count * ((1 + again_attention) * forward.exposed_ms + backward.exposed_ms) / 1e3
        alltoall += count * ((1 + again_attention) * forward.alltoall_ms + backward.alltoall_ms) / 1e3
        ahead = rest["forward"] + forward.total_ms / 1e3
        back = rest["backward"] + rest["again"] + (backward.total_ms + again_attention * forward.total_ms) / 1e3
        gather += count * _gather_exposed_s(job, hardware, ahead, back)
        copied += count * (max(0.0, saved_gb / hardware.host_gb_s - ahead) + max(0.0, saved_gb / hardware.host_gb_s - back))
    parts["ring, not hidden"], parts["all-to-all"] = exposed, alltoall
    parts["weights and gradients, not hidden"] = gather
    parts["offload, not hidden"] = copied
    parts = {name: micro * seconds for name, seconds in parts.items()}
    parts["weights and gradients, not hidden"] += _gradient_s(job, hardware)
    parts["optimizer"] = _optimizer_s(job, hardware)

    pairs = sum(count * mask_pairs(mask, job.seq_len) for mask, count, _, _ in attention) * job.batch
    heads = job.heads
    sequence_tokens = job.seq_len * job.batch
    sequences = job.dp * micro
    model_flops, matmul_flops = (sequences * step_flops(sizes.matmul, sequence_tokens, num_heads=heads.num_heads,
                                                        head_dim=heads.head_dim, layer_pairs=counted) for counted in (pairs, 0))
    return StepTime(parts, attention, model_flops, matmul_flops, sequence_tokens * sequences, job.num_gpus,
                    _fsdp_gb(job), micro * layers * saved_gb, hardware.peak_tflops)


def mask_pairs(mask: Mask, seq_len: int) -> int:
    """Allowed (query, key) pairs of a sequence."""
    if mask == Mask():
        return seq_len * (seq_len + 1) // 2
    return Work((mask,), seq_len).total


def _attention(job: Job, hardware: Hardware) -> tuple[tuple[Mask, int, PassTime, PassTime], ...]:
    attention, whole = job.cfg.attention, job.heads
    local = HeadSplit(whole.num_heads, whole.num_kv_heads, job.ulysses).local(whole)
    found = []
    for mask, count in job.layers_by_mask:
        loads = ring_loads(mask, job.masks, attention.layout, job.seq_len, job.ring, local, degree=job.ulysses,
                           ranks_per_host=job.gpus_per_host, routing=attention.routing, rotate=attention.rotate)
        times = (pass_time(loads[pass_], pass_, local, hardware, degree=job.ulysses, seq_rows=job.rows, whole=whole,
                           ranks_per_host=job.gpus_per_host) for pass_ in PASSES)
        found.append((mask, count, *times))
    return tuple(found)


def _elementwise_bytes(job: Job, pass_: str) -> float:
    """Per token of a layer."""
    model, heads = job.cfg.model, job.heads
    turned = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
    width = job.residual_itemsize / 4
    return (_ROPE_BYTES * turned + 2 * _NORM_BYTES[pass_] * model.dim * (0.5 + width / 2) + _SWIGLU_BYTES[pass_] * model.ffn_dim
            + _RESIDUAL_BYTES[pass_] * model.dim * width)


def _converted_s(job: Job, hardware: Hardware) -> float:
    """Rounding the weights of a layer for its products, each tile and pass anew, where they are fp32."""
    if job.compute_itemsize == 4 or job.shard != 1:
        return 0.0
    tile = job.cfg.train.tile_rows
    times = -(-job.rows // tile) if tile else 1
    return times * _CONVERT_BYTES * job.sizes.layer_matmul / (hardware.memory_gb_s * 1e9)


def _head_s(job: Job, hardware: Hardware) -> float:
    logits = float(job.cfg.model.vocab_size) * job.tokens
    # The logits, again in the backward, and two products more for the gradients.
    product = 4 * 2.0 * logits * job.cfg.model.dim / (hardware.matmul_tflops * 1e12)
    return (product + _LOGIT_BYTES * logits / (hardware.memory_gb_s * 1e9)) * hardware.rest_factor


def _gather_exposed_s(job: Job, hardware: Hardware, ahead: float, back: float) -> float:
    """What gathering a layer's weights (forward, backward) and adding up its gradients takes longer than computing a layer."""
    if job.shard == 1:
        return 0.0
    rate = hardware.collective_rate(job.shard, job.gpus_per_host) * 1e9
    share = (job.shard - 1) / job.shard
    gathered, reduced = (item * job.sizes.layer * share / rate for item in (job.compute_itemsize, 4))
    return max(0.0, gathered - ahead) + max(0.0, gathered + reduced - back)


def _fsdp_gb(job: Job) -> float:
    """GB that a rank receives per step: in each micro-batch the layers' weights twice, embedding and head in fp32 once; gradients
    in fp32 once, or in each with parallel.reduce=each."""
    sizes, micro = job.sizes, job.cfg.train.accumulation
    layers = job.cfg.model.num_layers * sizes.layer
    gathered = micro * (2 * job.compute_itemsize * layers + 4 * sizes.root)
    reduced = 4 * (layers + sizes.root) * (micro if job.cfg.parallel.reduce == "each" else 1)
    return (job.shard - 1) / job.shard * (gathered + reduced) / 1e9


def _gradient_s(job: Job, hardware: Hardware) -> float:
    """Gradients added over the copies of the weights, behind the last backward; with shards the root's traffic too."""
    copies = job.num_gpus // job.shard
    seconds = 0.0
    if job.shard > 1:
        share = (job.shard - 1) / job.shard
        seconds += 8 * job.sizes.root * share / (hardware.collective_rate(job.shard, job.gpus_per_host) * 1e9)
    if copies > 1:
        # A group's shards are added by as many rings beside each other: each has its own port between hosts.
        inside = job.num_gpus <= job.gpus_per_host
        rate = hardware.collective_gb_s if inside else hardware.across_gb_s if job.shard > 1 else hardware.collective_rate(
            job.num_gpus, job.gpus_per_host)
        size = 4 * job.sizes.total / job.shard
        seconds += 2 * size * (copies - 1) / copies / (rate * 1e9)
        seconds += 4 * size / (hardware.memory_gb_s * 1e9) if job.shard == 1 else 0.0  # into buckets and out of them
    return seconds


def _optimizer_s(job: Job, hardware: Hardware) -> float:
    own = job.sizes.total / job.shard
    seconds = own * hardware.optimizer_ns / 1e9
    if job.cfg.optim.offload:
        seconds += 8 * own / (hardware.host_gb_s * 1e9)  # two moments, there and back at the same time
    return seconds


def host_gib(job: Job, saved_gb: float) -> float:
    """Pinned host memory of a rank: what layers wait with, and the optimizer's moments."""
    moments = 8 * job.sizes.total / job.shard if job.cfg.optim.offload else 0
    return (job.cfg.model.num_layers * saved_gb * 1e9 + moments) / GIB
