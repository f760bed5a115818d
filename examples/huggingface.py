"""A model of Hugging Face's generates on flash.attention, for prompts of different lengths at once.

    python examples/huggingface.py                    # a small Llama with random weights
    python examples/huggingface.py --weights FOLDER --prompts "The paper says" "In a tile of K,"

FOLDER: what save_pretrained() wrote, or a copy of a model's page, the tokenizer's files too. Nothing is
fetched.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig  # noqa: E402

import flash_ladder.transformers  # noqa: E402, F401 - makes "ladder" known


def main(arguments: list[str] | None = None) -> torch.Tensor:
    """Print what is generated; return the tokens (B, N)."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--weights", type=Path, metavar="FOLDER")
    parser.add_argument("--prompts", nargs="+", default=["__device__ void", "for (int"])
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="so many new ones (default: 16)")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--attention", default="ladder", help="ladder (default), eager or sdpa")
    a = parser.parse_args(arguments)
    if a.weights and not (a.weights / "config.json").is_file():
        parser.error(f"--weights {a.weights}: there is no config.json; save_pretrained(FOLDER) writes one")

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if a.weights:
        model = AutoModelForCausalLM.from_pretrained(a.weights, attn_implementation=a.attention, dtype=dtype,
                                                     local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(a.weights, local_files_only=True, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        batch = tokenizer(a.prompts, return_tensors="pt", padding=True)
        ids, there = batch["input_ids"], batch["attention_mask"]
    else:
        config = LlamaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, intermediate_size=128, pad_token_id=0, eos_token_id=None)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=a.attention, dtype=dtype)
        length = max(len(prompt.encode()) for prompt in a.prompts)
        ids = torch.tensor([list(prompt.encode().rjust(length, b"\0")) for prompt in a.prompts])
        there = (ids != 0).long()
    found = model.to(device).eval().generate(
        ids.to(device), attention_mask=there.to(device), max_new_tokens=a.tokens, do_sample=False,
        cache_implementation=a.cache)
    for row in found:
        print(tokenizer.decode(row, skip_special_tokens=True) if a.weights else bytes(row.tolist()))
    return found


if __name__ == "__main__":
    main()
