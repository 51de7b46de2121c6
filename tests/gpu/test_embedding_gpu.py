"""On a GPU: the deterministic embedding's gradient has the same bits in every run, and with it a whole training step."""
import dataclasses

import numpy as np
import pytest
import torch

from ringflash.config import AttentionConfig, Config, DataConfig, ModelConfig
from ringflash.data import PackedDataset
from ringflash.model.embedding import deterministic_embedding
from ringflash.train.text import Data
from ringflash.train.trainer import Trainer
from ringflash.train.world import single

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("vocab", "rows"), [(257, 32768), (32000, 8192), (3, 5000)])
def test_the_gradient_is_the_exact_sum_and_has_the_same_bits_in_ten_runs(vocab, rows):
    tokens = torch.randint(0, vocab, (1, rows), device="cuda")
    tokens[0, : rows // 5] = 1  # one token is a fifth of the text, as a space is
    weight = torch.randn(vocab, 128, device="cuda", requires_grad=True)
    grad = torch.randn(1, rows, 128, device="cuda")
    runs = [torch.autograd.grad(deterministic_embedding(tokens, weight), weight, grad)[0] for _ in range(10)]
    assert all(torch.equal(runs[0], run) for run in runs[1:])
    exact = torch.zeros(vocab, 128, dtype=torch.float64, device="cuda").index_add_(0, tokens[0], grad[0].double())
    torch.testing.assert_close(runs[0].double(), exact, rtol=1e-5, atol=1e-3)


def test_two_training_runs_have_the_same_bits():
    cfg = Config(model=ModelConfig(dim=256, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=128, ffn_dim=512),
                 data=DataConfig(seq_len=4096), attention=AttentionConfig(deterministic=True))
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=3))
    tokens = np.random.default_rng(0).integers(0, 60, 40000).astype(np.uint16)
    dataset = PackedDataset(tokens, np.arange(0, 40001, 500), 4096, seed=0)

    def run():
        trainer = Trainer(cfg, single("cuda"), Data(dataset, dataset, 3.0))
        results = [trainer.train_step(step) for step in range(3)]
        return [(r.loss, r.grad_norm) for r in results], [p.detach().clone() for p in trainer.parameters]

    (figures, first), (again, second) = run(), run()
    assert figures == again and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
