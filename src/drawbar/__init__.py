"""Drawbar measures distributed deep-learning training end to end."""

__version__ = "0.1.0"
