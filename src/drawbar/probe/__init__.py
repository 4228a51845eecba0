"""Ceilings: what one stage of the input can do alone, with the loader's own parts and the rest removed."""
