"""Every kernel compiles for a GPU, without one: the compiler may reject what the interpreter accepts."""

from __future__ import annotations

from typing import Any

import pytest

from sosampler.engine.kernels import triton_kernels as engine

triton = pytest.importorskip("triton")

# Kernel, pointer arguments with their types, and compile-time constants; all other arguments are integers.
KERNELS: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (
        engine._finish,
        {"x": "fp16", "bias": "fp16", "other": "fp16"},
        {"has_bias": True, "has_other": True, "activation": 2, "block": 1024},
    ),
    *(
        (engine._centre, {"pixels": "u8", "output": resized}, {"unit": 4, "block": 1024})
        for resized in ("fp16", "fp32")
    ),
    *(
        (
            engine._normalise,
            {"pixels": resized, "output": kind, "mean": "fp32", "scale": "fp32"},
            {"block": 1024},
        )
        for resized, kind in (("fp16", "bf16"), ("fp32", "fp32"))
    ),
    *(
        (
            engine._normalise_blocks,
            {"pixels": resized, "output": kind, "mean": "fp32", "scale": "fp32"},
            {"block": engine._CELLS, "channels": 16},
        )
        for resized, kind in (("fp16", "bf16"), ("fp32", "fp32"))
    ),
    (engine._max_pool, {"x": "bf16", "output": "bf16"}, {"kernel": 3, "stride": 2, "padding": 1, "block": 1024}),
]


@pytest.mark.parametrize(("kernel", "pointers", "constants"), KERNELS)
def test_a_kernel_compiles(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
