"""Makes the tests' process Omni's before anything imports vLLM, which asks for its platform only once."""

from omni_core.plugins.manager import get_manager

get_manager()
