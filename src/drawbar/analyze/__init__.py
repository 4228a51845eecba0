"""Journal in, numbers out: pure functions. Never imports torch."""
