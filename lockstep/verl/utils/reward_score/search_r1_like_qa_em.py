"""verl.utils.reward_score.search_r1_like_qa_em"""

from lockstep.rewards.scorers.search_r1_like_qa_em import (
    compute_score,
    compute_score_subem,
    extract_solution,
    normal_form as normalize_answer,
)

__all__ = ["compute_score", "compute_score_subem", "extract_solution", "normalize_answer"]
