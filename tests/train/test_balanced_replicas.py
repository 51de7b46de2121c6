"""Samples dealt to data-parallel replicas by their allowed pairs: even, the same samples in a step, the same on all ranks."""
import dataclasses

import numpy as np
import pytest
from train_ranks import text, tiny

from ringflash import Mask
from ringflash.data.balanced_replicas import deal, imbalance
from ringflash.train.replicas import Replicas
from ringflash.train.trainer import Trainer
from ringflash.train.world import single

COSTS = np.random.default_rng(3).integers(1, 10**12, 24) ** 2 % 10**12


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 8, 24])
def test_every_sample_is_dealt_once_and_every_replica_gets_as_many(dp):
    order = deal(COSTS, dp)
    assert order.shape == (24 // dp, dp)
    assert sorted(order.ravel()) == list(range(24))


def test_by_hand():
    # Largest first: 9 and 8 are the first micro-batch; then replica 1 has had less and gets 5, and replica 0 gets 1.
    assert deal(np.array([1, 8, 5, 9]), 2).tolist() == [[3, 1], [0, 2]]
    assert deal(np.array([7, 7, 7, 7]), 2).tolist() == [[0, 1], [2, 3]]
    assert imbalance(np.array([1, 8, 5, 9]), np.array([[3, 1], [0, 2]])) == (9 + 5) / (8.5 + 3)
    assert imbalance(np.array([1, 8, 5, 9]), np.array([[0, 1], [2, 3]])) == (8 + 9) / (4.5 + 7)
    assert imbalance(np.zeros(4), np.arange(4).reshape(2, 2)) == 1.0


@pytest.mark.parametrize("dp", [2, 3, 4, 8])
def test_no_dealing_of_as_many_samples_to_each_micro_batch_waits_less(dp):
    random = np.random.default_rng(0)
    best = imbalance(COSTS, deal(COSTS, dp))
    assert all(best <= imbalance(COSTS, random.permutation(24).reshape(-1, dp)) for _ in range(200))
    assert best < imbalance(COSTS, np.arange(24).reshape(-1, dp))


def test_replicas_have_about_the_same_in_all():
    load = COSTS[deal(COSTS, 2)].sum(axis=0)
    assert abs(load[0] - load[1]) <= COSTS.max() - COSTS.min()
    assert load.max() / load.mean() < 1.02


@pytest.mark.parametrize("masks", [(Mask(),), (Mask(window_size=(9, 0), first_tokens=2), Mask()), (Mask(chunk_size=7),)], ids=str)
def test_pairs_of_a_sample_are_those_of_its_masks(masks):
    cfg = tiny(dp=2)
    replicas = Replicas(text(cfg).train, masks, dp=2, num_micro_batches=2)
    for sample in range(6):
        boundaries = replicas.train.cu_seqlens(sample)
        position, pairs = np.arange(45), 0
        for mask in masks:
            of = mask.with_documents(boundaries)
            for part in range(of.num_parts):
                first, stop = of.bounds(position, 45, 45, part)
                pairs += int((stop - first).sum())
        assert replicas.pairs(sample) == pairs


@pytest.mark.parametrize("dp, micro", [(4, 1), (2, 2), (1, 4)])
def test_a_step_has_the_same_samples_whatever_the_replicas(dp, micro):
    cfg = tiny(dp=dp, accumulation=micro)
    dealt = Replicas(text(cfg).train, (Mask(),), dp, micro).deal(8)
    assert [len(replicas) for replicas in dealt.micro_batches] == [dp] * micro
    assert sorted(n for replicas in dealt.micro_batches for samples in replicas for n in samples) == [8, 9, 10, 11]
    assert 1 <= dealt.imbalance <= dealt.in_order
    assert (dp == 1) == (dealt.in_order == 1)


def test_without_documents_samples_cost_the_same_and_keep_their_order():
    cfg = tiny(dp=2, accumulation=2)
    train = text(cfg).train
    train.document_mask, train.batch_size = False, 3
    dealt = Replicas(train, (Mask(),), 2, 2).deal(12)
    assert dealt.micro_batches == (((12, 13, 14), (15, 16, 17)), ((18, 19, 20), (21, 22, 23)))
    assert dealt.imbalance == dealt.in_order == 1.0


def test_what_is_read_ahead_is_what_the_step_takes():
    cfg = tiny(accumulation=4)
    made = Trainer(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=2)), single(), text(cfg))
    made.replicas = Replicas(made.data.train, (Mask(),), 2, 2)
    served, batch_of = [], made.data.train.batch_of
    made.data.train.batch_of = lambda samples: (served.append(samples), batch_of(samples))[1]
    result = made.train_step(0)
    ahead = made.next_samples(1)
    made.train_step(1)
    assert served[2:] == ahead and len(ahead) == 2
    assert 1 <= result.pairs_imbalance < result.pairs_imbalance_in_order
