"""verl.tools: the schemas of tools; tools are not served."""

from lockstep.verl._names import exports

__getattr__ = exports(__name__)
