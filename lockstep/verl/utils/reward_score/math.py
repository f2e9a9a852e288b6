"""verl.utils.reward_score.math, the older name of math_reward."""

from lockstep.verl.utils.reward_score.math_reward import (
    compute_score as compute_score,
    is_equiv as is_equiv,
    last_boxed_only_string as last_boxed_only_string,
    remove_boxed as remove_boxed,
    strip_string as strip_string,
)
