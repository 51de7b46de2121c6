"""Bytes that a rank holds at the moments of a training step, by part. No torch.

Counted by reading what allocates (model/transformer.py, activations.py, tiled.py, rowwise.py, loss.py, ring/loop.py,
train/optim.py); tests/plan/test_memory.py holds the sums against the live bytes of that code.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringflash.planning.hardware import GIB, Hardware
from ringflash.planning.job import Job
from ringflash.planning.ring_steps import Buffers, Loads, ring_loads
from ringflash.ring.heads import HeadSplit

FP32 = 4
_BUCKET_BYTES = 64 << 20  # of gradients.py
_OFFLOAD_ELEMENTS = 32 << 20  # of each moment in a buffer of train/optimizer_offload.py
_OFFLOAD_BUFFER_BYTES = 8 * _OFFLOAD_ELEMENTS
_INTERVALS_BYTES = 256 << 20  # the bound of ring/loop.py's cache
Parts = dict[str, float]


@dataclass(frozen=True)
class Memory:
    """moments: bytes by part at each moment of a step. saved: of one layer between its forward and its backward, per part;
    host: what of it waits in host memory."""

    moments: Mapping[str, Mapping[str, float]]
    saved: float
    host: float
    extra_gib: float
    slack: float
    context_gib: float

    @property
    def when(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> Mapping[str, float]:
        """At the peak."""
        return self.moments[self.when]

    @property
    def live_gib(self) -> float:
        """Of tensors at the peak: what torch.cuda.max_memory_allocated counts."""
        return sum(self.parts.values()) / GIB + self.extra_gib

    @property
    def reserved_gib(self) -> float:
        """With the allocator's slack, and what torch does not count: what a card must have."""
        return self.live_gib * (1 + self.slack) + self.context_gib


def step_memory(job: Job, hardware: Hardware) -> Memory:
    fixed, layer, head = _Fixed(job), _Layer(job), _head(job)
    layers = job.cfg.model.num_layers
    moments: dict[str, Parts] = {}

    def at(name: str, *parts: Parts) -> None:
        total: Parts = {}
        for each in parts:
            for part, size in each.items():
                total[part] = total.get(part, 0.0) + size
        moments[name] = {part: size for part, size in total.items() if size}

    def saved(count: int) -> Parts:
        return {part: size * count for part, size in layer.kept.items()}

    flying, tables = layer.in_flight, fixed.tables
    at("forward of the last layer", fixed.always, tables, saved(layers - 1), flying, layer.forward, fixed.gathered)
    at("head and loss", fixed.always, tables, saved(layers), flying, head)
    at("backward of the last layer", fixed.always, tables, saved(layers - 1), flying, layer.backward, fixed.gathered,
       fixed.gradients(0))
    at("backward of the first layer", fixed.always, tables, layer.backward, fixed.gathered, fixed.gradients(layers - 1))
    at("backward of the embedding", fixed.always, fixed.gradients(layers), fixed.embedding)
    at("optimizer", fixed.always, fixed.optimizer)
    return Memory(moments, sum(layer.saved.values()), layer.host, hardware.extra_gib, hardware.slack, hardware.context_gib)


class _Fixed:
    """What does not grow with the sequence, and the tables that do."""

    def __init__(self, job: Job):
        cfg, sizes = job.cfg, job.sizes
        self.job, own = job, sizes.total / job.shard
        state = {"adamw": 8, "sgd": 4 if cfg.optim.momentum else 0}[cfg.optim.name]
        heads = job.heads
        self.always = {"weights": FP32 * own, "optimizer state": 0.0 if cfg.optim.offload else state * own,
                       "tokens, labels, positions": job.tokens * 16.0 + job.rows * 8.0,
                       # Four int32 per row and visit.
                       "intervals of masks": min(32.0 * job.seq_len / job.ulysses * len(job.masks), _INTERVALS_BYTES)}
        self.tables: Parts = {"RoPE tables": job.rows * heads.head_dim * 4.0}
        self.gathered: Parts = {}
        if job.shard > 1:
            unit = sizes.layer
            embedding = FP32 * cfg.model.vocab_size * cfg.model.dim
            # In a backward: the layer's weights, the next layer's and what they come in, a gradient that is being reduced.
            self.gathered = {"gathered weights and their gradients": (3 * job.compute_itemsize + FP32) * unit,
                             "gathered embedding": embedding}
        # Without parallel.reduce=each a rank keeps whole gradients from one micro-batch to the next.
        self.grad_shard = 1 if cfg.train.accumulation > 1 and cfg.parallel.reduce == "last" else job.shard

    def gradients(self, layers_done: int) -> Parts:
        sizes = self.job.sizes
        if self.grad_shard < self.job.shard:
            return {"gradients": FP32 * float(sizes.total)}
        return {"gradients": FP32 * (sizes.head + layers_done * sizes.layer) / self.job.shard}

    @property
    def embedding(self) -> Parts:
        """Its gradient, whole and fp32, beside that of its output."""
        job, model = self.job, self.job.cfg.model
        weight = float(FP32 * model.vocab_size * model.dim)
        rounded = job.residual_itemsize if job.residual_itemsize != FP32 else 0
        return {"embedding's gradient": weight * (2 if job.shard > 1 else 1),
                "residual stream": float(job.tokens * model.dim * (FP32 + rounded)), "gathered embedding": weight if job.shard > 1 else 0.0}

    @property
    def optimizer(self) -> Parts:
        """All gradients, and the larger of what adding them over ranks copies and what AdamW makes of lists of tensors."""
        job, sizes = self.job, self.job.sizes
        own = sizes.total / job.shard
        flat = max(FP32 * sizes.head, min(_BUCKET_BYTES, FP32 * own)) if job.shard == 1 < job.num_gpus else 0
        more = FP32 * own if job.cfg.optim.name == "adamw" else 0.0
        if job.cfg.optim.offload:
            # Moments pass through three buffers of both (train/optimizer_offload.py).
            more = _OFFLOAD_BUFFER_BYTES * min(3, -(-own // _OFFLOAD_ELEMENTS)) + FP32 * min(own, _OFFLOAD_ELEMENTS)
        return {"gradients": FP32 * own, "optimizer temporaries": float(max(more, flat))}


class _Layer:
    """Bytes of one layer. saved: between forward and backward; kept: of that on the GPU; forward, backward: the most at work."""

    def __init__(self, job: Job):
        cfg, model, heads = job.cfg, job.cfg.model, job.heads
        self.job, self.heads = job, heads
        n, self.item, self.residual = job.tokens, job.compute_itemsize, job.residual_itemsize
        self.x = float(n * model.dim * self.residual)
        self.queries, self.keys = float(n * heads.num_heads * heads.head_dim), float(n * heads.num_kv_heads * heads.head_dim)
        self.split = HeadSplit(heads.num_heads, heads.num_kv_heads, job.ulysses)
        # Inside attention a KV head stands on every Ulysses rank whose query heads read it.
        self.gathered_keys = self.keys * self.split.local_kv_heads * job.ulysses / heads.num_kv_heads
        self.lse = float(n * heads.num_heads * FP32)
        self.qkv = self.item * (self.queries + 2 * self.keys)
        self.out = self.item * self.queries
        self.tile = min(cfg.train.tile_rows or job.rows, job.rows) * job.batch
        self.is_tiled = 0 < cfg.train.tile_rows < job.rows
        # A tiled function of rows keeps its inputs alone and runs again in the backward, also where one tile holds all rows.
        self.is_kept_whole = job.activations == "none" and cfg.train.tile_rows == 0
        self.loads = _worst_loads(job)
        self.saved = self._saved(job.activations)
        self.host = sum(self.saved.values()) if job.activations == "offload" else 0.0
        self.kept = {} if self.host else self.saved

    def _saved(self, policy: str) -> Parts:
        if policy == "block":
            return {"layer inputs": self.x}
        if policy in ("block_save_attention", "offload"):
            return {"layer inputs": self.x, "attention out and lse": self.out + self.lse}
        found = {"layer inputs": self.x, "attention out and lse": self.out + self.lse, "q, k, v": self.qkv}
        if self.is_kept_whole:
            model, n = self.job.cfg.model, self.job.tokens
            found["norms and MLP"] = self.x + n * self.item * (2 * model.dim + 4 * model.ffn_dim)
        return found

    @property
    def in_flight(self) -> Parts:
        """Offload: of the layer that was computed before this one, or is next in the backward."""
        return {"offload, under way": self.host} if self.host else {}

    def _weight_item(self) -> int:
        return FP32 if self.job.shard == 1 else self.item

    def _mlp(self, products: int, residuals: int) -> float:
        """Of a tile: so many tensors as wide as the MLP and as wide as the residual stream, and a norm's output."""
        model = self.job.cfg.model
        return self.tile * (residuals * self.residual * model.dim + self.item * (model.dim + products * model.ffn_dim))

    @property
    def forward(self) -> Parts:
        """The larger of two moments: attention's forward, and the MLP's of a tile."""
        own = {"layer inputs": self.x, "attention out and lse": self.out + self.lse}
        whole = {**own, "q, k, v": self.qkv, **self.attention_forward}
        if self.is_kept_whole:
            rows = {**self.saved, "residual stream": self.x}
        else:
            rows = {**own, "residual stream": self.x if self.is_tiled else 0.0, "tile of the MLP": self._mlp(3, 1)}
        return _largest(rows, whole)

    @property
    def attention_forward(self) -> Parts:
        """Beside q, k, v, out and lse of the rank's own rows."""
        ring = {"running out, fp32": FP32 * self.queries, **self._under_way("forward")} if self.job.ring > 1 else {}
        if self.job.ulysses == 1:
            return ring
        gathered = self.item * (self.queries + 2 * self.gathered_keys)
        own = gathered + self.out + self.lse
        return _largest({"Ulysses' heads": gathered, "Ulysses' parcels": 2 * gathered}, {"Ulysses' heads": own, **ring},
                        {"Ulysses' heads": own, "Ulysses' parcels": 3 * (self.out + self.lse)})

    @property
    def attention_backward(self) -> Parts:
        """Beside q, k, v, out, lse and dout of the rank's own rows."""
        keys = self.gathered_keys
        is_replicated = keys > self.keys  # then dk and dv are rounded once all ranks' are added
        of_keys = FP32 if is_replicated else self.item
        found = {"dq, dk, dv, fp32": FP32 * (self.queries + 2 * keys), "delta": self.lse, **self._under_way("backward"),
                 "dq, dk, dv, rounded": self.item * (self.queries + (0 if is_replicated else 2 * keys))}
        if self.job.ulysses == 1:
            return found
        gathered = self.item * (self.queries + 2 * keys) + 2 * self.out + self.lse
        gradients = self.item * self.queries + of_keys * 2 * keys
        return _largest({"Ulysses' heads": gathered, "Ulysses' parcels": 2 * gathered}, {"Ulysses' heads": gathered, **found},
                        {"Ulysses' heads": gathered, "dq, dk, dv, rounded": gradients, "Ulysses' parcels": 2 * gradients})

    def _under_way(self, pass_: str) -> Parts:
        if self.job.ring == 1:
            return {}
        buffers, is_copied = self.loads[pass_].buffers, self.job.cfg.attention.exchange in ("auto", "copy")
        rows = (buffers.own, buffers.landing if is_copied else buffers.received)
        return {"K, V and gradients under way": sum(Buffers.bytes_of(each, self.split.local(self.heads)) for each in rows)}

    @property
    def backward(self) -> Parts:
        """The larger of two moments, the MLP's backward (of a tile) and attention's, each with what is kept till then."""
        model, policy = self.job.cfg.model, self.job.activations
        norm = float(self.job.tokens * self.item * model.dim)
        # What stands when the layer's backward begins; dy counts as residual stream.
        own = {"layer inputs": self.x, "attention out and lse": self.out + self.lse, "q, k, v": self.qkv}
        if policy in ("block_save_attention", "offload"):
            del own["q, k, v"]  # made again after the MLP's backward
        rows: Parts = {**own, "residual stream": self.x}
        after = self.job.sizes.layer_matmul - self.job.sizes.layer_before
        if self.is_tiled:
            rows |= {"residual stream": 2 * self.x, "gradient of attention's out": self.out, "tile of the MLP": self._mlp(6, 2),
                     "weight gradients of a layer": (FP32 + self._weight_item()) * after}
            # The last tile's weight gradients wait while this one's are made: the first of them beside all that is wide.
            more = self._weight_item() * model.dim * model.ffn_dim
            rows["tile of the MLP"] = max(rows["tile of the MLP"] + more, self._weight_item() * after)
        else:
            single = self._weight_item() * model.dim * model.ffn_dim
            rows |= {"tile of the MLP": self._mlp(6, 1 if self.is_kept_whole else 2), "weight gradients of a layer": single}
            rows |= {} if policy == "block_save_attention" or self.job.cfg.train.tile_rows else {"norms": norm}
        whole = {**own, "q, k, v": self.qkv, "residual stream": self.x * (1 if policy == "none" else 2),
                 "gradient of attention's out": self.out, "weight gradients of a layer": self._weight_item() * after}
        whole |= {} if self.is_tiled else {"norms": norm}
        whole |= self.attention_backward
        return _largest(rows, whole)


def _largest(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


def _head(job: Job) -> Parts:
    """The larger of two moments of the loss's backward: making a chunk's logits while the last chunk's are still there, and
    adding to the head's gradient."""
    model, item = job.cfg.model, job.compute_itemsize
    logits = float(min(model.loss_chunk_rows, max(job.tokens, 1))) * model.vocab_size
    weight = float(model.vocab_size * model.dim)
    gathered = (1 if model.tie_embeddings else 2) * FP32 * weight if job.shard > 1 else 0.0
    own = {"hidden and its gradient": float(job.tokens * model.dim * (2 * item + job.residual_itemsize)),
           "head's weight, rounded": item * weight if item != FP32 else 0.0, "gathered embedding": gathered}
    making = {**own, "logits of a chunk": (3 * FP32 + item) * logits, "head's gradient": FP32 * weight}
    adding = {**own, "logits of a chunk": (FP32 + item) * logits, "head's gradient": 2 * FP32 * weight}
    return _largest(making, adding)


def _worst_loads(job: Job) -> dict[str, Loads]:
    """Of the kind of layer whose buffers are largest."""
    attention, whole = job.cfg.attention, job.heads
    local = HeadSplit(whole.num_heads, whole.num_kv_heads, job.ulysses).local(whole)
    found = [ring_loads(mask, job.masks, attention.layout, job.seq_len, job.ring, local, degree=job.ulysses,
                        ranks_per_host=job.gpus_per_host, routing=attention.routing, rotate=attention.rotate)
             for mask, _ in job.layers_by_mask]
    return max(found, key=lambda loads: Buffers.bytes_of(loads["backward"].buffers.landing, local))
