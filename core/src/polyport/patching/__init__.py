"""Patches of upstream libraries and fixes of traced graphs: small objects that retire themselves.

Each names the fault, the versions that have it and a reproduction. Outside that window it is inactive; a generic test
runs every reproduction with and without it, so that one which outlives its fault fails.
"""

from polyport.patching.apply import applied, in_window
from polyport.patching.patch import GraphFix, Patch, Target

__all__ = ["GraphFix", "Patch", "Target", "applied", "in_window"]
