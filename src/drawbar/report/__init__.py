"""Numbers in, pages and terminal text out. Never imports torch."""
