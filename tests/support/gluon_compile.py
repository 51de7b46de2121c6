"""Compile a Gluon kernel for sm_90 without a GPU, from the arguments a launch would pass, and read what ptxas made of it."""
from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from .triton_compile import HOPPER, Build, _ptxas


def compiled(kernel: triton.JITFunction, arguments: dict, options: dict, target: GPUTarget = HOPPER):
    """Triton's compiled kernel, specialised as its own launcher would (the same function reads the arguments)."""
    backend = make_backend(target)
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            kind, extra = "constexpr", None
        else:
            kind, extra = native_specialize_impl(
                backend, value, parameter.is_const, not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif isinstance(extra, str) and "D" in extra:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(GluonASTSource(kernel, signature, constants, attributes), target=target, options=dict(options))


def build(kernel: triton.JITFunction, arguments: dict, options: dict, target: GPUTarget = HOPPER) -> Build:
    """What ptxas reports of it."""
    made = compiled(kernel, arguments, options, target)
    ptx = made.asm["ptx"]
    report = _ptxas(ptx, re.search(r"\.target (sm_\w+)", ptx).group(1))
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    return Build(
        registers=int(re.search(r"Used (\d+) registers", report).group(1)),
        spill_bytes=int(spills.group(1)) + int(spills.group(2)),
        shared=made.metadata.shared,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        warnings=tuple(sorted(set(re.findall(r"\(C7\d{3}\)", report)))),
        ptx=ptx,
    )


def sass(kernel: triton.JITFunction, arguments: dict, options: dict, target: GPUTarget = HOPPER) -> str:
    """Its machine code, disassembled by the tool that Triton carries."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled(kernel, arguments, options, target).asm["cubin"])
        done = subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout
