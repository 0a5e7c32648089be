"""The one forward: a pre-norm decoder-only transformer (Vaswani et al., 2017; Touvron et al., 2023).

Written against `Ops`, it is the single description of the computation. The numpy backend runs it with arrays; the cpu
backend records it once with symbolic ones, so it never branches on values or on the number of rows, only on the spec.
Knows nothing of files, families or backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.models.spec import ModelSpec
from octavo.ops import Attention, Inputs, Ops, Weight

Forward = Callable[[Ops[Any], Mapping[str, Weight], Inputs[Any]], Any]


def make_forward(spec: ModelSpec) -> Forward:
    """The forward of a model: (ops, weights by canonical name, inputs) -> logits [S, vocab].

    Only the rows whose logits are wanted go through the final norm and the head.
    """
    scale = spec.head_dim**-0.5
    attentions = tuple(
        Attention(
            layer=layer,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=scale,
            window=spec.window(layer),
        )
        for layer in range(spec.num_layers)
    )
    biases = frozenset(name for name in spec.weight_shapes() if name.endswith("_bias"))
    head = "embed" if spec.tied_head else "head"

    def forward(ops: Ops[Any], weights: Mapping[str, Weight], inputs: Inputs[Any]) -> Any:
        def project(x: Any, name: str) -> Any:
            bias = f"{name}_bias"
            return ops.linear(x, weights[name], weights[bias] if bias in biases else None)

        x = ops.embed(weights["embed"], inputs.tokens)
        for attention in attentions:
            layer = f"layers.{attention.layer}."

            normed = ops.norm(x, weights[layer + "attn_norm"], spec.norm_eps)
            q = project(normed, layer + "q")
            k = project(normed, layer + "k")
            v = project(normed, layer + "v")
            q = ops.rope(q, spec.rope)
            k = ops.rope(k, spec.rope)
            ops.kv_write(attention, k, v)
            mixed = ops.attention(attention, q)
            x = ops.add(x, project(mixed, layer + "o"))

            normed = ops.norm(x, weights[layer + "mlp_norm"], spec.norm_eps)
            gate = project(normed, layer + "gate")
            up = project(normed, layer + "up")
            x = ops.add(x, project(ops.activate(spec.activation, gate, up), layer + "down"))
        x = ops.norm(ops.select(x, inputs.logit_rows), weights["norm"], spec.norm_eps)
        return ops.head(x, weights[head])

    return forward
