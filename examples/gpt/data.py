"""The repository's own sources, as bytes. What a step gets depends on the seed and its number alone."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("*.md", "*.py", "*.cu", "docs/*.md", "examples/**/*.py", "flash_ladder/**/*.py", "stages/**/*.cuh",
           "tests/*.py")


def corpus(root: Path = ROOT) -> torch.Tensor:
    """int64 (bytes,)"""
    files = sorted({file for pattern in SOURCES for file in root.glob(pattern)})
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def checksum(data: torch.Tensor) -> str:
    return f"{zlib.crc32(bytes(data.to(torch.uint8).numpy())):08x}"


def batch_of(data: torch.Tensor, seed: int, step: int, batch: int, seq_len: int) -> torch.Tensor:
    """(batch, seq_len), on the CPU."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(data) - seq_len + 1, (batch, 1), generator=generator)
    return data[starts + torch.arange(seq_len)]
