"""Every kernel compiles for a GPU, also where there is none: what the interpreter takes the compiler may refuse."""

from __future__ import annotations

from typing import Any

import pytest

from sosampler.engine.kernels import triton_kernels as engine

triton = pytest.importorskip("triton")

# Name, pointers by their types, numbers with a fraction, and what is known when it is compiled.
KERNELS: list[tuple[Any, dict[str, str], tuple[str, ...], dict[str, Any]]] = [
    (
        engine._finish,
        {"x": "fp16", "bias": "fp16", "other": "fp16"},
        (),
        {"has_bias": True, "has_other": True, "activation": 2, "block": 1024},
    ),
    *(
        (engine._centre, {"levels": "u8", "found": resized}, (), {"unit": 4, "block": 1024})
        for resized in ("fp16", "fp32")
    ),
    *(
        (
            engine._normalise,
            {"levels": resized, "found": kind, "mean": "fp32", "scale": "fp32"},
            (),
            {"block": 1024},
        )
        for resized, kind in (("fp16", "bf16"), ("fp32", "fp32"))
    ),
    *(
        (
            engine._normalise_blocks,
            {"levels": resized, "found": kind, "mean": "fp32", "scale": "fp32"},
            () if rounded else ("offset",),  # a whole number, or none at all
            {"levels_are_rounded": rounded, "block": engine._CELLS, "channels": 16},
        )
        for resized, kind, rounded in (("fp16", "bf16", True), ("fp32", "fp32", True), ("fp32", "bf16", False))
    ),
    (engine._max_pool, {"x": "bf16", "found": "bf16"}, (), {"kernel": 3, "stride": 2, "padding": 1, "block": 1024}),
]


@pytest.mark.parametrize(("kernel", "pointers", "fractions", "known"), KERNELS)
def test_a_kernel_compiles(
    kernel: Any, pointers: dict[str, str], fractions: tuple[str, ...], known: dict[str, Any]
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: f"*{kind}" for name, kind in pointers.items()}
    types |= dict.fromkeys(fractions, "fp32") | dict.fromkeys(known, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in known.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
