"""Positions that restart in each document, rope scaling, QK-norm and z-loss: a ring of two trains as one rank does."""
import dataclasses

import numpy as np
import pytest
import torch
from train_ranks import run_ranks, text, tiny

from ringflash.rotary import RopeScaling
from ringflash.train.trainer import Trainer, document_positions
from ringflash.train.world import connect, single

SEQ_LEN = 101
YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=32)
CASES = {  # (data.positions, what the model has)
    "global": ("global", {}), "document": ("document", {}), "document, yarn": ("document", {"rope_scaling": YARN}),
    "norm and z": ("document", {"qk_norm": True, "z_loss": 0.01}),
}


def config(name, cp):
    cfg = tiny(cp=cp, accumulation=2, seq_len=SEQ_LEN, eval_sequences=3)
    positions, model = CASES[name]
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **model),
                               data=dataclasses.replace(cfg.data, positions=positions))


def step_of(cfg, world):
    made = Trainer(cfg, world, text(cfg))
    seen = []
    made.model.register_forward_pre_hook(lambda module, args: seen.append(args[1].clone()))
    result = made.train_step(0)
    return {"loss": result.loss, "norm": result.grad_norm, "heldout": made.evaluate()[:2], "positions": seen[0],
            "gradients": {n: p.grad.clone() for n, p in made.model.named_parameters()},
            "weights": {n: p.detach().clone() for n, p in made.model.named_parameters()}}


def ring_body(rank):
    return {name: step_of(config(name, 2), connect(1, 2, torch.device("cpu"), timeout_s=60.0)) for name in CASES}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(ring_body, 2, tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="module")
def one_rank():
    return {name: step_of(config(name, 1), single()) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_ring_of_two_takes_the_step_of_one_rank(ranks, one_rank, name):
    want = one_rank[name]
    for rank in ranks:
        got = rank[name]
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-6) and got["norm"] == pytest.approx(want["norm"], rel=1e-5)
        assert got["heldout"] == (pytest.approx(want["heldout"][0], rel=5e-6), want["heldout"][1])
        assert got["gradients"].keys() == want["gradients"].keys()
        for key, reference in want["gradients"].items():
            torch.testing.assert_close(got["gradients"][key], reference, rtol=0, atol=1e-5 * float(reference.abs().max()) + 1e-12)
            torch.testing.assert_close(got["weights"][key], want["weights"][key], rtol=0, atol=1e-6)


def test_the_model_is_given_positions_that_restart_and_a_ring_shares_out_the_same(ranks, one_rank):
    cfg = config("document", 1)
    batch = text(cfg).train.batch(0, 0, 0, num_micro_batches=2, dp_size=1)
    expected = [p for length in np.diff(batch["cu_seqlens"]) for p in range(length)]
    assert one_rank["document"]["positions"].tolist() == expected and expected.count(0) > 1
    assert one_rank["global"]["positions"].tolist() == list(range(SEQ_LEN))
    shared = torch.cat([rank["document"]["positions"] for rank in ranks])
    assert sorted(shared.tolist()) == sorted(expected)


def test_with_documents_masked_only_differences_count_so_restarting_changes_nothing_but_rounding(one_rank):
    assert one_rank["document"]["loss"] == pytest.approx(one_rank["global"]["loss"], rel=2e-6)


def test_yarn_the_norms_and_the_z_loss_are_in_the_step(one_rank):
    losses = [one_rank[name]["loss"] for name in ("document", "document, yarn", "norm and z")]
    assert len({round(loss, 6) for loss in losses}) == 3
    assert all(one_rank["norm and z"]["gradients"][f"layers.1.attention.{x}_norm.weight"].any() for x in "qk")
    # log(257) ** 2 * 0.01 more per token, in training alone.
    assert losses[2] - one_rank["norm and z"]["heldout"][0] > 0.2


def test_document_positions_count_from_each_boundary():
    cu_seqlens = np.array([0, 1, 4, 6], dtype=np.int32)
    assert document_positions(torch.arange(6), cu_seqlens).tolist() == [0, 0, 1, 2, 0, 1]
    assert document_positions(torch.tensor([1, 3, 5]), cu_seqlens).tolist() == [0, 2, 1]
