"""Models behind one small ``Scorer`` interface, with a KV cache that rolls back by moving a length."""
