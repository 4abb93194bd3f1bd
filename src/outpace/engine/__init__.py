"""Sequences from request to output: prompts, drafting, steps, and the graph executor."""
