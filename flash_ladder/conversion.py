"""What a call under torch.autocast is converted to, and whether the stages that it takes know d_v: looked up
where torch.compile does not look."""

from __future__ import annotations

import torch

from .operators import as_text, of_text
from .plan import find_or_convert


def autocast(q, k, v, stage, backward):
    """q, k and v, under torch.autocast in the type that it asks for."""
    tensors = q, k, v
    if not all(isinstance(x, torch.Tensor) and x.device.type in ("cpu", "cuda") for x in tensors):
        return tensors
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    gradients = backward is not None or (
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    dtype = _autocast_type(device, torch.get_autocast_dtype(device), as_text(stage), as_text(backward),
                           gradients)
    return [x.to(dtype) if x.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and x.layout == torch.strided else x for x in tensors]


def _autocast_type(device: str, dtype: torch.dtype, stage: str | None, backward: str | None,
                   gradients: bool) -> torch.dtype:
    """Autocast's type, or float32 if a stage that the call names does not take it, or none that runs here."""
    for direction, name in [("fwd", stage), *[("bwd", backward)] * gradients]:
        try:
            find_or_convert(of_text(name), dtype, torch.device(device), direction)
        except (ValueError, RuntimeError):
            return torch.float32
    return dtype


def take_d_v(device: str, dtype: torch.dtype, d: int, stage: str | None, backward: str | None,
             deterministic: bool | None) -> bool:
    """Whether the stages of a call take a v with other columns than d. (One that is not found: its error is
    the operator's.)"""
    for direction, name in (("fwd", stage), ("bwd", backward)):
        try:
            found = find_or_convert(of_text(name), dtype, torch.device(device), direction, deterministic, d)
        except (ValueError, RuntimeError):
            continue
        if "d_v" not in found.takes:
            return False
    return True


# torch.compile need not look into the registry. torch.compiler.assume_constant_result() does just this, but
# imports torch._dynamo, which takes seconds.
for _constant in (_autocast_type, take_d_v):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010
