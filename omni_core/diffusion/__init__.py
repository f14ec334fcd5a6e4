"""What a diffusion model family implements, free of vLLM."""
