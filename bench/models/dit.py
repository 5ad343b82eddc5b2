"""A Diffusion Transformer with adaptive layer norms, which predicts the noise in latents of images."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and an MLP, scaled and shifted by what is known of the timestep.

    Args:
        width: the width of the residual stream, divisible by ``heads``.
        heads: the number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        modulation = self.modulation(F.silu(condition)).unsqueeze(1)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = modulation.chunk(6, dim=-1)
        qkv = self.qkv(self.norm_1(x) * (1 + scale_1) + shift_1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in qkv.chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate_1 * self.out(attended)
        result: Tensor = x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)
        return result


class DiT(nn.Module):
    """Blocks between an embedding of patches of 2 x 2 latents and a projection to such patches.

    Args:
        num_blocks: the number of blocks.
        width: the width of the residual stream.
        heads: the number of attention heads.
        side: the height and the width of latents.
        channels: the channels of latents.
    """

    def __init__(self, num_blocks: int, width: int, heads: int, side: int, channels: int = 4) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(channels, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn((side // 2) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4 * channels)

    def forward(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """Returns the predicted noise.

        Args:
            latents: of shape (batch, channels, side, side).
            timestep: of shape (batch,).
        """
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        half = torch.arange(self.width // 2, device=latents.device) * (-math.log(1e4) * 2 / self.width)
        angles = timestep[:, None].float() * half.exp()
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        for block in self.blocks:
            x = block(x, condition)
        patches = self.head(self.norm(x)).transpose(1, 2)
        return F.fold(patches, latents.shape[-2:], 2, stride=2)
