"""verl.tools: the base class and the schemas of tools."""

from lockstep.verl._names import exports

__getattr__ = exports(__name__)
