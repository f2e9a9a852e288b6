"""Models of transformers, and what they compute with here."""

from lockstep.models.lean_import import import_lean

import_lean()
