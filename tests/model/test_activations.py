"""train.activations changes what is kept between forward and backward, and no bit of a gradient; attention's forward, its kernels
and its messages run twice with `block` only."""
import contextlib
import dataclasses
import functools
import gc

import pytest
import torch
import torch.distributed as dist

from ringflash import Layout, Mask, shard, simulate
from ringflash.config import Config, TrainConfig
from ringflash.kernels import cpu, reference
from ringflash.model import activations
from ringflash.model.activation_memory import (CHOICES, USABLE, LayerSizes, choose_activations, host_bytes_per_token,
                                               saved_bytes_per_token, step_bytes)
from ringflash.model.build import build_model
from ringflash.model.host_store import Handle, HostStore
from ringflash.ring.exchange import record_traffic
from ringflash.tests.support.activation_cases import PLAIN, POLICIES, RICH, batch, model, step
from ringflash.tests.support.distributed import check_ranks

DOCUMENTS = [0, 9, 9, 10, 31, 44]                           # of 50 rows: the last six see nothing
LAYERS = (Mask(cu_seqlens=DOCUMENTS), Mask(window_size=(5, 0), cu_seqlens=DOCUMENTS))


@contextlib.contextmanager
def counted():
    """Calls of each kernel's forward and backward."""
    counts, plain = {"forward": 0, "backward": 0}, {}

    def wrap(function, name):
        @functools.wraps(function)
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)
        return call

    for kernel in (reference, cpu):
        for name in counts:
            plain[kernel, name] = getattr(kernel, name)
            setattr(kernel, name, wrap(plain[kernel, name], name))
    try:
        yield counts
    finally:
        for (kernel, name), function in plain.items():
            setattr(kernel, name, function)


@pytest.mark.parametrize("tile_rows", [0, 16])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "rich"])
def test_every_policy_gives_the_same_bits_and_runs_attention_as_often_as_it_says(config, kernel, bf16, tile_rows):
    layout = Layout("contiguous", 50, 1, LAYERS)
    tokens, labels = batch(50)
    found = {}
    for policy in POLICIES:
        made = model(config, kernel=kernel, activations=policy, tile_rows=tile_rows)
        with counted() as counts:
            found[policy] = step(made, tokens, torch.arange(50), labels, layout, bf16=bf16)
        forwards = 2 * config.num_layers if policy == "block" else config.num_layers
        assert counts == {"forward": forwards, "backward": config.num_layers}, policy
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in found["none"].gradients.values())
    for policy in POLICIES[1:]:
        assert not found[policy].differs(found["none"]), policy


def test_a_batch_of_several_sequences_and_two_backwards_in_turn_have_the_same_bits():
    tokens, labels = batch(21, rows=3)
    found = {}
    for policy in POLICIES:
        made = model(activations=policy)
        losses = [made(tokens[:, :n], torch.arange(n), labels[:, :n], layout="contiguous") for n in (21, 8)]
        for loss in losses:
            loss.backward()
        found[policy] = [parameter.grad for parameter in made.parameters()]
    for policy in POLICIES[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[policy], found["none"], strict=True)), policy


@pytest.mark.parametrize("bf16", [False, True])
def test_the_host_memory_that_is_pinned_ahead_is_what_a_step_takes(bf16):
    made = model(activations="offload")
    made.store.chunk_bytes, made.store.copies, asked = 256, True, []
    made.store.reserve = lambda chunks, device: asked.append(chunks)
    tokens, labels = batch(50)
    made.reserve_host(50, 2 if bf16 else 4, torch.device("cpu"))
    step(made, tokens, torch.arange(50), labels, "contiguous", bf16=bf16)
    assert asked == [made.store.num_chunks] and asked[0] > 3 * PLAIN.num_layers
    for layer in made.layers:
        layer.activations = "block"
    made.reserve_host(50, 4, torch.device("cpu"))
    assert len(asked) == 1


def test_block_takes_any_attention_and_the_others_say_what_they_need():
    attention = functools.partial(simulate, cp_size=3, kernel="reference", deterministic=True)
    tokens, labels = batch(20)
    found = [step(model(attention=attention, activations=policy), tokens, torch.arange(20), labels, "zigzag")
             for policy in ("none", "block")]
    assert not found[0].differs(found[1])
    for policy in ("block_save_attention", "offload"):
        with pytest.raises(RuntimeError, match=f"train.activations={policy}: keeps what the op .* nearest: block"):
            step(model(attention=attention, activations=policy), tokens, torch.arange(20), labels, "zigzag")


def test_without_gradients_nothing_is_kept():
    made = model(activations="offload")
    tokens, labels = batch(12)
    with torch.no_grad():
        loss = made(tokens, torch.arange(12), labels, layout="contiguous")
    assert not loss.requires_grad and made.store._last is None


def test_frozen_weights_get_no_gradient_and_the_others_the_same_bits():
    tokens, labels = batch(17)
    found = {}
    for policy in POLICIES:
        made = model(activations=policy, tile_rows=8)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_("wk" not in name and "up" not in name)
        loss = made(tokens, torch.arange(17), labels, layout="contiguous")
        loss.backward()
        found[policy] = {name: parameter.grad for name, parameter in made.named_parameters()}
    assert [n for n, g in found["none"].items() if g is None] == [n for n in found["none"] if "wk" in n or "up" in n]
    for policy in POLICIES[1:]:
        for name, gradient in found["none"].items():
            ours = found[policy][name]
            assert (gradient is None and ours is None) or torch.equal(gradient, ours), (policy, name)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_planted_defects_show_in_the_gradients(policy, monkeypatch):
    tokens, labels = batch(20)
    expected = step(model(activations=policy), tokens, torch.arange(20), labels, "contiguous")
    plain = activations.row_gradients

    def forgetful(function, tile_rows, inputs, weights, douts):
        return plain(function, tile_rows, (inputs[0] * 1.001, *inputs[1:]), weights, douts)

    monkeypatch.setattr(activations, "row_gradients", forgetful)
    assert step(model(activations=policy), tokens, torch.arange(20), labels, "contiguous").differs(expected)


# What is kept, in bytes

@pytest.mark.parametrize("tile_rows", [0, 16])
@pytest.mark.parametrize("residual", [None, torch.bfloat16])
def test_what_a_layer_keeps_is_what_the_memory_model_says(tile_rows, residual):
    sizes = LayerSizes(32, 48, 4, 2, 8, residual_itemsize=2 if residual else 4)
    tokens, labels = batch(64)
    for policy in POLICIES:
        kept = {}
        for num_layers in (2, 5):
            made = model(dataclasses.replace(PLAIN, num_layers=num_layers), activations=policy, tile_rows=tile_rows,
                         residual_dtype=residual)
            weights = {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}
            storages = {}

            def note(x):
                if x.device.type == "cpu" and x.untyped_storage().data_ptr() not in weights:
                    storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), torch.autocast("cpu", torch.bfloat16):
                loss = made(tokens, torch.arange(64), labels, layout="contiguous")
            kept[num_layers] = sum(storages.values())
            loss.backward()
        # offload keeps nothing with autograd; CPU tensors wait in the store as they are.
        expected = saved_bytes_per_token(sizes, policy, is_tiled=tile_rows > 0)
        assert (kept[5] - kept[2]) / 3 / 64 == pytest.approx(expected, rel=0.02, abs=8), policy
    assert host_bytes_per_token(sizes, "offload") == saved_bytes_per_token(sizes, "block_save_attention", is_tiled=True)


def test_auto_takes_the_first_policy_that_fits_and_never_block():
    sizes = LayerSizes(2048, 8192, 8, 2, 128)
    run = dict(num_layers=8, tokens=1 << 20, tile_rows=8192)
    needs = [step_bytes(sizes, policy, **run) for policy in CHOICES]
    assert needs == sorted(needs, reverse=True) and "block" not in CHOICES
    for policy, need in zip(CHOICES, needs, strict=True):
        fits = int((need + 10**9) / USABLE) + 1
        assert choose_activations(sizes, state_bytes=10**9, device_bytes=fits, **run) == policy
    assert choose_activations(sizes, state_bytes=10**9, device_bytes=1, **run) == "offload"


# Host memory

def _tensors(seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 7, generator=g), torch.randn(11, generator=g).bfloat16(), torch.empty(0, 4),
            torch.randn(2, 5, generator=g).t()]


@pytest.mark.parametrize("chunk_bytes", [8, 64, 1 << 20])
def test_host_store_gives_back_what_was_put_in_any_order_and_uses_its_chunks_again(chunk_bytes):
    store = HostStore(chunk_bytes, copies=True)
    for order in ([3, 2, 1, 0], [0, 3, 1, 2], [1, 0, 2, 3]):
        handles = [store.put(_tensors(seed)) for seed in range(4)]
        assert [handle.tensors is None for handle in handles] == [True, True, True, False], "the last is still on the device"
        for seed in order:
            taken = handles[seed].take()
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(taken, _tensors(seed), strict=True))
        assert len(store.free) == store.num_chunks
        used = store.num_chunks
    per_put = sum(-(-x.numel() * x.itemsize // chunk_bytes) for x in _tensors(0))
    assert used == 4 * per_put and store.host_bytes == used * chunk_bytes


def test_host_store_takes_back_the_chunks_of_a_graph_that_was_dropped():
    store = HostStore(64, copies=True)
    handles = [store.put(_tensors(seed)) for seed in range(3)]
    handles[1].take()
    del handles
    store.put(_tensors(9)).take()                           # the store's own last one goes
    gc.collect()
    assert len(store.free) == store.num_chunks


def test_host_store_gives_things_once():
    handle = HostStore(copies=True).put(_tensors(0))
    handle.take()
    with pytest.raises(RuntimeError, match="train.activations=offload: a second backward"):
        handle.take()


def test_offload_through_real_copies_has_the_same_bits_and_bounded_host_memory():
    tokens, labels = batch(50)
    expected = step(model(RICH), tokens, torch.arange(50), labels, "contiguous", bf16=True)
    made = model(RICH, activations="offload", tile_rows=0)
    made.store.copies, made.store.chunk_bytes = True, 1000
    sizes = []
    for _ in range(3):
        made.zero_grad()
        assert not step(made, tokens, torch.arange(50), labels, "contiguous", bf16=True).differs(expected)
        sizes.append(made.store.num_chunks)
    assert sizes[0] == sizes[2] > 0


class Clock:
    """Stands for a CUDA stream: remembers what of the others it has waited for, and how far it has come itself."""

    def __init__(self, name):
        self.name, self.time, self.seen = name, 0, {}

    def work(self):
        self.time += 1
        return self.name, self.time

    def wait_stream(self, other):
        self.wait_event({**other.seen, other.name: other.time})

    def record_event(self):
        return {**self.seen, self.name: self.time}

    def wait_event(self, event):
        self.seen = {name: max(self.seen.get(name, 0), event.get(name, 0)) for name in {*self.seen, *event}}

    def has_seen(self, moment):
        return self.seen.get(moment[0], 0) >= moment[1] or moment[0] == self.name


def test_on_a_gpu_each_copy_waits_for_what_it_reads_and_memory_is_given_up_after_its_copies(monkeypatch):
    compute, side = Clock("compute"), Clock("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    store = HostStore(64)
    plain = store.chunk
    store.stream, store.chunk, store.copies = lambda device: side, lambda pinned: plain(pinned=False), True
    copy, given_up = Handle._copy, []

    def copied(self, tensors, to_host):
        made = compute.work()                               # whatever compute did last: made these tensors, or used their memory
        copy(self, tensors, to_host)
        assert side.has_seen(made)
        self.copied, self.moment = {**side.record_event(), "side": side.time + 1}, side.work()

    def leave(self):
        was_there = self.tensors is not None
        plain_leave(self)
        if was_there and self.tensors is None:
            assert compute.has_seen(self.moment), "given up while it is copied"
            given_up.append(self)

    plain_leave = Handle.leave_device
    monkeypatch.setattr(Handle, "_copy", copied)
    monkeypatch.setattr(Handle, "leave_device", leave)
    for _ in range(2):
        handles = [store.put(_tensors(seed)) for seed in range(4)]
        for seed in (3, 2, 1, 0):
            taken = handles[seed].take()
            assert compute.has_seen(handles[seed].moment), "read, or given up by its new owner, before it has come"
            assert all(torch.equal(a, b) for a, b in zip(taken, _tensors(seed), strict=True))
            assert seed == 0 or handles[seed - 1].tensors is not None, "the one before is on its way"
    assert len(given_up) >= 6


def test_the_run_configuration_reaches_the_model():
    cfg = Config(train=TrainConfig(activations="auto", tile_rows=8, residual_dtype="bf16", dtype="bf16"))
    found = [build_model(cfg, None, tokens=4096, device_bytes=size) for size in (None, 10**12, 1)]
    assert [made.layers[0].activations for made in found] == ["none", "none", "offload"]
    assert all(made.layers[0].tile_rows == 8 == made.tile_rows and made.residual_dtype == torch.bfloat16 for made in found)
    plain = build_model(Config(), None)
    assert (plain.layers[0].activations, plain.tile_rows, plain.residual_dtype, plain.head.loss) == ("none", 0, None, "chunked")


# Over a real ring

def _on_a_ring(rank, world_size):
    found = {}
    for seq_len, kind, kernel, bf16 in ((41, "zigzag", "reference", False), (40, "contiguous", "cpu", True),
                                        (2, "zigzag", "cpu", False), (42, "striped", "cpu", False)):
        cu_seqlens = [0, seq_len // 3, seq_len - seq_len // 9]
        masks = tuple(Mask(window_size=window, cu_seqlens=cu_seqlens) for window in ((-1, 0), (6, 0)))
        layout = Layout(kind, seq_len, world_size, masks, group=dist.group.WORLD)
        # By its name there is no token: every run of the op's forward is a collective more.
        given = kind if kind == "striped" else layout
        whole, labels = batch(seq_len)
        tokens, mine, positions = (shard(x, layout, rank=rank) for x in (whole, labels, torch.arange(seq_len)[None]))
        for policy in POLICIES:
            made = model(dataclasses.replace(RICH, num_layers=2), kernel=kernel, group=dist.group.WORLD, activations=policy,
                         tile_rows=8 if bf16 else 0)
            with counted() as counts, record_traffic() as posted:
                done = step(made, tokens, positions[0], mine, given, bf16=bf16)
            sent = {pass_: sum(message.pass_ == pass_ for message in posted) for pass_ in ("forward", "backward")}
            found[seq_len, policy] = done, counts, sent
    return found


def test_on_a_ring_every_policy_gives_the_same_bits_and_only_block_sends_twice():
    ranks = check_ranks(_on_a_ring, 3, timeout_s=100)
    for rank, found in enumerate(ranks):
        for (seq_len, policy), (done, *counts) in found.items():
            plain, *expected = found[seq_len, "none"]
            assert not done.differs(plain), (rank, seq_len, policy)
            times = 2 if policy == "block" else 1
            wanted = [{"forward": times * of["forward"], "backward": of["backward"]} for of in expected]
            assert counts == wanted, (rank, seq_len, policy)
    for seq_len in (41, 40, 2, 42):
        assert sum(found[seq_len, "none"][2]["forward"] for found in ranks) > 0
