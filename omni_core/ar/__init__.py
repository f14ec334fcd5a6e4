"""Autoregressive stages whose steps carry a frame of codes: what a family supplies, and what crosses processes."""
