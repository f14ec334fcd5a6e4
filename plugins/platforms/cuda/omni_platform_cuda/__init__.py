"""NVIDIA CUDA platform for Omni."""
