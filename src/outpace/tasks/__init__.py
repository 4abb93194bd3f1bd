"""Whole tasks: speech and texts in, transcripts and scores out."""
