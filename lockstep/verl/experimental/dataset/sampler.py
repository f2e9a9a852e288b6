"""verl.experimental.dataset.sampler"""

from lockstep.data.sampler import AbstractCurriculumSampler, AbstractSampler

__all__ = ["AbstractCurriculumSampler", "AbstractSampler"]
