"""A pass of torch's compiler that joins the linear layers which multiply the same row into one launch.

The launch also computes what the graph does with the row and with the outputs: the RMS norm before a product, SiLU of
gate times up, and the addition of a residual. A kernel for each of them would take longer than its arithmetic.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import CallFunction, Ignored, KeywordArg, Match
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.linear.quantised import TOGETHER, RowNorm, one_row_linears, rounded

aten, prims = torch.ops.aten, torch.ops.prims


@torch.library.custom_op("sparsekv::one_row_linears", mutates_args=())
def _opaque(
    row: torch.Tensor,
    numbers: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `one_row_linears` as one opaque operator. `numbers` are the weights, rounded if `scales` are given."""
    channels = row.shape[-1]
    weights = [rounded(*pair, channels) for pair in zip(numbers, scales, strict=True)] if scales else list(numbers)
    output = one_row_linears(
        row.reshape(1, channels),
        weights,
        list(biases) or [None] * len(weights),
        norm=None if norm is None else RowNorm(norm, epsilon),
        gated=gated,
        residual=None if residual is None else residual.reshape(1, -1),
    )
    return output.view(*row.shape[:-1], -1)


@_opaque.register_fake
def _output_of(
    row: torch.Tensor,
    numbers: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    return row.new_empty(*row.shape[:-1], sum(len(one) for one in numbers[: 1 if gated else None]))


VIEWS = aten.view.default, aten.reshape.default
JOINED = torch.ops.sparsekv.one_row_linears.default


class Product(NamedTuple):
    """A node of the compiler's graph that multiplies one row by a layer's weights.

    Products of the same row have the same `source` and `shape`.
    """

    node: Node
    source: Node
    shape: tuple[int, ...]
    row: Node
    numbers: Node
    scales: Node | None
    bias: Node | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is equal for products that one launch can compute together.

        It has the row, its shape, the weights' dtype, whether the weights are rounded, and whether there is no bias.
        """
        return self.source, self.shape, _value(self.numbers).dtype, self.scales is None, self.bias is None


class JoinLinears(CustomGraphPass):  # type: ignore[misc]  # torch gives it no type
    """Replaces products of one row by calls of `one_row_linears`, which multiply up to TOGETHER weights in one launch.

    On a GPU, products with half-precision weights are replaced only from Hopper on. Then norms, gates and residuals
    become part of these calls.

    Args:
        device: type of the devices whose products are replaced.
    """

    def __init__(self, device: str = "cuda"):
        self.device = device

    def __call__(self, graph: Graph) -> None:
        kinds: dict[tuple[object, ...], list[Product]] = {}
        for product in self._products(graph):
            kinds.setdefault(product.kind, []).append(product)
        for products in kinds.values():
            for start in range(0, len(products), TOGETHER):
                _join(graph, products[start : start + TOGETHER])
        _drop_views(graph)
        for node in graph.find_nodes(op="call_function", target=JOINED):
            _take_norm(node)
        for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            _take_gate(node)
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            _take_residual(graph, node)
        graph.eliminate_dead_code()
        graph.lint()

    def uuid(self) -> Any:
        """Return this pass's part of a key in the compiler's cache: a hash of this file and of the device type."""
        return get_hash_for_files((__file__,), self.device)

    def _products(self, graph: Graph) -> Iterator[Product]:
        for node in graph.nodes:
            product = _rounded_product(node) or _plain_product(node)
            if product is not None and _value(product.row).device.type == self.device:
                yield product


def _value(node: Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _given(*nodes: Node | None) -> bool:
    """Whether the nodes are inputs of the graph, and so exist before each of its operations."""
    return all(node is None or node.op in ("placeholder", "get_attr") for node in nodes)


def _rounded_product(node: Node) -> Product | None:
    if node.target is not torch.ops.sparsekv.quantised_linear.default:
        return None
    row, numbers, scales, bias = node.args
    shape = tuple(_value(row).shape)
    if prod(shape[:-1]) != 1 or not _given(numbers, scales, bias):
        return None
    return Product(node, row, shape, row, numbers, scales, bias)


def _plain_product(node: Node) -> Product | None:
    """Return `x @ w.t()` or `bias + x @ w.t()` as a product, if the kernel can compute it and is faster; else None.

    The kernel was measured to be faster in half precision, on a GPU only from Hopper on.
    """
    if node.target is aten.mm.default:
        bias, (row, turned) = None, node.args
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, row, turned = node.args
    else:
        return None
    if turned.target is not aten.permute.default:
        return None
    weight, shape = turned.args[0], tuple(_value(row).shape)
    value = _value(weight)
    if (
        shape[0] != 1
        or not value.is_contiguous()
        or value.dtype not in (torch.float16, torch.bfloat16)
        or not _given(weight, bias)
        or (bias is not None and _value(bias).dim() != 1)
        or (value.is_cuda and not dependent_launch(value.device)["EARLY"])
    ):
        return None
    viewed = row.target in VIEWS and _value(row.args[0]).shape[-1] == shape[-1]
    return Product(node, row.args[0] if viewed else row, shape, row, weight, None, bias)


def _join(graph: Graph, products: Sequence[Product]) -> None:
    """Replace products of one kind by parts of one joint product."""
    first = products[0]
    numbers = [one.numbers for one in products]
    scales = [one.scales for one in products if one.scales is not None]
    biases = [one.bias for one in products if one.bias is not None]
    with graph.inserting_before(first.node):
        joined = _call(graph, JOINED, (first.source, numbers, scales, biases, None, 0.0, False, None))
        start = 0
        for one in products:
            stop = start + len(_value(one.numbers))
            part = joined if len(products) == 1 else _call(graph, aten.slice.Tensor, (joined, -1, start, stop))
            shape = list(_value(one.node).shape)
            one.node.replace_all_uses_with(_call(graph, aten.reshape.default, (part, shape)))
            start = stop
    for one in products:
        graph.erase_node(one.node)


def _call(graph: Graph, target: Any, arguments: tuple[Any, ...]) -> Node:
    """Insert a call whose output is shaped as the target shapes it."""
    node = graph.call_function(target, arguments)
    given = map_arg(arguments, _value)
    node.meta["val"] = target(*given)
    return node


def _drop_views(graph: Graph) -> None:
    """Remove reshapes of joint products and of their parts that change no shape, and all nodes that nothing reads."""
    for node in (node for target in VIEWS for node in graph.find_nodes(op="call_function", target=target)):
        source = node.args[0]
        while source.target in VIEWS:
            source = source.args[0]
        if source.target in (JOINED, aten.slice.Tensor) and _value(source).shape == _value(node).shape:
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


def _rms_norm() -> CallFunction:
    exact = CallFunction(prims.convert_element_type.default, KeywordArg("row"), torch.float32, _users=2)
    mean = CallFunction(aten.mean.dim, CallFunction(aten.pow.Tensor_Scalar, exact, 2), [-1], True)
    scale = CallFunction(aten.rsqrt.default, CallFunction(aten.add.Tensor, mean, KeywordArg("epsilon")))
    scaled = CallFunction(aten.mul.Tensor, exact, scale)
    normal = CallFunction(prims.convert_element_type.default, scaled, KeywordArg("dtype"))
    return CallFunction(aten.mul.Tensor, KeywordArg("weight"), normal)


def _gated() -> CallFunction:
    """Pattern of SiLU of a joint product's first outputs times its other outputs."""
    gate = CallFunction(aten.slice.Tensor, KeywordArg("joined"), -1, 0, KeywordArg("outputs"))
    up = CallFunction(aten.slice.Tensor, KeywordArg("joined"), -1, KeywordArg("outputs"), Ignored())
    exact = CallFunction(prims.convert_element_type.default, gate, torch.float32, _users=2)
    power = CallFunction(aten.exp.default, CallFunction(aten.neg.default, exact))
    activated = CallFunction(aten.div.Tensor, exact, CallFunction(aten.add.Tensor, power, 1))
    return CallFunction(
        aten.mul.Tensor, CallFunction(prims.convert_element_type.default, activated, KeywordArg("dtype")), up
    )


RMS_NORM, GATED = _rms_norm(), _gated()


def _match(pattern: CallFunction, node: object) -> dict[str, Any] | None:
    """Return the named parts of a pattern that matches a node, or None."""
    found = pattern.match(node) if isinstance(node, Node) else None
    return found.kwargs if isinstance(found, Match) else None


def _take_norm(joined: Node) -> None:
    """Let a joint product compute the RMS norm of its row, if the norm has no other reader.

    Rounded weights are multiplied together with a norm in bfloat16 only.
    """
    row, numbers, scales, biases, *_, gated, residual = joined.args
    found = _match(RMS_NORM, row) if len(row.users) == 1 else None
    if found is None:
        return
    plain, weight, epsilon = found["row"], found["weight"], found["epsilon"]
    if not isinstance(weight, Node) or not isinstance(epsilon, float) or not _given(weight):
        return
    dtypes, channels = {_value(one).dtype for one in (row, plain, weight)} | {found["dtype"]}, _value(row).shape[-1]
    fits = not scales or (dtypes == {torch.bfloat16} and channels % 16 == 0)
    if fits and len(dtypes) == 1 and _value(weight).shape == (channels,):
        joined.args = (plain, numbers, scales, biases, weight, epsilon, gated, residual)


def _take_gate(product: Node) -> None:
    """Let a joint product of two layers compute their gated output, if nothing else reads their outputs."""
    found = _match(GATED, product)
    if found is None:
        return
    joined, dtypes = found["joined"], {_value(product).dtype, _value(found["joined"]).dtype, found["dtype"]}
    if joined.target is not JOINED or len(joined.users) != 2 or len(joined.args[1]) != 2 or len(dtypes) != 1:
        return
    if 2 * found["outputs"] == _value(joined).shape[-1]:
        joined.args = (*joined.args[:6], True, None)
        joined.meta["val"] = _value(product)
        product.replace_all_uses_with(joined)


def _take_residual(graph: Graph, total: Node) -> None:
    """Replace the sum of a joint product and a residual by a joint product that adds the residual."""
    for joined, residual in (total.args, total.args[::-1]):
        if not isinstance(joined, Node) or joined.target is not JOINED or len(joined.users) > 1 or total.kwargs:
            continue
        *given, gated, before = joined.args
        values = {(_value(one).shape, _value(one).dtype) for one in (joined, total)}
        same = isinstance(residual, Node) and {(_value(residual).shape, _value(residual).dtype)} == values
        if same and not gated and before is None:
            with graph.inserting_before(total):  # the residual may be computed after the product
                total.replace_all_uses_with(_call(graph, JOINED, (*given, False, residual)))
            return
