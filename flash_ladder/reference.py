"""Attention in plain PyTorch: the truth, in float64, that stages are compared with.

The tests, the notebooks and the exercises' checker use it.
"""

import torch


def reference(q, k, v, visible=None, scale=None):
    """(O, L) by PyTorch, in the type of q: float64 for the truth, another one for the error to compare with.

    visible: query i sees key j <= i + this; or bools that broadcast to (B, H, N_q, N_k); None: all. L in the
    natural logarithm. Rows that see no key: O = 0, L = -inf. In 16 bits S and P are rounded, and the softmax
    between them is computed in float32, as PyTorch does it.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.transpose(-1, -2) * scale
    if visible is not None:
        scores = scores.masked_fill(~seen_by(visible, scores), -torch.inf)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    lse = scores.logsumexp(-1)
    probabilities = torch.exp(scores - lse.where(lse > -torch.inf, 0)[..., None])
    return probabilities.to(q.dtype) @ v, lse


def seen_by(visible, scores):
    """Which of the scores (B, H, N_q, N_k) count, as `reference` is told."""
    if isinstance(visible, torch.Tensor):
        return visible
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(visible)


def max_error(x, truth) -> float:
    """The largest absolute difference; infinities must be the same ones.

    NaN if there is a NaN, which fails every comparison.
    """
    same = x.double() == truth.double()
    return torch.where(same, 0.0, (x.double() - truth.double()).abs()).max().item()


def reference_gradients(q, k, v, do, visible=None, scale=None, dlse=None):
    """(dq, dk, dv) by autograd through `reference`, in float64. dlse: the gradient by L, or None."""
    q, k, v = inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, lse = reference(q, k, v, visible, scale)
    seen = lse > -torch.inf  # a row that sees no key has no gradient, whatever dlse is there
    outputs, gradients = [o], [do.double()]
    if dlse is not None and seen.any():
        outputs, gradients = [o, lse[seen]], [do.double(), dlse.double()[seen]]
    return torch.autograd.grad(outputs, inputs, gradients)


def recomputed_gradients(q, k, v, do, visible=None, scale=None, dlse=None):
    """(dq, dk, dv) by the formulas of flash_bwd.cu, from O and L, in PyTorch and the type of q: for the error
    to compare with. An L of 1000 has an error of 3e-5, and so has then all of its row of P. In 16 bits what
    goes into a product is rounded, and what lies between two of them is computed in float32."""
    o, lse = reference(q.double(), k.double(), v.double(), visible, scale)
    o, lse = o.to(q.dtype), lse.float()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    H_kv, group = k.shape[1], q.shape[1] // k.shape[1]
    K, V = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    P = torch.exp((q @ K.mT * scale).float() - lse[..., None])
    if visible is not None:
        P = P.where(seen_by(visible, P), 0)
    D = (do.float() * o.float()).sum(-1) - (0 if dlse is None else dlse)
    dS = P * ((do @ V.mT).float() - D.where(lse > -torch.inf, 0)[..., None])
    P, dS = P.to(q.dtype), dS.to(q.dtype)
    dK, dV = (x.unflatten(1, (H_kv, group)).sum(2) for x in (scale * dS.mT @ q, P.mT @ do))
    return scale * dS @ K, dK, dV


def random_qkv(B, H, H_kv, N_q, N_k, d, device, dtype=torch.float32, seed=0):
    """q, k, v: random normal, each with its own scale and offset, so no symmetry hides a swapped index."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, N_q, d, generator=generator)
    k = torch.randn(B, H_kv, N_k, d, generator=generator) * 1.1 + 0.1
    v = torch.randn(B, H_kv, N_k, d, generator=generator) * 0.7 - 0.3
    return (x.to(device, dtype) for x in (q, k, v))


def random_gradients(q, seed=7):
    """dO and dL for q: random normal, each with its own scale and offset, as in random_qkv."""
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(q.shape, generator=generator) * 0.9 + 0.2
    dlse = torch.randn(q.shape[:3], generator=generator) * 0.5 - 0.1
    return do.to(q.device, q.dtype), dlse.to(q.device)
