"""The model of the built-in task `bytes`: a decoder-only transformer over bytes, small enough for two cores."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from accumulus.errors import UsageError

START = 256
"""The token before the first byte of every sample; also what pads the inputs."""

VOCABULARY_SIZE = 257


class ByteModel(nn.Module):
    """Pre-norm transformer with rotary positions, SwiGLU and one matrix for embedding and output.

    Args:
        d_model: width; a multiple of `2 * num_heads`, because a rotary position turns pairs of channels.
        num_layers: number of blocks.
        num_heads: attention heads of a block.

    Raises:
        UsageError: `d_model` is not a multiple of `2 * num_heads`.

    Example:
        >>> model = ByteModel(d_model=16, num_layers=1, num_heads=2)
        >>> model(torch.tensor([[START, 100, 101]])).shape
        torch.Size([1, 3, 257])
    """

    def __init__(self, *, d_model: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        if d_model % (2 * num_heads):
            fits = max(1, round(d_model / (2 * num_heads))) * 2 * num_heads
            raise UsageError(
                f"--d-model {d_model} must be a multiple of twice --num-heads {num_heads}; {fits} would fit"
            )
        self.embedding = nn.Embedding(VOCABULARY_SIZE, d_model)
        self.blocks = nn.ModuleList(Block(d_model, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(d_model)
        self.head_width = d_model // num_heads
        self._initialize(num_layers)

    def _initialize(self, num_layers: int) -> None:
        """Small weights; smaller still where a block writes to the residual stream, which sums over blocks."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            writes_residual = name.endswith(("attention.output.weight", "mlp.output.weight"))
            fan_in = parameter.shape[1]
            std = fan_in**-0.5 / ((2 * num_layers) ** 0.5 if writes_residual else 1.0)
            nn.init.normal_(parameter, std=std)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the next byte at every position.

        Args:
            inputs: int64 tokens of shape (batch, length).

        Returns:
            Logits of shape (batch, length, 257); in the compute dtype of the autocast region around it.
        """
        rotation = rotary_angles(inputs.shape[1], self.head_width, inputs.device)
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = block(hidden, rotation)
        logits: Tensor = F.linear(self.norm(hidden), self.embedding.weight)
        return logits


class Block(nn.Module):
    """Attention, then an MLP, each added to what came in."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model)
        self.attention = Attention(d_model, num_heads)
        self.mlp_norm = nn.RMSNorm(d_model)
        self.mlp = SwiGlu(d_model)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`hidden` of shape (batch, length, d_model), and the same back."""
        attended = hidden + self.attention(self.attention_norm(hidden), rotation)
        output: Tensor = attended + self.mlp(self.mlp_norm(attended))
        return output


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.output = nn.Linear(d_model, d_model, bias=False)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Padding stands at the right, so the causal mask already hides it from every byte that counts."""
        batch, length, width = hidden.shape
        heads = self.query_key_value(hidden).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class SwiGlu(nn.Module):
    """The gated MLP of Shazeer, "GLU Variants Improve Transformer" (2020), hidden width 8/3 of the model's."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        hidden_width = 8 * ((d_model + 2) // 3)
        self.input = nn.Linear(d_model, 2 * hidden_width, bias=False)
        self.output = nn.Linear(hidden_width, d_model, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Elementwise over positions."""
        gate, value = self.input(hidden).chunk(2, dim=-1)
        output: Tensor = self.output(F.silu(gate) * value)
        return output


def rotary_angles(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (Su et al., "RoFormer", 2021).

    Args:
        length: number of positions.
        width: channels of one head; even.
        device: where to make them.

    Returns:
        Two float32 tensors of shape (length, width / 2).
    """
    frequencies = 1e4 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the two halves of each head's channels by its position's angles.

    Args:
        heads: shape (batch, heads, length, width).
        rotation: what `rotary_angles` made.

    Returns:
        The same shape and dtype.
    """
    cosine, sine = (part.to(heads.dtype) for part in rotation)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)
