"""Orders that racecheck (2025.3) does not follow, written out for it in the PTX of the same kernels. See Note [Racecheck].

1. A group meets in a barrier, then one of its threads arrives at an mbarrier for all: taken for the order of that one thread's
   accesses. Here each thread arrives, and 128 arrivals stand for one.
2. After a barrier of some of a CTA's threads, one of all, `__syncthreads` included, orders nothing. Here a barrier of some is an
   mbarrier at which they arrive and wait.

The same threads meet at the same places as before: nothing is ordered that was not.
"""
from __future__ import annotations

import re

FOR_ALL = 128  # arrivals that stand for one
MEMORY = 1024  # bytes in front of the kernel's own shared memory, which begins at a multiple of as many

_MEET = re.compile(r"^\s*bar\.sync\s+(\d+), (\d+);\s*$")
_SOME = re.compile(r"\bbar(rier)?(\.cta)?\.(sync|arrive|red)\S*\s+[^;]*,")
_ARRIVE = re.compile(r"@%p\d+ (mbarrier\.arrive\.shared(?:::cta)?\.b64 _, \[[^\]]+\]);")
_EXPECT = re.compile(r"(@%p\d+) mbarrier\.arrive\.expect_tx\.shared(?:::cta)?\.b64 _, (\[[^\]]+\]), \d+;")
_INIT = re.compile(r"(mbarrier\.init\.shared(?:::cta)?\.b64 \[[^\]]+\]), (\d+);")
_BEGIN = "$L__func_begin0:"

_MEETING = """\
{{
	.reg .pred met;
	mbarrier.arrive.shared::cta.b64 _, [racecheck_smem+{offset}];
meetLoop:
	mbarrier.try_wait.parity.shared::cta.b64 met, [racecheck_smem+{offset}], %racecheck_phase;
	@!met bra.uni meetLoop;
}}
	xor.b32 %racecheck_phase, %racecheck_phase, 1;
	bar.warp.sync -1;"""

_START = """\
	.reg .b32 %racecheck_phase;
{{
	.reg .pred first;
	.reg .b32 thread;
	mov.u32 thread, %tid.x;
	setp.eq.u32 first, thread, 0;
{inits}
	bar.sync 0;
}}
	mov.b32 %racecheck_phase, 0;"""

rewritten = 0  # kernels


def followed(ptx: str) -> str:
    """The kernel's PTX with both orders written out. A thread meets with one group only, as in Triton's partitions.

    Raises ValueError for PTX in which it does not know who arrives: another Triton may write it in another way.
    """
    lines, group, known, groups = [], None, 0, {}
    for line in ptx.split("\n"):
        if line.startswith("$L__BB") or "bra" in line:
            group = None
        elif "bar.warp.sync" in line:
            group = 32
        elif met := _MEET.match(line):
            number, group = int(met.group(1)), int(met.group(2))
            if groups.setdefault(number, group) != group:
                raise ValueError(f"barrier {number} is of {groups[number]} threads and of {group}")
            line = _MEETING.format(offset=8 * number)
        elif one := _ARRIVE.search(line):
            if group is None or FOR_ALL % group:
                raise ValueError(f"an arrival of {group} threads: {line.strip()}")
            known += 1
            each = "" if group == FOR_ALL else f", {FOR_ALL // group}"
            line = line[:one.start()] + one.group(1) + each + ";" + line[one.end():]
        elif one := _EXPECT.search(line):
            known += 1
            line += f"\n\t{one.group(1)} mbarrier.arrive.shared::cta.b64 _, {one.group(2)}, {FOR_ALL - 1};"
        elif start := _INIT.search(line):
            line = f"{line[:start.start()]}{start.group(1)}, {int(start.group(2)) * FOR_ALL};{line[start.end():]}"
        lines.append(line)
    if known != ptx.count("mbarrier.arrive"):
        raise ValueError(f"{ptx.count('mbarrier.arrive')} arrivals, of which {known} are of a known form")
    if left := [line for line in lines if _SOME.search(line)]:
        raise ValueError(f"a barrier of an unknown form: {left[0].strip()}")
    if lines.count(_BEGIN) != 1:
        raise ValueError(f"{lines.count(_BEGIN)} places where the kernel begins")
    inits = "\n".join(f"\t@first mbarrier.init.shared::cta.b64 [racecheck_smem+{8 * number}], {threads};"
                      for number, threads in sorted(groups.items()))
    lines.insert(lines.index(_BEGIN) + 1, _START.format(inits=inits))
    entry = next(i for i, line in enumerate(lines) if line.startswith(".visible .entry"))
    lines.insert(entry, f".shared .align {MEMORY} .b8 racecheck_smem[{MEMORY}];")
    return "\n".join(lines)


def install() -> None:
    """From now on triton compiles kernels with mbarriers this way, into a cache of their own."""
    from triton import knobs

    def hook(backend=None, stages=None, *unused):
        if stages is None:
            return "racecheck", "racecheck"
        plain = stages["ptx"]
        stages["ptx"] = lambda source, metadata: _rewritten(plain(source, metadata))

    knobs.runtime.add_stages_inspection_hook = hook
    knobs.cache.dir = f"{knobs.cache.dir}-racecheck"  # 3.6 has no part of a hook in its keys


def _rewritten(ptx: str) -> str:
    global rewritten
    if "mbarrier.init" not in ptx:
        return ptx
    rewritten += 1
    return followed(ptx)
