"""Layers of transformers with a state, with random parameters, and the same layers computed by our operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GraniteMoeHybridConfig, Lfm2Config, Qwen3NextConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tokenloom.kernels.contract import Norm, StateMetadata
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.state_laws import Pool, StateForm, metadata_of

HIDDEN = 48

Layer = Callable[[ReferenceOps, Tensor, Pool, StateMetadata], Tensor]  # hidden [T, HIDDEN] → [T, HIDDEN]


def _with_random_parameters(module: nn.Module) -> Any:
    """Draw parameters near those of models: none is at a value at which an error would not be seen."""
    for name, parameter in module.named_parameters():
        if name in ("A_log", "dt_bias"):
            nn.init.uniform_(parameter, -2, 0.5)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            nn.init.normal_(parameter, mean=1, std=0.3)
    return module.eval()


def gated_delta_layer() -> tuple[nn.Module, StateForm, Layer]:
    """Return a layer of Qwen3-Next, the form of its state, and the layer by our operations."""
    form = StateForm(2, 4, 32, 16, num_channels=2 * 2 * 32 + 4 * 16)
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=form.key_heads,
        linear_num_value_heads=form.value_heads,
        linear_key_head_dim=form.key_dim,
        linear_value_head_dim=form.value_dim,
        linear_conv_kernel_dim=form.num_taps,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    net = _with_random_parameters(Qwen3NextGatedDeltaNet(config, 0))

    def layer(ops: ReferenceOps, hidden: Tensor, pool: Pool, metadata: StateMetadata) -> Tensor:
        projected = net.in_proj_qkvz(hidden)[None], net.in_proj_ba(hidden)[None]
        *heads, gate, b, a = (each[0] for each in net.fix_query_key_value_ordering(*projected))
        mixed = torch.cat([each.flatten(1) for each in heads], dim=1)
        mixed = ops.causal_conv(mixed, net.conv1d.weight[:, 0], None, "silu", pool.conv, metadata)
        widths = [each.flatten(1).shape[1] for each in heads]
        q, k, v = (
            torch.unflatten(part, 1, each.shape[1:])
            for part, each in zip(torch.split(mixed, widths, 1), heads, strict=True)
        )
        q = F.normalize(q, dim=-1) * form.key_dim**-0.5
        k = F.normalize(k, dim=-1)
        decay = (-net.A_log.exp() * F.softplus(a + net.dt_bias)).exp()
        scanned = ops.state_scan(q, k, v, decay, b.sigmoid(), pool.scan, metadata)
        norm = Norm("rms", net.norm.weight, None, net.norm.variance_epsilon)
        normed = ops.gated_norm(scanned.flatten(1), gate.flatten(1), norm, form.value_heads, "norm_then_silu")
        output: Tensor = net.out_proj(normed)
        return output

    return net, form, layer


def mamba2_layer() -> tuple[nn.Module, StateForm, Layer]:
    """Return a layer of Granite 4 hybrid, the form of its state, and the layer by our operations."""
    form = StateForm(2, 6, 24, 16, num_channels=6 * 16 + 2 * 2 * 24)
    config = GraniteMoeHybridConfig(
        hidden_size=HIDDEN,
        mamba_n_heads=form.value_heads,
        mamba_n_groups=form.key_heads,
        mamba_d_state=form.key_dim,
        mamba_d_head=form.value_dim,
        mamba_d_conv=form.num_taps,
        mamba_expand=2,
        layer_types=["mamba"],
        num_hidden_layers=1,
    )
    net = _with_random_parameters(GraniteMoeHybridMambaLayer(config, 0))
    num_values, num_keys = form.value_heads * form.value_dim, form.key_heads * form.key_dim

    def layer(ops: ReferenceOps, hidden: Tensor, pool: Pool, metadata: StateMetadata) -> Tensor:
        gate, mixed, dt = net.in_proj(hidden).split((num_values, form.num_channels, form.value_heads), dim=1)
        mixed = ops.causal_conv(mixed, net.conv1d.weight[:, 0], net.conv1d.bias, "silu", pool.conv, metadata)
        x, b, c = torch.split(mixed, [num_values, num_keys, num_keys], dim=1)
        x = torch.unflatten(x, 1, (form.value_heads, form.value_dim))
        b, c = (torch.unflatten(each, 1, (form.key_heads, form.key_dim)) for each in (b, c))
        dt = F.softplus(dt + net.dt_bias)
        decay = (-net.A_log.exp() * dt).exp()
        scanned = ops.state_scan(c, b, x * dt[..., None], decay, None, pool.scan, metadata)
        scanned += x * net.D[:, None]
        norm = Norm("rms", net.norm.weight, None, net.norm.variance_epsilon)
        normed = ops.gated_norm(scanned.flatten(1), gate, norm, form.key_heads, "silu_then_norm")
        output: Tensor = net.out_proj(normed)
        return output

    return net, form, layer


def short_conv_layer() -> tuple[nn.Module, StateForm, Layer]:
    """Return a convolution of LFM2, the form of its state, and the layer by our operations."""
    form = StateForm(1, 1, 1, 1, num_taps=3, num_channels=HIDDEN)
    config = Lfm2Config(
        hidden_size=HIDDEN,
        conv_L_cache=form.num_taps,
        conv_bias=True,
        layer_types=["conv"],
        num_hidden_layers=1,
    )
    net = _with_random_parameters(Lfm2ShortConv(config, 0))

    def layer(ops: ReferenceOps, hidden: Tensor, pool: Pool, metadata: StateMetadata) -> Tensor:
        before, after, x = net.in_proj(hidden).chunk(3, dim=1)
        weight, bias = net.conv.weight[:, 0], net.conv.bias
        output: Tensor = net.out_proj(after * ops.causal_conv(before * x, weight, bias, "none", pool.conv, metadata))
        return output

    return net, form, layer


LAYERS = {"gated delta": gated_delta_layer, "mamba2": mamba2_layer, "short conv": short_conv_layer}


def assert_layer_is_transformers(ops: ReferenceOps, name: str) -> None:
    """Compare a layer in float32 with that of transformers: rows of 70 and 9 tokens at once, then in chunks."""
    torch.manual_seed(0)
    net, form, layer = LAYERS[name]()
    rows = [torch.randn(70, HIDDEN), torch.randn(9, HIDDEN)]
    expected = torch.cat([net(row[None])[0] for row in rows])
    scale = expected.abs().max()
    whole = layer(ops, torch.cat(rows), Pool(form, 3), metadata_of([70, 9], [-1, -1], [1, 2]))
    assert (whole - expected).abs().max() < 2e-6 * scale
    pool = Pool(form, 3)
    first = layer(ops, torch.cat((rows[0][:65], rows[1][:2])), pool, metadata_of([65, 2], [-1, -1], [0, 1]))
    then = layer(ops, torch.cat((rows[0][65:], rows[1][2:])), pool, metadata_of([5, 7], [0, 1], [2, 1]))
    cut = torch.cat((first[:65], then[:5], first[65:], then[5:]))
    assert (cut - expected).abs().max() < 2e-6 * scale
