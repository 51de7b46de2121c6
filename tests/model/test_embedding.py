"""The embedding whose gradient does not depend on the order in which rows come: torch's own values, bit by bit on a CPU."""
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from ringflash.config import Config
from ringflash.model import ModelConfig, Transformer
from ringflash.model.embedding import deterministic_embedding

SHAPES = [(257, (1, 4096), 40), (50, (1, 0), 50), (11, (2, 7), 11), (5, (3, 100), 1)]


@pytest.mark.parametrize(("vocab", "shape", "used"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient_are_those_of_torch(vocab, shape, used, dtype):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, used, shape, generator=generator)
    weight = torch.randn(vocab, 24, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(*shape, 24, generator=generator).to(dtype)
    out = deterministic_embedding(tokens, weight)
    (got,) = torch.autograd.grad(out, weight, grad)
    assert torch.equal(out, F.embedding(tokens, weight)) and got.dtype == dtype and got.shape == weight.shape
    exact = torch.zeros(vocab, 24, dtype=torch.float64).index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    if dtype == torch.float32:
        (theirs,) = torch.autograd.grad(F.embedding(tokens, weight), weight, grad)
        assert torch.equal(got, theirs)
    # fp32 sums, one rounding.
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert not got[used:].any(), "a token that is not in the text has gradient 0"


def test_the_gradient_does_not_depend_on_the_strides_of_what_arrives():
    tokens, weight = torch.tensor([[2, 0, 2, 1]]), torch.randn(3, 6, requires_grad=True)
    grad = torch.randn(6, 4).t()[None]
    (got,) = torch.autograd.grad(deterministic_embedding(tokens, weight), weight, grad)
    torch.testing.assert_close(got, torch.stack([grad[0, 1], grad[0, 3], grad[0, 0] + grad[0, 2]]))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_takes_the_same_step_with_it(tied):
    config = ModelConfig(vocab_size=31, dim=16, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=16, tie_embeddings=tied)
    tokens, positions = torch.arange(40)[None] % 7, torch.arange(40)
    gradients = []
    for deterministic in (False, True):
        model = Transformer(config, lambda q, k, v, *, layout, mask=None: q * k + v, deterministic=deterministic)
        assert model.embedding.deterministic is deterministic
        model(tokens, positions, tokens.roll(-1)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_training_takes_it_with_attention_deterministic():
    from ringflash.train.trainer import Trainer
    from ringflash.train.text import Data
    from ringflash.train.world import single

    for deterministic in (False, True):
        cfg = Config()
        cfg = dataclasses.replace(cfg, attention=dataclasses.replace(cfg.attention, deterministic=deterministic),
                                  data=dataclasses.replace(cfg.data, prefetch=False))  # there is no data
        assert Trainer(cfg, single(), Data(None, None, 0.0)).model.embedding.deterministic is deterministic
