"""Every mask, layout, routing and rotation on a GPU, in pairs and drawn at random; and what uneven masks cost, as a smoke run."""
import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from ringflash.launch import bench, check_random  # noqa: E402
from ringflash.launch.check_cells import pairwise_cells  # noqa: E402
from ringflash.launch.check_judge import judge_loopback  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


def test_every_two_of_masks_layouts_routings_rotations_ranks_and_heads_are_within_budget_together():
    cells = pairwise_cells("triton", dtypes=("bf16", "fp16"), seq_lens=(5, 389), head_dims=(64,))
    assert not [f"{v.cell}: {v.why()}" for v in judge_loopback(cells, "cuda") if not v.ok]


def test_problems_drawn_at_random_are_within_budget():
    held, verdicts = check_random.check(100, 0, device="cuda", kernels=("triton",), dtypes=("bf16",))
    assert held, [f"{v.cell}: {v.why()}" for v in verdicts if not v.ok]


def test_the_benchmark_of_uneven_masks_times_the_kernels_of_a_ring():
    assert bench.main(["balance", "--kernel", "triton", "--seq-len", "8192", "--dense-rows", "4096", "--heads", "4", "2", "64",
                       "--repeats", "2", "--cp-size", "4"]) == 0
