"""The training engine on megatron-core: its layers, schedules, data-parallel buffers and optimizer, with our attention and losses.

`engine.py` is the engine; `families.py` is the table of architectures.
"""

import logging
import warnings

logging.getLogger("megatron").setLevel(logging.WARNING)  # otherwise it lists every parameter

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")  # advice on speed, for every layer
warnings.filterwarnings("ignore", message=".*torch.distributed.*_tensor` is deprecated")  # how it calls torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it recommends packages that are not used here
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
