"""Training on dp x ring x ulysses is training on one rank: loss, every gradient, weights after two steps, evaluation."""
import dataclasses

import pytest
import torch
from train_ranks import run_ranks, text, tiny

from ringflash.mesh import ranks_of
from ringflash.train import equivalence
from ringflash.train.trainer import Trainer
from ringflash.train.world import connect, single

CPU = torch.device("cpu")
WORLDS = ((1, 4, 1), (1, 4, 2), (1, 4, 4), (2, 2, 2))       # dp, cp, ulysses; the tiny model has 4 query and 2 KV heads


def config(dp, cp, degree, seq_len):
    cfg = tiny(dp=dp, cp=cp, accumulation=2 // dp, seq_len=seq_len)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, sinks=True, softcap=8.0),
                               attention=dataclasses.replace(cfg.attention, layout="balanced" if degree == 2 else "zigzag",
                                                             routing="allgather" if degree == 1 else "auto"),
                               parallel=dataclasses.replace(cfg.parallel, ulysses=degree))


def steps_of(cfg, world):
    made = Trainer(cfg, world, text(cfg))
    first = made.gradients(0)
    grads = {name: p.grad.detach().clone() for name, p in made.model.named_parameters()}
    results = [made.train_step(step) for step in range(2)]
    return {"loss": [r.loss for r in (first, *results)], "valid": [r.valid_tokens for r in results], "grads": grads,
            "heldout": made.evaluate()[:2], "weights": {name: p.detach().clone() for name, p in made.model.named_parameters()}}


def body(rank):
    found = {}
    for dp, cp, degree in WORLDS:
        for seq_len in (45, 3):                             # also fewer tokens than ranks
            cfg = config(dp, cp, degree, seq_len)
            world = connect(dp, cp, CPU, timeout_s=60.0, ulysses=degree)
            assert ranks_of(world.cp_group).size == cp and ranks_of(world.cp_group).ulysses_size == degree
            found[dp, cp, degree, seq_len] = steps_of(cfg, world)
    cfg = config(1, 4, 2, 45)
    report = equivalence.run(cfg, text(cfg), device=CPU, group=torch.distributed.group.WORLD)
    return found, report.ok, report.table()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(body, 4, tmp_path_factory.mktemp("ulysses"))


@pytest.mark.parametrize("seq_len", (45, 3))
@pytest.mark.parametrize("dp, cp, degree", WORLDS)
def test_two_steps_on_four_ranks_are_those_of_one(ranks, dp, cp, degree, seq_len):
    want = steps_of(config(1, 1, 1, seq_len), single())     # two data-parallel samples are two micro-batches of one rank
    for found, _, _ in ranks:
        got = found[dp, cp, degree, seq_len]
        assert got["valid"] == want["valid"] and got["heldout"][1] == want["heldout"][1]
        assert got["loss"] == pytest.approx(want["loss"], rel=4e-6)
        assert got["heldout"][0] == pytest.approx(want["heldout"][0], rel=4e-6)
        for kind, limit in (("grads", 2e-6), ("weights", 4e-6)):
            for name, value in want[kind].items():
                torch.testing.assert_close(got[kind][name], value, rtol=0, atol=limit, msg=lambda said: f"{name}: {said}")


def test_the_proof_of_equivalence_takes_the_mesh_too(ranks):
    for _, ok, table in ranks:
        assert ok, table
