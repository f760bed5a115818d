"""The device that calls run on: a GPU, or the simulator on the CPU."""

from __future__ import annotations

import os

import torch

from . import simulator


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return f"{name} (sm_{major}{minor}), CUDA {torch.version.cuda}, PyTorch {torch.__version__}"
    return f"CPU, in the simulator ({os.cpu_count()} cores), PyTorch {torch.__version__}"


def multiprocessors(device: torch.device) -> tuple[int, int]:
    """How many there are, and bytes of shared memory of one."""
    if device.type == "cpu":
        return simulator.MULTIPROCESSORS
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor


def multiprocessors_of_a_launch(device: torch.device) -> int:
    """As many as a stage's launch() is told."""
    return simulator.FEW_MULTIPROCESSORS if device.type == "cpu" else multiprocessors(device)[0]


def shared_memory_per_block(device: torch.device) -> int:
    """Bytes of shared memory that a block may ask for."""
    if device.type == "cpu":
        return simulator.SHARED_MEMORY_PER_BLOCK
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
