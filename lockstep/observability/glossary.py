"""What each metric means, and the page about it: `python -m lockstep.observability.glossary > docs/metrics.md`.

In a name, `<mean,max,min>` stands for one of these words and `<source>` for any text.
"""

import re
import sys
from functools import cache

MEAN_MAX_MIN = "<mean,max,min>"
LENGTHS = "<mean,max,min,clip_ratio>"

GLOSSARY: dict[str, dict[str, str]] = {
    "Reward": {
        f"critic/score/{MEAN_MAX_MIN}": "score of a response as the reward function or reward model gave it; `mean` is the training reward",
        "critic/score/zero_variance_groups": "share of prompts whose samples all have the same score: group-relative advantages are 0 for them",
        f"critic/rewards/{MEAN_MAX_MIN}": "the score minus the KL penalty (`algorithm.use_kl_in_reward`); else equal to the score",
        "reward/<name>/mean": "mean of a further number that the reward function returned, such as `acc`",
        "reward/reward_failed/mean": "fraction of responses whose scoring failed (exception or time-out) and that scored 0",
        "train/num_unfinished_prompts": "prompts in generation that the step did not wait for (`rollout.over_sample_rate`)",
        "train/num_gen_batches": "batches of prompts generated for this step, with `algorithm.filter_groups`",
    },
    "Validation": {
        "val-core/<source>/<variable>/mean@<n>": "mean over n responses per prompt of `acc`, or of the score if the reward function returns no `acc`",
        "val-core/<source>/<variable>/best@<n>/mean": "expected best of n responses (pass@n for a score of 0 or 1)",
        "val-core/<source>/<variable>/maj@<n>/mean": "score of the majority answer of n responses; needs `pred` of the reward function",
        "val-aux/<source>/<variable>/<statistic>": "the same for other variables and smaller n; `std@n`, `worst@n/mean`, bootstrap deviations `*/std`",
    },
    "Policy": {
        "actor/pg_loss": "policy loss. Near 0 by construction, since advantages are centred; it does not measure progress",
        "actor/entropy": "mean entropy of the next-token distribution, in nats",
        "actor/grad_norm": "norm of the gradient before clipping at `actor.grad_clip`",
        "actor/ppo_kl": "KL from the policy that sampled to the policy being updated; exactly 0 if a step is a single update",
        "actor/pg_clipfrac": "fraction of tokens whose ratio was clipped; 0 if a step is a single update",
        "actor/pg_clipfrac_lower": "fraction of tokens with negative advantage clipped by `actor.clip_ratio_c` (dual clip)",
        "actor/kl_loss": "KL to the reference policy, as added to the loss (`actor.use_kl_loss`)",
        "actor/kl_coef": "its coefficient, `actor.kl_loss_coef`",
        "actor/reward_kl_penalty": "KL to the reference policy, as subtracted from the reward (`algorithm.use_kl_in_reward`)",
        "actor/reward_kl_penalty_coeff": "its coefficient, which changes with `kl_ctrl.type=adaptive`",
        "actor/route_mismatch": "share of tokens and layers whose router would choose other experts than those replayed (docs/moe.md)",
        "actor/router_aux_loss": "load-balance loss of experts (`actor.router_aux_loss_coef`); the number of experts per token if the load is even",
        "actor/expert_load_max": "tokens of the busiest expert relative to the mean of all experts, averaged over layers",
        "actor/lr": "learning rate of the step",
        f"critic/advantages/{MEAN_MAX_MIN}": "advantages of all response tokens",
        f"critic/returns/{MEAN_MAX_MIN}": "returns of all response tokens: the critic's target",
    },
    "Critic": {
        "critic/vf_loss": "value loss",
        "critic/vf_explained_var": "1 - var(returns - values) / var(returns): 1 is a perfect critic, 0 one that predicts the mean",
        "critic/vf_clipfrac": "fraction of values clipped by `critic.cliprange_value`",
        "critic/vpred_mean": "mean predicted value during the update",
        f"critic/values/{MEAN_MAX_MIN}": "values of all response tokens before the update",
        "critic/grad_norm": "norm of the critic's gradient before clipping",
        "critic/lr": "the critic's learning rate",
    },
    "Lengths": {
        f"response_length/{LENGTHS}": "tokens of a response; `clip_ratio` is the fraction that reached `data.max_response_length`",
        f"response_length_non_aborted/{LENGTHS}": "the same without empty responses",
        "response/aborted_ratio": "fraction of empty responses",
        f"prompt_length/{LENGTHS}": "tokens of a prompt; `clip_ratio` is the fraction that reached `data.max_prompt_length`",
        f"num_turns/{MEAN_MAX_MIN}": "turns of a conversation with an agent",
        f"tool_call_counts/{MEAN_MAX_MIN}": "tool calls of a conversation",
        f"tool_error_counts/{MEAN_MAX_MIN}": "tool calls of a conversation that failed: the policy got an error message; and failed `calc_reward`",
        f"malformed_call_counts/{MEAN_MAX_MIN}": "tool calls of a conversation that could not be parsed or name no tool",
        f"trajectory_breaks/{MEAN_MAX_MIN}": "how often the chat template or a program rewrote the history (docs/agents.md)",
        f"program_error_counts/{MEAN_MAX_MIN}": "1 if the program of a conversation failed (docs/agents.md)",
        f"environment_error_counts/{MEAN_MAX_MIN}": "1 if the environment of a conversation failed (docs/environments.md)",
    },
    "Supervised fine-tuning": {
        "train/loss": "cross-entropy of the step's trained tokens, in nats; in `lockstep rm` and `dpo` the mean loss of a pair",
        "train/grad_norm": "norm of the gradient before clipping at `optim.clip_grad`",
        "train/lr": "learning rate of the step",
        "train/global_tokens": "tokens of the step's sequences, over all ranks",
        "train/loss_tokens": "those of them that the loss is computed on",
        "train/total_tokens(B)": "tokens since the start of the run, in billions",
        "val/loss": "the same for the validation rows (`data.val_files`)",
    },
    "Preference training": {
        "train/pairs": "pairs of the step",
        "<train,val>/accuracy": "reward model: fraction of pairs whose chosen answer scores higher",
        "<train,val>/margin": "reward model: mean score of chosen answers minus that of rejected ones",
        "<train,val>/score": "reward model: mean score of all answers; `rm.center_rewards_coefficient` keeps it near 0",
        "rewards/<chosen,rejected>": "DPO: beta times the log-prob that an answer has gained over the reference, mean over the pairs",
        "rewards/margins": "DPO: the difference of these two",
        "rewards/accuracies": "DPO: fraction of pairs whose chosen answer has gained more",
        "logps/<chosen,rejected>": "DPO: log-prob of an answer, mean over the pairs",
        "val/<rewards,logps>/<name>": "the same for the validation pairs",
    },
    "Rollout against trainer": {
        "training/route_mismatch": "share of tokens and layers whose experts in the rollout are not those the trainer's router would choose",
        "training/rollout_log_probs_gap": "mean |log p(rollout) - log p(trainer)| of sampled tokens; the run stops if it is too large",
        "training/rollout_gap/position/<first_16,quarter_1,quarter_2,quarter_3,quarter_4,last>": "the same for the first 16 tokens of each response, the other tokens of each quarter, and the last token; only of buckets with enough tokens, as are the next two (docs/audits.md)",
        "training/rollout_gap/length/<bucket>": "the same by the length of the response: up to 64, 256, 1024, 4096 or 16384 tokens, or longer",
        "training/rollout_gap/turn/<bucket>": "the same by the turn of the conversation that the token is in",
        "weight_sync/canary_gap": "largest |log p(rollout) - log p(trainer)| on a fixed text after a weight update, if the rollout holds a copy; the run stops beyond rounding",
        "weight_sync/<send_s,canary_s>": "seconds of a weight update: transfer with checksums, and canary",
        "weight_sync/gb": "gigabytes that an update sends",
        "training/rollout_probs_diff_<mean,max,std>": "difference of the probabilities of sampled tokens",
        "training/rollout_probs_diff_valid": "1 if there were tokens to compare",
        "rollout_corr/kl": "KL from the trainer's policy to the rollout's, estimated as mean log-ratio; `k3_kl` is the k3 estimator",
        "rollout_corr/k3_kl": "the same with lower variance",
        "rollout_corr/<training,rollout>_<ppl,log_ppl>": "perplexity of the responses under trainer and rollout",
        "rollout_corr/<log_ppl_diff,log_ppl_abs_diff,log_ppl_diff_max,log_ppl_diff_min,ppl_ratio>": "difference and ratio of these perplexities",
        "rollout_corr/<chi2_token,chi2_seq>": "chi-squared divergence per token and per sequence",
        "rollout_corr/rollout_is_<statistic>": "importance weights (`rollout_correction.rollout_is`); `eff_sample_size` is the effective fraction of samples",
        "rollout_corr/rollout_rs_<statistic>": "rejection (`rollout_correction.rollout_rs`); `masked_fraction` is the fraction of rejected tokens",
    },
    "Asynchronous training": {
        "async/trainer_wait_share": "part of the time since the last step's samples in which training waited for samples",
        "async/rollout_wait_share": "part of that time in which nothing was generated",
        "async/staleness/<mean,max>": "updates between the policy that sampled a token and the one that trains on it",
        "async/mixed_policy_share": "part of the responses with tokens of several policies",
        "async/queue_length": "groups (samples of a prompt) that are finished and not trained on, after the step's were taken",
        "async/running_groups": "groups in generation at that time",
        "async/stale_groups": "groups that were dropped because of `trainer.max_staleness`",
        "async/filtered_groups": "groups that `algorithm.filter_groups` dropped",
    },
    "Audits": {
        "audit/<name>": "steps so far in which the audit `trainer.audit.<name>` found something, with level `warn`; missing if there is none (docs/audits.md)",
    },
    "Remote checkpoints": {
        "checkpoint/remote_failures": "failed attempts to copy a checkpoint to `trainer.default_hdfs_dir`, since the process began",
        "checkpoint/remote_behind": "saves that are newer than the newest complete copy; 0: the store is up to date",
    },
    "Time and memory": {
        "timing_s/step": "seconds of the step without saving; with validation in RL, without it in supervised training",
        "timing_s/gen": "seconds of generation; `gen_max` is the greedy baseline of ReMax (`rollout.mode=sync`)",
        "timing_s/reward": "seconds of scoring; with `rollout.mode=async` those after the last response was generated",
        "perf/rollout_<first_group,half_groups,last_group>_s": "seconds until the first, half and all of the prompts had their samples (`rollout.mode=async`)",
        "perf/reward_hidden_s": "seconds of scoring that passed while responses were generated (`rollout.mode=async`); `timing_s/reward` has the rest",
        "perf/reward_idle_fraction": "fraction of generation and scoring in which no reward was computed (`rollout.mode=async`)",
        "timing_s/<gen_max,old_log_prob,ref,values,adv,update_critic,update_actor,update_weights,dump_rollouts,testing,save_checkpoint>": "seconds of the other stages",
        "timing_per_token_ms/<stage>": "milliseconds per token: of the response for `gen`, of the whole sequence for other stages",
        "perf/throughput": "tokens (prompt and response, or all of the sequences in SFT) per second and GPU",
        "perf/time_per_step": "the same as `timing_s/step`",
        "perf/total_num_tokens": "tokens of the step",
        "perf/max_memory_<allocated,reserved>_gb": "peak GPU memory since the start, in GiB",
        "perf/max_memory_allocated_gb/<phase>": "peak GPU memory of the last run of a phase",
        "perf/out_of_memory_retries": "mini-batches and forward passes that were computed again in smaller micro-batches, and restarts for it, since the start of the run; only after the first (docs/reliability.md)",
        "perf/micro_batch_size/<phase>": "tokens, or sequences, of a micro-batch that out of memory has lowered",
        "perf/memory_used_gb/<phase>": "GPU memory in use at its end, by all processes",
        "perf/rollout_limit/<max_num_seqs,max_num_batched_tokens,kv_blocks>": "what the rollout does at once since generation ran out of memory (docs/reliability.md); absent if it did not",
        "perf/drafts/acceptance": "share of the draft tokens that were accepted (`rollout.history_drafts`, docs/speculation.md); absent if nothing was drafted",
        "perf/drafts/tokens_per_step": "tokens per sequence and decode step with drafts; 1 without drafts",
        "perf/drafts/share": "share of the generated tokens that were accepted drafts",
        "perf/drafts/saved_s": "seconds that drafts saved since the last update, per worker: what plain steps of as many tokens would have taken, by their measured times, minus what the steps with drafts took",
        "perf/drafts/history_mb": "memory of the answers that drafts come from, per worker, in MiB",
        "global_seqlen/<min,max,mean,minmax_diff>": "tokens per rank if rows were dealt out in order",
        "global_seqlen/<balanced_min,balanced_max>": "tokens per rank after balancing (`trainer.balance_batch`)",
    },
    "Progress": {
        "training/global_step": "number of the step",
        "training/epoch": "passes over the training rows, from 0",
        "training/agent_workers_replaced": "agent workers that died and were replaced so far (docs/agents.md); absent before the first",
        "training/rollout_repairs": "how often the rollout's dead processes or servers were replaced so far (docs/reliability.md); absent before the first",
        "training/restarts": "restarts of the workers in this command so far (docs/reliability.md); absent before the first",
    },
}

INTRODUCTION = """\
# Metrics

<!-- Generated by `make docs-config`; edit lockstep/observability/glossary.py instead. -->

A run writes every metric of every step to `metrics.jsonl` in its folder and to the trackers of [trainer.logger](logging.md).
`lockstep plot RUN` draws the main ones, `lockstep plot RUN --list` lists all with their meaning. Names are those of verl.

```bash
lockstep plot $RUN/first
lockstep plot $RUN/first $RUN/second --metric reward entropy 'timing_s/*' --smooth 10 --out $RUN/compare.svg
lockstep rollouts $RUN/first --step 2 --sort reward
```

`lockstep plot` compares runs, also ones that are still going; `--out` writes `.svg`, `.html` or `.png`. `lockstep rollouts` shows what is
behind a number: the prompts of a step, with each response, its score and its advantage ([logging.md](logging.md#generated-text)).

## What to watch

The first page of [`lockstep dashboard`](dashboard.md#health) checks these and more while a run trains, and says what it finds with the numbers.

| if | look at | likely cause |
|---|---|---|
| the reward does not rise | `critic/score/max` and `min`, `critic/score/zero_variance_groups`; `lockstep rollouts` | equal scores in every group give no gradient: the task is too hard or too easy, or the reward function never fires |
| the reward rises, validation does not | `val-core/...`, `lockstep rollouts RUN --validation` | overfitting, or the reward is satisfied by something else than a right answer |
| `response_length/clip_ratio` is high | `response_length/mean` | responses are cut before the answer: raise `data.max_response_length` |
| `actor/entropy` falls to nearly 0 | `critic/advantages/max` | samples of a group become identical: lower `optim.lr`, raise `actor.clip_ratio_high` or `actor.entropy_coeff` |
| `actor/entropy` rises without end | `actor/kl_loss` | the policy degrades: lower `optim.lr` or `actor.entropy_coeff`, use a KL term |
| `actor/grad_norm` jumps | `actor/ppo_kl`, `actor/pg_clipfrac` | updates are too large: lower `optim.lr` or the number of mini-batches per step |
| `critic/vf_explained_var` stays below 0 | `critic/vf_loss` | the critic has not learned: `trainer.critic_warmup`, `critic.optim.lr` |
| `reward/reward_failed/mean` is above 0 | the log | the reward function raises or exceeds `reward_model.timeout_s` |
| steps are slow | `timing_s/*` | [performance.md](performance.md) has figures to compare with |
"""


def explain(metric: str) -> str | None:
    """The meaning of a metric; None if the glossary does not have it."""
    return next((meaning for pattern, meaning in _patterns() if pattern.fullmatch(metric)), None)


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    entries = [entry for section in GLOSSARY.values() for entry in section.items()]
    entries.sort(key=lambda entry: entry[0].count("<"))  # reward/reward_failed/mean before reward/<name>/mean
    return [(re.compile(_expression(name)), meaning) for name, meaning in entries]


def _expression(name: str) -> str:
    parts = re.split(r"(<[^>]+>)", name)
    words = [part[1:-1].split(",") if part.startswith("<") else [part] for part in parts]
    return "".join(
        ".+" if part.startswith("<") and len(choices) == 1 else f"(?:{'|'.join(map(re.escape, choices))})"
        for part, choices in zip(parts, words)
    )


def page() -> str:
    """docs/metrics.md."""
    parts = [INTRODUCTION]
    for section, entries in GLOSSARY.items():
        rows = [f"| `{name}` | {meaning} |" for name, meaning in entries.items()]
        parts.append("\n".join([f"## {section}", "", "| metric | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
