"""Modules written as users write them: the networks that tracing must understand.

Nothing here knows about fedtailor. Each entry builds a module and a small batch (inputs, then the target).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = Any


@dataclass(frozen=True)
class Entry:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    own_class: bool = True  # whether pieces are of the module's own class (no literal sizes in forward)
    share: float = 0.9  # of the parameters that must be elastic


ZOO: dict[str, Entry] = {}


def images(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(3, *shape), torch.tensor([0, 1, 2]))


def tokens(length: int, vocabulary: int) -> Callable[[], Batch]:
    return lambda: (torch.randint(0, vocabulary, (3, length)), torch.tensor([0, 1, 2]))


def entry(batch: Callable[[], Batch], **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(cls: type[nn.Module]) -> type[nn.Module]:
        ZOO[cls.__name__] = Entry(cls.__name__, cls, batch, **options)
        return cls

    return add


# Convolutional networks


@entry(images(3, 8, 8))
class PlainCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Linear(12 * 2 * 2, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = x.view(x.size(0), -1)
        return self.classifier(F.dropout(x, 0.0, self.training))


@entry(images(1, 12, 12), own_class=False)
class LiteralLeNet(nn.Module):
    """The tutorial network: the size of the flattened features is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.conv2 = nn.Conv2d(6, 9, 2)
        self.fc1 = nn.Linear(9 * 2 * 2, 20)
        self.fc2 = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(-1, 9 * 2 * 2)
        x = F.dropout(F.relu(self.fc1(x)), p=0.0, training=self.training)
        return self.fc2(x)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


@entry(images(3, 8, 8), share=0.95)
class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.layers = nn.ModuleList([BasicBlock(8, 8, 1), BasicBlock(8, 12, 2), BasicBlock(12, 12, 1)])
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


@entry(images(3, 8, 8), own_class=False)
class OptionAResNet(nn.Module):
    """ResNet's shortcut without weights: every second pixel, and channels of zeros on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(8, 16, 3, 2, 1)
        self.bn = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, 1, 1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4), "constant", 0)
        x = F.relu(self.conv2(self.bn(self.conv1(x))) + shortcut)
        return self.fc(x.mean(dim=[2, 3]))


@entry(images(3, 8, 8))
class DenseNet(nn.Module):
    """Concatenation, then flatten and linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layers = nn.ModuleList()
        width = 6
        for _ in range(3):
            self.layers.append(
                nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4, 3, padding=1))
            )
            width += 4
        self.pool = nn.AvgPool2d(4)
        self.fc = nn.Linear(width * 2 * 2, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.fc(torch.flatten(self.pool(torch.cat(features, dim=1)), 1))


@entry(lambda: (torch.randn(2, 3, 16, 16), torch.zeros(2, 16, 16, dtype=torch.long)))
class UNet(nn.Module):
    """Segmentation; the code compares shapes before it joins."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self.twice(3, 6), self.twice(6, 10)
        self.bottom = self.twice(10, 12)
        self.up2, self.merge2 = nn.ConvTranspose2d(12, 10, 2, stride=2), self.twice(20, 10)
        self.up1, self.merge1 = nn.ConvTranspose2d(10, 6, 2, stride=2), self.twice(12, 6)
        self.out = nn.Conv2d(6, 4, 1)

    @staticmethod
    def twice(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        if x.shape[-2:] != skip.shape[-2:]:
            x = F.interpolate(x, size=skip.shape[-2:])
        return torch.cat([skip, x], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        x = self.merge2(self.join(self.up2(x), second))
        x = self.merge1(self.join(self.up1(x), first))
        return self.out(x)


@entry(images(3, 8, 8))
class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(12, 4), nn.Linear(4, 12)
        self.conv2 = nn.Conv2d(12, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        b, c, _, _ = x.size()
        gate = F.adaptive_avg_pool2d(x, 1).view(b, c)
        gate = torch.sigmoid(self.fc2(F.relu(self.fc1(gate)))).view(b, c, 1, 1)
        x = self.conv2(x * gate.expand_as(x))
        return self.head(x.mean((2, 3)))


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.act = nn.GELU()
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        return shortcut + (self.gamma * x).permute(0, 3, 1, 2)


class ChannelsFirstNorm(nn.Module):
    """A layer norm over channels, written out by hand."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@entry(images(3, 16, 16))
class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 4, stride=4), ChannelsFirstNorm(6))
        self.blocks = nn.Sequential(ConvNeXtBlock(6), ConvNeXtBlock(6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean([-2, -1])))


@entry(images(3, 8, 8), share=0.95)
class MobileNet(nn.Module):
    """Inverted residuals: expand, depthwise, project."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.blocks = nn.ModuleList([self.block(8, 12), self.block(12, 12)])
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(12, 5))

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        hidden = inputs * 3
        return nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, 1, 1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(),
            nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        return self.head(x + self.blocks[1](x))


@entry(images(3, 8, 8))
class ShuffleNet(nn.Module):
    """Grouped convolutions and a channel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.grouped1 = nn.Conv2d(12, 36, 1, groups=3)
        self.grouped2 = nn.Conv2d(36, 12, 3, padding=1, groups=3)
        self.many = nn.Conv2d(12, 24, 3, padding=1, groups=6)
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2, groups=3)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.grouped1(self.stem(x)))
        batch, channels, height, width = x.shape
        x = x.view(batch, 3, channels // 3, height, width).transpose(1, 2).contiguous()
        x = self.grouped2(x.view(batch, -1, height, width))
        return self.head(self.up(F.relu(self.many(x))).flatten(2).mean(-1))


@entry(images(4, 8, 8))
class NormZoo(nn.Module):
    """Group norm, instance norm, layer norm over space and channels, one slope per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(8, 16)
        self.act = nn.PReLU(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 12, 3, padding=1), nn.GroupNorm(2, 12)
        self.conv3, self.norm3 = nn.Conv2d(12, 10, 3, padding=1), nn.InstanceNorm2d(10, affine=True)
        self.norm4 = nn.LayerNorm([10, 8, 8])
        self.conv4, self.norm5 = nn.Conv2d(10, 6, 1), nn.GroupNorm(1, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        x = F.silu(self.norm2(self.conv2(x)))
        x = self.norm4(self.norm3(self.conv3(x)))
        return self.head(self.norm5(self.conv4(x)).amax((2, 3)))


@entry(images(3, 8, 8), share=0.85)
class SpatialAttention(nn.Module):
    """CBAM: the mean and the maximum over channels become a map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 10, 3, padding=1)
        self.map = nn.Conv2d(2, 1, 7, padding=3)
        self.conv2 = nn.Conv2d(10, 6, 3)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv1(x))
        average = torch.mean(x, dim=1, keepdim=True)
        largest, _ = torch.max(x, dim=1, keepdim=True)
        x = x * torch.sigmoid(self.map(torch.cat([average, largest], dim=1)))
        return self.head(F.normalize(self.conv2(x).mean((2, 3)), dim=1))


@entry(lambda: (torch.randn(2, 1, 6, 6), torch.randn(2, 1, 12, 12)))
class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, padding=2)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.out = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.shuffle(self.conv2(torch.tanh(self.conv1(x)))))


@entry(lambda: (torch.randn(2, 2, 6, 6, 6), torch.tensor([0, 1])))
class Volume(nn.Module):
    """Three dimensions down, one dimension along the way, in-place tricks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv3d, self.bn3d = nn.Conv3d(2, 6, 3, padding=1), nn.BatchNorm3d(6)
        self.up3d = nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.conv1d, self.bn1d = nn.Conv1d(4, 10, 3), nn.BatchNorm1d(10)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn3d(self.conv3d(x)).relu_()
        x = F.max_pool3d(self.up3d(x), 2)
        x[:, :, 0] = 0.5
        x = x.flatten(2)
        x.mul_(2).add_(1.0)
        x = F.glu(self.bn1d(self.conv1d(x)), dim=1)
        return self.head(x.mean(-1))


@entry(images(3, 8, 8), own_class=False, share=0.8)
class FunctionalNet(nn.Module):
    """Bare parameters and functions instead of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(8, 3, 3, 3) * 0.2), nn.Parameter(torch.zeros(8))
        self.depthwise = nn.Parameter(torch.randn(8, 1, 3, 3) * 0.3)
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.w2 = nn.Parameter(torch.randn(10, 8) * 0.3)
        self.gain = nn.Parameter(torch.ones(10))
        self.w3 = nn.Parameter(torch.randn(5, 10) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.w1, self.b1, padding=1)
        x = F.batch_norm(x, self.mean, self.variance, self.scale, self.shift, self.training)
        x = F.conv2d(F.relu(x), self.depthwise, padding=1, groups=8)
        x = F.linear(x.mean((2, 3)), self.w2)
        x = F.layer_norm(x, (10,), self.gain)
        return x @ self.w3.t()


# Recurrent networks


@entry(tokens(7, 11))
class BidirectionalGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.gru = nn.GRU(6, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.gru(self.embedding(x))
        return self.fc(output[:, -1, :])


@entry(tokens(7, 11), share=0.95)
class LSTMClassifier(nn.Module):
    """Initial states of a literal size; the last states of both layers are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 8
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, self.hidden, 2, batch_first=True)
        self.fc = nn.Linear(2 * self.hidden, 5)

    def forward(self, x: Tensor) -> Tensor:
        h0 = torch.zeros(2, x.size(0), self.hidden, device=x.device, dtype=self.fc.weight.dtype)
        c0 = torch.zeros(2, x.size(0), self.hidden, device=x.device, dtype=self.fc.weight.dtype)
        _, (h, _) = self.lstm(self.embedding(x), (h0, c0))
        return self.fc(torch.cat([h[-2], h[-1]], dim=1))


@entry(lambda: (torch.randn(5, 3, 4), torch.tensor([0, 1, 2])))
class CellLoop(nn.Module):
    """Time first; a loop over time with cells, then an Elman network."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 6)
        self.gru = nn.GRUCell(6, 5)
        self.rnn = nn.RNN(5, 7, nonlinearity="relu")
        self.fc = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.size(1), self.cell.hidden_size)
        c, g = torch.zeros_like(h), x.new_zeros(x.size(1), self.gru.hidden_size)
        steps = []
        for t in range(x.size(0)):
            h, c = self.cell(x[t], (h, c))
            g = self.gru(h, g)
            steps.append(g)
        _, last = self.rnn(torch.stack(steps))
        return self.fc(last.squeeze(0))


@entry(lambda: (torch.randint(0, 11, (3, 6)), torch.randint(0, 11, (3, 6))))
class TiedLanguageModel(nn.Module):
    """The output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.decoder = nn.Linear(8, 11)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(x))
        return self.decoder(x).transpose(1, 2)


@entry(
    lambda: {
        "source": torch.randint(0, 9, (3, 5)),
        "target_in": torch.randint(0, 7, (3, 4)),
        "labels": torch.randint(0, 7, (3, 4)),
    }
)
class EncoderDecoder(nn.Module):
    """Recurrent encoder and decoder with dot-product attention between them; a dict in, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(9, 6), nn.Embedding(7, 6)
        self.encoder = nn.GRU(6, 8, batch_first=True)
        self.decoder = nn.GRU(6, 8, batch_first=True)
        self.join = nn.Linear(16, 10)
        self.out = nn.Linear(10, 7)

    def forward(self, source: Tensor, target_in: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
        memory, state = self.encoder(self.source(source))
        x, _ = self.decoder(self.target(target_in), state)
        scores = torch.bmm(x, memory.transpose(1, 2)) / temperature
        context = torch.bmm(scores.softmax(dim=-1), memory)
        x = torch.tanh(self.join(torch.cat((x, context), dim=-1)))
        return {"scores": self.out(x), "attention": scores}


# Several inputs and outputs, shared parts


@entry(lambda: (torch.randn(3, 3, 8, 8), torch.randn(3, 4), torch.tensor([0, 1, 2])))
class MultiInputOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.tabular = nn.Linear(4, 6)
        self.mix = nn.Bilinear(8, 6, 10)
        self.classes, self.value = nn.Linear(10, 5), nn.Linear(10, 1)

    def forward(
        self, image: Tensor, table: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.conv(image).relu().amax((2, 3))
        if mask is not None:
            x = x * mask
        x = F.leaky_relu(self.mix(x, self.tabular(table)))
        return self.classes(x), {"value": self.value(x).squeeze(-1)}


@entry(lambda: (torch.randn(3, 1, 8, 8), torch.randn(3, 1, 8, 8), torch.tensor([0, 1, 2])))
class Siamese(nn.Module):
    """One tower used twice, and one block under two names."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.tower = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), block, nn.AdaptiveMaxPool2d(1), nn.Flatten()
        )
        self.again = block
        self.head = nn.Linear(16, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.tower(a), self.tower(b)
        b = self.again(b[:, :, None, None]).flatten(1)
        return self.head(torch.cat([(a - b).abs(), a * b], 1))


@entry(images(3, 8, 8))
class AuxiliaryHead(nn.Module):
    """In training it returns a second output from the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)
        self.aux, self.head = nn.Linear(8, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        middle = F.relu(self.conv1(x))
        out = self.head(F.relu(self.conv2(middle)).mean((2, 3)))
        if self.training:
            return out, self.aux(middle.mean((2, 3)))
        return out


# Attention


class PreNormBlock(nn.Module):
    """Separate projections, computed head sizes, fused attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.up, self.gate, self.down = (
            nn.Linear(dim, 2 * dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(2 * dim, dim),
        )

    def split(self, x: Tensor) -> Tensor:
        batch, time, channels = x.shape
        return x.view(batch, time, self.heads, channels // self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        y = F.scaled_dot_product_attention(
            self.split(self.q(y)), self.split(self.k(y)), self.split(self.v(y))
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@entry(tokens(6, 11), share=0.95)
class PreNormTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.position = nn.Parameter(torch.randn(1, 6, 16) * 0.1)
        self.blocks = nn.ModuleList([PreNormBlock(16, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) * math.sqrt(16) + self.position[:, : x.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


@entry(lambda: (torch.randn(3, 6, 5), torch.tensor([0, 1, 2])))
class PostNormEncoder(nn.Module):
    """PyTorch's own encoder, as in the tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(5, 12)
        layer = nn.TransformerEncoderLayer(12, nhead=2, dim_feedforward=20, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.project(x))[:, 0])


@entry(lambda: (torch.randn(5, 3, 6), torch.randn(4, 3, 7), torch.randn(4, 3, 3)))
class Translator(nn.Module):
    """Time first; pre-norm encoder and decoder with cross-attention and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(6, 8), nn.Linear(7, 8)
        encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(encoder, 1, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        decoder = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, norm_first=True)
        self.decoder = nn.TransformerDecoder(decoder, 1)
        self.out = nn.Linear(8, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(0), dtype=target.dtype)
        memory = self.encoder(self.source(source))
        return self.out(self.decoder(self.target(target), memory, tgt_mask=mask))


@entry(lambda: (torch.randn(3, 6, 8), torch.randn(3, 5, 4), torch.tensor([0, 1, 2])))
class CrossAttention(nn.Module):
    """Keys and values of another width; the attention weights are an output."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(8, 12), nn.Linear(4, 10)
        self.attention = nn.MultiheadAttention(12, 3, kdim=10, vdim=10, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        memory = torch.tanh(self.memory(memory))
        x, weights = self.attention(self.query(x), memory, memory)
        return self.head(x.mean(1)), weights


class ViTAttention(nn.Module):
    """One projection for all three, literal head sizes, the scale written out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        assert self.num_heads * self.head_dim == C, "wrong width"
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        x = (weights.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


@entry(images(3, 8, 8), share=0.95)
class ViT(nn.Module):
    """Patches, class token, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 12, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 12) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 12) * 0.1)
        self.norm1, self.attention = nn.LayerNorm(12), ViTAttention(12, 2)
        self.norm2, self.mlp = (
            nn.LayerNorm(12),
            nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)),
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x[:, 0])


@entry(lambda: (torch.randint(0, 11, (3, 6)), torch.randint(0, 11, (3, 6))))
class SmallGPT(nn.Module):
    """Causal language model with a mask buffer, a fused projection that is split by a number, and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.n_embd, self.n_head, self.block_size = 12, 3, 8
        self.wte, self.wpe = nn.Embedding(11, 12), nn.Embedding(8, 12)
        self.ln = nn.LayerNorm(12)
        self.c_attn, self.c_proj = nn.Linear(12, 36), nn.Linear(12, 12)
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))
        self.lm_head = nn.Linear(12, 11, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        b, t = idx.size()
        assert t <= self.block_size, f"sequence of length {t}"
        x = self.wte(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device))
        q, k, v = self.c_attn(self.ln(x)).split(self.n_embd, dim=2)
        q, k, v = (z.view(b, t, self.n_head, self.n_embd // self.n_head).transpose(1, 2) for z in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")).softmax(-1)
        y = (att @ v).transpose(1, 2).contiguous().view(b, t, self.n_embd)
        return self.lm_head(x + self.c_proj(y)).transpose(1, 2)


@entry(tokens(6, 11))
class RotaryEinsum(nn.Module):
    """Einsum projections with bare weights, rotary positions from a buffer, grouped head norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(2, 8, 6) * 0.3) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(2, 6, 8) * 0.3)
        angles = torch.arange(6)[:, None] / (100 ** (torch.arange(3) / 3))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)
        self.norm = nn.RMSNorm(6)
        self.head = nn.Linear(8, 5)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-b, a), dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in (self.wq, self.wk, self.wv))
        q, k = self.rotate(self.norm(q)), self.rotate(self.norm(k))
        weights = torch.einsum("bhte,bhse->bhts", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
        y = torch.einsum("bhts,bhse->bhte", weights, v)
        x = x + torch.einsum("bhte,hed->btd", y, self.wo)
        return self.head(x.mean(1))


@entry(images(3, 8, 8))
class Mixer(nn.Module):
    """MLP-Mixer: one perceptron over patches, one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 10, 2, stride=2)
        self.norm1, self.norm2 = nn.LayerNorm(10), nn.LayerNorm(10)
        self.tokens = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16))
        self.channels = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 10))
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(start_dim=2).permute(0, 2, 1)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(dim=1))


@entry(images(3, 8, 8))
class PatternMatching(nn.Module):
    """Code that symbolic tracing cannot follow: torch.export does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.LayerNorm(8)
        self.gru = nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        match tuple(x.shape):
            case (_, _, height, width):
                x = self.depthwise(F.relu(self.bn(self.conv(x))))
            case _:
                raise ValueError("images, please")
        x = self.norm(x.flatten(2).transpose(1, 2))
        seen = {height * width: x}  # a size as the key of a dict
        output, _ = self.gru(seen[x.shape[1]])
        return self.head(output.mean(1))
