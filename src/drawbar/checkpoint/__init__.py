"""Checkpoints: the state of training, written beside the training, and taken up again."""
