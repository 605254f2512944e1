"""A small Vision Transformer (Dosovitskiy et al., ICLR 2021) for images of 28 to 32 pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedtailor.errors import require
from fedtailor.models.attention import Blocks, transformer_blocks
from fedtailor.models.parts import image_shape, whole
from fedtailor.models.registry import register


class VisionTransformer(nn.Module):
    """Patches, positions, pre-norm blocks, mean over the patches, linear."""

    def __init__(
        self,
        image_channels: int,
        patch: int,
        patches: int,
        embedding: int,
        blocks: nn.Module,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(image_channels, embedding, patch, stride=patch)
        self.position = nn.Parameter(torch.empty(patches, embedding))
        nn.init.normal_(self.position, std=0.02)
        self.blocks = blocks
        self.classifier = nn.Linear(embedding, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.patches(x), 2).transpose(1, 2)  # (batch, patches, embedding)
        x = self.blocks(x + self.position)
        scores: Tensor = self.classifier(x.mean(dim=1))
        return scores


@register("vit")
def vit(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    patch: int = 4,
    embedding: int = 128,
    heads: int = 4,
    hidden: int = 256,
    depth: int = 4,
    dropout: float = 0.0,
) -> nn.Module:
    """Small Vision Transformer: square patches, pre-norm blocks, mean over the patches.

    ``patch`` is the side of a patch in pixels; ``hidden`` is the width of the feed-forward layers.
    """
    patch, embedding = whole("patch", patch), whole("embedding", embedding)
    image_channels, height, width = image_shape("vit", input_shape)
    expected = f"a height and width that are multiples of patch = {patch}, for model 'vit'"
    require(height % patch == 0 and width % patch == 0, "input_shape", input_shape, expected)
    blocks = transformer_blocks(Blocks(embedding, heads, hidden, depth, dropout), causal=False)
    patches = (height // patch) * (width // patch)
    return VisionTransformer(image_channels, patch, patches, embedding, blocks, num_classes)
