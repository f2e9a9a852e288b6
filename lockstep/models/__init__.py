"""Models of transformers, and what they compute with here."""

import sys

if "transformers" not in sys.modules and "sklearn" not in sys.modules:
    # transformers would import scikit-learn, scipy and pandas, where they are installed, for one kind of assisted decoding: two
    # seconds of a start. To be found absent while that module is imported, and only then, a package is None in sys.modules.
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        from transformers.generation import candidate_generator
        from transformers.utils import is_sklearn_available

        getattr(is_sklearn_available, "cache_clear", lambda: None)()
        candidate_generator.is_sklearn_available = lambda: False  # what it has imported says so
    finally:
        del sys.modules["sklearn"]
