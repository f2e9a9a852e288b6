"""verl's module paths over Lockstep, so that a program written on verl runs after one substitution of its imports:

    sed -E 's/\\bverl\\./lockstep.verl./g; s/\\b(from|import) verl\\b/\\1 lockstep.verl/g'

Modules re-export Lockstep's own functions, or adapt arguments and results to what programs on verl expect. Names that are
not served raise an ImportError that says what to use instead (`_names.NOT_SERVED`). New code imports from `lockstep`.
"""

from lockstep import __version__ as __version__
from lockstep.verl._names import explain_missing_modules, exports
from lockstep.verl._resolver import register_resolver

explain_missing_modules()
register_resolver()

__getattr__ = exports(__name__, {"lockstep.verl.protocol": ("DataProto",)})
