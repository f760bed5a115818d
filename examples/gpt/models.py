"""Models of Hugging Face's, by their shapes, with an attention to choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

import flash
import flash_ladder.transformers as ladder

ATTENTIONS = ("eager", "sdpa", "flash")


@dataclass(frozen=True)
class Shape:
    """A configuration, and what a run takes if nothing else is said."""

    config: dict
    batch: int
    seq_len: int
    steps: int


# 124m: GPT-2 (Radford et al., 2019), as GPT2Config has it. 1b: Llama 3.2 1B, as its config.json
# (Llama Team, arXiv 2407.21783). Their vocabularies are kept, though tokens are bytes: for the logits' memory
SHAPES = {
    "gpt2": {
        "tiny": Shape({"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 2}, 4, 64, 200),
        "124m": Shape({"vocab_size": 50257}, 8, 1024, 200)},
    "llama": {
        "tiny": Shape({"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                       "num_key_value_heads": 2, "intermediate_size": 176}, 4, 64, 200),
        "1b": Shape({"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
                     "intermediate_size": 8192, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, 1, 4096, 50)},
}


def shape_of(model: str, size: str) -> Shape:
    if size not in SHAPES[model]:
        raise ValueError(f"--size {size}: {model} comes in {' and '.join(SHAPES[model])}")
    return SHAPES[model][size]


def implementation(attention: str, stage: str | None = None, backward: str | None = None) -> str:
    """Transformers' name for it."""
    if attention != "flash":
        return attention
    if stage is None and backward is None:
        return ladder.NAME
    ladder.register("ladder_chosen", stage=stage, backward=backward)
    return "ladder_chosen"


def stages_of(config, dtype: torch.dtype, device: torch.device, batch: int, seq_len: int, dropout: float,
              stage: str | None, backward: str | None) -> dict[str, str]:
    """The names of the stages that a layer's calls take in training, by pass."""
    H = config.num_attention_heads
    sizes = {"B": batch, "H": H, "H_kv": getattr(config, "num_key_value_heads", H), "N_q": seq_len,
             "N_k": seq_len, "d": getattr(config, "head_dim", config.hidden_size // H), "gradients": 1,
             "masked": 1, "causal": 1}
    needs = ("dropout",) * (dropout > 0)
    return {direction: flash.find_stage(name, dtype, device, direction, None, sizes["d"], sizes, needs).name
            for direction, name in (("fwd", stage), ("bwd", backward))}


def build(model: str, size: str, attention: str, seq_len: int, dropout: float = 0.0,
          weights: Path | None = None) -> PreTrainedModel:
    """With weights by torch's seed, or those of a folder. attention: Transformers' name."""
    if weights is not None:
        made = pretrained(weights, attention, seq_len)
    else:
        made = AutoModelForCausalLM.from_config(config_of(model, size, seq_len, dropout), dtype=torch.float32,
                                                attn_implementation=attention)
    made.loss_type = "ForCausalLM"  # GPT-2 warns that it has none, and a warning is no part of a graph
    return made


def config_of(model: str, size: str, seq_len: int, dropout: float) -> GPT2Config | LlamaConfig:
    shape = {**shape_of(model, size).config, "bos_token_id": None, "eos_token_id": None}
    if model == "gpt2":
        return GPT2Config(**shape, n_positions=max(1024, seq_len), attn_pdrop=dropout, resid_pdrop=dropout,
                          embd_pdrop=dropout)
    return LlamaConfig(**shape, max_position_embeddings=max(4096, seq_len), attention_dropout=dropout)


def pretrained(weights: Path, attention: str, seq_len: int) -> PreTrainedModel:
    if not (weights / "config.json").is_file():
        raise ValueError(f"--weights {weights}: there is no config.json; save_pretrained() writes one")
    made = AutoModelForCausalLM.from_pretrained(weights, attn_implementation=attention, dtype=torch.float32,
                                                local_files_only=True)
    if made.config.max_position_embeddings < seq_len:
        most = made.config.max_position_embeddings
        raise ValueError(f"--seq-len {seq_len}: {weights} has {most} positions")
    return made
