"""Networks of single frames made faster without changing what they say.

Batch norm is folded into the convolution before it, and activation and residual addition are done by the convolution
itself where the device's library can.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sosampler.engine.kernels.blocks import ACTIVATIONS, FusedConv
from sosampler.engine.kernels.triton_kernels import max_pool
from sosampler.samplers.backbones import find_neighbours, shift_channels

log = logging.getLogger("sosampler")

# What networks that look at values raise when they are given none.
_TRACE_ERRORS = (
    *(fx.proxy.TraceError, TypeError, ValueError, RuntimeError, AttributeError),
    *(KeyError, NotImplementedError, AssertionError),
)
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)  # in evaluation
# What a fused network may differ by from the one it was made of, as a share of the largest value.
_TOLERANCE = 1e-3


class _Tracer(fx.Tracer):
    """Does not look into functions that count frames: how many there are is not known when tracing."""

    def __init__(self) -> None:
        super().__init__(autowrap_functions=(find_neighbours, shift_channels))


def fused(net: nn.Module, example: tuple[Any, ...], *, name: str, epilogues: bool = True) -> nn.Module:
    """A copy of `net` with fused convolutions that says the same; `net` itself stays as it is.

    Args:
        net: in float32 on the CPU; what it returns for F frames has F rows.
        example: arguments to try it on, the first of them float frames [F, 3, h, w].
        name: for the log.
        epilogues: also fuse activations and additions; without it batch norm alone.

    A network whose way depends on values cannot be traced; it is copied as it is, which is logged.
    """
    net = copy.deepcopy(net).eval().requires_grad_(False)
    try:
        traced = _traced(net)
        ShapeProp(traced).propagate(*example)
    except _TRACE_ERRORS as error:
        log.info("%s: cannot be traced, its convolutions are not fused (%s)", name, type(error).__name__)
        return net
    used = {str(node.target).split(".")[0] for node in traced.graph.nodes if node.op in ("call_module", "get_attr")}
    with torch.no_grad():
        expected = net(*example)
        _drop_nothings(traced)
        _fold_batch_norms(traced)
        if epilogues:
            _fuse_convolutions(traced)
            _join_biases(traced)
            _reuse_memory(traced)
        traced.graph.lint()
        traced.recompile()
        found = traced(*example)
    scale = float(expected.abs().max())
    if not torch.allclose(found, expected, atol=_TOLERANCE * max(scale, 1e-6), rtol=0):
        log.warning("%s: fused convolutions give other values; it runs as it is", name)
        return net
    traced.delete_all_unused_submodules()
    # Layers that the frames do not pass through but others ask for (a class layer behind a pool).
    for child, module in net.named_children():
        if child not in used:
            traced.add_module(child, module)
    return traced


def _traced(net: nn.Module) -> fx.GraphModule:
    tracer = _Tracer()
    graph = tracer.trace(net)
    return fx.GraphModule(net, graph)


def _module_of(graph: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def _set_module(graph: fx.GraphModule, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(graph.get_submodule(parent), child, module)


def _calls(graph: fx.GraphModule, target: object) -> int:
    return sum(node.op == "call_module" and node.target == target for node in graph.graph.nodes)


def _drop_nothings(graph: fx.GraphModule) -> None:
    for node in list(graph.graph.nodes):
        if isinstance(_module_of(graph, node), _NOTHING):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def _fold_batch_norms(graph: fx.GraphModule) -> None:
    """Each batch norm that alone reads a convolution goes into its weights."""
    for node in list(graph.graph.nodes):
        norm = _module_of(graph, node)
        if not isinstance(norm, nn.BatchNorm2d) or norm.running_var is None:
            continue
        before = node.args[0]
        if not isinstance(before, fx.Node) or len(before.users) != 1 or _calls(graph, before.target) != 1:
            continue
        conv = _module_of(graph, before)
        if type(conv) is not nn.Conv2d:
            continue
        _set_module(graph, str(before.target), fuse_conv_bn_eval(conv, norm))
        node.replace_all_uses_with(before)
        graph.graph.erase_node(node)


def _fuse_convolutions(graph: fx.GraphModule) -> None:
    """Replace convolutions, with what follows each where nobody else reads it, by `FusedConv`."""
    for node in reversed(list(graph.graph.nodes)):  # of two that are added the later one takes the addition
        conv = _module_of(graph, node)
        if (
            not isinstance(conv, nn.Conv2d)
            or type(conv) is not nn.Conv2d
            or conv.padding_mode != "zeros"
            or isinstance(conv.padding, str)
        ):
            continue
        if _calls(graph, node.target) != 1:
            continue
        last, other = node, None
        if (addition := _only_user(last)) is not None and (other := _other_operand(addition, last)) is not None:
            last = addition
        activation = None
        if (user := _only_user(last)) is not None and (activation := _activation(graph, user)) is not None:
            last = user
        _set_module(graph, str(node.target), FusedConv(conv, activation))
        if last is node:
            continue
        with graph.graph.inserting_before(last):
            arguments = (node.args[0],) if other is None else (node.args[0], other)
            new = graph.graph.call_module(str(node.target), arguments)
            new.meta = dict(last.meta)
        last.replace_all_uses_with(new)
        for old in _between(node, last, other):
            graph.graph.erase_node(old)


def _join_biases(graph: fx.GraphModule) -> None:
    """What a convolution adds to each channel is added by the one that adds its output to its own: one pass less."""
    for node in graph.graph.nodes:
        taker = _module_of(graph, node)
        if not isinstance(taker, FusedConv) or len(node.args) != 2 or not isinstance(node.args[1], fx.Node):
            continue
        giver = _module_of(graph, node.args[1])
        if not isinstance(giver, FusedConv) or giver.activation is not None or giver.bias is None:
            continue
        if len(node.args[1].users) != 1 or _calls(graph, node.args[1].target) != 1 or _calls(graph, node.target) != 1:
            continue
        both = giver.bias.detach() if taker.bias is None else taker.bias.detach() + giver.bias.detach()
        taker.bias, giver.bias = nn.Parameter(both.clone(), requires_grad=False), None


def _reuse_memory(graph: fx.GraphModule) -> None:
    """Tell convolutions that add a tensor for the last time that they may write over it.

    It must be the output of a convolution, which is new memory, or memory that was given up in the same way; and
    nobody who reads it may have kept a view of it.
    """
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    for node in graph.graph.nodes:
        taker = _module_of(graph, node)
        if not isinstance(taker, FusedConv) or len(node.args) != 2 or _calls(graph, node.target) != 1:
            continue
        other = node.args[1]
        if not isinstance(other, fx.Node) or node.args[0] is other:
            continue
        if not isinstance(_module_of(graph, other), FusedConv):
            continue
        taker.reuses = all(order[user] <= order[node] and _gives_new_memory(graph, user) for user in other.users)


def _gives_new_memory(graph: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(_module_of(graph, node), FusedConv) or node.target is shift_channels


class FastMaxPool(nn.Module):
    """Max pooling of [F, C, H, W] by one pass of the GPU."""

    def __init__(self, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return max_pool(x, self.kernel, self.stride, self.padding)


def pool_fast(net: nn.Module) -> None:
    """Replace the max pools of a fused network, in place."""
    if not isinstance(net, fx.GraphModule):
        return
    for name, pool in list(net.named_modules()):
        if not isinstance(pool, nn.MaxPool2d) or pool.ceil_mode or pool.return_indices:
            continue
        numbers = [pool.kernel_size, pool.stride, pool.padding, pool.dilation]
        pairs = [(one, one) if isinstance(one, int) else tuple(one) for one in numbers]
        if all(across == down for across, down in pairs) and pairs[3] == (1, 1):
            _set_module(net, name, FastMaxPool(*(pair[0] for pair in pairs[:3])))


def _between(first: fx.Node, last: fx.Node, other: fx.Node | None) -> list[fx.Node]:
    """The nodes from `last` back to `first`, in the order in which they may be erased."""
    found, node = [last], last
    while node is not first:
        node = next(each for each in node.all_input_nodes if each is not other or len(node.all_input_nodes) == 1)
        found.append(node)
    return found


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other_operand(addition: fx.Node, one: fx.Node) -> fx.Node | None:
    """What is added to `one`, if it is another tensor of the same shape."""
    if addition.op != "call_function" or addition.target not in _ADDITIONS or addition.kwargs:
        return None
    if len(addition.args) != 2:
        return None
    others = [each for each in addition.args if each is not one]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    other = others[0]
    return other if _shape(other) is not None and _shape(other) == _shape(one) else None


def _shape(node: fx.Node) -> Any:
    return getattr(node.meta.get("tensor_meta"), "shape", None)


_FUNCTIONS: dict[Callable[..., Any], str] = {F.relu: "relu", torch.relu: "relu", F.relu6: "relu6"}
_MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.ReLU6: "relu6"}


def _activation(graph: fx.GraphModule, node: fx.Node) -> str | None:
    if node.op == "call_function" and not isinstance(node.target, str):
        return _FUNCTIONS.get(node.target)
    module = _module_of(graph, node)
    found = _MODULES.get(type(module)) if module is not None else None
    return found if found in ACTIVATIONS else None
