"""Compile a triton kernel for sm_90 without a GPU, from the arguments a launch would pass, and read what ptxas made of it."""
from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

HOPPER = GPUTarget("cuda", 90, 32)
_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}


@dataclass(frozen=True)
class Build:
    """registers per thread; spill_bytes: stores + loads; shared: bytes a launch asks for; wgmma: how many; warnings: of ptxas."""

    registers: int
    spill_bytes: int
    shared: int
    wgmma: int
    warnings: tuple[str, ...]
    ptx: str


def build(kernel: triton.JITFunction, arguments: dict, options: dict, target: GPUTarget = HOPPER) -> Build:
    """Specialised as the launcher would: divisibility by 16 of integers and pointers, unless the kernel declines it."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        aligned = False
        if isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
            aligned = value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = 1
        else:
            signature[parameter.name] = "i32" if abs(value) < 1 << 31 else "i64"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=dict(options))
    ptx = compiled.asm["ptx"]
    arch = re.search(r"\.target (sm_\w+)", ptx).group(1)
    report = _ptxas(ptx, arch)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    return Build(
        registers=int(re.search(r"Used (\d+) registers", report).group(1)),
        spill_bytes=int(spills.group(1)) + int(spills.group(2)),
        shared=compiled.metadata.shared,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        warnings=tuple(sorted(set(re.findall(r"\(C7\d{3}\)", report)))),
        ptx=ptx,
    )


def _ptxas(ptx: str, arch: str) -> str:
    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run([str(binary), "-v", f"--gpu-name={arch}", str(source), "-o", str(Path(folder) / "kernel.cubin")],
                              capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr
