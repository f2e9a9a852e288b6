"""verl.tools.utils"""

from lockstep.verl._names import exports

__getattr__ = exports(__name__)
