"""Which draft, how far to guess, or not at all: found by measuring, within a given time."""
