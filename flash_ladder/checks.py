"""What attention() refuses, before anything is built or launched."""

from __future__ import annotations

import ctypes
import math

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .inspection import has_memory
from .values import shown

MAX_HEAD_DIM = 256
MAX_SCALE = 2.0**16  # with larger ones, q k^T of some 2^14 times it overflows an exponent of float32


def check_dimensions(q, k, v, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Raise ValueError for what has no shape (B, H, N, d)."""
    for name, x in zip(names, (q, k, v), strict=True):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
        check_kind(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, (B, H, N, d), not {x.dim()}: "
                             f"shape {tuple(x.shape)}")


def check_kind(name: str, x: torch.Tensor) -> None:
    """Raise ValueError for a tensor without a shape."""
    if isinstance(x, (UninitializedParameter, UninitializedBuffer)):
        raise ValueError(f"{name} is an uninitialized parameter, which has no shape yet: call its module "
                         "once")
    if x.is_nested:
        raise ValueError(f"{name} is a nested tensor, which no stage takes: pad its sequences to one "
                         "length (torch.nested.to_padded_tensor), or call once for each")


def check_dense(name: str, x: torch.Tensor) -> None:
    """Raise ValueError for a tensor without a shape, or of another layout."""
    check_kind(name, x)
    if x.layout != torch.strided:
        raise ValueError(f"{name} has layout {x.layout}: make it dense with .to_dense()")


def check_tensors(q, k, v, names: tuple[str, str, str] = ("q", "k", "v"), traced: bool = False) -> None:
    """Raise ValueError for tensors that no stage can take. traced: they have no memory, and need none, and
    their sizes may be symbols."""
    check_dimensions(q, k, v, names)
    if not traced:
        check_memory(dict(zip(names, (q, k, v), strict=True)))
    for name, x in zip(names, (q, k, v), strict=True):
        if 0 in x.shape:
            raise ValueError(f"{name} is empty: shape {tuple(x.shape)}; B, H, N and d must be at least 1")
        if x.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} is on {x.device}; stages run on CUDA and CPU tensors: "
                             "move it with .to()")
        check_dense(name, x)
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has type {x.dtype}, {names[0]} {q.dtype}: make them the same")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, {names[0]} on {q.device}: move them to one device")
        if not traced and any(size > 2**31 - 1024 for size in x.shape):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; the kernels count up to 2^31 in whole "
                             "tiles: at most 2^31 - 1024")
        if not traced:
            check_tangent(name, x)
    B, H, _, d = q.shape
    if d % 8 or d > MAX_HEAD_DIM:
        raise ValueError(f"{names[0]} has d = {d}; d must be a multiple of 8 up to {MAX_HEAD_DIM}: pad all "
                         "three with zeros (torch.nn.functional.pad) and keep scale at 1 / sqrt of the "
                         "true d")
    if k.shape[0] != B or k.shape[3] != d:
        raise ValueError(f"{names[1]} has shape {tuple(k.shape)}; for {names[0]} of shape {tuple(q.shape)} "
                         f"it must be ({B}, H_kv, N_k, {d})")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{names[2]} has shape {tuple(v.shape)}, {names[1]} {tuple(k.shape)}: "
                         "they must be the same, but for the last dimension")
    d_v = v.shape[3]
    if d_v % 8 or d_v > d:
        raise ValueError(f"{names[2]} has d_v = {d_v}; it must be a multiple of 8 up to {names[0]}'s d, {d}: "
                         "pad with zeros (torch.nn.functional.pad), as scaled_dot_product_attention does")
    if H % k.shape[1]:
        raise ValueError(f"{names[0]} has {H} heads, {names[1]} and {names[2]} {k.shape[1]}: "
                         "H must be a multiple of H_kv")
    for name, x in zip(names, (q, k, v), strict=True):
        if x.stride(3) != 1:
            raise ValueError(f"{name}'s last dimension is not contiguous (stride {x.stride(3)}): "
                             f"pass {name}.contiguous()")
        past = 0 if traced else x.data_ptr() % 16
        if past or not rows_fit(x):
            in_bytes = tuple(s * x.element_size() for s in x.stride()[:3])
            raise ValueError(f"{name}'s rows must start at multiples of 16 bytes; its first is {past} bytes "
                             f"past one, its strides are {in_bytes} bytes: pass "
                             f"{name}.clone(memory_format=torch.contiguous_format)")


def check_memory(tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError for tensors that could have memory and have none: it was freed, or never was there."""
    for name, x in tensors.items():
        could = x.device.type in ("cpu", "cuda") and x.layout == torch.strided and 0 not in x.shape
        if could and not has_memory(x):
            raise ValueError(f"{name} is a {type(x).__name__} without memory of its own, as in torch.func or "
                             "a FakeTensorMode: pass a plain tensor")


def rows_fit(x: torch.Tensor) -> bool:
    """Whether all rows start at multiples of 16 bytes, if the first one does."""
    return not any(stride * x.element_size() % 16
                   for size, stride in zip(x.shape[:-1], x.stride()) if size > 1)


def check_tangent(name: str, x: torch.Tensor) -> None:
    if forward_ad.unpack_dual(x).tangent is not None:
        raise ValueError(f"{name} has a tangent, and the stages no forward-mode derivative: pass "
                         "torch.autograd.forward_ad.unpack_dual(...).primal")


def as_bool(name: str, value) -> bool:
    """As Python's own, checked: NumPy's is called bool_ or, since 2.0, bool."""
    if type(value).__name__ not in ("bool", "bool_", "int") or value not in (True, False):
        raise ValueError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def as_scale(scale: float | None, d: int) -> float:
    """As a float32, checked. None: 1 / sqrt(d)."""
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise ValueError("scale requires grad, and no stage has its gradient: multiply q by it, and pass "
                         "scale=1.0")
    try:
        rounded = ctypes.c_float(1 / math.sqrt(d) if scale is None else scale).value
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor without memory
        rounded = math.nan
    if not abs(rounded) <= MAX_SCALE:
        raise ValueError(f"scale must be a number from -{MAX_SCALE:.0f} to {MAX_SCALE:.0f}, not "
                         f"{shown(scale)}: beyond, scores overflow; multiply q by the rest, if it has to be")
    return rounded


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Autograd's tensors come with any strides, such as 0 from a sum: a copy, where a stage needs others."""
    at = _address(x)
    if at and x.stride(3) == 1 and at % 16 == 0 and rows_fit(x) and not x.is_neg():
        return x
    return materialized(x.clone(memory_format=torch.contiguous_format))


def materialized(x: torch.Tensor) -> torch.Tensor:
    """With its elements in memory as they are: no bit that negates them, nor one that says that all are 0."""
    if _address(x):
        return x.resolve_neg()
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if x._is_zerotensor() else x


def _address(gradient: torch.Tensor) -> int:
    try:
        return gradient.data_ptr()
    except RuntimeError:
        raise RuntimeError("flash.attention() takes one gradient of o and of L at a time, not a batch of "
                           "them (is_grads_batched, vectorize=True): call torch.autograd.grad for each"
                           ) from None
