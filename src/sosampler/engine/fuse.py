"""Fuse convolutions with the batch norm, the residual addition and the activation after them; outputs stay equal."""

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

from sosampler.engine.kernels.blocks import FusedConv
from sosampler.engine.kernels.triton_kernels import max_pool
from sosampler.samplers.backbones import find_neighbours, shift_channels

log = logging.getLogger("sosampler")

# Raised while tracing by networks whose control flow depends on values.
_TRACE_ERRORS = (
    *(fx.proxy.TraceError, TypeError, ValueError, RuntimeError, AttributeError),
    *(KeyError, NotImplementedError, AssertionError),
)
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_NO_OPS = (nn.Identity, nn.Dropout, nn.Dropout2d)  # in evaluation mode
_ACTIVATION_FUNCTIONS: dict[Callable[..., Any], str] = {F.relu: "relu", torch.relu: "relu", F.relu6: "relu6"}
_ACTIVATION_MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.ReLU6: "relu6"}
_TOLERANCE = 1e-3  # largest difference of a fused network's output, relative to the largest value


def fuse_network(net: nn.Module, example: tuple[Any, ...], *, name: str, epilogues: bool = True) -> nn.Module:
    """Return a copy of `net`, in float32 on the CPU, with fused convolutions.

    A network whose control flow depends on values cannot be traced; its copy is plain, which is logged. `example` are
    arguments to compare both on, float frames [F, 3, h, w] first; `epilogues` also fuses activations and additions.
    """
    net = copy.deepcopy(net).eval().requires_grad_(False)
    try:
        # Functions that depend on the number of frames, unknown here, are not traced into.
        tracer = fx.Tracer(autowrap_functions=(find_neighbours, shift_channels))
        traced = fx.GraphModule(net, tracer.trace(net))
        ShapeProp(traced).propagate(*example)
    except _TRACE_ERRORS as error:
        log.info("%s: cannot be traced, its convolutions are not fused (%s)", name, type(error).__name__)
        return net
    used = {str(node.target).split(".")[0] for node in traced.graph.nodes if node.op in ("call_module", "get_attr")}
    with torch.no_grad():
        expected = net(*example)
        for node in list(traced.graph.nodes):
            if isinstance(_module_of(traced, node), _NO_OPS):
                node.replace_all_uses_with(node.args[0])
                traced.graph.erase_node(node)
        _fold_batch_norms(traced)
        if epilogues:
            _fuse_convolutions(traced)
            _join_biases(traced)
            _mark_in_place(traced)
        traced.graph.lint()
        traced.recompile()
        output = traced(*example)
    scale = float(expected.abs().max())
    if not torch.allclose(output, expected, atol=_TOLERANCE * max(scale, 1e-6), rtol=0):
        log.warning("%s: fused convolutions give different values; it runs unfused", name)
        return net
    traced.delete_all_unused_submodules()
    for child, module in net.named_children():  # layers that are used elsewhere (a class layer after a pool)
        if child not in used:
            traced.add_module(child, module)
    return traced


def _module_of(graph: fx.GraphModule, node: fx.Node) -> Any:
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def _num_calls(graph: fx.GraphModule, target: object) -> int:
    return sum(node.op == "call_module" and node.target == target for node in graph.graph.nodes)


def _fold_batch_norms(graph: fx.GraphModule) -> None:
    """Fold each batch norm into its convolution, where no other layer reads that."""
    for node in list(graph.graph.nodes):
        norm = _module_of(graph, node)
        if not isinstance(norm, nn.BatchNorm2d) or norm.running_var is None:
            continue
        before = node.args[0]
        if not isinstance(before, fx.Node) or len(before.users) != 1 or _num_calls(graph, before.target) != 1:
            continue
        if type(conv := _module_of(graph, before)) is not nn.Conv2d:
            continue
        graph.set_submodule(str(before.target), fuse_conv_bn_eval(conv, norm))
        node.replace_all_uses_with(before)
        graph.graph.erase_node(node)


def _fuse_convolutions(graph: fx.GraphModule) -> None:
    """Replace convolutions, with the addition and activation that follow, by `FusedConv`."""
    for node in reversed(list(graph.graph.nodes)):  # of two that are added, the later one takes the addition
        conv = _module_of(graph, node)
        if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            continue
        if _num_calls(graph, node.target) != 1:
            continue
        last, other = node, None
        if (addition := _only_user(last)) is not None and (other := _other_operand(addition, last)) is not None:
            last = addition
        activation = None
        if (user := _only_user(last)) is not None and (activation := _activation(graph, user)) is not None:
            last = user
        graph.set_submodule(str(node.target), FusedConv(conv, activation))
        if last is node:
            continue
        with graph.graph.inserting_before(last):
            arguments = (node.args[0],) if other is None else (node.args[0], other)
            new = graph.graph.call_module(str(node.target), arguments)
            new.meta = dict(last.meta)
        last.replace_all_uses_with(new)
        while last is not node:  # erase from the last node back to the convolution
            inputs = last.all_input_nodes
            before = next(each for each in inputs if each is not other or len(inputs) == 1)
            graph.graph.erase_node(last)
            last = before
        graph.graph.erase_node(node)


def _join_biases(graph: fx.GraphModule) -> None:
    """Move the bias of a convolution whose output is only added by another into that one: saves a pass."""
    for node in graph.graph.nodes:
        target = _module_of(graph, node)
        if not isinstance(target, FusedConv) or len(node.args) != 2 or not isinstance(node.args[1], fx.Node):
            continue
        source = _module_of(graph, node.args[1])
        if not isinstance(source, FusedConv) or source.activation is not None or source.bias is None:
            continue
        if len(node.args[1].users) != 1 or any(_num_calls(graph, each.target) != 1 for each in (node.args[1], node)):
            continue
        total = source.bias.detach() if target.bias is None else target.bias.detach() + source.bias.detach()
        target.bias, source.bias = nn.Parameter(total.clone(), requires_grad=False), None


def _mark_in_place(graph: fx.GraphModule) -> None:
    """Allow convolutions to overwrite the tensor they add, if they are the last to read it."""
    # It must be the output of a fused convolution, whose memory no other tensor shares; no reader may keep a view.
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    for node in graph.graph.nodes:
        conv = _module_of(graph, node)
        if not isinstance(conv, FusedConv) or len(node.args) != 2 or _num_calls(graph, node.target) != 1:
            continue
        other = node.args[1]
        if isinstance(other, fx.Node) and other is not node.args[0] and isinstance(_module_of(graph, other), FusedConv):
            conv.in_place = all(
                order[user] <= order[node]
                and (isinstance(_module_of(graph, user), FusedConv) or user.target is shift_channels)
                for user in other.users
            )


class FastMaxPool(nn.Module):
    """Max pooling of [F, C, H, W] by one GPU kernel."""

    def __init__(self, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return max_pool(x, self.kernel, self.stride, self.padding)


def replace_max_pools(net: nn.Module) -> None:
    """Replace the max pools of a fused network by `FastMaxPool`, in place."""
    if not isinstance(net, fx.GraphModule):
        return
    for name, pool in list(net.named_modules()):
        if not isinstance(pool, nn.MaxPool2d) or pool.ceil_mode or pool.return_indices:
            continue
        numbers = [pool.kernel_size, pool.stride, pool.padding, pool.dilation]
        pairs = [(number, number) if isinstance(number, int) else tuple(number) for number in numbers]
        if all(across == down for across, down in pairs) and pairs[3] == (1, 1):
            net.set_submodule(name, FastMaxPool(*(pair[0] for pair in pairs[:3])))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other_operand(addition: fx.Node, operand: fx.Node) -> fx.Node | None:
    """Return the tensor that is added to `operand`, if it has the same shape."""
    if addition.op != "call_function" or addition.target not in _ADDITIONS or addition.kwargs:
        return None
    others = [each for each in addition.args if each is not operand]
    if len(addition.args) != 2 or len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    shapes = [getattr(each.meta.get("tensor_meta"), "shape", None) for each in (operand, others[0])]
    return others[0] if shapes[0] is not None and shapes[0] == shapes[1] else None


def _activation(graph: fx.GraphModule, node: fx.Node) -> str | None:
    if node.op == "call_function" and not isinstance(node.target, str):
        return _ACTIVATION_FUNCTIONS.get(node.target)
    module = _module_of(graph, node)
    return None if module is None else _ACTIVATION_MODULES.get(type(module))
