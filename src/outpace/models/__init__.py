"""Who scores: models behind one small interface, with a cache that rolls back by moving a length."""
