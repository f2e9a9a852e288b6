"""verl.experimental.dataset.sampler"""

from lockstep.data.sampler import (
    AbstractCurriculumSampler as AbstractCurriculumSampler,
    AbstractSampler as AbstractSampler,
)
