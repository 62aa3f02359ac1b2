"""Auxiliary models: their sizes, that the full one is the server, and what is refused."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fsl_sage.models import ResNet18, SmallCNN
from fsl_sage.split import (
    Analysis,
    AuxiliaryStates,
    Split,
    SplitError,
    auxiliary,
    split_by_analysis,
    split_model,
    twice_differentiable_attention,
)
from fsl_sage.split.trace.skeleton import on_meta, skeleton
from tests.split.families import FAMILIES, GPT2, gpt2


def bytes_of(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


@pytest.fixture(scope="module")
def resnet() -> Split:
    torch.manual_seed(0)
    return split_model(ResNet18(10), "layer2", torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize(
    ("spec", "size", "first"),
    [
        ("linear", 5_160, "fc.weight"),
        ("half", 3_692_608, "layer3.0.conv1.weight"),
        ("blocks:1", 8_419_408, "layer3.0.conv1.weight"),
        ("full", 42_025_080, "layer3.0.conv1.weight"),
    ],
)
def test_the_papers_four_variants_have_its_sizes(resnet: Split, spec: str, size: int, first: str) -> None:
    made = auxiliary(resnet, spec)
    assert bytes_of(made) == size
    assert next(iter(made.state_dict())) == first
    assert made(resnet.client(torch.randn(3, 3, 32, 32))).shape == (3, 10)


def test_ours_is_layer3_and_a_new_fc(resnet: Split) -> None:
    made = auxiliary(resnet)
    assert {name.split(".")[0] for name in made.state_dict()} == {"layer3", "fc"}
    assert made.fc.weight.shape == (10, 256)
    assert torch.equal(made.layer3[0].conv1.weight, resnet.server.layer3[0].conv1.weight)


@pytest.mark.parametrize(
    ("budget", "size"),
    [("5%", 5_160), ("10%", 3_692_608), (8_419_408, 8_419_408), ("8419407", 3_692_608), ("100%", 42_025_080)],
)
def test_a_budget_takes_the_most_that_fits(resnet: Split, budget: Any, size: int) -> None:
    assert bytes_of(auxiliary(resnet, budget)) == size


def test_a_budget_below_the_smallest_is_refused(resnet: Split) -> None:
    with pytest.raises(SplitError, match="'linear', takes 5,160 bytes; 5,159 were allowed"):
        auxiliary(resnet, 5_159)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("blocks:3", "asks for 3 blocks; behind the cut the server has 2 blocks"),
        ("blocks:0", "asks for 0 blocks"),
        (True, "'True' is none of"),
        (2.5, "'2.5' is none of"),
        ("third", '\'third\' is none of "linear", "half", "full"'),
    ],
)
def test_unknown_auxiliaries_are_refused(resnet: Split, spec: Any, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        auxiliary(resnet, spec)


@pytest.mark.parametrize("family", ["vit", "convnext", "gpt2", "bert", "llama_lora"])
def test_the_full_auxiliary_gives_the_servers_cut_gradients(family: str) -> None:
    torch.manual_seed(0)
    model, example = FAMILIES[family]()
    names = [name for name, _ in model.named_modules() if name.endswith((".0", "embeddings"))]
    cut = {"convnext": names[0], "llama_lora": "base_model.model.model.layers.0"}.get(family)
    cut = cut or next(name for name in names if name.endswith(("h.0", "layers.0", "layer.0")))
    split = split_model(model, cut, example, tied="untie")
    made = auxiliary(split, "full")
    assert bytes_of(made) == bytes_of(split.server)
    gradients = []
    for part in (split.server, made):
        boundary = split.client(example).detached()
        output = part(boundary)
        output.logits.square().sum().backward()
        gradients.append([tensor.grad for tensor in boundary.tensors if tensor.grad is not None])
    assert gradients[0]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_auxiliary_weights_are_its_own() -> None:
    split = split_model(SmallCNN(), "block1", torch.randn(2, 3, 16, 16))
    before = copy.deepcopy(split.server.state_dict())
    made = auxiliary(split, "full")
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in split.server.state_dict().items())


def test_auxiliaries_are_copied_pickled_and_trained() -> None:
    x = torch.randn(4, 3, 16, 16)
    split = split_model(SmallCNN(), "block1", x)
    made = auxiliary(split, "linear")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(made)))
    boundary = split.client(x).detached()
    assert torch.equal(made(boundary), twin(boundary.tensors))
    made(boundary).sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())
    assert all(parameter.grad is None for parameter in split.server.parameters())


def test_half_of_blocks_without_blocks_inside_is_half_of_them() -> None:
    model, example = _gpt2_with_layers(5)
    split = split_model(model, "transformer.h.0", example, tied="untie")
    for spec, kept in (("linear", 0), ("half", 2), ("blocks:3", 3), ("full", 4)):
        names = auxiliary(split, spec).state_dict()
        assert {name.split(".")[2] for name in names if ".h." in name} == {str(1 + block) for block in range(kept)}
        assert "lm_head.weight" in names
        assert "transformer.ln_f.weight" in names


def _gpt2_with_layers(layers: int) -> Any:
    import transformers

    _, example = gpt2()
    tokens = {"vocab_size": 24, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **tokens, "n_layer": layers})), example


@pytest.mark.slow
def test_gpt2_medium_has_the_sizes_of_today() -> None:
    """65.12, 341.56 and 89.30 million: wte counted on the client and as lm_head, with LoRA, without mask buffers."""
    import transformers
    from peft import LoraConfig, get_peft_model

    config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16)
    with torch.device("meta"):
        base = transformers.GPT2LMHeadModel(config)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    example = {"input_ids": torch.zeros(1, 8, dtype=torch.long, device="meta")}
    split = split_model(model, "base_model.model.transformer.h.0", example)
    parts = (split.client, split.server, auxiliary(split, "blocks:3"))
    assert [round(sum(p.numel() for p in part.parameters()) / 1e6, 2) for part in parts] == [65.12, 341.56, 89.3]


# -- without building ------------------------------------------------------------------------------------------------


def shapes_of(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in state.items()}


@pytest.mark.parametrize("spec", ["blocks:1", "linear", "half", "full", "30%", 100_000])
@pytest.mark.parametrize(
    ("family", "stride"),
    [
        *(("small_cnn", 1), ("convnext", 4), ("gpt2", 4)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("resnet18", 17), ("llama_lora", 5))),
    ],
)
@pytest.mark.parametrize("meta", [False, True])
def test_states_of_all_cuts_are_those_of_auxiliaries_that_are_built(
    family: str, stride: int, spec: str | int, meta: bool
) -> None:
    model, example = FAMILIES[family]()
    analysis = Analysis(model, example)
    fast = AuxiliaryStates(_on_meta(model, example) if meta else analysis, spec)
    compared = 0
    for cut in analysis.cut_names[::stride]:
        try:
            built = auxiliary(split_by_analysis(analysis, cut, "untie"), spec, aligned=False)
        except SplitError as error:
            with pytest.raises(SplitError, match=re.escape(str(error)[:30])):
                fast.at(cut)
            continue
        assert shapes_of(fast.at(cut)) == shapes_of(built.state_dict(keep_vars=True))
        compared += 1
    assert compared or isinstance(spec, int)


def _on_meta(model: nn.Module, example: Any) -> Analysis:
    if isinstance(example, Tensor):
        return Analysis(skeleton(model, on_meta), example.to("meta"))
    example = {name: value for name, value in example.items() if name != "attention_mask"}  # looked at by value
    return Analysis(
        skeleton(model, on_meta), {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in example.items()}
    )


# -- widths that differ ------------------------------------------------------------------------------------------------


class Stages(nn.Module):
    """Three stages, each wider and smaller, and a norm before the classifier: its width cannot change."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 4), (4, 8), (8, 16))
        )
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x).flatten(2).mean(2))


def test_a_fitting_layer_goes_where_no_linear_follows() -> None:
    split = split_model(Stages(), "stages.0", torch.randn(2, 3, 32, 32))
    linear, one = auxiliary(split, "linear"), auxiliary(split, "blocks:1")
    assert linear.get_parameter("stages.2.fit.weight").shape == (16, 4)
    assert one.get_parameter("stages.2.fit.weight").shape == (16, 8)
    assert one(split.client(torch.randn(3, 3, 32, 32))).shape == (3, 5)


def test_the_servers_layers_count_as_blocks_where_there_are_no_larger_ones() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 3))
    split = split_model(model, "1", torch.randn(2, 6))
    assert set(auxiliary(split, "linear").state_dict()) == {"5.weight", "5.bias"}
    assert auxiliary(split, "linear").get_parameter("5.weight").shape == (3, 8)
    assert bytes_of(auxiliary(split, "blocks:1")) == bytes_of(split.server)


# -- one's own module --------------------------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self, split: Split, classes: int = 10) -> None:
        super().__init__()
        self.head = nn.Linear(split.plan.cuts[0].tensors[0].shape[1], classes)

    def forward(self, z: Tensor) -> Tensor:
        return self.head(z.mean((2, 3)))


def test_a_users_module_is_called_with_the_boundarys_tensors() -> None:
    x = torch.randn(4, 3, 16, 16)
    split = split_model(SmallCNN(), "block1", x)
    own = Own(split)
    made = auxiliary(split, own)
    assert set(made.state_dict()) == {"head.weight", "head.bias"}
    assert torch.equal(made(split.client(x)), own(split.client(x).tensors[0]))
    made.eval()
    assert not own.training


def test_a_users_module_must_return_what_the_server_does() -> None:
    split = split_model(SmallCNN(), "block1", torch.randn(4, 3, 16, 16))
    with pytest.raises(SplitError, match=r"returns tensors of \[\(4, 7\)\]; the server returns \[\(4, 10\)\]"):
        auxiliary(split, Own(split, 7))
    with pytest.raises(SplitError, match="the auxiliary module fails on the boundary's tensors"):
        auxiliary(split, nn.Linear(3, 10))


def test_two_cuts_have_no_auxiliary() -> None:
    split = split_model(SmallCNN(), ("block1", "block2"), torch.randn(2, 3, 16, 16))
    with pytest.raises(SplitError, match="the server does not compute the loss"):
        auxiliary(split)


# -- double backward ---------------------------------------------------------------------------------------------------


class Distances(Own):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z) + F.pdist(z.flatten(1)).sum()


class Once(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, z: Tensor) -> Tensor:
        return z * 2

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class OnceOnly(Own):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(Once.apply(z))


@pytest.mark.parametrize(
    ("module", "name"), [(Distances, "aten::_pdist_backward"), (OnceOnly, "a function marked @once_differentiable")]
)
def test_operations_without_double_backward_are_named(module: Any, name: str) -> None:
    split = split_model(SmallCNN(), "block1", torch.randn(4, 3, 16, 16))
    with pytest.raises(SplitError, match=f"cannot be aligned: {name} cannot be differentiated twice"):
        auxiliary(split, module(split))
    assert isinstance(auxiliary(split, module(split), aligned=False), nn.Module)


def test_attention_is_aligned_by_the_kernel_that_can_be() -> None:
    model, example = gpt2()
    split = split_model(model, "transformer.h.0", example, tied="untie")
    made = auxiliary(split).eval()
    boundary = split.client(example).detached()

    def second_derivative() -> None:
        smashed = boundary.tensors[0]
        (gradient,) = torch.autograd.grad(made(boundary).logits.square().sum(), smashed, create_graph=True)
        gradient.square().sum().backward()

    with pytest.raises(RuntimeError, match="is not implemented"):
        second_derivative()
    with twice_differentiable_attention():
        second_derivative()
    assert all(parameter.grad is not None for parameter in made.transformer.h[1].parameters())
