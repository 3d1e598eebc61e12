"""A decode step and a prompt on the CPU beside llama.cpp."""
