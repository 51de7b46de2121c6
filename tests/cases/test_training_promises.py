"""What training promises about memory and about when kernels are compiled."""
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringflash.config import AttentionConfig, Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from ringflash.data import PackedDataset
from ringflash.train import loop
from ringflash.train.stopping import StopRequest
from ringflash.train.text import Data
from ringflash.train.trainer import Trainer
from ringflash.train.world import single

VOCAB, CHUNK = 257, 32  # more rows than the model has dims, so that no weight is larger than a chunk of logits


def trainer(seq_len: int) -> Trainer:
    cfg = Config(
        model=ModelConfig(vocab_size=VOCAB, dim=24, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=40, loss_chunk_rows=CHUNK),
        data=DataConfig(seq_len=seq_len), attention=AttentionConfig(kernel="cpu"), optim=OptimConfig(name="sgd", warmup_steps=0),
        train=TrainConfig(eval_sequences=2, dtype="fp32"))
    tokens, starts = torch.arange(4000).remainder(VOCAB).numpy(), [0, 700, 4000]
    return Trainer(cfg, single(), Data(*(PackedDataset(tokens, starts, seq_len) for _ in range(2)), 3.0))


class Sizes(TorchDispatchMode):
    """The most elements of a tensor, and of one as wide as the vocabulary, that any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = self.logits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
                if x.ndim and x.shape[-1] == VOCAB:
                    self.logits = max(self.logits, x.numel())
        return out


@pytest.mark.parametrize("seq_len", (64, 512))
def test_evaluation_takes_no_larger_tensor_than_training_and_keeps_none_for_a_backward(seq_len):
    made, saved = trainer(seq_len), []
    with Sizes() as training:
        made.gradients(0)
    with Sizes() as evaluating, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        made.evaluate()
    assert evaluating.largest <= training.largest and not saved
    # one chunk of logits at a time in both, and nothing of S * S or S * V elements anywhere
    assert evaluating.logits == training.logits == CHUNK * VOCAB
    assert training.largest <= max(seq_len * 40, CHUNK * VOCAB)


def test_kernels_are_compiled_before_any_rank_waits_for_another(monkeypatch, tmp_path):
    order = []

    class Stop(BaseException):
        pass

    def connect(*arguments, **options):
        order.append("connect")
        raise Stop

    def warmup(dtype, head_dim, device, **options):
        order.append(("warmup", dtype, head_dim, options))

    monkeypatch.setattr(loop, "open_data", lambda cfg: None)
    monkeypatch.setattr(loop, "select_kernel", lambda cfg, device: SimpleNamespace(warmup=warmup))
    monkeypatch.setattr(loop, "connect", connect)
    cfg = Config(attention=AttentionConfig(deterministic=True))
    with pytest.raises(Stop):
        loop.run(cfg, store=None, rank=0, world_size=1, folder=tmp_path, stop=StopRequest())
    (first, dtype, head_dim, options), second = order
    assert (first, second) == ("warmup", "connect") and (dtype, head_dim) == (torch.float32, 32)
    assert options == {"batch": 1, "num_heads": 4, "num_kv_heads": 2, "deterministic": True, "softcap": 0.0}
