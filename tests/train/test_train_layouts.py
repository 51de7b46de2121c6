"""Training on layouts made from each batch's documents is training on one rank; what Ulysses ranks own comes together again."""
import dataclasses

import pytest
import torch
import torch.distributed as dist
from train_ranks import run_ranks, text, tiny

from ringflash import Layout, Mask, shard, shard_batch, unshard
from ringflash.train.trainer import Trainer
from ringflash.train.world import connect, single

CPU = torch.device("cpu")
LAYOUTS = ("balanced", "auto")


def config(cp, layout):
    cfg = tiny(cp=cp, accumulation=2, seq_len=301)
    return dataclasses.replace(cfg, attention=dataclasses.replace(cfg.attention, layout=layout))


def steps_of(cfg, world, count=2):
    made = Trainer(cfg, world, text(cfg))
    results = [made.train_step(step) for step in range(count)]
    kinds = [made.shard(made.data.train.batch(0, micro, 0, num_micro_batches=2, dp_size=1)).layout.kind for micro in range(2)]
    return {"loss": [r.loss for r in results], "valid": [r.valid_tokens for r in results], "kinds": kinds,
            "weights": {n: p.detach().clone() for n, p in made.model.named_parameters()}}


def ring_body(rank):
    found = {layout: steps_of(config(2, layout), connect(1, 2, CPU, timeout_s=60.0)) for layout in LAYOUTS}
    x = torch.arange(2.0 * 37).reshape(2, 37).requires_grad_()
    for kind in ("zigzag", "striped", "balanced"):
        layout = Layout(kind, 37, 1, Mask(cu_seqlens=[0, 9, 30]), ulysses_size=2, group=dist.group.WORLD)
        part = shard(x, layout, group=dist.group.WORLD)
        whole = unshard(part, layout, group=dist.group.WORLD)
        whole.sum().backward()
        batch = {"tokens": torch.arange(37)[None], "cu_seqlens": [0, 9, 30]}
        sharded = shard_batch(batch, Layout(kind, 37, 1, ulysses_size=2), group=dist.group.WORLD)
        found[kind, "ulysses"] = (layout.is_agreed, part.detach(), whole.detach(), sharded.positions, sharded.num_valid)
    try:
        Layout("zigzag", 37, 2, ulysses_size=2, group=dist.group.WORLD)
    except ValueError as error:
        found["refused"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(ring_body, 2, tmp_path_factory.mktemp("ring"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_on_a_balanced_ring_of_two_are_those_of_one_rank(ranks, layout):
    want = steps_of(config(1, layout), single())
    for rank in ranks:
        got = rank[layout]
        assert got["kinds"] == ["balanced"] * 2 and got["valid"] == want["valid"]
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-6)
        for name, weight in want["weights"].items():
            torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=2e-6)
    assert want["loss"][1] < want["loss"][0]


def test_shards_of_ulysses_ranks_come_together_over_their_group(ranks):
    x = torch.arange(2.0 * 37).reshape(2, 37)
    for kind in ("zigzag", "striped", "balanced"):
        layout = Layout(kind, 37, 1, Mask(cu_seqlens=[0, 9, 30]), ulysses_size=2)
        for rank, found in enumerate(ranks):
            is_agreed, part, whole, positions, num_valid = found[kind, "ulysses"]
            assert is_agreed and torch.equal(whole, x) and num_valid == 28
            assert torch.equal(part, x[:, layout.positions(rank)])
            assert positions.tolist() == layout.positions(rank).tolist()


def test_a_group_of_another_size_is_refused_with_the_number_of_ranks(ranks):
    assert all("cp_size=2 with ulysses_size=2: 4 ranks: the group has 2 ranks" in found["refused"] for found in ranks)
