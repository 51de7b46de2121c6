"""What a step of training is said to have taken."""
import time
from types import SimpleNamespace

import torch

from ringflash.train import loop
from ringflash.train.trainer import StepResult


def test_the_seconds_of_a_step_end_when_the_gpu_has_done_the_optimizers_work(monkeypatch):
    busy, rows, device = 0.1, [], torch.device("cuda", 0)
    queued = []

    def train_step(step):
        queued.append(step)  # the optimizer's kernels, of which the host does not see the end
        return StepResult(1.0, 1.0, 0.1, 640, 640)

    def synchronize(of):
        assert of == device and queued
        time.sleep(busy * len(queued))
        queued.clear()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    trainer = SimpleNamespace(train_step=train_step, world=SimpleNamespace(device=device, world_size=1))
    meter = SimpleNamespace(row=lambda step, seconds: {"seconds": seconds})
    recorder, progress = SimpleNamespace(step=rows.append), loop.Progress()
    for _ in range(2):
        assert loop._step(trainer, meter, recorder, progress, 0.0) is False
    assert [busy <= row["seconds"] < 5 * busy for row in rows] == [True, True] and not queued
    assert progress.trained_s >= 2 * busy and rows[0]["tokens_per_s"] <= 640 / busy
