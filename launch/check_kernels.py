"""Which kernels a check runs, and with what: those that were named, all of it; else those of the device, each with what it takes."""
from __future__ import annotations

from collections.abc import Sequence

from ringflash.kernels import dispatch
from ringflash.launch.check_problem import DTYPES, VARIANTS, head_dim_v

KERNELS = {"cpu": ("cpu", "reference"), "cuda": ("hopper", "triton", "reference")}
# Of these, unless named, only what they take is checked, where they run; the others have to take all that is asked for.
SPECIAL = ("hopper",)

Taken = tuple[tuple[str, ...], tuple[int, ...]]     # dtypes and head dims


def valid_kernels() -> list[str]:
    return [name for name in dispatch.KERNELS if name != "auto"]


def chosen_kernels(named: Sequence[str] | None, device: str, dtypes: Sequence[str], head_dims: Sequence[int],
                   variants: Sequence[str] = ("plain",)) -> dict[str, Taken]:
    """The kernels to check, each with the dtypes and head dims of its cells. named: None for the device's own.

    RuntimeError when one that was named, or is not in SPECIAL, cannot run all of it here (none is ever replaced by another).
    """
    found: dict[str, Taken] = {}
    for kernel in KERNELS[device] if named is None else named:
        if named is None and kernel in SPECIAL:
            some, dims = taken(kernel, device, dtypes, head_dims, variants)
            if some and dims:
                found[kernel] = some, dims
            continue
        for dtype in dtypes:
            for head_dim in head_dims:
                for variant in variants:
                    dispatch.select(kernel, device=device, dtype=DTYPES[dtype], head_dim=head_dim,
                                    head_dim_v=head_dim_v(variant, head_dim))
        found[kernel] = tuple(dtypes), tuple(head_dims)
    return found


def taken(kernel: str, device: str, dtypes: Sequence[str], head_dims: Sequence[int], variants: Sequence[str]) -> Taken:
    """The dtypes that a kernel takes with some of the head dims, and the head dims that it takes with all of those dtypes, with all
    variants; why not the others is said."""
    def reason(dtype: str, head_dim: int) -> str | None:
        return next(filter(None, (_reason(kernel, device, dtype, head_dim, variant) for variant in variants)), None)

    some = tuple(dtype for dtype in dtypes if not all(reason(dtype, head_dim) for head_dim in head_dims))
    dims = tuple(head_dim for head_dim in head_dims if not any(reason(dtype, head_dim) for dtype in some or dtypes))
    if not some or not dims:
        print(f"{kernel}: no cells: {reason((some or dtypes)[0], head_dims[0])}", flush=True)
        return (), ()
    left_out = [(dtype, reason(dtype, dims[0])) for dtype in dtypes if dtype not in some]
    left_out += [(f"head_dim {head_dim}", next(filter(None, (reason(dtype, head_dim) for dtype in some))))
                 for head_dim in head_dims if head_dim not in dims]
    for what, why in left_out:
        print(f"{kernel}: no cells of {what}: {why}", flush=True)
    return some, dims


def walked_variants(kernel: str, device: str, dtypes: Sequence[str], head_dims: Sequence[int]) -> tuple[str, ...]:
    """The variants beside the plain one that this kernel takes at every dtype and head dim; what it does not take is said."""
    found = []
    for variant in VARIANTS[1:]:
        reasons = [_reason(kernel, device, dtype, head_dim, variant) for dtype in dtypes for head_dim in head_dims]
        if any(reasons):
            print(f"{kernel}: no cells of variant {variant}: {next(filter(None, reasons))}", flush=True)
        else:
            found.append(variant)
    return tuple(found)


def _reason(kernel: str, device: str, dtype: str, head_dim: int, variant: str) -> str | None:
    return dispatch.unavailable(kernel, device=device, dtype=DTYPES[dtype], head_dim=head_dim,
                                head_dim_v=head_dim_v(variant, head_dim))
