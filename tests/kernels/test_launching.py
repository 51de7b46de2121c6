"""Launches by way of kernels/launching.py: the compiled kernel that Triton would have chosen, and descriptors that it would make."""
import itertools
import random
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from triton._C.libtriton import native_specialize_impl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from ringflash.kernels import hopper, launching, triton_backward, triton_support, visits  # noqa: E402

BF16 = torch.bfloat16
ROOM = torch.zeros(4096, dtype=BF16)


def a_value(rng: random.Random, parameter):
    """Of any kind that a parameter of that name may have."""
    if parameter.is_constexpr:
        return rng.choice((64, 128, True, False, "tma"))
    offset = rng.choice((0, 0, 1, 8))
    tensor = ROOM[offset : offset + 1024].view(1, 4, 2, 128)
    number = rng.choice((0, 1, 2, 16, 48, 17, 2**31 - 1, 2**31, 2**31 + 16, 2**40, -1, -16))
    kinds = [number, number, 0.5, None, tensor, tensor.float()]
    if visits.describable(tensor):
        kinds.append(triton_support.describe(tensor, rng.choice((16, 64)), 128))
    return rng.choice(kinds)


def test_arguments_with_one_key_are_specialised_alike_by_triton():
    """Over random arguments: what Triton's own binder tells apart has different keys."""
    known, backend, rng = launching._Kernel(triton_backward.backward_kernel), make_backend(GPUTarget("cuda", 90, 32)), random.Random(0)
    parameters = known.kernel.params

    def specialised(values):
        return tuple(("constexpr", value) if p.is_constexpr else native_specialize_impl(
            backend, value, p.is_const, not p.do_not_specialize, not p.do_not_specialize_on_alignment)
            for p, value in zip(parameters, values))

    start, found = [a_value(rng, p) for p in parameters], {}
    for _ in range(3000):
        values = list(start)
        place = rng.randrange(len(values))  # one at a time, so that keys come again
        values[place] = a_value(rng, parameters[place])
        key = known.key(tuple(values))
        assert found.setdefault(key, specialised(values)) == specialised(values)
    assert 100 < len(set(found.values())) <= len(found) < 1000


class FakeKernel:
    """Stands in for a jitted kernel: what it compiled, and what was launched by its own way and by that of the compiled kernel."""

    def __init__(self):
        self.params = [SimpleNamespace(name=name, is_constexpr=name == "D", do_not_specialize=name == "n",
                                       do_not_specialize_on_alignment=False) for name in ("x", "n", "D")]
        self.own, self.direct = [], []

    def __getitem__(self, grid):
        def launch(**arguments):
            self.own.append((grid, arguments))
            return Compiled(self)

        return launch


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *values: self.kernel.direct.append((grid, values))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "DIRECT", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return FakeKernel()


def test_a_variant_is_launched_by_triton_once_and_then_directly_with_the_arguments_in_their_order(kernel):
    x, y = torch.zeros(8), torch.ones(8)
    launching.launch(kernel, (3,), dict(n=5, D=64, x=x), {"num_warps": 4})
    launching.launch(kernel, (2, 7), dict(n=6, D=64, x=y), {"num_warps": 4})
    assert kernel.own == [((3,), dict(n=5, D=64, x=x, num_warps=4, **launching.OPTIONS))]
    assert len(kernel.direct) == 1 and kernel.direct[0][0] == (2, 7, 1)
    assert kernel.direct[0][1][0] is y and kernel.direct[0][1][1:] == (6, 64)


@pytest.mark.parametrize("change", [
    dict(D=128), dict(n=2**31), dict(x=torch.zeros(8, dtype=BF16)), dict(x=torch.zeros(9)[1:]), dict(x=None), dict(num_warps=8),
    dict(device=1)], ids=lambda change: next(iter(change)))
def test_what_another_compiled_kernel_serves_is_triton_s_to_launch_again(kernel, change, monkeypatch):
    arguments = dict(x=torch.zeros(8), n=5, D=64)
    launching.launch(kernel, (1,), arguments, {"num_warps": 4})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: change.get("device", 0))
    other = arguments | {name: value for name, value in change.items() if name in arguments}
    launching.launch(kernel, (1,), other, {"num_warps": change.get("num_warps", 4)})
    assert len(kernel.own) == 2 and not kernel.direct


def test_arguments_of_a_kind_that_is_not_known_stay_triton_s(kernel, monkeypatch):
    for value in (SimpleNamespace(), True):
        for _ in range(2):
            launching.launch(kernel, (1,), dict(x=value, n=5, D=64), {})
    assert len(kernel.own) == 4 and not kernel.direct
    monkeypatch.setattr(launching, "DIRECT", False)
    for _ in range(2):
        launching.launch(kernel, (1,), dict(x=torch.zeros(8), n=5, D=64), {})
    assert len(kernel.own) == 6 and not kernel.direct


def test_descriptors_are_those_of_tritons_constructor_and_do_not_share_their_tensors():
    made = []
    for heads in (1, 3):
        x = torch.zeros(2, 40, heads, 64, dtype=BF16)
        own = triton_support.describe(x, 16, 64)
        steps = [40 * heads * 64, 64 if heads > 1 else visits.ALIGNMENT_BYTES, heads * 64, 1]
        assert own == TensorDescriptor(x, [2, heads, 40, 64], steps, [1, 1, 16, 64]) and own.base is x
        made.append(own)
    assert made[0].base is not made[1].base and made[0].shape == [2, 1, 40, 64] and made[0].form is made[1].form
    assert triton_support.describe(x, 32, 64).form is not own.form


@pytest.mark.skipif(hopper.missing_software() is not None, reason=str(hopper.missing_software()))
def test_gluon_descriptors_are_those_of_its_constructor():
    from ringflash.kernels import gluon_shim

    for dtype, swizzled in itertools.product((BF16, torch.float32), (True, False)):
        x, gl = torch.zeros(8, 40, dtype=dtype), gluon_shim.gl
        own = gluon_shim.describe(x, (4, 32), swizzled)
        element = gluon_shim.ELEMENTS[dtype]
        layout = (gl.NVMMASharedLayout.get_default_for([4, 32], element) if swizzled
                  else gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=element.primitive_bitwidth, rank=2))
        assert own == gluon_shim.TensorDescriptor(x, [8, 40], [40, 1], [4, 32], layout) and own.base is x
        assert own.form is gluon_shim.describe(x, (4, 32), swizzled).form
