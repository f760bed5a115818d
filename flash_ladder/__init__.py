"""What flash.py is made of: stages, their builds, a call's way down, and CUDA on the CPU."""

__version__ = "0.1.0"
