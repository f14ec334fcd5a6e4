"""Wan text-to-video for Omni."""
