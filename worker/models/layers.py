"""Layers that the model families share. Weights are created empty and filled by the loader.

A fused projection declares the checkpoint's separate tensors as *parts*: rows of its weight, in order. Layers that are
divided among ranks hold a share of each tensor and tell the loader which (``targets``).
"""

import torch
import torch.nn.functional as F
from torch import nn

from kernels.attention import AttentionBatch
from kernels.fp8_quantize import add_rms_norm_quantize, rms_norm_quantize
from kernels.linear import linear
from kernels.norm import add_rms_norm, rms_norm
from kernels.rotary_attention import rotary_attention
from kernels.rotary_kv import HeadNorms
from worker.kv_cache import KVCache
from worker.model_config import ModelConfig
from worker.models.linear_weights import Activations, Cut, make_weights, quantization_of
from worker.models.sharding import Part, Piece, Target, part, scaled
from worker.parallel.shards import ALONE, Parallel
from worker.quantization import Quantization

Angles = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """Normalises the last dimension, after adding the residual when there is one.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        offset: added to the weight.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size]."""
        return rms_norm(x, self.weight, self.eps, self.offset)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised sum, sum) of ``x`` and the residual; without a residual, ``x`` begins it."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)

    def add_before(
        self, taker: "Attention | FeedForward", x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Activations, torch.Tensor]:
        """``add``, with the normalised sum quantized when what comes next takes it so."""
        if not taker.takes_quantized:
            return self.add(x, residual)
        if residual is None:
            return rms_norm_quantize(x, self.weight, self.eps, self.offset), x
        return add_rms_norm_quantize(x, residual, self.weight, self.eps, self.offset)


class Linear(nn.Module):
    """``x @ weight.T + bias``, with the outputs of several checkpoint tensors side by side.

    Divided by outputs, every rank computes its own from the whole input. Divided by inputs, every rank computes all
    outputs from its share of the input, and they are summed.

    Args:
        in_features: width of the whole input.
        parts: the fused tensors, and the outputs held of each.
        inputs: the inputs held; None is all.
        quantization: of the weights; None: they have the model's dtype.
    """

    def __init__(
        self,
        in_features: int,
        parts: list[Part],
        bias: bool = False,
        inputs: range | None = None,
        parallel: Parallel = ALONE,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__()
        self.cut = Cut(in_features, inputs or range(in_features), tuple(parts))
        self.sum = parallel.sum if len(self.cut.inputs) < in_features else None
        self.weights = make_weights(self.cut, quantization)
        self.bias = nn.Parameter(torch.empty(self.cut.out_held), requires_grad=False) if bias else None

    @property
    def takes_quantized(self) -> bool:
        """Whether the input is best quantized by the operation before."""
        return self.weights.takes_quantized

    def forward(self, x: Activations) -> torch.Tensor:
        """[tokens, inputs held] to [tokens, outputs held]."""
        if self.sum is None:
            return self.weights(x, self.bias)
        y = self.sum(self.weights(x, None))
        return y if self.bias is None else y + self.bias

    def gated(self, x: Activations, activation: str, taker: "Linear") -> Activations:
        """``act(gate) * up`` of the outputs, which are a gate and as many of up, as ``taker`` takes it: [tokens,
        outputs held / 2]."""
        return self.weights.gated(x, self.bias, activation, taker.takes_quantized)

    def targets(self) -> dict[str, Target]:
        """Where each checkpoint tensor goes, by its name below the module that owns this one."""
        found = self.weights.targets(self.cut)
        if self.bias is not None:
            for fused, rows in self.cut.rows():
                pieces = tuple(Piece(self.bias.data[place], (taken,)) for place, taken in rows)
                found[f"{fused.name}.bias"] = Target((fused.width,), pieces)
        return found


class VocabularyRows(nn.Module):
    """A row for each token of this rank's share of the vocabulary: what embedding and output projection have in common.

    All ranks' shares have the same size; rows beyond the vocabulary stay zero.
    """

    def __init__(self, vocab_size: int, size: int, parallel: Parallel) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.parallel = parallel
        self.rows = parallel.padded_share(vocab_size)
        make = torch.zeros if self.rows.stop > vocab_size else torch.empty
        self.weight = nn.Parameter(make(len(self.rows), size), requires_grad=False)

    def targets(self) -> dict[str, Target]:
        """Where each checkpoint tensor goes, by its name below this module."""
        taken = slice(min(self.rows.start, self.vocab_size), min(self.rows.stop, self.vocab_size))
        held = self.weight.data[: taken.stop - taken.start]
        return {"weight": Target((self.vocab_size, self.weight.shape[1]), (Piece(held, (taken,)),))}


class Embedding(VocabularyRows):
    """Token embeddings; their weight may serve as the output projection too."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] int64 to [tokens, size]."""
        if self.parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        elsewhere = (token_ids < self.rows.start) | (token_ids >= self.rows.stop)
        held = F.embedding((token_ids - self.rows.start).masked_fill(elsewhere, 0), self.weight)
        return self.parallel.sum(held.masked_fill(elsewhere[:, None], 0))


class OutputHead(VocabularyRows):
    """The output projection."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, size] to logits, [rows, vocab], which are whole on the leader only."""
        return self.parallel.join(linear(x, self.weight))[:, : self.vocab_size]


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023) over the paged cache, divided by heads.

    Args:
        config: sizes, biases, normalised heads, soft cap.
        layer: index, which chooses the cache's layer and the window.
        fused: the checkpoint itself holds one tensor for query, key and value.
    """

    def __init__(
        self, config: ModelConfig, layer: int, parallel: Parallel, norm_offset: float = 0.0, fused: bool = False
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.query_scale or config.head_dim**-0.5
        self.window = config.window(layer)
        self.softcap = config.attention_softcap
        heads, kv_heads = parallel.share(config.num_heads), parallel.kv_heads(config.num_kv_heads)
        self.num_heads, self.num_kv_heads = len(heads), len(kv_heads)
        query = (config.num_heads * self.head_dim, scaled(heads, self.head_dim))
        key = (config.num_kv_heads * self.head_dim, scaled(kv_heads, self.head_dim))
        parts = [part("q_proj", query), part("k_proj", key), part("v_proj", key)]
        if fused:
            parts = [part("qkv_proj", query, key, key)]
        output = [part("o_proj", (config.hidden_size, range(config.hidden_size)))]
        input_form, output_form = (
            quantization_of(config, f"model.layers.{layer}.self_attn", names) for names in (parts, output)
        )
        self.qkv_proj = Linear(config.hidden_size, parts, config.qkv_bias, quantization=input_form)
        self.o_proj = Linear(query[0], output, config.o_bias, query[1], parallel, output_form)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, norm_offset) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, norm_offset) if config.qk_norm else None

    @property
    def takes_quantized(self) -> bool:
        """See ``Linear``."""
        return self.qkv_proj.takes_quantized

    def forward(self, x: Activations, angles: Angles, cache: KVCache, batch: AttentionBatch) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]; writes the tokens' keys and values into the cache."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)
        attended = rotary_attention(
            self.qkv_proj(x), *angles, *cache.layer(self.layer), batch, self.scale, self.window, self.softcap, norms
        )
        return self.o_proj(attended.flatten(1))


class FeedForward(nn.Module):
    """The second half of a decoder layer, [tokens, hidden] to [tokens, hidden]."""

    @property
    def takes_quantized(self) -> bool:
        """See ``Linear``."""
        return False


class GatedMLP(FeedForward):
    """Gated feed-forward layer, divided by its inner width.

    Args:
        config: sizes, biases, activation.
        layer: index, which its name has.
        fused: the checkpoint itself holds one tensor for gate and up.
    """

    def __init__(self, config: ModelConfig, layer: int, parallel: Parallel, fused: bool = False) -> None:
        super().__init__()
        size, intermediate_size = config.hidden_size, config.intermediate_size
        inner = (intermediate_size, parallel.share(intermediate_size))
        parts = [part("gate_up_proj", inner, inner)] if fused else [part("gate_proj", inner), part("up_proj", inner)]
        output = [part("down_proj", (size, range(size)))]
        input_form, output_form = (
            quantization_of(config, f"model.layers.{layer}.mlp", names) for names in (parts, output)
        )
        self.gate_up_proj = Linear(size, parts, config.mlp_bias, quantization=input_form)
        self.down_proj = Linear(intermediate_size, output, config.mlp_bias, inner[1], parallel, output_form)
        self.activation = config.activation

    @property
    def takes_quantized(self) -> bool:
        """See ``Linear``."""
        return self.gate_up_proj.takes_quantized

    def forward(self, x: Activations) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        return self.down_proj(self.gate_up_proj.gated(x, self.activation, self.down_proj))
