"""optim.offload: AdamW's moments in host memory change no bit of a run, and are saved and found again."""
import contextlib
import copy

import pytest
import torch
from torch import nn

from ringflash.config import OptimConfig
from ringflash.train.optim import build_optimizer
from ringflash.train.optimizer_offload import MOMENTS, OffloadedAdamW

SHAPES = [(7, 5), (33,), (1, 1), (64, 3), (0, 4), (12,)]


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


def build(weights, offload, **changed):
    return build_optimizer(OptimConfig(offload=offload, lr=1e-2, weight_decay=0.3, **changed), weights)


def step(optimizer, weights, seed):
    give_gradients(weights, seed)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (seed + 1)
    optimizer.step()


@pytest.mark.parametrize("bucket", [1, 7, 32, 10**6])
@pytest.mark.parametrize("foreach", [None, True])
def test_steps_have_the_bits_of_torch_adamw_whatever_the_size_of_a_bucket(bucket, foreach):
    plain, moved = parameters(), parameters()
    optimizers = build(plain, False), build(moved, True)
    optimizers[1].bucket_elements = bucket
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["foreach"] = foreach
    for seed in range(5):
        step(optimizers[0], plain, seed)
        step(optimizers[1], moved, seed)
    for a, b in zip(plain, moved, strict=True):
        assert torch.equal(a, b)
        for name in ("step", *MOMENTS):
            assert torch.equal(optimizers[0].state[a][name], optimizers[1].state[b][name]), name


def test_a_parameter_without_gradient_stays_and_does_not_count_a_step():
    weights = parameters()
    optimizer = build(weights, True)
    step(optimizer, weights, 0)
    give_gradients(weights, 1)
    weights[0].grad, before = None, weights[0].detach().clone()
    optimizer.step()
    assert torch.equal(weights[0], before)
    assert [int(optimizer.state[w]["step"]) for w in weights] == [1, 2, 2, 2, 2, 2]


def test_a_loaded_state_goes_on_with_the_same_bits():
    weights = parameters()
    optimizer = build(weights, True)
    for seed in range(3):
        step(optimizer, weights, seed)
    saved, kept = copy.deepcopy(optimizer.state_dict()), [w.detach().clone() for w in weights]
    step(optimizer, weights, 3)
    again = [nn.Parameter(w) for w in kept]
    other = build(again, True)
    other.load_state_dict(saved)
    step(other, again, 3)
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


class Clock:
    """Stands for a CUDA stream: see test_activations.py; here only the order of waits counts."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))

    def record_event(self):
        return self

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.name))

    def synchronize(self):
        self.log.append(("host", "waits for", self.name))


def test_on_a_gpu_every_bucket_waits_for_its_moments_and_the_host_for_the_last(monkeypatch):
    log = []
    compute, side = Clock("compute", log), Clock("side", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    plain, moved = parameters(), parameters()
    optimizers = build(plain, False), build(moved, True)
    optimizers[1].bucket_elements = 50
    optimizers[1]._streams.of = lambda device: side
    for seed in range(3):
        log.clear()
        step(optimizers[0], plain, seed)
        step(optimizers[1], moved, seed)
        buckets = log.count(("compute", "waits for", "side"))
        assert buckets > 3 and log == [("side", "waits for", "compute"),
                                       *[("compute", "waits for", "side"), ("side", "waits for", "compute")] * buckets,
                                       ("host", "waits for", "side")]
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))


def test_a_planted_stale_moment_is_seen():
    plain, moved = parameters(), parameters()
    optimizers = build(plain, False), build(moved, True)
    for seed in range(2):
        step(optimizers[0], plain, seed)
        step(optimizers[1], moved, seed)
        optimizers[1].state[moved[0]]["exp_avg"].zero_()
    assert not torch.equal(plain[0], moved[0])


def test_what_it_cannot_take_is_refused():
    with pytest.raises(ValueError, match="optim.offload=true: takes contiguous fp32 parameters, got torch.bfloat16"):
        OffloadedAdamW([{"params": [nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))]}])
    with pytest.raises(ValueError, match="fp32"):
        OffloadedAdamW([{"params": [nn.Parameter(torch.ones(2, 3).t())]}])
    with pytest.raises(ValueError, match="closure"):
        build(parameters(), True).step(lambda: None)


def test_an_optimizer_without_the_option_is_torchs_own():
    assert type(build(parameters(), False)) is torch.optim.AdamW
