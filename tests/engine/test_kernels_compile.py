"""Every kernel compiles for a GPU, also where there is none: what the interpreter takes the compiler may refuse."""

from __future__ import annotations

from typing import Any

import pytest

from sosampler.engine.kernels import triton_kernels as engine
from sosampler.training import crop_kernel as crops
from sosampler.training import depthwise
from sosampler.training import norm_kernels as norms
from sosampler.training import shift_kernel as shift

triton = pytest.importorskip("triton")

TILE = {"block_channels": norms._FINAL_CHANNELS, "block_rows": norms._FINAL_ROWS}
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
    *(
        (
            norms._sum,
            {"x": "bf16", "given": "bf16", "kept": "fp32", "sums": "fp32"},
            (),
            {"backward": backward, "relu6": True, "block_rows": rows, "block_channels": norms._TILE_CHANNELS},
        )
        for backward, rows in ((False, norms._TILE_ROWS), (True, norms._TILE_ROWS_BACK))
    ),
    (
        norms._finish_forward,
        {
            **{"x": "bf16", "sums": "fp32", "weight": "fp32", "bias": "fp32"},
            **{"running_mean": "fp32", "running_variance": "fp32", "batches": "i64", "kept": "fp32"},
        },
        ("momentum", "eps"),
        TILE,
    ),
    (norms._finish_backward, {"sums": "fp32", "kept": "fp32", "told": "fp32"}, (), TILE),
    (norms._apply, {"x": "bf16", "found": "bf16", "kept": "fp32"}, (), {"relu6": True, "block": 1024}),
    (
        norms._apply_backward,
        {"x": "bf16", "given": "bf16", "found": "bf16", "kept": "fp32", "told": "fp32"},
        (),
        {"relu6": True, "block": 1024},
    ),
    *(
        (
            shift._move,
            {"x": "bf16", "found": "bf16", "has_next": "u8", "has_previous": "u8"},
            (),
            {"back": back, "block": 1024},
        )
        for back in (False, True)
    ),
    *(
        (
            kernel,
            {"values": "bf16", "given": "bf16", "taps": "fp32", "found": "bf16", "sums": "fp32"},
            (),
            {"block_pixels": depthwise._PIXELS, "block_channels": depthwise._CHANNELS},
        )
        for kernel in depthwise._BACK.values()
    ),
    *(
        (
            crops._crop,
            {
                **{"frames": "u8", "across": "fp32", "down": "fp32"},
                **{"scale": "fp32", "offset": "fp32", "found": "bf16"},
            },
            (),
            {"times": times, "block": crops._BLOCK},
        )
        for times in (1, 16)  # in seconds, however large pictures are
    ),
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
