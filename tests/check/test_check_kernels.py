"""Which kernels a check runs by itself: what a machine's GPU can do, and no cell that a kernel does not take."""
import pytest
import torch

from ringflash.kernels import dispatch, hopper
from ringflash.launch import check, check_planted, check_random
from ringflash.launch.check_kernels import chosen_kernels


@pytest.fixture
def on_a_hopper_gpu(monkeypatch):
    """`unavailable` as on such a GPU: by dtype and head dims alone."""
    def unavailable(kernel, *, device, dtype, head_dim, deterministic=False, head_dim_v=None):
        if kernel != "hopper":
            return None
        if dtype not in hopper.DTYPES:
            return f"dtype {dtype}"
        return None if head_dim in hopper.HEAD_DIMS and head_dim_v in (None, head_dim) else f"head_dim {head_dim}, {head_dim_v}"

    monkeypatch.setattr(dispatch, "unavailable", unavailable)
    monkeypatch.setattr(dispatch, "_load", lambda kernel: kernel)


def test_by_itself_a_check_on_a_hopper_gpu_runs_the_hopper_kernel_at_what_it_takes_and_says_the_rest(on_a_hopper_gpu, capsys):
    found = chosen_kernels(None, "cuda", ("fp32", "bf16", "fp16"), (64, 80, 128))
    everything = ("fp32", "bf16", "fp16"), (64, 80, 128)
    assert found == {"hopper": (("bf16", "fp16"), (64, 128)), "triton": everything, "reference": everything}
    said = capsys.readouterr().out
    assert "hopper: no cells of fp32: dtype torch.float32" in said and "no cells of head_dim 80: head_dim 80" in said


@pytest.mark.parametrize("dtypes, head_dims, variants", [
    (("fp32",), (128,), ("plain",)), (("bf16",), (80,), ("plain",)), (("bf16",), (128,), ("plain", "v-dim"))], ids=str)
def test_of_what_it_does_not_take_at_all_the_hopper_kernel_has_no_cells_unless_it_was_named(
    on_a_hopper_gpu, capsys, dtypes, head_dims, variants
):
    assert list(chosen_kernels(None, "cuda", dtypes, head_dims, variants)) == ["triton", "reference"]
    assert capsys.readouterr().out.startswith("hopper: no cells: ")
    with pytest.raises(RuntimeError, match="'hopper' is not available"):
        chosen_kernels(("hopper",), "cuda", dtypes, head_dims, variants)


def test_elsewhere_a_check_does_without_the_hopper_kernel_and_says_so_but_not_without_the_others(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "unavailable", lambda kernel, **_: "not here" if kernel == "hopper" else None)
    monkeypatch.setattr(dispatch, "_load", lambda kernel: kernel)
    assert list(chosen_kernels(None, "cuda", ("bf16",), (128,))) == ["triton", "reference"]
    assert capsys.readouterr().out == "hopper: no cells: not here\n"
    monkeypatch.setattr(dispatch, "unavailable", lambda kernel, **_: "not here" if kernel == "triton" else None)
    with pytest.raises(RuntimeError, match="'triton' is not available.*not here"):
        chosen_kernels(None, "cuda", ("bf16",), (128,))


def test_the_matrix_and_random_problems_of_a_hopper_gpu_hold_its_kernel_with_16_bits_and_the_others_with_all(on_a_hopper_gpu):
    cells = check.matrix_cells(check.parser().parse_args(["--device", "cuda", "--quick"]))
    drawn = [check_random.draw(seed, kernels=("hopper", "triton"), device="cuda") for seed in range(60)]
    for found in (cells, drawn):
        taken = {kernel: {cell.dtype for cell in found if cell.kernel == kernel} for kernel in ("hopper", "triton")}
        assert "fp32" not in taken["hopper"] and "bf16" in taken["hopper"] and {"fp32", "bf16"} <= taken["triton"]
    assert {cell.variant for cell in cells if cell.kernel == "hopper"} == {"plain", "softcap", "sinks"}
    assert all(torch.finfo(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[cell.dtype])).bits == 16
               for cell in drawn if cell.kernel == "hopper")


def test_defects_are_planted_in_the_dtype_with_the_tightest_budgets_that_a_kernel_takes(on_a_hopper_gpu):
    found = {kernel: check_planted.sharpest_dtype(kernel, torch.device("cuda"), 64) for kernel in ("triton", "hopper")}
    assert found == {"triton": "fp32", "hopper": "bf16"}
