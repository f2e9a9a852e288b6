"""verl.utils.torch_dtypes"""

import torch

NAMES = {
    torch.float32: ("fp32", "float32", "float", "32"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16", "half", "16"),
}


class PrecisionType:
    """Between dtypes and their names."""

    @staticmethod
    def to_dtype(precision: str | int | torch.dtype) -> torch.dtype:
        for dtype, names in NAMES.items():
            if precision is dtype or str(precision) in names:
                return dtype
        raise ValueError(
            f"precision {precision!r}: must be one of {', '.join(n for names in NAMES.values() for n in names)}"
        )

    @staticmethod
    def to_str(precision: torch.dtype) -> str:
        return NAMES[precision][0]
