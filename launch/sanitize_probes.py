"""A small specialised kernel, to see what a sanitizer follows: records handed from one warp to four, in order or not.

Every order that the `hopper` kernels rest on, and nothing else: a barrier of the first four warps before the others start, the
words with which Triton starts them, and records behind mbarriers at which one thread arrives for all.
"""
from __future__ import annotations

import torch

from ringflash.kernels.gluon_shim import gl, gluon, mbarrier

PROGRAMS, RECORDS, WORDS = 16, 6, 8


@gluon.jit
def writer(record_s, full, empty, RECORDS: gl.constexpr, WORDS: gl.constexpr, WAITS: gl.constexpr):
    words = gl.arange(0, WORDS, gl.BlockedLayout([WORDS], [32], [1], [0]))
    for item in range(RECORDS):
        if WAITS:
            if item > 1:
                mbarrier.wait(empty.index(item - 2), 0)
        record_s.index(item & 1).store(words + item)
        mbarrier.arrive(full.index(item), count=1)


@gluon.jit
def reader(out, record_s, full, empty, RECORDS: gl.constexpr, WORDS: gl.constexpr, WAITS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([WORDS], [32], [4], [0])
    total = gl.zeros([WORDS], gl.int32, layout)
    for item in range(RECORDS):
        if WAITS:
            mbarrier.wait(full.index(item), 0)
        total += record_s.index(item & 1).load(layout)
        mbarrier.arrive(empty.index(item), count=1)
    gl.store(out + gl.program_id(0) * WORDS + gl.arange(0, WORDS, layout), total)


@gluon.jit
def record_kernel(
    out,  # OUT   [programs, WORDS] int32: sums of the records
    RECORDS: gl.constexpr, WORDS: gl.constexpr, READER_WAITS: gl.constexpr, WRITER_WAITS: gl.constexpr,
):
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    record_s = gl.allocate_shared_memory(gl.int32, [2, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [RECORDS, 1], barrier)
    for i in gl.static_range(RECORDS):  # one for each record: nobody can miss a phase, whoever does not wait
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize([(reader, (out, record_s, full, empty, RECORDS, WORDS, READER_WAITS)),
                        (writer, (record_s, full, empty, RECORDS, WORDS, WRITER_WAITS))], [1], [24])


def run(probe: str, device: torch.device) -> bool:
    """Whether the sums are right, of "ordered"; those of a race may be anything."""
    out = torch.zeros(PROGRAMS, WORDS, dtype=torch.int32, device=device)
    record_kernel[(PROGRAMS,)](out, RECORDS, WORDS, probe != "reader-early", probe != "writer-early", num_warps=4)
    found = out.cpu()  # also the end of the kernel: a sanitizer reports what has ended
    exact = RECORDS * torch.arange(WORDS, dtype=torch.int32) + sum(range(RECORDS))
    return probe != "ordered" or torch.equal(found, exact.expand(PROGRAMS, -1))
