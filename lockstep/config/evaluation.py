"""The configuration of evaluation (`lockstep eval`)."""

from dataclasses import dataclass, field

from lockstep.config.bounds import PositiveInt
from lockstep.config.data import DataConfig
from lockstep.config.environment import RootConfig
from lockstep.config.ppo import PPOConfig
from lockstep.config.reward import CustomRewardFunctionConfig, RewardFunctionConfig, RewardModelConfig


@dataclass(frozen=True)
class EvaluationDataConfig:
    path: list[str] = field(default_factory=list)
    """Rows with responses, as `lockstep generate` writes them: a parquet, jsonl or json file, or a list of these."""
    prompt_key: str = "prompt"
    """Column of the prompt, which is shown with the responses (`scores_path`)."""
    response_key: str = "responses"
    """Column of the responses: a list of texts, or one text."""
    data_source_key: str = "data_source"
    """Column that selects the scorer; metrics are per data source. That of rows without it is `default`."""
    reward_model_key: str = "reward_model"
    """Column with the `ground_truth`; of rows without it, the ground truth is the column `ground_truth`, `answer` or `solution`."""
    max_response_length: PositiveInt | None = None
    """Maximum response length of the generation, for the overlong penalty of `reward_model.reward_manager=dapo`."""
    correct_score: float = 1.0
    """A response is correct, for pass@k, if its `acc` (or else its score) is at least this."""
    output_path: str | None = None
    """Write the metrics to this JSON file."""
    scores_path: str | None = None
    """Write each response with its score to this file of JSON lines, which `lockstep rollouts` shows."""


@dataclass(frozen=True)
class EvaluationConfig(RootConfig):
    data: EvaluationDataConfig = field(default_factory=EvaluationDataConfig)
    reward_model: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)


def as_validation(config: EvaluationConfig) -> PPOConfig:
    """The training configuration whose validation scores responses in the same way."""
    scoring = RewardModelConfig(**vars(config.reward_model))
    data = DataConfig(
        reward_fn_key=config.data.data_source_key,
        max_response_length=config.data.max_response_length or 0,
    )
    return PPOConfig(data=data, reward_model=scoring, custom_reward_function=config.custom_reward_function)
