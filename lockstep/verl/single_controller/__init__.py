"""verl.single_controller"""

from lockstep.verl._names import exports

__getattr__ = exports(__name__)
