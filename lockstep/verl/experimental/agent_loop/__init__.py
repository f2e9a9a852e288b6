"""verl.experimental.agent_loop: the parsers of tool calls; agent loops are not served."""

from lockstep.verl._names import exports

__getattr__ = exports(__name__)
