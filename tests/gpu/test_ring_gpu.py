"""The ring on a GPU: loopback with the Triton kernels, real NCCL ranks that share one card or have one each, bits, growth.

Ranks that share a card are told apart by NCCL_HOSTID (launch/check_spawn.py); all else is the ring as it runs on many hosts.
"""
import pytest
import torch

from ringflash.kernels import dispatch
from ringflash.launch import check_planted, check_scale
from ringflash.launch.check_cells import LAYOUTS, MASKS, matrix
from ringflash.launch.check_judge import Judge, judge_loopback, loopback_cell
from ringflash.launch.check_ring import run_ring
from ringflash.launch.check_train import check_train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
              pytest.mark.timeout(600)]


def judged(verdicts):
    bad = [f"{v.cell}: {v.why()}" for v in verdicts if not v.ok]
    assert verdicts and not bad, "\n".join(bad)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loopback_ring_is_within_budget_for_every_dtype_group_size_and_ring_size(mask, layout):
    cells = matrix(("triton",), ("bf16", "fp16", "fp32"), masks=(mask,), layouts=(layout,), seq_lens=(5, 128, 389),
                   head_dims=(64, 128), diagonal=True)
    assert {c.cp_size for c in cells} == {1, 2, 3, 4, 8} and {c.ratio for c in cells} == {1, 4, 7, 8}
    judged(judge_loopback(cells, "cuda"))


@pytest.mark.parametrize("head_dim", [80, 96, 256])
def test_loopback_ring_takes_head_dims_that_are_no_power_of_two_and_256(head_dim):
    judged(judge_loopback(matrix(("triton",), ("bf16",), masks=("causal", "documents+window"), layouts=("zigzag",), cp_sizes=(3,),
                                 ratios=(4,), seq_lens=(131,), head_dims=(head_dim,)), "cuda"))


def ring_matches_loopback(num_processes: int) -> None:
    cells = matrix(("triton",), ("bf16", "fp32"), cp_sizes=(num_processes,), seq_lens=(5, 389), head_dims=(64, 128),
                   diagonal=True)
    judge = Judge("cuda")
    results = run_ring(cells, num_processes, device_type="cuda", delay_ms=5.0, timeout_s=500)
    judged([judge.judge(cell, lambda: result, same_as=lambda: loopback_cell(cell, "cuda"))
            for cell, result in zip(cells, results)])


@pytest.mark.parametrize("num_processes", [2, 4])
def test_nccl_ranks_on_one_card_with_random_delays_are_within_budget_and_the_bits_of_loopback(num_processes):
    ring_matches_loopback(num_processes)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_ranks_on_a_card_each_are_within_budget_and_the_bits_of_loopback():
    ring_matches_loopback(torch.cuda.device_count())


def test_out_and_lse_repeat_bit_for_bit_and_gradients_do_when_deterministic():
    held, records = check_scale.bitwise(("triton",), torch.device("cuda"), repeats=30, seq_len=1031, head_dim=128)
    assert held, records


def test_errors_at_eight_ranks_are_at_most_a_tenth_above_those_of_one():
    held, records = check_scale.growth("triton", torch.device("cuda"), seq_len=8192, head_dim=128)
    assert held, records


@pytest.mark.parametrize("kernel", ("triton", "hopper"))
@pytest.mark.parametrize("defect", check_planted.DEFECTS)
def test_a_planted_defect_is_caught(defect, kernel):
    if why := dispatch.unavailable(kernel, device="cuda", dtype=torch.bfloat16, head_dim=64):
        pytest.skip(why)
    caught, evidence = check_planted.catches(defect, kernel, torch.device("cuda"), head_dim=64)
    assert caught, evidence


def test_peak_memory_is_linear_in_the_length():
    held, records = check_scale.memory("triton", torch.device("cuda"), seq_lens=(16384, 32768, 65536))
    assert held, records


def test_one_sgd_step_on_two_nccl_ranks_of_one_card_is_that_of_one_rank():
    held, report = check_train(num_processes=2, device_type="cuda", run=None, timeout_s=500)
    assert held, report
