"""A pass of torch's compiler that joins the linear layers which multiply the same row into one launch."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.linear.quantised import TOGETHER, one_row_linears, rounded

aten = torch.ops.aten


@torch.library.custom_op("sparsekv::one_row_linears", mutates_args=())
def _opaque(
    row: torch.Tensor, numbers: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Run `one_row_linears` as one opaque operator. `numbers` are the weights, rounded if `scales` are given."""
    channels = row.shape[-1]
    weights = [rounded(*pair, channels) for pair in zip(numbers, scales, strict=True)] if scales else list(numbers)
    output = one_row_linears(row.reshape(1, channels), weights, list(biases) or [None] * len(weights))
    return output.view(*row.shape[:-1], -1)


@_opaque.register_fake
def _output_of(
    row: torch.Tensor, numbers: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    return row.new_empty(*row.shape[:-1], sum(len(one) for one in numbers))


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

    On a GPU, products with half-precision weights are replaced only from Hopper on. A product with rounded weights is
    replaced only together with other products of the same row.

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
                some = products[start : start + TOGETHER]
                if len(some) > 1 or some[0].scales is None:
                    _join(graph, some)
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
    viewed = row.target in (aten.view.default, aten.reshape.default)
    return Product(node, row.args[0] if viewed else row, shape, row, weight, None, bias)


def _join(graph: Graph, products: Sequence[Product]) -> None:
    """Replace products of one kind by parts of one joint product."""
    first = products[0]
    numbers = [one.numbers for one in products]
    scales = [one.scales for one in products if one.scales is not None]
    biases = [one.bias for one in products if one.bias is not None]
    with graph.inserting_before(first.node):
        arguments = (first.row, numbers, scales, biases)
        joined = graph.call_function(torch.ops.sparsekv.one_row_linears.default, arguments)
        joined.meta["val"] = _output_of(_value(first.row), [_value(one) for one in numbers], (), ())
        start = 0
        for one in products:
            stop = start + len(_value(one.numbers))
            part = graph.call_function(aten.slice.Tensor, (joined, -1, start, stop))
            part.meta["val"] = _value(joined)[..., start:stop]
            one.node.replace_all_uses_with(part)
            start = stop
    for one in products:
        graph.erase_node(one.node)
