"""Sequences from request to output: prompts, drafting, the scheduler, and the two executors."""
