"""Two tiny models in plain PyTorch, each written by hand in three parts: a residual network and a GPT-2 with LoRA.

Behind the client part come the server part (the rest of the model) or the auxiliary (a short stand-in for the rest).
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.given import Target

# ---------------------------------------------------------------------------------------------- the residual network


class Block(nn.Module):
    """relu(F(x) + downsample(x)), with F two convolutions of 3x3."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + self.downsample(x))


class ResNetClient(nn.Module):
    """Images [B, 3, 32, 32] to z [B, 16, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.block1 = Block(8, 16, stride=2)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        return self.block1(torch.relu(self.bn1(self.conv1(images))))


class ResNetServer(nn.Module):
    """z to logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.block2 = Block(16, 32, stride=2)
        self.block3 = Block(32, 48, stride=2)
        self.fc = nn.Linear(48, 10)
        self.double()

    def forward(self, z: Tensor) -> Tensor:
        return self.fc(self.block3(self.block2(z)).mean(dim=(2, 3)))


class ResNetAuxiliary(nn.Module):
    """z to logits [B, 10], by one block less."""

    def __init__(self) -> None:
        super().__init__()
        self.block2 = Block(16, 32, stride=2)
        self.fc = nn.Linear(32, 10)
        self.double()

    def forward(self, z: Tensor) -> Tensor:
        return self.fc(self.block2(z).mean(dim=(2, 3)))


class ResNetDecoder(nn.Module):
    """z back to images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 3, 3, padding=1)
        self.double()

    def forward(self, z: Tensor) -> Tensor:
        y = torch.relu(self.conv1(z))
        return self.conv2(y.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3))


def image_loss(output: Tensor, target: Target) -> Tensor:
    return F.cross_entropy(output, target["labels"])


def image_terms(target: Target) -> int:
    return len(target["labels"])


# ------------------------------------------------------------------------------------------------------------- GPT-2


class Conv1D(nn.Module):
    """Hugging Face's name for a linear layer whose weight is [in, out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class LoraConv1D(Conv1D):
    """y = W x + b + (alpha / r) B(A x)."""

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float) -> None:
        super().__init__(inputs, outputs)
        self.scale = alpha / rank
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * self.lora_B["default"](self.lora_A["default"](x))


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = LoraConv1D(hidden, 3 * hidden, rank, alpha)
        self.c_proj = Conv1D(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = (
            part.reshape(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(hidden, dim=2)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(hidden // self.heads)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(diagonal=1)
        attention = scores.masked_fill(future, -math.inf).softmax(dim=3)
        return self.c_proj((attention @ value).transpose(1, 2).reshape(batch, length, hidden))


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.c_fc = Conv1D(hidden, 4 * hidden)
        self.c_proj = Conv1D(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(gelu_new(self.c_fc(x)))


class GPT2Block(nn.Module):
    def __init__(self, hidden: int, heads: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden, eps=1e-5)
        self.attn = Attention(hidden, heads, rank, alpha)
        self.ln_2 = nn.LayerNorm(hidden, eps=1e-5)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def take_base(module: nn.Module, base: Mapping[str, Tensor], trained: tuple[str, ...] = ()) -> None:
    """Gives `module` the base model's weights, frozen and not copied, so that tied ones are one tensor in all parts.

    Those in `trained` are its own copies. The LoRA weights are trained in any case.
    """
    dtype = base["transformer.wte.weight"].dtype
    module.to(dtype)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            continue
        tensor = base["transformer.wte.weight" if name == "lm_head.weight" else name].detach()
        parameter.data = tensor.clone() if name in trained else tensor
        parameter.requires_grad_(name in trained)


class GPT2Client(nn.Module):
    """Embeddings and block 0: input_ids [B, L] to hidden states [B, L, hidden]."""

    def __init__(self, base: Mapping[str, Tensor], rank: int = 4, alpha: float = 32.0, heads: int = 2) -> None:
        super().__init__()
        vocabulary, hidden = base["transformer.wte.weight"].shape
        positions = len(base["transformer.wpe.weight"])
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, hidden),
                "wpe": nn.Embedding(positions, hidden),
                "h": nn.ModuleDict({"0": GPT2Block(hidden, heads, rank, alpha)}),
            }
        )
        take_base(self, base)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.transformer["wte"](input_ids) + self.transformer["wpe"](positions)
        return self.transformer["h"]["0"](x)


class GPT2Rest(nn.Module):
    """Some blocks, ln_f and lm_head: hidden states to logits [B, L, vocabulary]."""

    def __init__(
        self, base: Mapping[str, Tensor], blocks: range, rank: int, alpha: float, heads: int, trained: tuple[str, ...]
    ) -> None:
        super().__init__()
        vocabulary, hidden = base["transformer.wte.weight"].shape
        self.transformer = nn.ModuleDict(
            {
                "h": nn.ModuleDict({str(n): GPT2Block(hidden, heads, rank, alpha) for n in blocks}),
                "ln_f": nn.LayerNorm(hidden, eps=1e-5),
            }
        )
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        take_base(self, base, trained)

    def forward(self, z: Tensor) -> Tensor:
        for block in self.transformer["h"].values():
            z = block(z)
        return self.lm_head(self.transformer["ln_f"](z))


class GPT2Server(GPT2Rest):
    """Blocks 1 to 4, ln_f and lm_head. Only the adapters are trained."""

    def __init__(self, base: Mapping[str, Tensor], rank: int = 4, alpha: float = 32.0, heads: int = 2) -> None:
        super().__init__(base, range(1, 5), rank, alpha, heads, trained=())


class GPT2Auxiliary(GPT2Rest):
    """Blocks 1 to 3, and an ln_f and lm_head of its own, which are trained as the adapters are."""

    def __init__(self, base: Mapping[str, Tensor], rank: int = 4, alpha: float = 32.0, heads: int = 2) -> None:
        trained = ("transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight")
        super().__init__(base, range(1, 4), rank, alpha, heads, trained)


def text_loss(smoothing: float = 0.0) -> Callable[[Tensor, Target], Tensor]:
    """The mean cross entropy over the positions where the mask is true."""

    def loss(output: Tensor, target: Target) -> Tensor:
        mask = target["mask"]
        return F.cross_entropy(output[mask], target["labels"][mask].long(), label_smoothing=smoothing)

    return loss


def text_terms(target: Target) -> int:
    return int(target["mask"].sum())
