"""What backends that build on this one lower a traced program with.

`prepare` makes its graph functional and decomposes what the backend has no translation for; `signature` says which nodes are
inputs, weights and results; `facts` answers what translations ask about nodes; `Leaves` records how the leaves of a call meet the
inputs and outputs of the lowered graph.
"""

from __future__ import annotations

from polyport_dynamo.lowering import signature
from polyport_dynamo.lowering.functionalize import share_memory
from polyport_dynamo.lowering.leaves import PASSED_THROUGH, Leaves
from polyport_dynamo.lowering.preparing import Operators, Prepared, prepare

__all__ = ["PASSED_THROUGH", "Leaves", "Operators", "Prepared", "prepare", "share_memory", "signature"]
