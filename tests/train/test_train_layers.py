"""Layers with different masks in one model, on one layout and one batch: a ring of four trains as one rank does."""
import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from train_ranks import run_ranks, text, tiny

from ringflash import Mask
from ringflash.model import ModelConfig, Transformer
from ringflash.tests.support.masks import allowed_pairs
from ringflash.train import equivalence
from ringflash.train.trainer import Trainer, layer_masks, model_config
from ringflash.train.world import connect, single

CPU = torch.device("cpu")
WINDOW, SEQ_LEN = 16, 203
PATTERNS = {  # layout -> what its model's layers see, and first tokens beside the window
    "zigzag": (["window", "global"], 0), "balanced": (["window", "global"], 0), "auto": (["window", "window", "global"], 0),
    "contiguous": (["chunk", "window"], 2), "striped": (["global", "chunk", "window"], 1),
}


def config(cp, layout, **attention):
    layers, first_tokens = PATTERNS[layout]
    cfg = tiny(cp=cp, accumulation=2, seq_len=SEQ_LEN)
    chosen = dict(layout=layout, layers=layers, window_size=[WINDOW - 1, 0], first_tokens=first_tokens,
                  chunk_size=24 if "chunk" in layers else None) | attention
    return dataclasses.replace(
        cfg, model=dataclasses.replace(cfg.model, num_layers=3, sinks=True),
        attention=dataclasses.replace(cfg.attention, **chosen))


def step_of(cfg, world):
    made = Trainer(cfg, world, text(cfg))
    result = made.train_step(0)
    return {"loss": result.loss, "norm": result.grad_norm, "valid": result.valid_tokens,
            "gradients": {n: p.grad.clone() for n, p in made.model.named_parameters()},
            "weights": {n: p.detach().clone() for n, p in made.model.named_parameters()}}


def ring_body(rank):
    found = {}
    for layout in PATTERNS:
        cfg = config(4, layout)
        found[layout] = step_of(cfg, connect(1, 4, CPU, timeout_s=60.0))
    report = equivalence.run(config(4, "balanced"), text(config(4, "balanced")), device=CPU, group=dist.group.WORLD)
    found["report"] = (report.ok, report.table())
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(ring_body, 4, tmp_path_factory.mktemp("ring"))


@functools.cache
def one_rank(layout):
    return step_of(config(1, layout), single())


@pytest.mark.parametrize("layout", PATTERNS)
def test_a_ring_of_four_gives_loss_and_every_gradient_of_one_rank_sinks_included(ranks, layout):
    want = one_rank(layout)
    for rank in ranks:
        got = rank[layout]
        assert got["valid"] == want["valid"] and got["loss"] == pytest.approx(want["loss"], rel=2e-6)
        assert got["norm"] == pytest.approx(want["norm"], rel=1e-5)
        assert got["gradients"].keys() == want["gradients"].keys() and "layers.2.attention.sinks" in got["gradients"]
        for name, reference in want["gradients"].items():
            assert reference.any(), name
            torch.testing.assert_close(got["gradients"][name], reference, rtol=0, atol=1e-5 * float(reference.abs().max()))


def test_the_equivalence_report_takes_such_a_model(ranks):
    for rank in ranks:
        ok, table = rank["report"]
        assert ok, table
        assert "gradient of layers.2.attention.sinks" in table


def dense(cfg, boundaries):
    """Plain attention of one model, that knows from the order of calls which layer asks, and from the configuration what that
    layer may see; it looks at no Mask."""
    kinds = {"global": {}, "chunk": dict(chunk_size=cfg.attention.chunk_size),
             "window": dict(window_size=(WINDOW - 1, 0), first_tokens=cfg.attention.first_tokens)}
    calls = []

    def attend(q, k, v, *, layout, mask, sinks):
        kind = cfg.attention.layers[len(calls) % cfg.model.num_layers % len(cfg.attention.layers)]
        calls.append(kind)
        rows = torch.arange(q.shape[1])
        allowed = allowed_pairs(rows, rows, seq_len_q=len(rows), seq_len_k=len(rows), cu_seqlens=boundaries[0], **kinds[kind])
        group = q.shape[2] // k.shape[2]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, -torch.inf)
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        p = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        return torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(group, 2))

    return attend, calls


@pytest.mark.parametrize("layout", PATTERNS)
def test_each_layer_sees_what_its_place_in_the_pattern_says(layout):
    cfg, boundaries = config(1, layout), [None]
    made = Trainer(cfg, single(), text(cfg))
    attend, calls = dense(cfg, boundaries)
    plain = Transformer(model_config(cfg), attend, seed=cfg.train.seed)
    sharded = [made.shard(made.data.train.batch(0, micro, 0, num_micro_batches=2, dp_size=1)) for micro in range(2)]
    valid = made.count_valid(sharded)
    total = 0.0
    for batch in sharded:
        boundaries[0] = batch.layout.masks[0].cu_seqlens.tolist()
        loss = plain(batch.tokens, batch.positions, batch.labels, layout=batch.layout) / valid
        loss.backward()
        total += loss.item()
    want = one_rank(layout)
    assert total == pytest.approx(want["loss"], rel=2e-6)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(p.grad, want["gradients"][name], rtol=0, atol=2e-5 * float(p.grad.abs().max()))
    layers = PATTERNS[layout][0]
    assert calls == 2 * [layers[i % len(layers)] for i in range(3)]


def test_another_order_or_another_kind_of_layer_is_another_model():
    base = one_rank("zigzag")["loss"]
    others = [config(1, "zigzag", layers=layers) for layers in (["global", "window"], ["window"])]
    others.append(config(1, "zigzag", layers=["global"], window_size=[-1, -1]))
    losses = [step_of(cfg, single())["loss"] for cfg in others]
    assert len({base, *losses}) == 4 and all(abs(loss - base) > 1e-6 for loss in losses)


def test_one_layout_carries_all_masks_with_the_documents_of_the_batch_and_is_balanced_for_their_sum():
    cfg = config(1, "balanced")
    assert layer_masks(cfg.attention) == (Mask(window_size=(15, 0)), Mask())
    assert layer_masks(config(1, "striped").attention) == (
        Mask(), Mask(chunk_size=24), Mask(window_size=(15, 0), first_tokens=1))
    assert layer_masks(tiny().attention) == (Mask(),)
    made = Trainer(cfg, single(), text(cfg))
    masks = made.shard(made.data.train.batch(0, 0, 0, num_micro_batches=2, dp_size=1)).layout.masks
    assert [mask.window_size[0] for mask in masks] == [15, -1]
    assert masks[0].cu_seqlens is not None and (masks[0].cu_seqlens == masks[1].cu_seqlens).all()


def test_a_layout_of_one_mask_leaves_it_to_attention_and_several_repeat_over_the_layers():
    asked = []

    def attend(q, k, v, *, layout, mask=None):
        asked.append(mask)
        return q

    class Given:
        def __init__(self, *masks):
            self.masks = masks

    config_ = ModelConfig(vocab_size=11, dim=8, num_layers=5, num_heads=2, num_kv_heads=2, ffn_dim=8)
    model, tokens = Transformer(config_, attend), torch.zeros(1, 3, dtype=torch.int64)
    for layout in (None, Given("only"), Given("a", "b"), Given("a", "b", "c")):
        model(tokens, torch.arange(3), layout=layout)
    assert asked == [None] * 10 + ["a", "b", "a", "b", "a"] + ["a", "b", "c", "a", "b"]
