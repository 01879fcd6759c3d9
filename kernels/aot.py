"""Compile every kernel ahead of time for real GPUs, on a machine that has none.

``python -m icmllab.kernels.aot [kernel ...]`` prints the table: registers, spilled bytes, shared
memory and the width of loads and stores for each target.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from icmllab.kernels.registry import Program, specs

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Compiled:
    """What a kernel became for one target.

    Attributes:
        registers: registers a thread (vector registers on AMD).
        spilled: bytes of local memory (scratch on AMD) a thread; 0 is wanted.
        shared: bytes of shared memory (LDS) a program.
        load_bits: bits of the widest global load.
        store_bits: bits of the widest global store.
        wide_loads: bytes that a program reads by loads of 128 bits or more, as written in the code.
        wide_stores: the same for stores.
        assembly: the text that these were read from.
    """

    registers: int
    spilled: int
    shared: int
    load_bits: int
    store_bits: int
    wide_loads: int
    wide_stores: int
    assembly: str


@cache
def compile_program(kernel: str, program: str, target: str) -> Compiled:
    """Compile one form of a kernel for one target, anew, leaving Triton's cache alone.

    Args:
        kernel: a kernel's name in the registry.
        program: the name of one of its compiled forms.
        target: one of ``TARGETS``.

    Raises:
        ValueError: one of the names is unknown.
    """
    form = _known("program", program, _known("kernel", kernel, specs()).programs)
    _known("target", target, dict.fromkeys(TARGETS))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
    source = ASTSource(
        fn=form.kernel,
        signature=_signature(form),
        constexprs=form.constants,
        attrs={
            (form.kernel.arg_names.index(a),): [["tt.divisibility", 16]] for a in form.divisible
        },
    )
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        built = triton.compile(source, target=gpu, options={"num_warps": form.num_warps})
        threads = form.num_warps * gpu.warp_size
        return _read_nvidia(built, threads) if nvidia else _read_amd(built, threads)


def _known(what: str, name: str, table: Mapping[str, object]) -> object:
    if name not in table:
        raise ValueError(f"{what} must be one of {', '.join(table)}: got {name!r}")
    return table[name]


def _signature(form: Program) -> dict[str, str]:
    """Triton wants every argument, in order, constants as ``constexpr``."""
    names = form.kernel.arg_names
    missing = [a for a in names if a not in form.signature and a not in form.constants]
    if missing:
        raise ValueError(f"signature lacks {', '.join(missing)} of {form.kernel.__name__}")
    return {a: "constexpr" if a in form.constants else form.signature[a] for a in names}


def _read_nvidia(built, threads: int) -> Compiled:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        sass = _run(tools / "nvdisasm", file.name)
    numbers = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    loads, stores = (_sass_bits(sass, kind) for kind in ("LDG", "STG"))
    return Compiled(
        registers=int(numbers["REG"]),
        spilled=int(numbers["LOCAL"]) + int(numbers["STACK"]),
        shared=built.metadata.shared,
        load_bits=max(loads, default=0),
        store_bits=max(stores, default=0),
        wide_loads=_wide(loads, threads),
        wide_stores=_wide(stores, threads),
        assembly=sass,
    )


def _sass_bits(sass: str, kind: str) -> list[int]:
    """Bits of each global access in SASS; one that names no width moves 32 or less."""
    widths = {"64": 64, "128": 128, "256": 256}
    found = re.findall(rf"\b{kind}\.E((?:\.\w+)*)", sass)
    return [max((widths.get(w, 32) for w in parts.split(".")), default=32) for parts in found]


def _read_amd(built, threads: int) -> Compiled:
    text = built.asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", text).group(1))

    loads, stores = (_amd_bits(text, kind) for kind in ("load", "store"))
    return Compiled(
        registers=number("vgpr_count"),
        spilled=number("private_segment_fixed_size") + 4 * number("vgpr_spill_count"),
        shared=built.metadata.shared,
        load_bits=max(loads, default=0),
        store_bits=max(stores, default=0),
        wide_loads=_wide(loads, threads),
        wide_stores=_wide(stores, threads),
        assembly=text,
    )


def _amd_bits(text: str, kind: str) -> list[int]:
    """Bits of each vector memory access in AMD's assembly; a part of a word counts as 32."""
    widths = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64}
    found = re.findall(rf"\b(?:global|buffer|flat)_{kind}_(\w+)", text)
    return [widths.get(w, 32) for w in found]


def _wide(bits: list[int], threads: int) -> int:
    return sum(b // 8 * threads for b in bits if b >= 128)


def _run(*command: object) -> str:
    return subprocess.run(
        [str(c) for c in command], check=True, capture_output=True, text=True
    ).stdout


HEAD = (
    "kernel",
    "form",
    "target",
    "registers",
    "spilled",
    "shared",
    "load",
    "store",
    "wide loads",
    "wide stores",
)


def rows(kernels: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """One line for each kernel (of all when none is named), form and target."""
    lines = []
    for name in kernels or specs():
        for form in _known("kernel", name, specs()).programs:
            for target in TARGETS:
                c = compile_program(name, form, target)
                sizes = (f"{c.registers}", f"{c.spilled} B", f"{c.shared} B")
                widths = (f"{c.load_bits} b", f"{c.store_bits} b")
                wide = (f"{c.wide_loads} B", f"{c.wide_stores} B")
                lines.append((name, form, target, *sizes, *widths, *wide))
    return lines


def table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """Lines as text in aligned columns."""
    widths = [max(len(r[i]) for r in (head, *lines)) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    )


if __name__ == "__main__":
    print(table(HEAD, rows(sys.argv[1:])))
