"""Choosing a kernel: by name it runs or raises, `auto` says what it chose."""
import logging
import sys

import pytest
import torch

from ringflash.kernels import dispatch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def choose(kernel="auto", device="cpu", dtype=torch.float32, head_dim=64):
    return dispatch.select(kernel, device=device, dtype=dtype, head_dim=head_dim)


def test_an_unknown_name_is_a_value_error_that_lists_the_valid_ones():
    with pytest.raises(ValueError, match="'flash'.*auto, hopper, triton, cpu, reference"):
        choose("flash")


@pytest.mark.parametrize("dtype", FLOATS)
def test_auto_on_cpu_tensors_is_the_cpu_kernel(dtype):
    assert choose(dtype=dtype).name == "cpu"


def test_auto_in_float64_on_cpu_tensors_is_the_reference():
    assert choose(dtype=torch.float64).name == "reference"


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_a_named_kernel_is_that_kernel(kernel):
    assert choose(kernel).name == kernel


def test_a_kernel_whose_module_is_not_written_is_refused_as_not_built_yet(monkeypatch):
    monkeypatch.setitem(dispatch._MODULES, "hopper", None)
    with pytest.raises(RuntimeError, match="hopper.*not built yet"):
        choose("hopper")


def test_the_hopper_kernel_is_refused_without_a_gpu():
    with pytest.raises(RuntimeError, match="kernel='hopper' is not available"):
        choose("hopper", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "kernel, device, dtype, reason",
    [
        ("cpu", "cpu", torch.float64, "dtype torch.float64"),
        ("cpu", "cuda", torch.float32, "tensors are on cuda"),
        ("reference", "cpu", torch.int32, "dtype torch.int32"),
    ],
)
def test_a_named_kernel_that_cannot_run_raises_and_never_falls_back(kernel, device, dtype, reason):
    with pytest.raises(RuntimeError, match=reason):
        choose(kernel, device, dtype)


def test_triton_on_cpu_tensors_needs_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="kernel='triton' is not available"):
        choose("triton")


def test_a_missing_triton_package_is_a_runtime_error(monkeypatch):
    for module in [m for m in sys.modules if m.startswith("ringflash.kernels.triton")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match="triton package is not installed"):
        choose("triton")


def test_auto_without_any_kernel_says_why_each_was_refused():
    with pytest.raises(RuntimeError, match="cpu: dtype torch.int32.*reference: dtype torch.int32"):
        choose(dtype=torch.int32)
    with pytest.raises(RuntimeError, match="no kernel is chosen by itself on meta"):
        choose(device="meta")


def test_auto_logs_its_choice_once(caplog):
    dispatch._logged.clear()
    with caplog.at_level(logging.INFO, logger="ringflash"):
        choose(head_dim=48)
        choose(head_dim=48)
        choose("cpu", head_dim=48)
    assert [r.getMessage() for r in caplog.records] == ["kernel='auto' chose 'cpu' for float32, head_dim 48, on cpu"]


def test_a_backend_is_asked_about_both_head_dims(monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(dispatch._load("cpu"), "unavailable", lambda *args: asked.append(args[2:]) or "not today")
    dispatch._logged.clear()
    select = dict(device="cpu", dtype=torch.float32, head_dim=192)
    with caplog.at_level(logging.INFO, logger="ringflash"):
        assert dispatch.select("auto", **select, head_dim_v=128).name == "reference"
        assert dispatch.select("auto", **select).name == "reference"
    assert asked == [(192, False, 128), (192, False, 192)]
    assert [r.getMessage().partition(" (")[0] for r in caplog.records] == [
        "kernel='auto' chose 'reference' for float32, head_dim 192, head_dim_v 128, on cpu",
        "kernel='auto' chose 'reference' for float32, head_dim 192, on cpu"]
    with pytest.raises(RuntimeError, match="head_dim 192, head_dim_v 128, on cpu: not today"):
        dispatch.select("cpu", **select, head_dim_v=128)


def test_triton_takes_head_dims_of_q_and_v_up_to_256_each():
    backend = pytest.importorskip("triton") and dispatch._load("triton")
    ask = (torch.device("cpu"), torch.float16)
    assert backend.unavailable(*ask, 192, False, 288) == "head_dim_v 288: supported are 1 to 256"
    assert backend.unavailable(*ask, 0, False, 128) == "head_dim 0: supported are 1 to 256"
    assert "head_dim" not in (backend.unavailable(*ask, 192, True, 128) or "")


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_backends_share_one_shape(kernel):
    backend = choose(kernel)
    for part in ("unavailable", "forward", "backward", "delta", "warmup"):
        assert callable(getattr(backend, part))
