"""flash.attention() in Hugging Face's models.

    import flash_ladder.transformers
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ladder")
    model.set_attn_implementation("ladder")     # of a model that is there

The mask function says what a query sees, once a forward pass, and the attention function uses it, in each
layer. Between them goes a tensor of four dimensions, as Transformers passes no other. It is one of:

    None                       all keys up to the query's own, which is the last query's for the last key
    int32 (B, 1, 1, n)         likewise, of the query's own document: its number, of each token
    int32 (B, 1, 2, n)         likewise, from a first key up to an end: mask[b, 0, 0, 0], mask[b, 0, 1, 0]
    int32 (B, 1, 3, n)         likewise, within the configuration's sliding window
    bool or float, (B, 1 or H, N_q, N_k)   just what it says: True is seen, or a number is added

Keys after the first n are not there yet: a static cache has room for them. A bidirectional layer
(module.is_causal is False) sees keys after the query's own, too. For a single query, a mask has it all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
except ImportError as error:
    raise ImportError("flash_ladder.transformers needs Hugging Face's Transformers, 5.17 or later: "
                      "pip install 'transformers>=5.17'") from error

from . import masks
from .attention import attention
from .masks import Mask
from .values import shown

# Not with "flash" in it: Transformers takes such a name for one of FlashAttention's packages, and loads that
NAME = "ladder"


def register(name: str = NAME, **options) -> None:
    """Make `name` an attn_implementation. options: stage, backward, deterministic and tile sizes, as of
    flash.attention(), for all layers.

        flash_ladder.transformers.register("ladder_fp32", stage="fp32_tuned", backward="recompute")
    """
    if "flash" in name:
        raise ValueError(f"name: Transformers takes {shown(name)} for a package of FlashAttention's, as "
                         f"'flash' is in it: choose another one, like {NAME!r}")
    AttentionInterface.register(name, functools.partial(attend, options=options) if options else attend)
    AttentionMaskInterface.register(name, make_mask)


# ------------------------------------------------------------------------------------------ a layer
def attend(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
           softcap: float | None = None, s_aux: torch.Tensor | None = None, is_causal: bool | None = None,
           position_bias: torch.Tensor | None = None, options: dict | None = None,
           **others) -> tuple[torch.Tensor, None]:
    """The attention of a layer, as Transformers asks for it.

    Args:
        query: (B, H, N_q, d). key, value: (B, H_kv, N_k, d) and (B, H_kv, N_k, d_v).
        attention_mask: see above.
        softcap: of scores, before the mask. s_aux: (H,), a sink. position_bias: added to the scores.
        options: of register().
        others: for other implementations; sliding_window too, which the mask tells.
    Returns:
        (B, N_q, H, d_v); and None, as there are no weights.
    Raises:
        ValueError: for what no stage can do, saying what would.
    """
    if others.get("output_attentions"):
        raise ValueError("output_attentions: the weights are never in memory; use "
                         'model.set_attn_implementation("eager") for a pass that needs them')
    if others.get("cache") is not None:
        raise ValueError("continuous batching keeps a paged cache, which this implementation does not "
                         'read: use model.generate(), or attn_implementation="sdpa"')
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 4:
            kind = f"of shape {tuple(attention_mask.shape)}" if hasattr(attention_mask, "shape") else \
                type(attention_mask).__name__
            raise ValueError(f"attention_mask: {kind}; pass the model a mask (B, N), or one of bools, or of "
                             "numbers to add, (B, 1 or H, N_q, N_k)")
        if attention_mask.shape[-1] < key.shape[2]:
            key, value = (x[:, :, :attention_mask.shape[-1]] for x in (key, value))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal, seen = _read(module, attention_mask, query.shape[2], is_causal)
    if position_bias is not None:
        seen.append(masks.additive(position_bias[..., :key.shape[2]]))
    if softcap is not None:
        seen.insert(0, masks.softcap(softcap))
    mask = functools.reduce(Mask.__and__, seen) if seen else None
    o = attention(query, key, value, causal=causal, mask=mask, scale=scaling, dropout_p=dropout, sink=s_aux,
                  **(options or {}))
    return o.transpose(1, 2).contiguous(), None


def _read(module: torch.nn.Module, mask: torch.Tensor | None, N_q: int,
          is_causal: bool) -> tuple[bool, list[Mask]]:
    """attention()'s causal, and the masks beside it, of what the mask function made."""
    if mask is None:
        return is_causal and N_q > 1, []
    if mask.dtype != torch.int32:
        return False, [masks.of_tensor("attention_mask", mask)]
    if mask.shape[2] == 1:
        return is_causal, [masks.document(mask[:, 0, 0])]
    there = masks.padding(mask[:, 0, 0, 0], mask[:, 0, 1, 0])
    if mask.shape[2] == 2:
        return is_causal and N_q > 1, [there]
    # The configuration's, as the mask function has it: a layer's own is meant for FlashAttention's arguments.
    # A causal window has the query's own key in it, one of both sides has not
    config: Any = module.config
    size = config.sliding_window
    return False, [masks.window(size - 1, 0) if is_causal else masks.window(size, size), there]


# ------------------------------------------------------------------------------------------ the mask
def make_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int | torch.Tensor = 0,
              kv_offset: int = 0, mask_function=causal_mask_function,
              attention_mask: torch.Tensor | None = None, local_size: int | None = None,
              allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
              use_vmap: bool = False, device: torch.device | str = "cpu", config=None,
              **others) -> torch.Tensor | None:
    """What the queries see, in one of the forms above.

    It looks into the padding, once, where there is more than one query and nothing is compiled or captured.
    In a decoding step it reads nothing back from the GPU.

    Args:
        q_offset, kv_offset: the position of the first query, and of the first key. A static cache has the
            former as a tensor.
        mask_function: what Transformers would ask for each pair.
        attention_mask: bool (B, positions), False for padding.
        local_size: of a window, or of chunks.
        allow_is_causal_skip, allow_is_bidirectional_skip: mask_function is the plain one of its kind.
        use_vmap: it is somebody's own.
    """
    there = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if there is not None:
        there = there[:, kv_offset:kv_offset + kv_length]
    dense: Callable[[], torch.Tensor] = functools.partial(
        sdpa_mask,
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
        kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
        allow_is_causal_skip=False, use_vmap=use_vmap, device=device)
    plain = allow_is_causal_skip or allow_is_bidirectional_skip or mask_function is causal_mask_function
    if local_size is not None:
        if getattr(config, "attention_chunk_size", None) is not None:
            plain = False
        elif kv_length <= local_size:  # all keys are within it
            local_size = None if plain else local_size
    if not plain:
        documents = _documents(q_length, kv_length, q_offset, mask_function, use_vmap, local_size, batch_size,
                               there, device)
        return dense() if documents is None else documents
    if allow_is_bidirectional_skip:
        n: int | torch.Tensor = kv_length
        if local_size is not None and (q_length != kv_length or q_length == 1):
            return dense()
    else:
        n = q_offset - kv_offset + q_length                       # keys up to that of the last query
    if q_length == 1:
        if there is not None or local_size is not None:
            return dense()
        if isinstance(n, int):
            return None if n == kv_length else dense()
        return _ranges(torch.zeros_like(n).expand(batch_size), n.expand(batch_size), 2, kv_length)
    may_look = not torch.compiler.is_compiling() and not (
        torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing())
    if not isinstance(n, int):
        if not may_look:
            return dense()
        n = int(n)
    if n > kv_length:  # queries further on than the keys
        return dense()
    rows = 2 if local_size is None else 3
    if there is not None:
        there = there[:, :n]
        first, end, of_range = _extent(there)
        if may_look:
            shortest, contiguous = torch.stack((end.min() - first.max(), of_range.all())).tolist()
            if contiguous and shortest < n:
                return _ranges(first, end, rows, n)
            there = None if contiguous else there
    if there is not None:  # padding somewhere, or nobody knows
        whole = q_length == n and local_size is None
        return there.to(torch.int32)[:, None, None].contiguous() if whole else dense()
    if n == kv_length and local_size is None:
        return None
    first, end = (torch.full((batch_size,), x, device=device) for x in (0, n))
    return _ranges(first, end, rows, n)


def _ranges(first: torch.Tensor, end: torch.Tensor, rows: int, n: int) -> torch.Tensor:
    """int32 (B, 1, rows, n), of (B,)."""
    ends = torch.stack((first, *[end] * (rows - 1)), 1).to(torch.int32)
    return ends[:, None, :, None].expand(-1, 1, -1, n)


def _extent(there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of bool (B, n): the first True and the one after the last, and whether all between are True; (B,)."""
    n = there.shape[1]
    count = there.sum(1)
    first = there.to(torch.uint8).argmax(1)
    end = torch.where(count > 0, n - there.flip(1).to(torch.uint8).argmax(1), first)
    return first, end, end - first == count


def _documents(q_length: int, kv_length: int, q_offset, mask_function, use_vmap: bool, local_size: int | None,
               batch_size: int, there: torch.Tensor | None, device) -> torch.Tensor | None:
    """int32 (B, 1, 1, N): numbers of packed sequences; None if the mask is another one.

    Transformers tells them by a function that is "and" of the causal one, alone of those that are not plain.
    A sequence begins with each query that does not see the key before its own.
    """
    if (use_vmap or local_size is not None or there is not None or mask_function.__name__ != "and_mask"
            or not isinstance(q_offset, int) or q_offset or q_length != kv_length or q_length == 1):
        return None
    batch = torch.arange(batch_size, device=device)[:, None]
    at = torch.arange(1, q_length, device=device)[None]
    sees = mask_function(batch, torch.zeros_like(batch), at, at - 1)
    numbers = torch.nn.functional.pad((~sees).cumsum(1), (1, 0)).to(torch.int32)
    return numbers.expand(batch_size, -1)[:, None, None].contiguous()


register()
