"""Linear layers of a model that are replaced by rounded ones, and those that stay."""

from copy import deepcopy

import pytest
import torch
from support.causal_families import tiny_config, tiny_model
from support.kernel_runs import DEVICE
from support.random_tensors import normal
from support.reference import assert_close
from support.tiny_models import FAMILIES, build_tiny
from torch import nn
from transformers import GPT2Config, LlamaConfig, PreTrainedModel, Qwen2MoeConfig

from sparsekv.formats.device import model_bytes
from sparsekv.kernels.linear.quantised import QuantisedLinear, quantise_linears, round_to_int4, round_to_int8

by_bits = pytest.mark.parametrize("bits", [8, 4], ids=["int8", "int4"])
IDS = torch.arange(40)[None]


def with_restored(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """Write the dequantised weights into a model's own linear layers. A tied output layer is untied first."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            made = round_to_int8(module.weight.detach()) if bits == 8 else round_to_int4(module.weight.detach())
            module.weight = nn.Parameter(made.restored(torch.float32))
    return model


@by_bits
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
@torch.inference_mode()
def test_model_computes_what_its_rounded_weights_give(family: str, bits: int) -> None:
    model = FAMILIES[family]()
    assert quantise_linears(model, bits) > 0.9
    expected = with_restored(FAMILIES[family](), bits)(IDS).logits
    assert_close(model(IDS).logits, expected, 1e-5)
    for length in (1, 2, 16):  # few rows
        assert_close(model(IDS[:, :length]).logits, expected[:, :length], 1e-5)


@by_bits
def test_tied_output_layer_is_rounded_and_the_embedding_stays(bits: int) -> None:
    model = build_tiny(LlamaConfig, tie_word_embeddings=True)()
    before = model.get_input_embeddings().weight.detach().clone()
    quantise_linears(model, bits)
    assert torch.equal(model.get_input_embeddings().weight, before)
    head = model.get_output_embeddings()
    assert isinstance(head, QuantisedLinear)
    assert 0 < float((head.weight - before).abs().max()) < float(before.abs().max()) / 4


def test_routers_gates_and_fused_experts_stay() -> None:
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    model = build_tiny(Qwen2MoeConfig, shared_expert_intermediate_size=32, **changes)()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    share = quantise_linears(model, 8)
    after = dict(model.named_parameters())
    kept = {name for name in before if name in after and before[name].ndim > 1}
    assert {name.rpartition(".mlp.")[2] for name in kept if ".mlp." in name} == {
        "gate.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
        "shared_expert_gate.weight",
    }
    assert all(torch.equal(before[name], after[name]) for name in kept)
    rounded = sum(one.numel() for name, one in before.items() if name not in after and one.ndim == 2)
    left = sum(one.numel() for name, one in after.items() if name != "model.embed_tokens.weight")
    assert share == pytest.approx(rounded / (rounded + left))


def test_embeddings_of_layers_do_not_count_as_weights_that_stay() -> None:
    """Gemma 3n's have as many weights as all its layers, which have no experts."""
    model = tiny_model(tiny_config("gemma3n_text"))
    embeddings = model.model.embed_tokens_per_layer
    before = sum(one.numel() for one in model.parameters()) - embeddings.weight.numel()
    embeddings.weight = nn.Parameter(torch.zeros(before, 1))
    assert quantise_linears(model, 8) > 0.9


@pytest.mark.parametrize(("family", "router"), [("jetmoe", "mlp.router.layer"), ("hunyuan_v1_moe", "mlp.gate.wg")])
def test_linear_layers_within_routers_stay(family: str, router: str) -> None:
    model = tiny_model(tiny_config(family))
    quantise_linears(model, 8)
    assert type(model.get_submodule(f"model.layers.0.{router}")) is nn.Linear
    assert isinstance(model.get_output_embeddings(), QuantisedLinear)


@by_bits
@torch.inference_mode()
def test_layers_of_gpt2_whose_weights_are_transposed(bits: int) -> None:
    plain = build_tiny(GPT2Config, n_head=4)()
    weight, bias = plain.transformer.h[0].mlp.c_fc.weight.detach().clone(), plain.transformer.h[0].mlp.c_fc.bias
    quantise_linears(plain, bits)
    layer = plain.transformer.h[0].mlp.c_fc
    assert isinstance(layer, QuantisedLinear)
    rows = normal(0, 1, 3, len(weight))
    assert_close(layer.weight, weight.T, 0.1)
    assert_close(layer(rows), rows.double() @ layer.weight.T.double() + bias.double(), 1e-6)


def test_weights_that_are_quantised_or_shared_among_ranks_stay() -> None:
    class Packed(nn.Parameter):
        pass

    model = FAMILIES["llama"]()
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = Packed(layer.weight.detach())
    quantise_linears(model, 8)
    assert model.model.layers[0].self_attn.q_proj is layer


def test_memory_of_a_model_counts_its_rounded_weights() -> None:
    """A byte a weight and a scale an output; with the scales of its groups int4 is 4.5 bits a weight."""
    sizes = []
    for bits in (8, 4):
        layer = nn.Linear(1024, 64, bias=False)
        model = nn.Sequential(layer)
        weight = round_to_int8(layer.weight.detach()) if bits == 8 else round_to_int4(layer.weight.detach())
        model.set_submodule("0", QuantisedLinear(weight, None, torch.float32))
        sizes.append(model_bytes(model))
    assert sizes == [64 * 1024 + 4 * 64, 64 * 1024 * 9 // 16]


@by_bits
@torch.inference_mode()
def test_copied_layer_multiplies_by_its_own_weights(bits: int) -> None:
    """The compiled product of a layer holds the addresses of its weights."""
    weight = normal(1, 33, 100)
    layer = QuantisedLinear(round_to_int8(weight) if bits == 8 else round_to_int4(weight), None, torch.float32)
    row = normal(0, 1, 1, 100)
    before = layer(row)
    copied = deepcopy(layer)
    copied.scales.zero_()
    assert not copied(row).any()
    assert torch.equal(layer(row), before)


@by_bits
@torch.inference_mode()
def test_the_compiler_sees_a_layer_as_one_operator(bits: int) -> None:
    layer = nn.Linear(100, 33)
    weight = round_to_int8(layer.weight.detach()) if bits == 8 else round_to_int4(layer.weight.detach())
    rounded = QuantisedLinear(weight, layer.bias.detach(), torch.float32)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    rows = normal(0, 1, 2, 100)
    output = torch.compile(rounded, backend=backend, fullgraph=True)(rows)
    assert torch.equal(output, rounded(rows))
    (graph,) = graphs
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_function"] == [
        "sparsekv.quantised_linear.default"
    ]


@by_bits
@torch.inference_mode()
@pytest.mark.gpu
def test_layer_on_a_gpu_in_a_captured_graph(bits: int) -> None:
    """Replayed for other rows; the definition's products are those of the same weights."""
    layer = nn.Linear(1024, 700, bias=False, dtype=torch.bfloat16, device=DEVICE)
    weight = round_to_int8(layer.weight.detach()) if bits == 8 else round_to_int4(layer.weight.detach())
    rounded = QuantisedLinear(weight, None, torch.bfloat16)
    for count in (1, 7, 16, 30):
        rows = normal(0, count, 1024).to(DEVICE, torch.bfloat16)
        fed = torch.zeros_like(rows)
        rounded(fed)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = rounded(fed)
        fed.copy_(rows)
        graph.replay()
        assert_close(output, rows.double() @ weight.restored(torch.float64).T, 8e-3)
