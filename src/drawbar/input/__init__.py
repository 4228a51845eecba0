"""From byte ranges to batches: the reading plan, record streams, decode and augmentation, the loader."""
