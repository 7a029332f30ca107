"""A backend of torch.compile that joins the linear layers which multiply the same row into one launch.

The launch also computes what the graph does with the row and with the outputs: the RMS norm before a product, SiLU of
gate times up, and the addition of a residual. Another launch computes the norms and RoPE of query and key. A kernel for
each of them would take longer than its arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, Ignored, KeywordArg, Match, PatternExpr
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.linear.quantised import TOGETHER, RowNorm, one_row_linears, rounded
from sparsekv.kernels.linear.rotated_heads import rotated_heads

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


@torch.library.custom_op("sparsekv::rotated_heads", mutates_args=())
def _opaque_rotation(
    channels: torch.Tensor,
    queries: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: Sequence[torch.Tensor],
    epsilons: Sequence[float],
) -> torch.Tensor:
    """Run `rotated_heads` as one opaque operator on the first channels of a joint product; return [1, H, 1, D]."""
    pairs = [RowNorm(*pair) for pair in zip(norms, epsilons, strict=True)]
    return rotated_heads(channels.flatten(), queries, cos.flatten(), sin.flatten(), pairs)[None, :, None]


@_opaque_rotation.register_fake
def _heads_of(channels: torch.Tensor, queries: int, cos: torch.Tensor, *_: object) -> torch.Tensor:
    return channels.new_empty(1, channels.numel() // cos.shape[-1], 1, cos.shape[-1])


Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]
"""A backend of torch.compile: from a graph and its inputs it makes a function that computes the graph."""

JOINED, ROTATED = torch.ops.sparsekv.one_row_linears.default, torch.ops.sparsekv.rotated_heads.default

MOVES = frozenset(
    {aten.slice.Tensor, aten.reshape.default, aten.permute.default, aten.unsqueeze.default, aten.expand.default}
)
"""Operators that compute nothing: views, and copies if a tensor's strides allow no view."""


class OtherOperatorsError(RuntimeError):
    """A graph computes something with other operators than this project's."""


def joined_or(otherwise: Backend, device: str = "cuda") -> Backend:
    """Return a backend that runs a graph operator by operator, if `JoinLinears` leaves only this project's operators.

    Such a graph needs no kernels of torch's own compiler, which takes seconds to import and to run. Other graphs go to
    the backend `otherwise`.

    Args:
        device: type of the devices whose products are joined.
    """

    def run_joined(module: GraphModule, _: list[Any]) -> GraphModule:
        JoinLinears(device)(module.graph)
        for node in module.graph.nodes:
            target = node.target
            if node.op == "call_function" and target not in MOVES and getattr(target, "namespace", "") != "sparsekv":
                raise OtherOperatorsError(f"the graph has {target}")
        module.recompile()
        return module

    traced: Backend = aot_autograd(fw_compiler=run_joined, decompositions=select_decomp_table())

    def backend(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        try:
            return traced(module, inputs)
        except OtherOperatorsError:
            return otherwise(module, inputs)

    return backend


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
        for node in graph.find_nodes(op="call_function", target=aten.view.default):
            node.target = aten.reshape.default  # so that patterns have one of them
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
        _rotate(graph)
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
    viewed = row.target is aten.reshape.default and _value(row.args[0]).shape[-1] == shape[-1]
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
    for node in graph.find_nodes(op="call_function", target=aten.reshape.default):
        source = node.args[0]
        while source.target is aten.reshape.default:
            source = source.args[0]
        if source.target in (JOINED, aten.slice.Tensor) and _value(source).shape == _value(node).shape:
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


def _rms_norm(row: PatternExpr) -> CallFunction:
    exact = CallFunction(prims.convert_element_type.default, row, torch.float32, _users=2)
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


def _rotation(norm: Callable[[PatternExpr], PatternExpr]) -> CallFunction:
    """Pattern of heads that are a part of a joint product, after a norm and RoPE."""
    part = CallFunction(aten.slice.Tensor, KeywordArg("joined"), -1, KeywordArg("start"), KeywordArg("stop"))
    heads = norm(CallFunction(aten.reshape.default, part, Ignored()))
    heads = CallFunction(aten.permute.default, heads, [0, 2, 1, 3], _users=3)
    first = CallFunction(aten.slice.Tensor, heads, 3, 0, KeywordArg("half"))
    second = CallFunction(aten.slice.Tensor, heads, 3, KeywordArg("half"), Ignored())
    turned = CallFunction(aten.cat.default, [CallFunction(aten.neg.default, second), first], -1)
    cos, sin = (CallFunction(aten.unsqueeze.default, KeywordArg(name), 1, _users=MULTIPLE) for name in ("cos", "sin"))
    return CallFunction(
        aten.add.Tensor, CallFunction(aten.mul.Tensor, heads, cos), CallFunction(aten.mul.Tensor, turned, sin)
    )


RMS_NORM, GATED = _rms_norm(KeywordArg("row")), _gated()
ROTATIONS = _rotation(lambda heads: heads), _rotation(_rms_norm)


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
    if joined.target is not JOINED or len(joined.args[1]) != 2 or len(dtypes) != 1:
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


def _rotate(graph: Graph) -> None:
    """Replace norms and RoPE of query and key, which are the first parts of a joint product, by one operator."""
    pairs: dict[object, list[tuple[Node, dict[str, Any]]]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        found = next(filter(None, (_match(pattern, node) for pattern in ROTATIONS)), None)
        if found is not None and found["joined"].target is JOINED:
            pairs.setdefault((found["joined"], found["cos"], found["sin"]), []).append((node, found))
    for pair in pairs.values():
        pair.sort(key=lambda one: one[1]["start"])
        if len(pair) == 2 and _rotate_together(pair[0][1], pair[1][1]) and all(_fits(*one) for one in pair):
            _join_rotations(graph, *pair)


def _rotate_together(query: dict[str, Any], key: dict[str, Any]) -> bool:
    """Whether two parts of a joint product are its first channels, and both or none have a norm."""
    return query["start"] == 0 and query["stop"] == key["start"] and ("weight" in query) == ("weight" in key)


def _fits(node: Node, found: dict[str, Any]) -> bool:
    """Whether heads have the shapes and the dtype of `rotated_heads`."""
    batch, heads, tokens, channels = _value(node).shape
    given = [found["cos"], found["sin"], *([found["weight"]] if "weight" in found else [])]
    values = [_value(one) for one in given if isinstance(one, Node)]
    return (
        batch == tokens == 1
        and len(values) == len(given)
        and all(one.numel() == one.shape[-1] == channels == 2 * found["half"] for one in values)
        and found["stop"] - found["start"] == heads * channels
        and {one.dtype for one in (_value(node), _value(found["joined"]), *values)} == {_value(node).dtype}
        and isinstance(found.get("epsilon", 0.0), float)
    )


def _join_rotations(graph: Graph, of_query: tuple[Node, dict[str, Any]], of_key: tuple[Node, dict[str, Any]]) -> None:
    (query, found), (key, of_norm) = of_query, of_key
    queries, heads = (_value(query).shape[1], _value(query).shape[1] + _value(key).shape[1])
    norms = [one for one in (found, of_norm) if "weight" in one]
    with graph.inserting_before(min(query, key)):
        channels = _call(graph, aten.slice.Tensor, (found["joined"], -1, 0, of_norm["stop"]))
        more = [one["weight"] for one in norms], [one["epsilon"] for one in norms]
        rotated = _call(graph, ROTATED, (channels, queries, found["cos"], found["sin"], *more))
        query.replace_all_uses_with(_call(graph, aten.slice.Tensor, (rotated, 1, 0, queries)))
        key.replace_all_uses_with(_call(graph, aten.slice.Tensor, (rotated, 1, queries, heads)))
