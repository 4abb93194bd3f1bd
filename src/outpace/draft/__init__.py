"""Who guesses. A drafter is any object with `propose`, `commit` and `reset`: see `outpace.draft.base`."""
