"""The version of this distribution, stated once."""

__version__ = "0.1.0"
