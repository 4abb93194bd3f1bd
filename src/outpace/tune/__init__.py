"""Tuning: choose a draft and num_draft_tokens, or no speculation, by measuring within a time budget."""
