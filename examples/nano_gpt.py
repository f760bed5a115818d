"""A GPT of one's own on flash.attention: it learns this repository's sources, byte by byte, and writes some.

    python examples/nano_gpt.py                       # without a GPU, in the simulator: a minute
    python examples/nano_gpt.py --steps 2000 --layers 6 --width 384 --heads 6 --context 256 --batch 64

(The architecture: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.)
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flash  # noqa: E402


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, and the result: (B, N, width)."""
        B, N, width = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)   # (B, H, N, d), views
        o = flash.attention(q, k, v, causal=True)
        return self.out(o.transpose(1, 2).reshape(B, N, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int):
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.apply(self.begin)
        self.head.weight = self.token.weight                           # tied

    @staticmethod
    def begin(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, N) to logits (B, N, 256)."""
        x = self.token(tokens) + self.position.weight[:tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def sample(self, prompt: bytes, length: int, temperature: float = 0.8) -> str:
        """The prompt, and what follows it: as many bytes."""
        tokens = torch.tensor([list(prompt)], device=self.head.weight.device)
        for _ in range(length):
            logits = self(tokens[:, -self.context:])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def main(arguments: list[str] | None = None) -> float:
    """Train and sample. Returns the mean loss of the last ten steps, in nats a byte."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    sizes = {"steps": 300, "batch": 8, "context": 64, "layers": 2, "width": 64, "heads": 2, "sample": 200,
             "seed": 0}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, metavar="N")
    parser.add_argument("--lr", type=float, default=3e-3)
    a = parser.parse_args(arguments)
    if a.width % a.heads or a.width // a.heads % 8:
        parser.error(f"--width {a.width} --heads {a.heads}: d = width / heads must be a multiple of 8")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(a.seed)
    text = b"".join(file.read_bytes() for file in sorted((ROOT / "stages").rglob("*.cuh")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT(a.layers, a.width, a.heads, a.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr)
    print(f"{sum(x.numel() for x in model.parameters()):,} parameters, {len(data):,} bytes, on {device}")

    losses, began = [], time.perf_counter()
    for step in range(1, a.steps + 1):
        starts = torch.randint(len(data) - a.context, (a.batch, 1))
        batch = data[starts + torch.arange(a.context + 1)].to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(a.steps // 10, 1) == 0:
            speed = step * a.batch * a.context / (time.perf_counter() - began)
            print(f"step {step:5}   loss {losses[-1]:.3f}   {speed:,.0f} tokens/s")
    if a.sample:
        print(model.sample(b"__device__ ", a.sample))
    return sum(losses[-10:]) / len(losses[-10:])


if __name__ == "__main__":
    main()
