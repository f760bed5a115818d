"""flash.explain(): the stages that a call takes, why, and what that comes to."""

import pytest
import torch
from conftest import random_qkv

import flash
from flash_ladder import plan, registry
from flash_ladder.compiled import MULTIPROCESSOR, Kernel

try:
    NVCC = flash.find_nvcc()
except RuntimeError:
    NVCC = None
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def stage(name: str, direction: str = "fwd") -> flash.Stage:
    return next(s for s in flash.stages(direction) if s.name == name)


def test_numbers():
    """Those of the registry and of the call itself; a backward stage only where a gradient is needed."""
    q, k, v = random_qkv(1, 4, 2, 40, 60, 64, "cpu", torch.float16)
    found = flash.explain(q, k, v, causal=True)
    assert found.backward is None
    found = flash.explain(q.requires_grad_(), k, v, causal=True)
    pairs = sum(row + 21 for row in range(40))
    for one, direction, flops in ((found.forward, "fwd", 4), (found.backward, "bwd", 10)):
        chosen = registry.find_stage(None, torch.float16, q.device, direction, False, 64)
        tiles = chosen.tiles(64, flash.shared_memory_per_block(q.device), 160, True)
        assert one.stage == chosen and one.tiles == tiles
        assert one.flops == flops * 4 * 64 * pairs
        assert one.hbm_bytes == chosen.hbm_bytes(1, 4, 40, 60, 64, H_kv=2, **tiles)
        assert one.shared_bytes == chosen.shared_bytes(64, tiles) > 0
        assert one.files[:2] == (flash.ROOT / f"flash_{direction}.cu", chosen.path)
    assert found.forward.workspace_bytes == 0
    taken = [p for key, p in plan._plans.items() if p.stage == found.backward.stage]
    assert found.backward.workspace_bytes in {p.workspace_bytes for p in taken} - {0}


def test_why():
    q, k, v = random_qkv(1, 2, 2, 40, 40, 64, "cpu")
    one = flash.explain(q, k, v).forward
    assert (one.why, one.why_tiles) == ("the end of its branch, which is taken on any GPU",
                                        "the header's rule for this d, size and mask")
    one = flash.explain(q, k, v, stage="flash2", Br=32).forward
    assert (one.why, one.why_tiles) == ("the call names it", "Br by the call")
    found = flash.explain(q, k, v, deterministic=True, backward=None, Bc_bwd=32)
    default = registry.find_stage(None, torch.float32, q.device, "bwd")
    assert not default.can_be_deterministic and found.backward.stage.name == "deterministic"
    assert found.backward.why == f"the nearest relative of {default.name}, which is not deterministic"


def test_errors_are_attentions():
    q, k, v = random_qkv(1, 2, 2, 40, 40, 64, "cpu")
    with pytest.raises(ValueError, match="there is no stage 'none'"):
        flash.explain(q, k, v, stage="none")
    with pytest.raises(ValueError, match="^k has type"):
        flash.explain(q, k.half(), v)


@needs_nvcc
def test_shown():
    q, k, v = random_qkv(1, 2, 2, 40, 40, 64, "cpu", torch.float16)
    found = flash.explain(q.requires_grad_(), k, v, architecture="sm_80")
    for text in (str(found), found._repr_html_()):
        for word in ("ampere_tuned", "forward_kernel", "registers", "for sm_80", "a block", "flash_bwd.cu",
                     "stages/common/mask.cuh", f"{found.forward.flops:,}"):
            assert word in text
    kernels = {kernel.name for kernel in found.backward.kernels}
    assert {"backward_kernel", "prepare_kernel"} <= kernels
    assert all(0 < kernel.registers <= 255 for kernel in found.backward.kernels)


def test_without_nvcc(monkeypatch):
    def none(*_):
        raise RuntimeError("needs nvcc; there is no nvcc: pip install it")
    monkeypatch.setattr("flash_ladder.compiled.find_nvcc", none)
    found = flash.explain(*random_qkv(1, 1, 1, 8, 8, 8, "cpu"), stage="naive")
    assert found.forward.kernels == () and "pip install it" in str(found)


@pytest.mark.parametrize("architecture, threads, registers, shared, expected", [
    ("sm_90a", 128, 128, 41984, (4, 16, "registers")),          # 65536 / (128 * 128) = 4
    ("sm_90a", 256, 32, 99328, (2, 16, "shared memory")),       # 228 KiB / 98 KiB
    ("sm_75", 256, 32, 0, (4, 32, "warps")),                    # 1024 threads
    ("sm_86", 32, 16, 0, (16, 16, "blocks")),
    ("sm_80", 128, 97, 0, (4, 16, "registers")),      # a warp takes 13 * 256 of 65536
])
def test_occupancy_by_hand(architecture, threads, registers, shared, expected):
    found = Kernel("x", registers, 0, 0, threads).occupancy(architecture, shared)
    assert (found.blocks, found.warps, found.limit) == expected


def test_occupancy_where_there_is_none():
    assert Kernel("x", 32, 0, 0, 0).occupancy("sm_80", 0) is None
    assert Kernel("x", 32, 0, 0, 128).occupancy("sm_75", 100_000) is None
    assert set(MULTIPROCESSOR) >= {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"}


def test_hbm_of_fewer_columns_of_v():
    """The header's formula is of as many as q has."""
    q = torch.zeros(1, 2, 16, 16)
    assert flash.explain(q, q, q[..., :8], stage="flash2").forward.hbm_bytes is None
