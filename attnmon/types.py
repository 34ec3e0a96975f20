"""What one attention call is made of, once every way of making it has been brought to one form."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttentionCall"]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of softmax attention by one module, with its arguments normalised.

    The weights of the call are ``softmax(cap(query @ key^T * scale) + bias)`` over the visible keys, where
    ``cap(z) = softcap * tanh(z / softcap)`` (the identity without one) and ``bias`` is a floating-point ``attn_mask``.
    Everything that a model's own call may say in other ways (`nn.MultiheadAttention`'s inverted masks, a module's
    default scale, attention sinks, appended keys) has been rewritten into these fields by `attnmon.capture`, so
    nothing downstream needs to know where a call came from.

    Tensors are the model's own (not copies, possibly part of an autograd graph): whoever reads them must detach
    and must not write to them.

    Attributes:
        layer: Path of the module that attends, e.g. ``"transformer.h.3.attn"``, without wrapper prefixes.
        query: ``(batch, num_heads, q_len, head_dim)``, the model's dtype.
        key: ``(batch, num_kv_heads, kv_len, head_dim)``; ``num_heads`` is a multiple of ``num_kv_heads``, query head
            ``h`` reads key head ``h // (num_heads // num_kv_heads)``.
        value: ``(batch, num_kv_heads, kv_len, v_head_dim)``.
        attn_mask: None, a bool tensor (True = attends) or a floating-point tensor added to the scaled scores,
            broadcastable to ``(batch, num_heads, q_len, kv_len)``.
        causal_offset: None if the call is not causal by flag; otherwise query ``i`` sees key ``j`` only where
            ``j <= i + causal_offset``. 0 is torch's own ``is_causal`` (aligned to the upper left), ``kv_len - q_len``
            aligns the last query with the last key. It restricts in addition to ``attn_mask``.
        scale: What the dot products are multiplied by; the model's own temperature is ``1 / scale``.
        softcap: Bound of a ``tanh`` soft cap on the scaled scores (before the mask), or None.
        valid: ``(batch, q_len)`` bool, True where the query is a token rather than padding; None if unknown.
        labels: ``(batch, q_len)`` integer labels of the queries' positions, or None if the model was not given any.
        hidden: ``(batch, kv_len, hidden_size)`` input of the attention module that the keys were made from, or None
            if it was not asked for or does not match the keys.
        embedding: ``(batch, kv_len, hidden_size)`` token embeddings of the keys' positions, likewise.
        output: ``(batch, num_heads, q_len, v_head_dim)``, what the module's own attention returned, for checking
            that the fields above explain it; None where dropout makes the two differ by design.
        unexplained: Names of arguments of the call that this form cannot express. The call can be trusted only
            where ``output`` confirms it.
    """

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    causal_offset: int | None
    scale: float
    softcap: float | None = None
    valid: Tensor | None = None
    labels: Tensor | None = None
    hidden: Tensor | None = None
    embedding: Tensor | None = None
    output: Tensor | None = None
    unexplained: tuple[str, ...] = ()

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads; a divisor of `num_heads`."""
        return self.key.shape[1]

    @property
    def temperature(self) -> float:
        """The model's own softmax temperature, ``1 / |scale|``: a negative scale turns the scores around."""
        return 1.0 / abs(self.scale)
